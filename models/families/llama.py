"""Llama and its like, SmolLM2 among them: text alone. As transformers' ``llama``."""

from collections.abc import Mapping
from importlib import import_module

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
    if config.boolean("mlp_bias", default=False):
        raise config.error("mlp_bias", "is true; a feed-forward with biases is not supported")
    return parse_text_config(files, "llama", parse_attention(config), max_positions=2048)


def recipes() -> Mapping[str, CheckpointRecipe]:
    # By its name: no actor depends on it.
    made: dict[str, CheckpointRecipe] = import_module(".text.made_checkpoint", __package__).recipes("llama")
    return made
