"""Qwen3-ASR: speech in, text out. As transformers' ``qwen3_asr``, and as the model's own files, whose fields and tensors are those of
a ``thinker``. Its decoder is Qwen3's: positions count tokens.
"""

from collections.abc import Mapping
from importlib import import_module
from typing import TYPE_CHECKING

from msgspec.structs import replace

from ....schema.media import MediaKind
from ...architecture import LanguageConfig, ModelConfig
from ...checkpoint.json_fields import CheckpointFiles, JsonObject
from ...checkpoint.weight_specs import TensorSpec, language_specs
from ...media_config import AudioConfig
from ...text.transcripts import SpeechRules
from .. import no_media
from ..family import CheckpointRecipe, made_recipes
from ..fields import max_positions, parse_attention, parse_decoder, parse_dtype, parse_eos
from ..qwen2_5 import tensors
from ..qwen3 import sound
from ..text.ropes import parse_rope

if TYPE_CHECKING:
    import torch

    from ...towers.interface import Tower

positions, image_item, video_item = no_media.positions, no_media.image_item, no_media.video_item
sample_frames, video_with_sound = no_media.sample_frames, no_media.video_with_sound
audio_item = sound.audio_item

_TOWER = AudioConfig(
    num_mel_bins=128,
    num_layers=24,
    num_heads=16,
    ffn_size=4096,
    hidden_size=1024,
    out_hidden_size=0,
    max_source_positions=1500,
    n_window=50,
    conv_channels=480,
)
_LANGUAGES = (
    "ar Arabic, yue Cantonese, zh Chinese, cs Czech, da Danish, nl Dutch, en English, fil Filipino, fi Finnish, fr French, de German, "
    "el Greek, hi Hindi, hu Hungarian, id Indonesian, it Italian, ja Japanese, ko Korean, mk Macedonian, ms Malay, fa Persian, "
    "pl Polish, pt Portuguese, ro Romanian, ru Russian, es Spanish, sv Swedish, th Thai, tr Turkish, vi Vietnamese"
)
SPEECH = SpeechRules(
    before="language ",
    marker="<asr_text>",
    languages=tuple((code, name) for code, name in (entry.split() for entry in _LANGUAGES.split(", "))),
)
_PROJECTOR = {"multi_modal_projector.linear_1.": "audio.proj1.", "multi_modal_projector.linear_2.": "audio.proj2."}


def parse_config(files: CheckpointFiles) -> ModelConfig:
    """Map config.json. Raises CheckpointError, also for a forced aligner, which writes no text."""
    outer = files.required("config.json")
    config = outer.object("thinker_config") if outer.has("thinker_config") else outer
    if config.has("classify_num") or outer.data.get("architectures") == ["Qwen3ASRForTokenClassification"]:
        raise outer.error("architectures", "is that of a forced aligner, which writes no text; only Qwen3-ASR itself is supported")
    text = config.object("text_config")
    language = _parse_text(text, _is_tied(outer, config, text))
    audio = sound.parse_tower(config.object("audio_config"), language.hidden_size, _TOWER)
    return ModelConfig(
        family="qwen3_asr",
        language=language,
        dtype=parse_dtype(outer, config, text),
        max_context=max_positions(text),
        eos_token_ids=parse_eos(files, outer, config, text),
        audio=audio,
        audio_rules=sound.parse_rules(files, config.object("audio_config"), audio),
        speech=SPEECH,
        audio_token_id=config.integer("audio_token_id", default=151676, least=0),
    )


def _is_tied(outer: JsonObject, config: JsonObject, text: JsonObject) -> bool:
    """A thinker's decoder says it itself."""
    places = (outer,) if config is outer else (text, config, outer)
    return next((one.boolean("tie_word_embeddings") for one in places if one.has("tie_word_embeddings")), True)


def _parse_text(text: JsonObject, tie: bool) -> LanguageConfig:
    if text.boolean("use_sliding_window", default=False):
        raise text.error("use_sliding_window", "is true; sliding-window attention is not supported")
    heads = replace(parse_attention(text, default_head_dim=128), qk_norm=True)
    return parse_decoder(text, heads, parse_rope(text, heads.head_dim, max_positions(text), default_theta=5e6), tie)


def tensor_specs(config: ModelConfig) -> list[TensorSpec]:
    """See ``Family``."""
    assert config.audio is not None
    return [*language_specs(config.language), *sound.tower_specs(config.audio)]


def canonical_name(name: str) -> str:
    """See ``Family``."""
    bare = name.removeprefix("model.")
    for theirs, ours in _PROJECTOR.items():
        if bare.startswith(theirs):
            return ours + bare.removeprefix(theirs)
    return tensors.canonical_name(name)


def checkpoint_name(name: str) -> str:
    """See ``Family``."""
    placed = {ours: f"model.{theirs}" for theirs, ours in _PROJECTOR.items()}
    return tensors.placed(name, {**placed, "language.": "model.language_model.", "audio.": "model.audio_tower."})


def build_towers(config: ModelConfig, weights: "dict[str, torch.Tensor]", device: "torch.device") -> "dict[MediaKind, Tower]":
    # By its name: only the process that builds towers depends on them (runtime/supervisor/reload.py).
    towers: dict[MediaKind, Tower] = import_module(f"{__package__}.towers").build_towers(config, weights, device)
    return towers


def recipes() -> Mapping[str, CheckpointRecipe]:
    return made_recipes(__package__)
