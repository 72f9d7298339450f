"""Positions, windows and frames of the patches of pictures and clips, as in Qwen2.5-VL's tower (arXiv 2502.13923, 2.1). In a tower
without windows a frame is a window.

A token is merge_size x merge_size patches that stand together; its patches follow each other in the tower's input.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...media_config import VisionConfig
from ...towers.sequences import Sequences

_CUBIC = -0.75  # the slope of a cubic convolution at a distance of 1


class Geometry(NamedTuple):
    """Of all items of a forward together, on the tower's device. T patches; the order of windows is that of ``token_order``."""

    token_order: Tensor  # int64 [T / merge_size ** 2]: which token stands where, frame by frame and within it window by window
    positions: Tensor  # int64 [T, 2]: row and column of each patch in its frame, in the order of windows
    windows: Sequences
    frames: Sequences
    taps: Tensor  # int64 [T, 4 or 16]: rows of the table of positions around each patch, if there is one
    tap_weights: Tensor  # float32, likewise

    def interpolated(self, table: Tensor) -> Tensor:
        """The learned positions of the patches, float32 [T, hidden], from a table [side ** 2, hidden]."""
        weights = self.tap_weights.unsqueeze(2)
        total = table[self.taps[:, 0]] * weights[:, 0]
        for tap in range(1, self.taps.shape[1]):
            total += table[self.taps[:, tap]] * weights[:, tap]
        return total


class _Frame(NamedTuple):
    """One frame. ``order``: its tokens window by window; the rest in that order."""

    order: NDArray[np.int64]
    places: NDArray[np.int64]  # row and column of each patch
    window_tokens: NDArray[np.int64]
    taps: NDArray[np.int64]
    tap_weights: NDArray[np.float32]


def geometry(grids: Sequence[tuple[int, int, int]], config: VisionConfig, device: torch.device) -> Geometry:
    """Of items of (frames, rows of patches, columns of patches) each; rows and columns are multiples of merge_size."""
    orders, parts, frame_lengths = list[NDArray[np.int64]](), list[_Frame](), list[NDArray[np.int64]]()
    num_tokens = 0
    for num_frames, height, width in grids:
        frame = _frame(height // config.merge_size, width // config.merge_size, config)
        frames = np.arange(num_frames)[:, None] * len(frame.order) + num_tokens
        orders.append((frames + frame.order).ravel())
        parts += [frame] * num_frames
        frame_lengths.append(np.full(num_frames, height * width))
        num_tokens += num_frames * len(frame.order)

    def joined(field: str) -> Tensor:
        return torch.from_numpy(np.concatenate([getattr(part, field) for part in parts])).to(device)

    windows = np.concatenate([part.window_tokens for part in parts]) * config.merge_size**2
    return Geometry(
        torch.from_numpy(np.concatenate(orders)).to(device),
        joined("places"),
        Sequences.of(windows, device),
        Sequences.of(np.concatenate(frame_lengths), device),
        joined("taps"),
        joined("tap_weights"),
    )


@lru_cache(maxsize=32)
def _frame(rows: int, columns: int, config: VisionConfig) -> _Frame:
    """Of a frame of rows x columns tokens. The largest windows are first: windows of one size are computed together, and no window sees
    another."""
    merge = config.merge_size
    side = config.window_size // merge // config.patch_size or max(rows, columns)
    row, column = (axis.ravel() for axis in np.indices((rows, columns)))
    window = row // side * -(-columns // side) + column // side
    sizes = np.bincount(window)
    order = np.lexsort((window, -sizes[window]))
    patch_row, patch_column = (axis.ravel() for axis in np.indices((merge, merge)))
    places = np.stack((row[order, None] * merge + patch_row, column[order, None] * merge + patch_column), axis=-1).reshape(-1, 2)
    return _Frame(order, places, -np.sort(-sizes), *_taps(places, (rows * merge, columns * merge), config))


def _taps(places: NDArray[np.int64], size: tuple[int, int], config: VisionConfig) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """The entries of the square table of positions around each patch, and their weights."""
    side = config.position_side
    if not side:
        return np.empty((0, 4), np.int64), np.empty((0, 4), np.float32)
    around = _AROUND[config.positions]
    (rows, row_weights), (columns, column_weights) = (around(places[:, axis], size[axis], side) for axis in (0, 1))
    taps = rows[:, :, None] * side + columns[:, None, :]
    weights = row_weights[:, :, None] * column_weights[:, None, :]
    return taps.reshape(len(places), -1), weights.reshape(len(places), -1)


def _between_corners(place: NDArray[np.int64], length: int, side: int) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """On one axis the two entries around each of ``length`` places, where the first and the last are the table's."""
    exact = place.astype(np.float32) * np.float32(side - 1) / np.float32(max(length - 1, 1))
    lower = np.floor(exact)
    share, index = exact - lower, lower.astype(np.int64)
    return np.stack((index, np.minimum(index + 1, side - 1)), 1), np.stack((1 - share, share), 1)


def _within_edges(place: NDArray[np.int64], length: int, side: int) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """As ``_between_corners``, where the first and the last place are as far from the edges as the table's entries are from its own."""
    exact = np.clip((place + 0.5) / length * side - 0.5, 0, side - 1).astype(np.float32)
    lower = np.floor(exact)
    share, index = exact - lower, lower.astype(np.int64)
    return np.stack((index, np.minimum(index + 1, side - 1)), 1), np.stack((1 - share, share), 1)


def _between_edges(place: NDArray[np.int64], length: int, side: int) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """On one axis the four entries around the middle of each of ``length`` places, which together are as wide as the table: by cubic
    convolution, as torch's ``grid_sample``. Entries outside of the table are those at its edge."""
    exact = (place + 0.5) / length * side - 0.5
    lower = np.floor(exact)
    distance = np.abs((exact - lower)[:, None] - np.arange(-1, 3))
    near = ((_CUBIC + 2) * distance - (_CUBIC + 3)) * distance**2 + 1
    far = ((distance - 5) * distance + 8) * _CUBIC * distance - 4 * _CUBIC
    index = np.clip(lower.astype(np.int64)[:, None] + np.arange(-1, 3), 0, side - 1)
    return index, np.where(distance <= 1, near, far).astype(np.float32)


_AROUND = {"bilinear": _between_corners, "bilinear_edges": _within_edges, "bicubic": _between_edges}
