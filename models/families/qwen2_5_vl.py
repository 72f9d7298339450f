"""Qwen2.5-VL: text, images and video. Its decoder and positions as in transformers' ``qwen2_5_vl``."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ...schema.media import ItemShape, MediaSpan
from ..architecture import ModelConfig
from ..checkpoint.json_fields import CheckpointFiles
from ..errors import UnsupportedMediaError
from . import qwen2_5
from . import qwen2_5_fields as fields
from .qwen2_5 import audio_item, image_item, sample_frames

__all__ = ["audio_item", "image_item", "parse_config", "positions", "sample_frames", "video_item", "video_with_sound"]


def parse_config(files: CheckpointFiles) -> ModelConfig:
    """Map config.json, nested (text_config) or flat. Raises CheckpointError."""
    config = files.required("config.json")
    text = config.object("text_config") if config.has("text_config") else config
    tie = config.boolean("tie_word_embeddings", default=False) or text.boolean("tie_word_embeddings", default=False)
    language = fields.parse_language(text, default_theta=1e6, tie=tie)
    vision = fields.parse_vision(config.object("vision_config"), language.hidden_size)
    return ModelConfig(
        family="qwen2_5_vl",
        language=language,
        dtype=fields.parse_dtype(config, text),
        max_context=text.integer("max_position_embeddings", default=32768),
        eos_token_ids=fields.parse_eos(files, config, text),
        vision=vision,
        vision_rules=fields.parse_vision_rules(files, vision, video_falls_back=True),
        image_token_id=config.integer("image_token_id", default=151655, least=0),
        video_token_id=config.integer("video_token_id", default=151656, least=0),
        positions_per_second=config.object("vision_config").number("tokens_per_second", default=4.0),
    )


def video_item(config: ModelConfig, num_frames: int, height: int, width: int, sampled_fps: float) -> ItemShape:
    """Seconds per temporal patch follow the rate at which frames were really sampled."""
    rules = qwen2_5.vision_rules(config, "video")
    grid = qwen2_5.video_grid(rules, num_frames, height, width)
    return qwen2_5.video_item_of(rules, grid, rules.temporal_patch_size / sampled_fps)


def video_with_sound(config: ModelConfig, video: ItemShape, sound: ItemShape) -> ItemShape:
    raise UnsupportedMediaError("this model takes no sound with its videos")


def positions(config: ModelConfig, num_tokens: int, spans: Sequence[MediaSpan]) -> tuple[NDArray[np.int64], int]:
    """Text after a medium continues at its larger side; long videos' temporal positions may reach beyond that."""
    assert config.vision is not None
    merge = config.vision.merge_size

    def temporal(item: ItemShape) -> NDArray[np.int64]:
        interval = np.float32(1.0)
        if item.kind == "video":
            interval = np.float32(config.positions_per_second) * np.float32(item.second_per_grid_s)
        return (np.arange(item.grid[0], dtype=np.float32) * interval).astype(np.int64)

    def advance(item: ItemShape, _: NDArray[np.int64]) -> int:
        return max(item.grid[1:]) // merge

    return qwen2_5.fill_positions(num_tokens, spans, merge, temporal, advance)
