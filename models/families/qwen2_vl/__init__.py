"""Qwen2-VL: text, images and video. Its decoder and positions as in transformers' ``qwen2_vl``."""

from collections.abc import Mapping

import msgspec

from ...architecture import ModelConfig
from ...checkpoint.json_fields import CheckpointFiles, JsonObject
from ...media_config import VisionConfig
from ..family import CheckpointRecipe, made_recipes
from ..qwen2_5 import fields, media, seeing, tensors

audio_item, image_item, sample_frames = media.audio_item, media.image_item, media.sample_frames
build_towers, video_item, video_with_sound = seeing.build_towers, seeing.video_item, seeing.video_with_sound
positions, tensor_specs = seeing.positions_by_patch, tensors.tensor_specs

_NAMES = {".mlp.fc1.": ".mlp.up_proj.", ".mlp.fc2.": ".mlp.down_proj."}


def parse_config(files: CheckpointFiles) -> ModelConfig:
    """Map config.json, nested (text_config) or flat. Raises CheckpointError."""
    return seeing.parse_config(files, "qwen2_vl", fields.parse_language, _parse_vision, seeing.parse_rules)


def _parse_vision(vision: JsonObject, hidden_size: int) -> VisionConfig:
    """The tower, whose ``hidden_size`` is its output's."""
    vision.text("hidden_act", default="quick_gelu", choices=("quick_gelu",))
    inner = int(vision.integer("embed_dim") * vision.number("mlp_ratio", default=4))
    config = fields.parse_tower(vision, hidden_size, inner, width="embed_dim", output="hidden_size")
    return msgspec.structs.replace(config, norm="layer", feed_forward="quick_gelu")


def canonical_name(name: str) -> str:
    """See ``Family``."""
    return tensors.renamed(tensors.canonical_name(name), _NAMES)


def checkpoint_name(name: str) -> str:
    """See ``Family``."""
    return tensors.checkpoint_name(tensors.renamed(name, {ours: theirs for theirs, ours in _NAMES.items()}))


def recipes() -> Mapping[str, CheckpointRecipe]:
    return made_recipes(__package__)
