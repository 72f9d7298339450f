"""Products with a matrix in int4 on a CPU, in integers, of any number of rows of activations.

As ``row_kernels``, in the layout of ``checkpoint.int4``: a vector has the codes of four columns of some rows of the matrix, which are
multiplied by four activations of 8 bits (``part_rows``). A product of a code and an activation is at most 15 x 127, so those of 32
columns are added up in 16 bits, or in 32 by instructions for it (VNNI). Scales follow for each 32 columns, in float32. A row's result
is the same bits however many rows are beside it, however many threads there are, and with any of these instructions.
Shapes: M rows of activations, N rows of the matrix, K columns, G groups.
"""

from collections.abc import Sequence
from functools import cache

import torch
from llvmlite import ir
from torch import Tensor

from ..schema.weight_layout import INT4_MIDDLE, PACKED_COLUMNS, PACKED_ROWS
from .groups import Groups
from .kernel import Kernel, check_columns, has_vnni, load_kernel, threads_for, vector_width
from .machine_code import (
    FLOAT,
    POINTER,
    add_pairs,
    add_product,
    add_products_of_bytes,
    address,
    clear,
    constant,
    load_vector,
    load_word,
    loop,
    multiply_add,
    multiply_bytes,
    new_sums,
    prefetch,
    spread,
)
from .part_rows import PART, round_rows

_BYTE, _WORD = ir.IntType(8), ir.IntType(32)
_HALF = PACKED_ROWS // 2  # rows in one half of a block's bytes
_BYTES_AHEAD = 8192  # of the matrix: asked for before they are needed
_ROWS_OF_WHOLE_BLOCKS = 2  # of activations: with more, a block's rows are multiplied in pieces


def has_kernel(packed: Tensor) -> bool:
    """Return whether ``multiply`` takes a matrix in int4. A process's first one makes the kernel."""
    if vector_width() is None or packed.device.type != "cpu":
        return False
    _kernel()
    round_rows(torch.empty(0, PART, dtype=torch.float32))  # loads the kernel that rounds
    return True


def multiply(x_MK: Tensor, packed: Tensor, scales: Tensor) -> Tensor:
    """x W^T, float32 [M, N], of activations in any floating dtype, which are rounded, and a contiguous packed matrix [N, K / 2] with
    its scales [N, G, 2]."""
    x = x_MK.float().contiguous()
    num_values, num_groups, _ = scales.shape
    check_columns(x, 2 * packed.shape[1])
    num_rows, num_columns = x.shape
    codes, steps = round_rows(x)
    out = torch.empty(num_rows, num_values, dtype=torch.float32)
    addresses = codes.data_ptr(), steps.data_ptr(), packed.data_ptr(), scales.data_ptr(), out.data_ptr()
    _kernel().run((num_rows, num_values, num_columns, num_groups, *addresses), threads_for(num_values * num_columns))
    return out


def multiply_groups(x_MK: Tensor, packed: Tensor, scales: Tensor, groups: Groups) -> Tensor:
    """As ``multiply``, of each group of rows with its rows of the matrix, whole blocks of them: float32 [M, rows of a group's
    product]."""
    x = x_MK.float().contiguous()
    num_values, num_groups, _ = scales.shape
    groups.check(x, num_values, 2 * packed.shape[1])
    assert groups.num_values % PACKED_ROWS == 0 and not (groups.firsts % PACKED_ROWS).any()
    codes, steps = round_rows(x)
    out = torch.empty(x.shape[0], groups.num_values, dtype=torch.float32)
    words = groups.words(
        groups.sizes,
        groups.num_values,
        x.shape[1],
        num_groups,
        groups.of_rows(codes),
        groups.of_rows(steps),
        groups.of_values(packed),
        groups.of_values(scales),
        groups.of_rows(out),
    )
    _kernel().run_all(words, groups.num_threads(x.shape[1]))
    return out


