"""Sums of products of int8 as numbers, in one pass while they are in cache: torch takes three, and memory for each.

Shapes: M rows, N columns, of which ``sums`` has a block of n.
"""

from collections.abc import Sequence
from functools import cache

import torch
from llvmlite import ir
from torch import Tensor

from .kernel import Kernel, available_threads, load_kernel, vector_width
from .machine_code import FLOAT, POINTER, address, constant, load_vector, load_word, loop, spread, to_bfloat16

_SHORT, _WORD = ir.IntType(16), ir.IntType(32)
_KINDS = (torch.float32, torch.bfloat16)


def has_kernel(num_values: int, dtype: torch.dtype) -> bool:
    """Return whether ``scale`` writes so many columns, in this dtype."""
    width = vector_width()
    return width is not None and num_values % width == 0 and dtype in _KINDS


def scale(sums_Mn: Tensor, less_n: Tensor, steps_n: Tensor, row_steps_M1: Tensor, out_Mn: Tensor) -> None:
    """Write (sums - less) x steps x row steps, in this order in float32, to ``out``, whose rows may be parts of longer ones. ``sums``
    and ``less`` are int32, steps float32; all but ``out`` are contiguous, n is a multiple of a vector's width."""
    num_rows, num_values = out_Mn.shape
    assert sums_Mn.shape == out_Mn.shape and len(less_n) == len(steps_n) == num_values and len(row_steps_M1) == num_rows
    assert has_kernel(num_values, out_Mn.dtype) and out_Mn.stride(1) == 1 and sums_Mn.is_contiguous()
    addresses = (tensor.data_ptr() for tensor in (sums_Mn, less_n, steps_n, row_steps_M1, out_Mn))
    _kernel(out_Mn.dtype).run((1, num_rows, num_values, out_Mn.stride(0), *addresses), available_threads())


@cache
def _kernel(dtype: torch.dtype) -> Kernel:
    width = vector_width()
    assert width is not None
    name = str(dtype).removeprefix("torch.")
    return load_kernel(f"scaling-{name}", _Rows(width, dtype == torch.bfloat16), 1)


class _Rows:
    """Emits a row. The words are 1, M, n, the numbers from one row of the result to the next, and the addresses of sums, what they are
    less, steps, steps of rows, and the result."""

    most_rows = 1

    def __init__(self, width: int, is_rounded: bool) -> None:
        self._width, self._is_rounded, self._floats = width, is_rounded, ir.VectorType(FLOAT, width)

    def emit(self, builder: ir.IRBuilder, num_rows: int, arguments: Sequence[ir.Value]) -> None:
        words, _, row, stop = arguments
        num_values, distance = load_word(builder, words, 2), load_word(builder, words, 3)
        sums, less, steps, row_steps, out = (load_word(builder, words, index, POINTER) for index in range(4, 9))
        with loop(builder, row, stop, 1) as row:
            step = spread(builder, builder.load(address(builder, row_steps, row), align=4, typ=FLOAT), self._width)
            begin, end = builder.mul(row, num_values), builder.mul(row, distance)
            with loop(builder, constant(0), num_values, self._width) as column:
                total = load_vector(builder, sums, builder.add(begin, column), self._width, _WORD)
                total = builder.sub(total, load_vector(builder, less, column, self._width, _WORD))
                found = builder.fmul(builder.sitofp(total, self._floats), load_vector(builder, steps, column, self._width))
                found, place = builder.fmul(found, step), builder.add(end, column)
                if self._is_rounded:
                    builder.store(to_bfloat16(builder, found), address(builder, out, place, _SHORT), align=2)
                else:
                    builder.store(found, address(builder, out, place), align=4)
