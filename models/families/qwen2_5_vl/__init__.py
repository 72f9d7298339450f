"""Qwen2.5-VL: text, images and video. Its decoder and positions as in transformers' ``qwen2_5_vl``."""

from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from ....schema.media import ItemShape, MediaKind, MediaSpan
from ...architecture import ModelConfig
from ...checkpoint.json_fields import CheckpointFiles
from ...errors import UnsupportedMediaError
from ..family import CheckpointRecipe
from ..fields import parse_dtype, parse_eos
from ..qwen2_5 import fields, media, tensors

if TYPE_CHECKING:
    import torch

    from ...towers.interface import Tower

audio_item, image_item, sample_frames = media.audio_item, media.image_item, media.sample_frames
canonical_name, checkpoint_name, tensor_specs = tensors.canonical_name, tensors.checkpoint_name, tensors.tensor_specs


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
        dtype=parse_dtype(config, text),
        max_context=text.integer("max_position_embeddings", default=32768),
        eos_token_ids=parse_eos(files, config, text),
        vision=vision,
        vision_rules=fields.parse_vision_rules(files, vision, video_falls_back=True),
        image_token_id=config.integer("image_token_id", default=151655, least=0),
        video_token_id=config.integer("video_token_id", default=151656, least=0),
        positions_per_second=config.object("vision_config").number("tokens_per_second", default=4.0),
    )


def video_item(config: ModelConfig, num_frames: int, height: int, width: int, sampled_fps: float) -> ItemShape:
    """Seconds per temporal patch follow the actual sampling rate of the frames."""
    rules = media.vision_rules(config, "video")
    grid = media.video_grid(rules, num_frames, height, width)
    return media.video_item_of(rules, grid, rules.temporal_patch_size / sampled_fps)


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

    return media.fill_positions(num_tokens, spans, merge, temporal, advance)


def build_towers(config: ModelConfig, weights: "dict[str, torch.Tensor]", device: "torch.device") -> "dict[MediaKind, Tower]":
    # By its name: only the process that builds towers depends on them (runtime/supervisor/reload.py).
    towers: dict[MediaKind, Tower] = import_module(f"{__package__}.towers").build_towers(config, weights, device)
    return towers


def recipes() -> Mapping[str, CheckpointRecipe]:
    # By its name: no actor depends on it.
    made: dict[str, CheckpointRecipe] = import_module(f"{__package__}.made_checkpoint").recipes()
    return made
