"""Products of few rows with a matrix in int4 on a CPU, in the layout of ``checkpoint.int4``.

As ``row_kernels``, for a matrix whose rows lie side by side in blocks: a byte has a code of one row in its lower half and a code of
another row in its upper half. A vector holds a column's codes of some rows, which are multiplied by one activation. Codes are added up
as they are within a group of columns; scale and zero follow once for each group.
Shapes: M rows of activations, N rows of the matrix, K columns, G groups.
"""

from collections.abc import Sequence
from functools import cache

import torch
from llvmlite import ir
from torch import Tensor

from ..checkpoint.int4 import MIDDLE
from .machine_code import (
    FLOAT,
    POINTER,
    Kernel,
    add_product,
    address,
    check_columns,
    clear,
    constant,
    from_bfloat16,
    load_kernel,
    load_vector,
    load_word,
    loop,
    multiply_add,
    new_sums,
    prefetch,
    vector_width,
)

_BYTE, _BFLOAT16, _WORD = ir.IntType(8), ir.IntType(16), ir.IntType(32)
_MOST_ROWS = 96  # of activations: with more, products with converted blocks are faster
_BYTES_AHEAD = 2048  # of the matrix: asked for before they are needed, which halves the time of one row
_BOTH_HALVES = 2  # rows of activations: up to so many, both halves of bytes are multiplied at once; more sums do not fit in registers


def most_rows(packed: Tensor) -> int:
    """As that of ``row_kernels``, with a matrix in int4."""
    if vector_width() is None or packed.device.type != "cpu":
        return 0
    _kernel()
    return _MOST_ROWS


def multiply(x_MK: Tensor, packed: Tensor, scales_GN2: Tensor) -> Tensor:
    """x W^T, float32 [M, N], of activations in any floating dtype and a packed matrix [N, K / 2]; it and its scales are contiguous."""
    x = x_MK.float().contiguous()
    num_groups, num_values, _ = scales_GN2.shape
    check_columns(x, 2 * packed.shape[1])
    sums_MG = x.view(x.shape[0], num_groups, -1).sum(2)
    out = x.new_empty(x.shape[0], num_values)
    addresses = (tensor.data_ptr() for tensor in (x, packed, scales_GN2, sums_MG, out))
    _kernel().run((x.shape[0], num_values, x.shape[1], num_groups, *addresses), torch.get_num_threads())
    return out


@cache
def _kernel() -> Kernel:
    width = vector_width()
    assert width is not None
    return load_kernel("int4", _Tiles(width), 4 * width)


