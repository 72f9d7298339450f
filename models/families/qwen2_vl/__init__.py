"""Qwen2-VL: text, images and video. Its decoder and positions as in transformers' ``qwen2_vl``."""

from collections.abc import Mapping, Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from ....schema.media import ItemShape, MediaSpan
from ...architecture import ModelConfig, VisionConfig
from ...checkpoint.json_fields import CheckpointFiles, JsonObject
from ..family import CheckpointRecipe, made_recipes
from ..qwen2_5 import fields, media, seeing, tensors

audio_item, image_item, sample_frames = media.audio_item, media.image_item, media.sample_frames
build_towers, video_item, video_with_sound = seeing.build_towers, seeing.video_item, seeing.video_with_sound
tensor_specs = tensors.tensor_specs

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


def positions(config: ModelConfig, num_tokens: int, spans: Sequence[MediaSpan]) -> tuple[NDArray[np.int64], int]:
    """A temporal patch of a video stands one behind the one before it."""

    def temporal(item: ItemShape) -> NDArray[np.int64]:
        return np.arange(item.grid[0])

    return seeing.positions(config, num_tokens, spans, temporal)


def recipes() -> Mapping[str, CheckpointRecipe]:
    return made_recipes(__package__)
