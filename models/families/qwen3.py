"""Qwen3 for text alone: norms of queries and keys. As transformers' ``qwen3``."""

from collections.abc import Mapping
from importlib import import_module

import msgspec

from ..architecture import ModelConfig
from ..checkpoint.json_fields import CheckpointFiles
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
    mixer = msgspec.structs.replace(parse_attention(config, default_head_dim=128), qk_norm=True)
    return parse_text_config(files, "qwen3", mixer, max_positions=32768)


def recipes() -> Mapping[str, CheckpointRecipe]:
    # By its name: no actor depends on it.
    made: dict[str, CheckpointRecipe] = import_module(".text.made_checkpoint", __package__).recipes("qwen3")
    return made
