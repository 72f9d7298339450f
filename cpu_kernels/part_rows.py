"""Activations for products of integers with a matrix in groups of columns: rounded to 8 bits in parts of 32 columns, by a kernel.

A part of a row has a step of its own, so an outlier makes only its neighbours in that part coarser.
Shapes: M rows, K columns, a multiple of 32.
"""

from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import torch
from llvmlite import ir
from torch import Tensor

from .kernel import Kernel, available_threads, load_kernel
from .machine_code import FLOAT, POINTER, address, call_intrinsic, constant, load_vector, load_word, loop, spread

PART = 32  # columns with one step
_MOST = 127.0
_LEAST = 1e-30  # in a part whose numbers are all smaller, they may be rounded to zero
_LEAST_WORK = 1 << 16  # numbers: fewer are left to one thread
_BLOCK_PARTS = 32
_BYTE, _WORD = ir.IntType(8), ir.IntType(32)
_FLOATS, _WORDS = ir.VectorType(FLOAT, PART), ir.VectorType(_WORD, PART)


class RoundedRows(NamedTuple):
    """Rows of activations: whole numbers x steps."""

    codes: Tensor  # int8 [M, K], -127 to 127
    steps: Tensor  # float32 [M, K / 32, 2]: a part's step, NaN where a number is missing, and the sum of its rounded numbers


def round_rows(x_MK: Tensor) -> RoundedRows:
    """Round contiguous float32 rows. The largest number of a part becomes 127 or -127."""
    num_rows, num_columns = x_MK.shape
    codes = torch.empty(num_rows, num_columns, dtype=torch.int8)
    steps = torch.empty(num_rows, num_columns // PART, 2, dtype=torch.float32)
    words = (1, num_rows * num_columns // PART, x_MK.data_ptr(), codes.data_ptr(), steps.data_ptr())
    _kernel().run(words, available_threads() if num_rows * num_columns >= _LEAST_WORK else 1)
    return RoundedRows(codes, steps)


@cache
def _kernel() -> Kernel:
    return load_kernel("part_rows", _Parts(), _BLOCK_PARTS)


class _Parts:
    """Emits the rounding of some parts. The words are 1, the number of parts, and the addresses of x, the whole numbers and the
    steps."""

    most_rows = 1

    def emit(self, builder: ir.IRBuilder, num_rows: int, arguments: Sequence[ir.Value]) -> None:
        words, _, start, stop = arguments
        x, codes, steps = (load_word(builder, words, index, POINTER) for index in range(2, 5))
        with loop(builder, start, stop, 1) as part:
            first = builder.mul(part, constant(PART))
            values = load_vector(builder, x, first, PART)
            bits = builder.and_(builder.bitcast(values, _WORDS), ir.Constant(_WORDS, [0x7FFFFFFF] * PART))
            # As whole numbers, the bits of a missing number are larger than those of any other.
            largest = builder.bitcast(call_intrinsic(builder, f"llvm.vector.reduce.smax.v{PART}i32", _WORD, [bits]), FLOAT)
            bound = builder.select(builder.fcmp_ordered("<", largest, _number(_LEAST)), _number(_LEAST), largest)
            scaled = builder.fmul(values, spread(builder, builder.fdiv(_number(_MOST), bound), PART))
            whole = builder.fptosi(call_intrinsic(builder, f"llvm.rint.v{PART}f32", _FLOATS, [scaled]), _WORDS)
            builder.store(builder.trunc(whole, ir.VectorType(_BYTE, PART)), address(builder, codes, first, _BYTE), align=1)
            step = builder.fmul(bound, _number(1 / _MOST))
            total = builder.sitofp(call_intrinsic(builder, f"llvm.vector.reduce.add.v{PART}i32", _WORD, [whole]), FLOAT)
            pair = builder.mul(part, constant(2))
            builder.store(step, address(builder, steps, pair))
            builder.store(builder.fmul(step, total), address(builder, steps, builder.add(pair, constant(1))))


def _number(value: float) -> ir.Constant:
    return ir.Constant(FLOAT, torch.tensor(value).item())  # of float32
