"""Qwen2.5-VL: text, images and video. Its decoder and positions as in transformers' ``qwen2_5_vl``."""

from collections.abc import Mapping, Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from ....schema.media import ItemShape, MediaSpan
from ...architecture import ModelConfig
from ...checkpoint.json_fields import CheckpointFiles
from ..family import CheckpointRecipe, made_recipes
from ..qwen2_5 import fields, media, seeing, tensors

audio_item, image_item, sample_frames = media.audio_item, media.image_item, media.sample_frames
build_towers, video_item, video_with_sound = seeing.build_towers, seeing.video_item, seeing.video_with_sound
canonical_name, checkpoint_name, tensor_specs = tensors.canonical_name, tensors.checkpoint_name, tensors.tensor_specs


def parse_config(files: CheckpointFiles) -> ModelConfig:
    """Map config.json, nested (text_config) or flat. Raises CheckpointError."""
    config = seeing.parse_config(files, "qwen2_5_vl", fields.parse_language, fields.parse_vision, seeing.parse_rules)
    rate = files.required("config.json").object("vision_config").number("tokens_per_second", default=4.0)
    return msgspec.structs.replace(config, positions_per_second=rate)


def positions(config: ModelConfig, num_tokens: int, spans: Sequence[MediaSpan]) -> tuple[NDArray[np.int64], int]:
    """Temporal positions of a video follow its seconds."""

    def temporal(item: ItemShape) -> NDArray[np.int64]:
        interval = np.float32(1.0)
        if item.kind == "video":
            interval = np.float32(config.positions_per_second) * np.float32(item.second_per_grid_s)
        return (np.arange(item.grid[0], dtype=np.float32) * interval).astype(np.int64)

    return seeing.positions(config, num_tokens, spans, temporal)


def recipes() -> Mapping[str, CheckpointRecipe]:
    return made_recipes(__package__)