@cache
def _kernel() -> Kernel:
    width = vector_width()
    assert width is not None
    return load_kernel("int4", _Tiles(width, has_vnni()), PACKED_ROWS)


class _Tiles:
    """Emits tiles of one block. The words are M, N, K, G and the addresses of the activations' whole numbers and steps, the matrix, its
    scales, and the product."""

    most_rows = 4

    def __init__(self, width: int, with_vnni: bool) -> None:
        self._width, self._floats, self._words = width, ir.VectorType(FLOAT, width), ir.VectorType(_WORD, width)
        self._bytes = ir.VectorType(_BYTE, PACKED_COLUMNS * width)
        self._with_vnni = with_vnni

    def emit(self, builder: ir.IRBuilder, num_rows: int, arguments: Sequence[ir.Value]) -> None:
        words, first, start, _ = arguments
        num_values, num_columns, num_groups = (load_word(builder, words, index) for index in (1, 2, 3))
        scales, out = (load_word(builder, words, index, POINTER) for index in (7, 8))
        rows = [builder.add(first, constant(index)) for index in range(num_rows)]
        num_parts = builder.udiv(num_columns, constant(PART))
        parts_of_group = builder.udiv(num_parts, num_groups)
        totals = {value: new_sums(builder, 1, num_rows, self._floats)[0] for value in range(0, PACKED_ROWS, self._width)}
        clear(builder, [*totals.values()], self._floats)
        with loop(builder, constant(0), num_groups, 1) as group:
            of_group = builder.add(builder.mul(start, num_groups), builder.mul(group, constant(PACKED_ROWS)))
            factors = {value: self._scales(builder, scales, builder.add(of_group, constant(value))) for value in totals}
            begin = builder.mul(group, parts_of_group)
            with loop(builder, begin, builder.add(begin, parts_of_group), 1) as part:
                self._add_part(builder, arguments, rows, part, factors, totals)
        for value, variables in totals.items():
            for row, variable in zip(rows, variables, strict=True):
                place = builder.add(builder.mul(row, num_values), builder.add(start, constant(value)))
                builder.store(builder.load(variable, typ=self._floats), address(builder, out, place), align=4)

    def _add_part(
        self,
        builder: ir.IRBuilder,
        arguments: Sequence[ir.Value],
        rows: Sequence[ir.Value],
        part: ir.Value,
        factors: dict[int, tuple[ir.Value, ir.Value]],
        totals: dict[int, list[ir.Value]],
    ) -> None:
        """Add the products of 32 columns to ``totals``, which are by the first row of a vector in the block, as are the ``factors``."""
        words = arguments[0]
        num_columns, steps = load_word(builder, words, 2), load_word(builder, words, 5, POINTER)
        columns = [builder.add(builder.mul(row, num_columns), builder.mul(part, constant(PART))) for row in rows]
        places = [builder.udiv(column, constant(PART // 2)) for column in columns]
        pieces = [*range(0, _HALF, self._width)]
        at_once = len(pieces) if len(rows) <= _ROWS_OF_WHOLE_BLOCKS else 1  # the sums fit in registers
        for first in range(0, len(pieces), at_once):
            taken = pieces[first : first + at_once]
            sums = self._sums_of_part(builder, arguments, columns, part, taken)
            for index, place in enumerate(places):
                step, total = (self._spread(builder, steps, builder.add(place, constant(number))) for number in range(2))
                for value, of_value in sums.items():
                    (scale, zero), variable = factors[value], totals[value][index]
                    add_product(builder, variable, total, zero)
                    add_product(builder, variable, builder.fmul(builder.sitofp(of_value[index], self._floats), step), scale)

    def _sums_of_part(
        self, builder: ir.IRBuilder, arguments: Sequence[ir.Value], columns: Sequence[ir.Value], part: ir.Value, pieces: Sequence[int]
    ) -> dict[int, list[ir.Value]]:
        """Sums of codes x activations of 32 columns, int32, of vectors of rows from each piece on and of those in the upper halves of
        its bytes, by the first row: one for each row of activations."""
        words, _, start, _ = arguments
        x, packed = (load_word(builder, words, index, POINTER) for index in (4, 6))
        block = builder.udiv(builder.mul(start, load_word(builder, words, 2)), constant(2))
        codes_of_part = address(builder, packed, builder.add(block, builder.mul(part, constant(PART * _HALF))), _BYTE)
        rows_of_part = [address(builder, x, column, _BYTE) for column in columns]
        kind = self._words if self._with_vnni else ir.VectorType(ir.IntType(16), 2 * self._width)
        values = [value for piece in pieces for value in (piece, piece + _HALF)]
        sums = new_sums(builder, len(values), len(columns), kind)
        clear(builder, sums, kind)
        with loop(builder, constant(0), constant(PART), PACKED_COLUMNS) as column:
            place = builder.mul(column, constant(_HALF))
            if pieces[0] == 0:  # the others are in the same line of the cache
                prefetch(builder, codes_of_part, builder.add(place, constant(_BYTES_AHEAD)), _BYTE, cache=1)
            codes = [
                half
                for piece in pieces
                for half in self._codes(builder, codes_of_part, builder.add(place, constant(piece * PACKED_COLUMNS)))
            ]
            for index, row in enumerate(rows_of_part):
                activations = self._activations(builder, row, column)
                for of_value, half in zip(sums, codes, strict=True):
                    before = builder.load(of_value[index], typ=kind)
                    builder.store(self._added(builder, before, half, activations), of_value[index])
        found = [[builder.load(total, typ=kind) for total in of_value] for of_value in sums]
        if not self._with_vnni:
            found = [[add_pairs(builder, total) for total in of_value] for of_value in found]
        return dict(zip(values, found, strict=True))

    def _codes(self, builder: ir.IRBuilder, packed: ir.Value, place: ir.Value) -> tuple[ir.Value, ir.Value]:
        """Codes in the lower and in the upper halves of bytes."""
        both = load_vector(builder, packed, place, self._bytes.count, _BYTE)
        low, high = (ir.Constant(self._bytes, [number] * self._bytes.count) for number in (15, 4))
        return builder.and_(both, low), builder.lshr(both, high)

    def _activations(self, builder: ir.IRBuilder, x: ir.Value, place: ir.Value) -> ir.Value:
        """Four of them, again and again."""
        four = builder.load(address(builder, x, place, _BYTE), align=4, typ=_WORD)
        return builder.bitcast(spread(builder, four, self._width), self._bytes)

    def _added(self, builder: ir.IRBuilder, total: ir.Value, codes: ir.Value, activations: ir.Value) -> ir.Value:
        """Sums of products, of each four columns in int32 with VNNI, of each two in int16 without."""
        if self._with_vnni:
            return add_products_of_bytes(builder, total, codes, activations)
        return builder.add(total, multiply_bytes(builder, codes, activations))

    def _scales(self, builder: ir.IRBuilder, scales: ir.Value, place: ir.Value) -> tuple[ir.Value, ir.Value]:
        """Scales of ``width`` rows, and the values of code 0. Each is the half of a word."""
        pairs = load_vector(builder, scales, place, self._width, _WORD)
        shift, upper = (ir.Constant(self._words, [number] * self._width) for number in (16, -65536))
        scale = builder.bitcast(builder.shl(pairs, shift), self._floats)
        zero = builder.bitcast(builder.and_(pairs, upper), self._floats)
        return scale, multiply_add(builder, scale, ir.Constant(self._floats, [-float(INT4_MIDDLE)] * self._width), zero)

    def _spread(self, builder: ir.IRBuilder, base: ir.Value, place: ir.Value) -> ir.Value:
        """A vector of one number of a tensor in float32."""
        return spread(builder, builder.load(address(builder, base, place), align=4, typ=FLOAT), self._width)
