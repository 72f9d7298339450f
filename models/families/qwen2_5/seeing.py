"""The common parts of families that see and do not hear: Qwen2-VL and its successors, and GLM's."""

from collections.abc import Callable, Sequence
from importlib import import_module
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from ....schema.media import ItemShape, MediaKind, MediaSpan
from ...architecture import LanguageConfig, ModelConfig
from ...checkpoint.json_fields import CheckpointFiles, JsonObject
from ...errors import UnsupportedMediaError
from ...media_config import VisionConfig, VisionRules
from ..fields import max_positions, parse_dtype, parse_eos
from . import fields, media

if TYPE_CHECKING:
    import torch

    from ...towers.interface import Tower


def parse_config(
    files: CheckpointFiles,
    family: str,
    parse_text: Callable[[JsonObject, bool], LanguageConfig],
    parse_tower: Callable[[JsonObject, int], VisionConfig],
    parse_rules: Callable[[CheckpointFiles, VisionConfig], VisionRules],
    placeholder: int = 151655,
) -> ModelConfig:
    """Map config.json, nested (text_config) or flat, of a model that sees pictures and videos. ``parse_text`` gets the decoder's fields
    and whether its embeddings are tied, ``parse_tower`` the tower's fields and the decoder's width, ``parse_rules`` the files and the
    tower. ``placeholder``: the id that stands for a picture where the file does not say; that of a video follows it. Raises
    CheckpointError."""
    config = files.required("config.json")
    text = config.object("text_config") if config.has("text_config") else config
    tie = config.boolean("tie_word_embeddings", default=False) or text.boolean("tie_word_embeddings", default=False)
    language = parse_text(text, tie)
    vision = parse_tower(config.object("vision_config"), language.hidden_size)
    return ModelConfig(
        family=family,
        language=language,
        dtype=parse_dtype(config, text),
        max_context=max_positions(text),
        eos_token_ids=parse_eos(files, config, text),
        vision=vision,
        vision_rules=parse_rules(files, vision),
        image_token_id=config.integer("image_token_id", default=placeholder, least=0),
        video_token_id=config.integer("video_token_id", default=placeholder + 1, least=0),
    )


def parse_rules(files: CheckpointFiles, vision: VisionConfig) -> VisionRules:
    """Rules of Qwen2's and Qwen2.5's processors."""
    return fields.parse_vision_rules(files, vision, video_falls_back=True)


def video_item(
    config: ModelConfig, num_frames: int, height: int, width: int, sampled_fps: float, times_s: Sequence[float] = ()
) -> ItemShape:
    """Seconds per temporal patch follow the actual sampling rate of the frames."""
    rules = media.vision_rules(config, "video")
    return media.video_item_of(rules, media.video_grid(rules, num_frames, height, width), rules.temporal_patch_size / sampled_fps)


def video_with_sound(config: ModelConfig, video: ItemShape, sound: ItemShape) -> ItemShape:
    """Refuse it."""
    raise UnsupportedMediaError("this model takes no sound with its videos")


def positions(
    config: ModelConfig, num_tokens: int, spans: Sequence[MediaSpan], temporal: Callable[[ItemShape], NDArray[np.int64]]
) -> tuple[NDArray[np.int64], int]:
    """Those of a model that sees and does not hear: text after a medium continues at its larger side; temporal positions may reach
    beyond that."""
    assert config.vision is not None
    merge = config.vision.merge_size

    def advance(item: ItemShape, _: NDArray[np.int64]) -> int:
        return max(item.grid[1:]) // merge

    return media.fill_positions(num_tokens, spans, merge, temporal, advance)


def positions_by_patch(config: ModelConfig, num_tokens: int, spans: Sequence[MediaSpan]) -> tuple[NDArray[np.int64], int]:
    """Those where a temporal patch of a video stands one behind the one before it."""

    def temporal(item: ItemShape) -> NDArray[np.int64]:
        return np.arange(item.grid[0])

    return positions(config, num_tokens, spans, temporal)


def build_towers(config: ModelConfig, weights: "dict[str, torch.Tensor]", device: "torch.device") -> "dict[MediaKind, Tower]":
    # By its name: only the process that builds towers depends on them (runtime/supervisor/reload.py).
    towers: dict[MediaKind, Tower] = import_module(f"{__package__}.towers").build_towers(config, weights, device)
    return towers
