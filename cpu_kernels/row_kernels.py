"""Products of few rows with a matrix in rows on a CPU.

A decode step reads every weight once. torch needs up to seven times as long: its kernels for few rows are for one row, for both
factors in one format, or for matrices that are packed into a copy. Here a matrix is read as it lies in the memory that the run's
processes share, each weight is converted once for up to four rows of activations, and products are added up in float32. A row's result
is the same bits however many rows are beside it, and however many threads there are.
Shapes: M rows of activations, N rows of the matrix, K columns.
"""

from collections.abc import Sequence
from functools import cache

import torch
from llvmlite import ir
from torch import Tensor

from .groups import Groups
from .kernel import Kernel, check_columns, load_kernel, threads_for, vector_width
from .machine_code import (
    FLOAT,
    POINTER,
    add_product,
    address,
    clear,
    constant,
    load_vector,
    load_word,
    loop,
    new_sums,
    prefetch,
    reduce,
    to_floats,
)

BLOCK_ROWS = 48  # of a matrix
_MOST_ROWS = 48  # of activations: with more, other products of large matrices are faster
_MOST_ROWS_BESIDE_AMX = 4  # as above, of a matrix and activations in bfloat16 where AMX multiplies them
_MOST_ROWS_BESIDE_BFLOAT16 = 16  # likewise, where AVX512-BF16 does
_STORED = {torch.float32: FLOAT, torch.bfloat16: ir.IntType(16), torch.float16: ir.HalfType()}
_BYTES_AHEAD = 8192  # of a matrix, beyond the rows that are multiplied next: asked for before they are needed


def has_kernel(values: Tensor) -> bool:
    """Return whether there are kernels for this matrix: not on a GPU, on a processor without AVX2, or for rows that are no whole
    vectors."""
    width = vector_width()
    if width is None or values.device.type != "cpu" or values.dtype not in _STORED:
        return False
    return values.is_contiguous() and values.numel() > 0 and values.shape[1] % width == 0


def most_rows(values: Tensor, activations: torch.dtype = torch.float32) -> int:
    """Return up to how many rows of activations in this dtype ``multiply`` is faster than others with this matrix. It is 0 without a
    kernel. A process's first matrix of a dtype makes the kernel."""
    if not has_kernel(values):
        return 0
    _kernel(values.dtype)
    if values.dtype == activations == torch.bfloat16:
        if torch.cpu._is_amx_tile_supported():
            return _MOST_ROWS_BESIDE_AMX
        if torch.cpu._is_avx512_bf16_supported():
            return _MOST_ROWS_BESIDE_BFLOAT16
    return _MOST_ROWS


def multiply(x_MK: Tensor, values: Tensor) -> Tensor:
    """x W^T, float32 [M, N], of activations in any floating dtype and a matrix that has a kernel."""
    x = x_MK.float().contiguous()
    check_columns(x, values.shape[1])
    out = torch.empty(x.shape[0], values.shape[0], dtype=torch.float32)
    words = (x.shape[0], *values.shape, x.data_ptr(), values.data_ptr(), out.data_ptr())
    _kernel(values.dtype).run(words, threads_for(values.numel()))
    return out


def multiply_groups(x_MK: Tensor, values: Tensor, groups: Groups) -> Tensor:
    """As ``multiply``, of each group of rows with its rows of the matrix: float32 [M, rows of a group's product]."""
    x, num_columns = x_MK.float().contiguous(), values.shape[1]
    groups.check(x, *values.shape)
    out = torch.empty(x.shape[0], groups.num_values, dtype=torch.float32)
    addresses = groups.of_rows(x), groups.of_values(values), groups.of_rows(out)
    words = groups.words(groups.sizes, groups.num_values, num_columns, *addresses)
    _kernel(values.dtype).run_all(words, groups.num_threads(num_columns))
    return out


@cache
def _kernel(dtype: torch.dtype) -> Kernel:
    width = vector_width()
    assert width is not None
    return load_kernel(f"rows-{_STORED[dtype]}", RowTiles(_STORED[dtype], width), BLOCK_ROWS)


def _bytes_of(stored: ir.Type) -> int:
    return {FLOAT: 4, ir.HalfType(): 2}.get(stored) or stored.width // 8