class _Tiles:
    """Emits tiles of one block of bytes: 4 vectors of rows. The words are M, N, K, G and the addresses of x, the matrix, its scales and
    zeros, the sums of x in each group, and the product."""

    def __init__(self, width: int) -> None:
        self._width, self._floats = width, ir.VectorType(FLOAT, width)

    def emit(self, builder: ir.IRBuilder, num_rows: int, arguments: Sequence[ir.Value]) -> None:
        parts = [(0, 1)] if num_rows <= _BOTH_HALVES else [(0,), (1,)]
        for halves in parts:
            self._multiply(builder, num_rows, arguments, halves)

    def _multiply(self, builder: ir.IRBuilder, num_rows: int, arguments: Sequence[ir.Value], halves: Sequence[int]) -> None:
        """Multiply with the rows in the lower (0) or upper (1) halves of bytes, two vectors of them each."""
        words, first, start, _ = arguments
        num_values, num_columns, num_groups = (load_word(builder, words, index) for index in (1, 2, 3))
        scales, sums, out = (load_word(builder, words, index, POINTER) for index in (6, 7, 8))
        group_columns = builder.udiv(num_columns, num_groups)
        rows = [builder.add(first, constant(index)) for index in range(num_rows)]
        values = [builder.add(start, constant((2 * half + index) * self._width)) for half in halves for index in range(2)]
        totals, partial = (new_sums(builder, num_rows, len(values), self._floats) for _ in range(2))
        clear(builder, totals, self._floats)
        with loop(builder, constant(0), num_groups, 1) as group:
            clear(builder, partial, self._floats)
            begin = builder.mul(group, group_columns)
            self._add_columns(builder, arguments, rows, halves, (begin, builder.add(begin, group_columns)), partial)
            for index, value in enumerate(values):
                scale, zero = self._scales(builder, scales, builder.add(builder.mul(group, num_values), value))
                for row, parts, done in zip(rows, partial, totals, strict=True):
                    of_group = self._spread(builder, sums, builder.add(builder.mul(row, num_groups), group))
                    add_product(builder, done[index], of_group, zero)
                    add_product(builder, done[index], builder.load(parts[index], typ=self._floats), scale)
        for row, done in zip(rows, totals, strict=True):
            for value, total in zip(values, done, strict=True):
                place = builder.add(builder.mul(row, num_values), value)
                builder.store(builder.load(total, typ=self._floats), address(builder, out, place), align=4)

    def _add_columns(
        self,
        builder: ir.IRBuilder,
        arguments: Sequence[ir.Value],
        rows: Sequence[ir.Value],
        halves: Sequence[int],
        columns: tuple[ir.Value, ir.Value],
        partial: Sequence[Sequence[ir.Value]],
    ) -> None:
        """Add the products with the codes of some columns, from the first to the end, to ``partial``."""
        words, _, start, _ = arguments
        num_columns = load_word(builder, words, 2)
        x, packed = (load_word(builder, words, index, POINTER) for index in (4, 5))
        num_bytes = 2 * self._width
        block = builder.udiv(builder.mul(start, num_columns), constant(2))
        with loop(builder, *columns, 1) as column:
            place = builder.add(block, builder.mul(column, constant(num_bytes)))
            prefetch(builder, packed, builder.add(place, constant(_BYTES_AHEAD)), _BYTE)
            both = load_vector(builder, packed, place, num_bytes, _BYTE)
            codes = [vector for half in halves for vector in self._codes(builder, both, half)]
            for row, parts in zip(rows, partial, strict=True):
                activation = self._spread(builder, x, builder.add(builder.mul(row, num_columns), column))
                for vector, total in zip(codes, parts, strict=True):
                    add_product(builder, total, activation, vector)

    def _codes(self, builder: ir.IRBuilder, both: ir.Value, half: int) -> list[ir.Value]:
        """Two vectors of codes in float32."""
        low, high = (ir.Constant(both.type, [number] * both.type.count) for number in (15, 4))
        codes = builder.lshr(both, high) if half else builder.and_(both, low)
        words = ir.VectorType(_WORD, self._width)
        parts = (self._picked(builder, codes, range(first, first + self._width)) for first in (0, self._width))
        return [builder.sitofp(builder.zext(part, words), self._floats) for part in parts]

    def _scales(self, builder: ir.IRBuilder, scales: ir.Value, place: ir.Value) -> tuple[ir.Value, ir.Value]:
        """Scales of ``width`` rows, and the values of code 0."""
        pairs = load_vector(builder, scales, builder.mul(place, constant(2)), 2 * self._width, _BFLOAT16)
        scale, zero = (from_bfloat16(builder, self._picked(builder, pairs, range(first, 2 * self._width, 2))) for first in (0, 1))
        return scale, multiply_add(builder, scale, ir.Constant(self._floats, [-float(MIDDLE)] * self._width), zero)

    def _spread(self, builder: ir.IRBuilder, base: ir.Value, place: ir.Value) -> ir.Value:
        """A vector of one number of a tensor in float32."""
        value = builder.load(address(builder, base, place), align=4, typ=FLOAT)
        lone = builder.insert_element(ir.Constant(self._floats, ir.Undefined), value, ir.Constant(_WORD, 0))
        return self._picked(builder, lone, [0] * self._width)

    def _picked(self, builder: ir.IRBuilder, values: ir.Value, places: Sequence[int]) -> ir.Value:
        return builder.shuffle_vector(values, values, ir.Constant(ir.VectorType(_WORD, len(places)), list(places)))
