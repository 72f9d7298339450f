"""Qwen2.5-Omni's thinker. The members are those of ``Family``."""

from ..qwen2_5.media import audio_item, image_item, sample_frames
from ..qwen2_5.tensors import canonical_name, checkpoint_name, tensor_specs
from .family import TOWER_MODULES, build_towers, parse_config, positions, recipes, video_item, video_with_sound

__all__ = [
    "TOWER_MODULES",
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