class RowTiles:
    """Emits tiles for a matrix of one dtype. The words are M, N, K and the addresses of x, the matrix, and the product."""

    most_rows = 4
    at_once = {1: 8, 2: 4, 3: 4, 4: 3}
    """Rows of activations -> rows of the matrix that they are multiplied by at once. The sums fit in registers."""

    def __init__(self, stored: ir.Type, width: int) -> None:
        self._stored, self._width = stored, width
        self.sums = ir.VectorType(FLOAT, width)

    def emit(self, builder: ir.IRBuilder, num_rows: int, arguments: Sequence[ir.Value]) -> None:
        _, _, start, stop = arguments
        at_once = self.at_once[num_rows]
        whole = builder.sub(stop, builder.urem(builder.sub(stop, start), constant(at_once)))
        with loop(builder, start, whole, at_once) as value:
            self._multiply(builder, num_rows, arguments, value, at_once)
        with loop(builder, whole, stop, 1) as value:
            self._multiply(builder, num_rows, arguments, value, 1)

    def _multiply(self, builder: ir.IRBuilder, num_rows: int, arguments: Sequence[ir.Value], value: ir.Value, at_once: int) -> None:
        """Multiply with rows [value, value + at_once) of the matrix. Each product is summed over the columns in the same order."""
        words, first, _, _ = arguments
        num_values, num_columns = load_word(builder, words, 1), load_word(builder, words, 2)
        x, weights, out = (load_word(builder, words, index, POINTER) for index in (3, 4, 5))
        rows = [builder.add(first, constant(index)) for index in range(num_rows)]
        values = [builder.add(value, constant(index)) for index in range(at_once)]
        sums = new_sums(builder, num_rows, at_once, self.sums)
        clear(builder, sums, self.sums)
        ahead = builder.add(builder.mul(num_columns, constant(at_once)), constant(_BYTES_AHEAD // _bytes_of(self._stored)))
        with loop(builder, constant(0), num_columns, self._width) as column:

            def activation(row: ir.Value) -> ir.Value:
                return self.activation(builder, x, builder.add(builder.mul(row, num_columns), column))

            def weight(other: ir.Value) -> ir.Value:
                place = builder.add(builder.mul(other, num_columns), column)
                # Without this a step of one row takes 1.3 times as long: memory is read a page and a row at a time.
                prefetch(builder, weights, builder.add(place, ahead), self._stored)
                return self.converted(builder, load_vector(builder, weights, place, self._width, self._stored))

            if num_rows > at_once:  # the fewer factors stay in registers while the others come one by one
                kept = [weight(other) for other in values]
                for index, row in enumerate(rows):
                    coming = activation(row)
                    for factor, total in zip(kept, sums[index], strict=True):
                        self.add(builder, total, coming, factor)
            else:
                kept = [activation(row) for row in rows]
                for index, other in enumerate(values):
                    coming = weight(other)
                    for factor, totals in zip(kept, sums, strict=True):
                        self.add(builder, totals[index], factor, coming)
        join = builder.fadd if isinstance(self.sums.element, ir.FloatType) else builder.add
        for row, totals in zip(rows, sums, strict=True):
            for other, total in zip(values, totals, strict=True):
                found = self.finished(builder, words, reduce(builder, builder.load(total, typ=self.sums), join), row, other)
                builder.store(found, address(builder, out, builder.add(builder.mul(row, num_values), other), found.type), align=4)

    def activation(self, builder: ir.IRBuilder, x: ir.Value, place: ir.Value) -> ir.Value:
        """A vector of a row of x."""
        return load_vector(builder, x, place, self._width)

    def converted(self, builder: ir.IRBuilder, values: ir.Value) -> ir.Value:
        """Weights as they are stored, as they are multiplied: in float32."""
        return to_floats(builder, values)

    def finished(self, builder: ir.IRBuilder, words: ir.Value, total: ir.Value, row: ir.Value, value: ir.Value) -> ir.Value:
        """Return what the kernel writes for a row of activations and a row of the matrix. ``total`` is the sum of their products."""
        return total

    def add(self, builder: ir.IRBuilder, total: ir.Value, activation: ir.Value, weight: ir.Value) -> None:
        """Add products to a variable."""
        add_product(builder, total, activation, weight)
