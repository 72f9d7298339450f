"""Positions, windows and frames of the patches of pictures and clips, as in Qwen2.5-VL's tower (arXiv 2502.13923, 2.1). In a tower
without windows a frame is a window.

A token is merge_size x merge_size patches that stand together; its patches follow each other in the tower's input.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...architecture import VisionConfig
from ...towers.sequences import Sequences


class Geometry(NamedTuple):
    """Of all items of a forward together, on the tower's device. T patches; the order of windows is that of ``token_order``."""

    token_order: Tensor  # int64 [T / merge_size ** 2]: which token stands where, frame by frame and within it window by window
    positions: Tensor  # int64 [T, 2]: row and column of each patch in its frame, in the order of windows
    windows: Sequences
    frames: Sequences


def geometry(grids: Sequence[tuple[int, int, int]], config: VisionConfig, device: torch.device) -> Geometry:
    """Of items of (frames, rows of patches, columns of patches) each; rows and columns are multiples of merge_size."""
    orders, positions, window_lengths, frame_lengths = [], [], [], []
    num_tokens, merged = 0, config.merge_size**2
    for num_frames, height, width in grids:
        order, places, lengths = _frame(height // config.merge_size, width // config.merge_size, config)
        frames = np.arange(num_frames)[:, None] * len(order) + num_tokens
        orders.append((frames + order).ravel())
        positions.append(np.tile(places, (num_frames, 1)))
        window_lengths.append(np.tile(lengths * merged, num_frames))
        frame_lengths.append(np.full(num_frames, height * width))
        num_tokens += num_frames * len(order)
    return Geometry(
        torch.from_numpy(np.concatenate(orders)).to(device),
        torch.from_numpy(np.concatenate(positions)).to(device),
        Sequences.of(np.concatenate(window_lengths), device),
        Sequences.of(np.concatenate(frame_lengths), device),
    )


def _frame(rows: int, columns: int, config: VisionConfig) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Of a frame of rows x columns tokens: the tokens window by window, positions of their patches, tokens of each window.

    The largest windows are first: windows of one size are computed together, and no window sees another.
    """
    merge = config.merge_size
    side = config.window_size // merge // config.patch_size or max(rows, columns)
    row, column = (axis.ravel() for axis in np.indices((rows, columns)))
    window = row // side * -(-columns // side) + column // side
    sizes = np.bincount(window)
    order = np.lexsort((window, -sizes[window]))
    patch_row, patch_column = (axis.ravel() for axis in np.indices((merge, merge)))
    places = np.stack((row[order, None] * merge + patch_row, column[order, None] * merge + patch_column), axis=-1).reshape(-1, 2)
    return order, places, -np.sort(-sizes)
