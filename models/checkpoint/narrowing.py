"""A checkpoint's numbers in the format in which they are kept: a floating one, int8 with a scale for each row, int8g or int4.

Scales are bfloat16, so that no kernel has to round them. ``weights`` calls ``narrow`` once for each tensor, while ``memory`` loads the
model.
"""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from ...schema.weight_layout import INT8_MOST, PACKED_ROWS
from . import int4, int8g

_BLOCK_VALUES = 1 << 20  # converted at once: an embedding matrix in float32 would take gigabytes


def narrow(values: Tensor, target: Tensor, scales: Tensor | None = None) -> None:
    """Write ``values`` [rows, ...] of any floating type to ``target`` of the same shape, rounded to the nearest.

    With ``scales`` bfloat16 [rows], ``target`` is int8 and a row's numbers are ``scales`` x ``target``. With ``scales`` bfloat16
    [rows, groups], ``target`` is int8, see ``int8g``; with [rows, groups, 2] it is uint8 [rows, columns / 2], see ``int4``.

    Raises: ValueError for values that float16 or a format of integers does not have.
    """
    if scales is None and (target.dtype != torch.float16 or values.dtype == target.dtype):
        target.copy_(values)
        return
    is_int8g = scales is not None and scales.dim() == 2
    for rows, block in _blocks(values, are_kept=is_int8g):
        if scales is None:
            _halve(block, target[rows])
        elif scales.dim() == 1:
            _quantize(block, target[rows], scales[rows])
        elif is_int8g:
            int8g.write(block, target[rows], scales[rows])
            _check_finite(scales[rows], "int8g")
        else:
            codes, steps, zeros = int4.quantize(block, scales.shape[1])
            _check_finite(zeros, "int4")
            int4.pack(codes, steps, zeros, target[rows], scales[rows])


def row_blocks(rows: slice, num_columns: int, unit: int = 1, num_values: int = _BLOCK_VALUES) -> Iterator[slice]:
    """The rows that are converted at once, a multiple of int4's and int8g's, and of ``unit``, in each but the last."""
    unit = math.lcm(unit, PACKED_ROWS)
    step = max(1, num_values // (max(1, num_columns) * unit)) * unit
    return (slice(first, min(first + step, rows.stop)) for first in range(rows.start, rows.stop, step))


def _blocks(values: Tensor, are_kept: bool = False) -> Iterator[tuple[slice, Tensor]]:
    """Blocks of rows in float32, all in the same memory, which may be written to unless they ``are_kept``."""
    if are_kept and values.dtype == torch.float32:
        yield from ((rows, values[rows]) for rows in row_blocks(slice(0, values.shape[0]), math.prod(values.shape[1:])))
        return
    memory: Tensor | None = None
    for rows in row_blocks(slice(0, values.shape[0]), math.prod(values.shape[1:])):
        memory = torch.empty(values[rows].shape) if memory is None else memory
        yield rows, memory[: rows.stop - rows.start].copy_(values[rows])


def _halve(block: Tensor, target: Tensor) -> None:
    limit = torch.finfo(torch.float16).max
    least, most = map(float, torch.aminmax(block))
    if not (-limit <= least and most <= limit):  # also for NaN
        raise ValueError(
            f"has {least if -least > most else most:g}, float16 holds at most {limit:g}: set model.weights to another format"
        )
    target.copy_(block)


def _quantize(block: Tensor, target: Tensor, scales: Tensor) -> None:
    largest = torch.maximum(block.amax(1), -block.amin(1))  # without a copy of the block
    _check_finite(largest, "int8")
    scales.copy_(largest / INT8_MOST)  # rounded by 1/512 of itself at most: the largest is still 127 of them
    used = scales.float()
    # Rows of zeros, and of numbers too small to be divided by their scale, are zeros.
    inverse = torch.where(used < torch.finfo(torch.float32).tiny, 0.0, used.reciprocal())
    target.copy_(block.mul_(inverse.unsqueeze(1)).round_())


def _check_finite(derived: Tensor, form: str) -> None:
    if not bool(derived.isfinite().all()):
        raise ValueError(f"has a value that is not finite, which {form} cannot hold: set model.weights to another format")
