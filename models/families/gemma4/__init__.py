"""Gemma 4 with towers (E2B, E4B, 26B-A4B, 31B), as transformers' ``gemma4``: text, pictures and videos, small models sounds;
checkpoints of the decoder alone, too."""

from collections.abc import Mapping
from importlib import import_module
from typing import TYPE_CHECKING

from msgspec.structs import replace

from ....schema.media import MediaKind
from ...architecture import ModelConfig
from ...checkpoint.json_fields import CheckpointFiles, JsonObject
from ...checkpoint.weight_specs import TensorSpec, language_specs
from ...media_config import AudioConfig, AudioRules, VisionConfig, VisionRules
from .. import no_media
from ..family import CheckpointRecipe, made_recipes
from ..fields import parse_dtype, parse_eos
from ..qwen2_5 import seeing
from ..qwen2_5.tensors import placed
from ..text import gemma
from . import media
from .clock import read_clock_tokens
from .decoder import parse_text
from .rules import sound_rules, vision_rules
from .towers_config import Conformer, PooledVision, parse_sound, parse_vision, sound_specs, vision_specs

if TYPE_CHECKING:
    import torch

    from ...towers.interface import Tower

positions, video_with_sound = no_media.positions, seeing.video_with_sound
image_item, video_item, audio_item, sample_frames = media.image_item, media.video_item, media.audio_item, media.sample_frames

_MAX_POSITIONS = 131072
PLACEHOLDERS = {"image_token_id": 258880, "video_token_id": 258884, "audio_token_id": 258881}  # where the file does not say
_PARTS = {
    "vision_tower.": "vision.",
    "embed_vision.embedding_projection.": "vision.projection.",
    "audio_tower.": "audio.",
    "embed_audio.embedding_projection.": "audio.projection.",
}


def parse_config(files: CheckpointFiles) -> ModelConfig:
    """Map config.json. Raises CheckpointError."""
    root = files.required("config.json")
    has_parts = root.has("text_config")
    text = root.object("text_config") if has_parts else root
    placeholders = tuple(root.integer(field, default=id, least=0) for field, id in PLACEHOLDERS.items()) if has_parts else ()
    config = parse_alone(files, "gemma4", text, placeholders)
    if has_parts and root.has("vision_config"):
        vision = parse_vision(root.object("vision_config"), config.language.hidden_size)
        config = seeing_config(files, config, vision, vision_rules(files, vision, vision.patch_size, vision.merge_size))
    if has_parts and root.has("audio_config"):
        audio = parse_sound(root.object("audio_config"), config.language.hidden_size)
        config = hearing_config(files, config, audio, sound_rules(files, audio))
    return config


def parse_alone(files: CheckpointFiles, family: str, text: JsonObject, placeholders: tuple[int, ...]) -> ModelConfig:
    """A model without towers. ``text``: the decoder's fields. Raises CheckpointError."""
    root = files.required("config.json")
    max_context = text.integer("max_position_embeddings", default=_MAX_POSITIONS)
    tie = (root if root.has("tie_word_embeddings") else text).boolean("tie_word_embeddings", default=True)
    return ModelConfig(
        family=family,
        language=parse_text(text, max_context, tie, placeholders),
        dtype=parse_dtype(root, text),
        max_context=max_context,
        eos_token_ids=parse_eos(files, root, text),
    )


def seeing_config(files: CheckpointFiles, config: ModelConfig, vision: VisionConfig, rules: VisionRules) -> ModelConfig:
    """With pictures and videos, and the tokens around them. Raises CheckpointError."""
    root = files.required("config.json")
    image, video = (root.integer(field, default=PLACEHOLDERS[field], least=0) for field in ("image_token_id", "video_token_id"))
    ends = root.integer("boi_token_id", default=255999, least=0), root.integer("eoi_token_id", default=258882, least=0)
    return replace(
        config,
        vision=vision,
        vision_rules=rules,
        image_token_id=image,
        video_token_id=video,
        vision_start_token_id=ends[0],
        vision_end_token_id=ends[1],
        times=read_clock_tokens(files.path),
        item_text_ids=(*config.item_text_ids, *ends),
    )


def hearing_config(files: CheckpointFiles, config: ModelConfig, audio: AudioConfig, rules: AudioRules) -> ModelConfig:
    """With sounds, and the tokens around them. Raises CheckpointError."""
    root = files.required("config.json")
    ends = root.integer("boa_token_id", default=256000, least=0), root.integer("eoa_token_index", default=258883, least=0)
    return replace(
        config,
        audio=audio,
        audio_rules=rules,
        audio_token_id=root.integer("audio_token_id", default=PLACEHOLDERS["audio_token_id"], least=0),
        audio_start_token_id=ends[0],
        audio_end_token_id=ends[1],
        item_text_ids=(*config.item_text_ids, *ends),
    )


def tensor_specs(config: ModelConfig) -> list[TensorSpec]:
    """See ``Family``."""
    specs = list(language_specs(config.language))
    if isinstance(config.vision, PooledVision):
        specs += vision_specs(config.vision)
    if isinstance(config.audio, Conformer):
        specs += sound_specs(config.audio)
    return specs


def canonical_name(name: str) -> str:
    """See ``Family``."""
    bare = name.removeprefix("model.")
    if (found := placed(bare, _PARTS)) != bare:
        return found
    for prefix in ("model.language_model.", "language_model.model."):
        if name.startswith(prefix):
            name = f"model.{name.removeprefix(prefix)}"
    return gemma.canonical_name(name)


def checkpoint_name(name: str) -> str:
    """See ``Family``."""
    if name.startswith("language."):
        return gemma.checkpoint_name(name).replace("model.", "model.language_model.", 1)
    return placed(name, {ours: f"model.{theirs}" for theirs, ours in reversed(_PARTS.items())})


def build_towers(config: ModelConfig, weights: "dict[str, torch.Tensor]", device: "torch.device") -> "dict[MediaKind, Tower]":
    # By its name: only the process that builds towers depends on them (runtime/supervisor/reload.py).
    towers: dict[MediaKind, Tower] = import_module(f"{__package__}.towers").build_towers(config, weights, device)
    return towers


def recipes() -> Mapping[str, CheckpointRecipe]:
    return made_recipes(__package__, "gemma4")
