"""Qwen2.5-Omni's thinker: text, images, video and audio in, text out. Sound tracks of videos are not used.

Positions as in transformers' ``qwen2_5_omni`` without ``use_audio_in_video``.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ..architecture import Item, ItemLike, ModelConfig, SpanLike
from ..json_fields import CheckpointFiles
from . import qwen2_5
from . import qwen2_5_fields as fields
from .qwen2_5 import audio_item, image_item, sample_frames

__all__ = ["audio_item", "image_item", "parse_config", "positions", "sample_frames", "video_item"]


def parse_config(files: CheckpointFiles) -> ModelConfig:
    """Map config.json of the whole model (thinker_config) or of the bare thinker. Raises CheckpointError."""
    outer = files.required("config.json")
    config = outer.object("thinker_config") if outer.has("thinker_config") else outer
    text = config.object("text_config")
    language = fields.parse_language(text, default_theta=1e6, tie=config.boolean("tie_word_embeddings", default=False))
    vision = fields.parse_vision(config.object("vision_config"), language.hidden_size, split_qkv=True)
    audio = fields.parse_audio(config.object("audio_config"), language.hidden_size)
    return ModelConfig(
        family="qwen2_5_omni",
        language=language,
        dtype=fields.parse_dtype(outer, config, text),
        max_context=text.integer("max_position_embeddings", default=32768),
        eos_token_ids=fields.parse_eos(files, config, text),
        vision=vision,
        audio=audio,
        vision_rules=fields.parse_vision_rules(files, vision, video_falls_back=False),
        audio_rules=fields.parse_audio_rules(files, audio),
        image_token_id=config.integer("image_token_id", "image_token_index", default=151655, least=0),
        video_token_id=config.integer("video_token_id", "video_token_index", default=151656, least=0),
        audio_token_id=config.integer("audio_token_id", "audio_token_index", default=151646, least=0),
        positions_per_second=config.number("position_id_per_seconds", default=25),
    )


def video_item(config: ModelConfig, num_frames: int, height: int, width: int, sampled_fps: float) -> Item:
    """Seconds per temporal patch follow the rate asked for, not ``sampled_fps``: so does transformers' processor."""
    rules = qwen2_5.vision_rules(config, "video")
    grid = qwen2_5.video_grid(rules, num_frames, height, width)
    return qwen2_5.video_item_of(rules, grid, rules.temporal_patch_size / rules.fps)


def positions(config: ModelConfig, num_tokens: int, spans: Sequence[SpanLike]) -> tuple[NDArray[np.int64], int]:
    """Text after a medium continues one beyond the largest position of the medium on any axis."""
    assert config.vision is not None
    merge = config.vision.merge_size

    def temporal(item: ItemLike) -> NDArray[np.int64]:
        seconds = np.float32(item.second_per_grid_s if item.kind == "video" else 1.0)
        steps = np.arange(item.grid[0], dtype=np.float32) * seconds
        return (steps * np.float32(config.positions_per_second)).astype(np.int64)

    def advance(item: ItemLike, offsets: NDArray[np.int64]) -> int:
        return max(int(offsets[-1]), item.grid[1] // merge - 1, item.grid[2] // merge - 1) + 1

    return qwen2_5.fill_positions(num_tokens, spans, merge, temporal, advance)
