"""Qwen3 with experts, for text alone. As transformers' ``qwen3_moe``."""

from collections.abc import Mapping
from importlib import import_module

import msgspec

from ..architecture import ModelConfig
from ..checkpoint.json_fields import CheckpointFiles
from .experts import parse_experts
from .family import CheckpointRecipe
from .fields import parse_attention
from .no_media import audio_item, build_towers, image_item, positions, sample_frames, video_item, video_with_sound
from .text.checkpoint import canonical_name, checkpoint_name, parse_text_config, tensor_specs

__all__ = [
    "audio_item",
    "build_towers",
    "canonical_name",
    "checkpoint_name",
    "image_item",
    "parse_config",
    "positions",
    "recipes",
    "sample_frames",
    "tensor_specs",
    "video_item",
    "video_with_sound",
]


def parse_config(files: CheckpointFiles) -> ModelConfig:
    """Map config.json. Raises CheckpointError."""
    config = files.required("config.json")
    mixer = msgspec.structs.replace(parse_attention(config), qk_norm=True)
    return parse_text_config(files, "qwen3_moe", mixer, max_positions=32768, feed_forwards=parse_experts)


def recipes() -> Mapping[str, CheckpointRecipe]:
    # By its name: no actor depends on it.
    made: dict[str, CheckpointRecipe] = import_module(".text.made_checkpoint", __package__).recipes("qwen3_moe")
    return made
