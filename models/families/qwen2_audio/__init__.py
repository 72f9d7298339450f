"""Qwen2-Audio: text and sounds of up to half a minute, as transformers' ``qwen2_audio``. There a shorter clip gets silence behind it,
of which only the convolutions see the beginning: here that alone is made. The decoder is Qwen2's; positions count tokens.
"""

from collections.abc import Mapping
from importlib import import_module
from typing import TYPE_CHECKING

from msgspec.structs import replace

from ....schema.media import ItemShape, MediaKind, SegmentShape
from ...architecture import LanguageConfig, ModelConfig
from ...checkpoint.json_fields import CheckpointFiles, JsonObject
from ...checkpoint.weight_specs import TensorSpec, language_specs
from ...errors import UnsupportedMediaError
from ...media_config import AudioConfig, AudioRules
from .. import no_media
from ..family import CheckpointRecipe, made_recipes
from ..fields import max_positions, parse_attention, parse_decoder, parse_dtype, parse_eos
from ..qwen2_5 import fields, media, tensors
from ..text.ropes import parse_rope

if TYPE_CHECKING:
    import torch

    from ...towers.interface import Tower

positions, image_item, video_item = no_media.positions, no_media.image_item, no_media.video_item
sample_frames, video_with_sound = no_media.sample_frames, no_media.video_with_sound

_TEXT = {"hidden_size": 4096, "intermediate_size": 22016, "num_hidden_layers": 32, "num_attention_heads": 32, "vocab_size": 151936}
_STRIDE = 2  # of the tower's second convolution
_SILENCE = 2  # mel frames behind a clip that its last row depends on
_NAMES = {
    "language_model.lm_head.": "lm_head.",
    "multi_modal_projector.linear.": "audio.proj.",
    "audio_tower.layer_norm.": "audio.ln_post.",
}


def parse_config(files: CheckpointFiles) -> ModelConfig:
    """Map config.json, whose ``text_config`` leaves out what is as in Qwen2Config. Raises CheckpointError."""
    config = files.required("config.json")
    text = config.object("text_config").over(_TEXT)
    language = _parse_text(text)
    audio = fields.parse_audio(config.object("audio_config"), language.hidden_size)
    audio = replace(audio, n_window=audio.max_source_positions * _STRIDE // 2)
    return ModelConfig(
        family="qwen2_audio",
        language=language,
        dtype=parse_dtype(config, text),
        max_context=max_positions(text),
        eos_token_ids=parse_eos(files, config, text),
        audio=audio,
        audio_rules=_parse_rules(files, audio),
        audio_token_id=config.integer("audio_token_index", "audio_token_id", default=151646, least=0),
    )


def _parse_text(text: JsonObject) -> LanguageConfig:
    if text.boolean("use_sliding_window", default=False):
        raise text.error("use_sliding_window", "is true; sliding-window attention is not supported")
    heads = replace(parse_attention(text), bias=True, output_bias=False)
    rope = parse_rope(text, heads.head_dim, max_positions(text))
    return parse_decoder(text, heads, rope, tie=text.boolean("tie_word_embeddings", default=False))


def _parse_rules(files: CheckpointFiles, audio: AudioConfig) -> AudioRules:
    extractor = fields.feature_extractor(files, audio).over({"chunk_length": 30})
    rules = replace(fields.parse_audio_rules(files, audio), max_s=extractor.number("chunk_length"))
    frames, heard = rules.num_frames(int(rules.max_s * rules.sample_rate)), audio.max_source_positions * _STRIDE
    if frames != heard:
        raise extractor.error("chunk_length", f"is {rules.max_s:g}, which gives {frames} mel frames; the tower hears {heard}")
    return replace(rules, silent_frames=_SILENCE)


def audio_item(config: ModelConfig, num_frames: int) -> ItemShape:
    """See ``Family``."""
    rules = config.audio_rules
    assert rules is not None
    if num_frames < 1 or media.audio_tokens(num_frames) < 1:
        raise UnsupportedMediaError(f"audio of {max(num_frames, 0)} mel frames is too short, at least 3 are needed")
    most = rules.num_frames(int(rules.max_s * rules.sample_rate))
    if num_frames > most:
        heard_s = num_frames * rules.hop / rules.sample_rate
        raise UnsupportedMediaError(f"audio of {heard_s:g} s is longer than the {rules.max_s:g} s that this model hears at once")
    tokens = media.audio_tokens(num_frames)
    segment = SegmentShape("audio", (num_frames, 0, 0), min(num_frames + _SILENCE, most), rules.row_bytes, tokens)
    return ItemShape(kind="audio", grid=segment.grid, num_tokens=tokens, segments=[segment])


def tensor_specs(config: ModelConfig) -> list[TensorSpec]:
    """See ``Family``."""
    assert config.audio is not None
    return [*language_specs(config.language), *tensors.audio_specs(config.audio, has_positions=True)]


def canonical_name(name: str) -> str:
    """See ``Family``."""
    bare = name.removeprefix("model.")
    found = tensors.placed(bare, _NAMES)
    return found if found != bare else tensors.canonical_name(name)


def checkpoint_name(name: str) -> str:
    """See ``Family``."""
    turned = {ours: theirs for theirs, ours in _NAMES.items()}
    return tensors.placed(name, {**turned, "language.": "language_model.model.", "audio.": "audio_tower."})


def build_towers(config: ModelConfig, weights: "dict[str, torch.Tensor]", device: "torch.device") -> "dict[MediaKind, Tower]":
    # By its name: only the process that builds towers depends on them (runtime/supervisor/reload.py).
    towers: dict[MediaKind, Tower] = import_module(f"{__package__}.towers").build_towers(config, weights, device)
    return towers


def recipes() -> Mapping[str, CheckpointRecipe]:
    return made_recipes(__package__)
