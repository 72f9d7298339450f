"""Products of integers with a matrix that has scales for groups of columns: what its formats share.

A vector has the codes of four columns of some rows of the matrix, which are multiplied by four activations of 8 bits. Products of 32
columns are added up in integers, which are exact, and become float32 with the activations' step and the group's scales. A row's result
is the same bits however many rows are beside it, however many threads there are, and with any of a processor's instructions.
Shapes: M rows of activations, N rows of the matrix, K columns, G groups.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from llvmlite import ir
from torch import Tensor

from ..schema.weight_layout import PACKED_COLUMNS, PACKED_ROWS
from .groups import Groups
from .kernel import Kernel, check_columns, has_vnni, threads_for, vector_width
from .machine_code import (
    FLOAT,
    POINTER,
    address,
    clear,
    constant,
    load_vector,
    load_word,
    loop,
    new_sums,
    prefetch,
    spread,
)
from .part_rows import PART, round_rows

BYTE, WORD = ir.IntType(8), ir.IntType(32)
_LINE_BYTES = 64
_BYTES_AHEAD = 8192  # of the matrix: asked for before they are needed
_MOST_VECTORS = {1: 4, 2: 4, 3: 2, 4: 2}
"""Rows of activations -> vectors of rows of the matrix that they are multiplied by at once. The sums fit in registers."""


def multiply(kernel: Kernel, x_MK: Tensor, packed: Tensor, scales: Tensor, num_columns: int) -> Tensor:
    """x W^T, float32 [M, N], of activations in any floating dtype, which are rounded, and a contiguous packed matrix with a row for
    each of its rows, as its scales [N, G, ...]."""
    x = x_MK.float().contiguous()
    check_columns(x, num_columns)
    num_values, num_groups = scales.shape[:2]
    codes, steps = round_rows(x)
    out = torch.empty(x.shape[0], num_values, dtype=torch.float32)
    addresses = codes.data_ptr(), steps.data_ptr(), packed.data_ptr(), scales.data_ptr(), out.data_ptr()
    kernel.run((x.shape[0], num_values, num_columns, num_groups, *addresses), threads_for(num_values * num_columns))
    return out


def multiply_groups(kernel: Kernel, x_MK: Tensor, packed: Tensor, scales: Tensor, num_columns: int, groups: Groups) -> Tensor:
    """As ``multiply``, of each group of rows with its rows of the matrix, whole blocks of them: float32 [M, rows of a group's
    product]."""
    x = x_MK.float().contiguous()
    num_values, num_groups = scales.shape[:2]
    groups.check(x, num_values, num_columns)
    assert groups.num_values % PACKED_ROWS == 0 and not (groups.firsts % PACKED_ROWS).any()
    codes, steps = round_rows(x)
    out = torch.empty(x.shape[0], groups.num_values, dtype=torch.float32)
    words = groups.words(
        groups.sizes,
        groups.num_values,
        num_columns,
        num_groups,
        groups.of_rows(codes),
        groups.of_rows(steps),
        groups.of_values(packed),
        groups.of_values(scales),
        groups.of_rows(out),
    )
    kernel.run_all(words, groups.num_threads(num_columns))
    return out


def can_run(packed: Tensor) -> bool:
    """Return whether this processor has kernels for such a matrix."""
    if vector_width() is None or packed.device.type != "cpu":
        return False
    round_rows(torch.empty(0, PART, dtype=torch.float32))  # loads the kernel that rounds
    return True


class PartTiles(ABC):
    """Emits tiles of one block. The words are M, N, K, G and the addresses of the activations' whole numbers and steps, the matrix, its
    scales, and the product."""

    most_rows = 4
    bytes_of_column: int
    """Of a block: what a column's codes take."""

    def __init__(self, width: int, with_vnni: bool) -> None:
        self.width, self.floats, self.words = width, ir.VectorType(FLOAT, width), ir.VectorType(WORD, width)
        self.bytes = ir.VectorType(BYTE, PACKED_COLUMNS * width)
        self.with_vnni = with_vnni

    @classmethod
    def for_this_processor(cls) -> "PartTiles":
        width = vector_width()
        assert width is not None
        return cls(width, has_vnni())

    @abstractmethod
    def values_of(self, piece: int) -> tuple[int, ...]:
        """The rows of the block at which the vectors begin that a vector of codes holds, which begins at this byte of a column."""

    @abstractmethod
    def sums_of_part(self) -> ir.VectorType:
        """In what products of 32 columns are added up."""

    @abstractmethod
    def codes(self, builder: ir.IRBuilder, stored: ir.Value) -> Sequence[ir.Value]:
        """Of a vector of bytes, those of each of ``values_of``, as they are multiplied."""

    @abstractmethod
    def added(self, builder: ir.IRBuilder, total: ir.Value, codes: ir.Value, activations: ir.Value) -> ir.Value:
        """``total`` with the products of codes and activations."""

    @abstractmethod
    def joined(self, builder: ir.IRBuilder, total: ir.Value) -> ir.Value:
        """Sums of 32 columns, a word for each row."""

    @abstractmethod
    def scales(self, builder: ir.IRBuilder, scales: ir.Value, place: ir.Value) -> tuple[ir.Value, ...]:
        """Return the scales of a group for a vector of rows, and its offsets where the format has them, in float32."""

    @abstractmethod
    def scaled(
        self, builder: ir.IRBuilder, variable: ir.Value, scales: tuple[ir.Value, ...], products: ir.Value, total: ir.Value
    ) -> None:
        """Add to a variable what 32 columns give: the products of codes and activations, and the sum of these, in float32."""

    def emit(self, builder: ir.IRBuilder, num_rows: int, arguments: Sequence[ir.Value]) -> None:
        words, first, start, _ = arguments
        num_values, num_columns, num_groups = (load_word(builder, words, index) for index in (1, 2, 3))
        scales, out = (load_word(builder, words, index, POINTER) for index in (7, 8))
        rows = [builder.add(first, constant(index)) for index in range(num_rows)]
        num_parts = builder.udiv(num_columns, constant(PART))
        parts_of_group = builder.udiv(num_parts, num_groups)
        totals = {value: new_sums(builder, 1, num_rows, self.floats)[0] for value in range(0, PACKED_ROWS, self.width)}
        clear(builder, [*totals.values()], self.floats)
        with loop(builder, constant(0), num_groups, 1) as group:
            of_group = builder.add(builder.mul(start, num_groups), builder.mul(group, constant(PACKED_ROWS)))
            factors = {value: self.scales(builder, scales, builder.add(of_group, constant(value))) for value in totals}
            begin = builder.mul(group, parts_of_group)
            with loop(builder, begin, builder.add(begin, parts_of_group), 1) as part:
                self._add_part(builder, arguments, rows, part, factors, totals)
        for value, variables in totals.items():
            for row, variable in zip(rows, variables, strict=True):
                place = builder.add(builder.mul(row, num_values), builder.add(start, constant(value)))
                builder.store(builder.load(variable, typ=self.floats), address(builder, out, place), align=4)

    def _add_part(
        self,
        builder: ir.IRBuilder,
        arguments: Sequence[ir.Value],
        rows: Sequence[ir.Value],
        part: ir.Value,
        factors: dict[int, tuple[ir.Value, ...]],
        totals: dict[int, list[ir.Value]],
    ) -> None:
        """Add the products of 32 columns to ``totals``, which are by the first row of a vector in the block, as are the ``factors``."""
        words = arguments[0]
        num_columns, steps = load_word(builder, words, 2), load_word(builder, words, 5, POINTER)
        columns = [builder.add(builder.mul(row, num_columns), builder.mul(part, constant(PART))) for row in rows]
        places = [builder.udiv(column, constant(PART // 2)) for column in columns]
        pieces = [*range(0, self.bytes_of_column, self.width)]
        at_once = max(1, _MOST_VECTORS[len(rows)] // len(self.values_of(0)))
        for first in range(0, len(pieces), at_once):
            sums = self._sums(builder, arguments, columns, part, pieces[first : first + at_once])
            for index, place in enumerate(places):
                step, total = (self._spread(builder, steps, builder.add(place, constant(number))) for number in range(2))
                for value, of_value in sums.items():
                    products = builder.fmul(builder.sitofp(of_value[index], self.floats), step)
                    self.scaled(builder, totals[value][index], factors[value], products, total)

    def _sums(
        self, builder: ir.IRBuilder, arguments: Sequence[ir.Value], columns: Sequence[ir.Value], part: ir.Value, pieces: Sequence[int]
    ) -> dict[int, list[ir.Value]]:
        """Sums of codes x activations of 32 columns, int32, of the vectors of rows in each piece, by the first row: one for each row of
        activations."""
        words, _, start, _ = arguments
        x, packed = (load_word(builder, words, index, POINTER) for index in (4, 6))
        block = builder.mul(builder.mul(builder.udiv(start, constant(PACKED_ROWS)), load_word(builder, words, 2)), self._column_bytes())
        codes_of_part = address(builder, packed, builder.add(block, builder.mul(part, constant(PART * self.bytes_of_column))), BYTE)
        rows_of_part = [address(builder, x, column, BYTE) for column in columns]
        kind = self.sums_of_part()
        values = [value for piece in pieces for value in self.values_of(piece)]
        sums = new_sums(builder, len(values), len(columns), kind)
        clear(builder, sums, kind)
        with loop(builder, constant(0), constant(PART), PACKED_COLUMNS) as column:
            codes: list[ir.Value] = []
            for piece in pieces:
                place = builder.add(builder.mul(column, self._column_bytes()), constant(piece * PACKED_COLUMNS))
                if piece * PACKED_COLUMNS % _LINE_BYTES == 0:
                    prefetch(builder, codes_of_part, builder.add(place, constant(_BYTES_AHEAD)), BYTE, cache=1)
                codes += self.codes(builder, load_vector(builder, codes_of_part, place, self.bytes.count, BYTE))
            for index, row in enumerate(rows_of_part):
                activations = self._activations(builder, row, column)
                for of_value, factor in zip(sums, codes, strict=True):
                    before = builder.load(of_value[index], typ=kind)
                    builder.store(self.added(builder, before, factor, activations), of_value[index])
        return {
            value: [self.joined(builder, builder.load(total, typ=kind)) for total in of_value]
            for value, of_value in zip(values, sums, strict=True)
        }

    def _column_bytes(self) -> ir.Constant:
        return constant(self.bytes_of_column)

    def _activations(self, builder: ir.IRBuilder, x: ir.Value, place: ir.Value) -> ir.Value:
        """Four of them, again and again."""
        four = builder.load(address(builder, x, place, BYTE), align=4, typ=WORD)
        return builder.bitcast(spread(builder, four, self.width), self.bytes)

    def _spread(self, builder: ir.IRBuilder, base: ir.Value, place: ir.Value) -> ir.Value:
        """A vector of one number of a tensor in float32."""
        return spread(builder, builder.load(address(builder, base, place), align=4, typ=FLOAT), self.width)
