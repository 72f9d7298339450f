"""Videos whose temporal positions count time, as those of Qwen's Omni models: items, and positions of a prompt."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ....schema.media import ItemShape, MediaSpan
from ...architecture import ModelConfig
from . import media


def video_item(
    config: ModelConfig, num_frames: int, height: int, width: int, sampled_fps: float, times_s: Sequence[float] = ()
) -> ItemShape:
    """Seconds per temporal patch follow the requested rate, not ``sampled_fps``, as in transformers' processor."""
    rules = media.vision_rules(config, "video")
    grid = media.video_grid(rules, num_frames, height, width)
    return media.video_item_of(rules, grid, rules.temporal_patch_size / rules.fps)


def positions(config: ModelConfig, num_tokens: int, spans: Sequence[MediaSpan]) -> tuple[NDArray[np.int64], int]:
    """See ``Family``."""
    return positions_by_clock(config, num_tokens, spans, shares_fences=True)


def positions_by_clock(
    config: ModelConfig, num_tokens: int, spans: Sequence[MediaSpan], *, shares_fences: bool
) -> tuple[NDArray[np.int64], int]:
    """Text after a medium continues one beyond the largest position of the medium's last segment on any axis. ``shares_fences`` as in
    ``fill_positions``."""
    assert config.vision is not None
    merge = config.vision.merge_size

    def temporal(item: ItemShape) -> NDArray[np.int64]:
        seconds = np.float32(item.second_per_grid_s if item.kind == "video" else 1.0)
        steps = np.arange(item.grid[0], dtype=np.float32) * seconds
        return (steps * np.float32(config.positions_per_second)).astype(np.int64)

    def advance(item: ItemShape, offsets: NDArray[np.int64]) -> int:
        if item.segments[-1].kind == "audio":
            return sum(part.num_tokens for part in item.segments if part.kind == "audio")
        return max(int(offsets[-1]), item.grid[1] // merge - 1, item.grid[2] // merge - 1) + 1

    return media.fill_positions(num_tokens, spans, merge, temporal, advance, shares_fences)
