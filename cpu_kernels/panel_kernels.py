"""Products of many rows of float32 with a matrix in rows on a CPU.

A block of the matrix is converted to float32 and transposed, and all rows of activations are multiplied by it before the next one. A
block consists of panels: of each column of the matrix a panel has the numbers of two vectors of rows, one after another. Some rows of
activations are multiplied by a panel at once, with sums that fit in registers. Sums run over the columns in order, so a row's result is
the same bits however many rows are beside it, and however many threads there are.
Shapes: M rows of activations, N rows of the matrix, K columns.
"""

from collections.abc import Iterator, Sequence
from functools import cache
from itertools import chain
from typing import NamedTuple, Self

import torch
from llvmlite import ir
from torch import Tensor

from .groups import Groups
from .kernel import Kernel, check_columns, load_kernel, threads_for, vector_width
from .machine_code import (
    FLOAT,
    INT,
    POINTER,
    add_outer_products,
    add_product,
    address,
    constant,
    load_floats,
    load_vector,
    load_word,
    loop,
    new_sums,
    prefetch,
    transpose,
)
from .row_kernels import has_kernel

_STORED = {torch.float32: FLOAT, torch.bfloat16: ir.IntType(16), torch.float16: ir.HalfType()}
_VECTORS = 2  # of a panel's rows
_PANELS = 2  # of a block: each row of activations is read once for so many
COLUMNS = 1024  # of a block, which has 128 KB with AVX2: it stays in the second cache
_ROWS = 6  # of activations, multiplied at once: with AVX2 12 of 16 registers are sums
_LINE_BYTES = 64

Vectors = list[list[ir.Value]]  # of each row, of its vectors in a panel


def can_multiply(values: Tensor) -> bool:
    """Return whether ``multiply`` takes this matrix. A process's first matrix of a dtype makes the kernel."""
    if values.dtype not in _STORED or not has_kernel(values):
        return False
    _kernel(values.dtype)
    return True


def multiply(x_MK: Tensor, values: Tensor) -> Tensor:
    """x W^T, float32 [M, N], of activations and a matrix that has a kernel."""
    check_columns(x_MK, values.shape[1])
    x, (num_rows, num_values) = x_MK.float().contiguous(), (x_MK.shape[0], values.shape[0])
    out = in_panels(num_rows, num_values)
    words = (1, *values.shape, num_rows, out.shape[1], x.data_ptr(), values.data_ptr(), out.data_ptr())
    _kernel(values.dtype).run(words, threads_for(values.numel()))
    return out[:, :num_values].contiguous()  # a copy only where the last panel is not full


def multiply_groups(x_MK: Tensor, values: Tensor, groups: Groups) -> Tensor:
    """As ``multiply``, of each group of rows with its rows of the matrix: float32 [M, rows of a group's product]."""
    x, num_columns = x_MK.float().contiguous(), values.shape[1]
    groups.check(x, *values.shape)
    out = in_panels(x.shape[0], groups.num_values)
    shape = 1, groups.num_values, num_columns, groups.sizes, out.shape[1]
    words = groups.words(*shape, groups.of_rows(x), groups.of_values(values), groups.of_rows(out))
    _kernel(values.dtype).run_all(words, groups.num_threads(num_columns))
    return out[:, : groups.num_values].contiguous()


def in_panels(num_rows: int, num_values: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Memory of a product, in whole panels."""
    return torch.empty(num_rows, -(-num_values // panel_rows()) * panel_rows(), dtype=dtype)


def panel_rows() -> int:
    width = vector_width()
    assert width is not None
    return _VECTORS * width


@cache
def _kernel(dtype: torch.dtype) -> Kernel:
    tiles = PanelTiles(_STORED[dtype], panel_rows())
    return load_kernel(f"panels-{_STORED[dtype]}", tiles, tiles.block_rows)


class Words(NamedTuple):
    """The words of a product, loaded."""

    num_values: ir.Value
    num_columns: ir.Value
    num_rows: ir.Value
    out_columns: ir.Value
    x: ir.Value
    weights: ir.Value
    out: ir.Value
    base: ir.Value  # where they lie

    @classmethod
    def load(cls, builder: ir.IRBuilder, base: ir.Value) -> Self:
        numbers = (load_word(builder, base, index) for index in range(1, 5))
        addresses = (load_word(builder, base, index, POINTER) for index in range(5, 8))
        return cls._make((*numbers, *addresses, base))


class Block(NamedTuple):
    """Rows [start, stop) and columns [first, end) of a matrix, and the memory of its panels. The last panel may not be full."""

    start: ir.Value
    stop: ir.Value
    first: ir.Value
    end: ir.Value
    panels: ir.Value


class PanelTiles:
    """Emits the products of all rows of activations with a block of the matrix's rows, as one tile. The words are 1, N, K, M, the
    product's columns (N rounded up to whole panels), and the addresses of x, the matrix, and the product."""

    most_rows = 1
    rows_at_once, unrolled = _ROWS, 4  # rows of activations, and columns, that code is repeated for

    def __init__(self, stored: ir.Type, panel_rows: int) -> None:
        self._stored, self._panel_rows = stored, panel_rows
        self._width = panel_rows // _VECTORS
        self._floats = ir.VectorType(FLOAT, self._width)
        self.block_rows = _PANELS * panel_rows

    def emit(self, builder: ir.IRBuilder, num_rows: int, arguments: Sequence[ir.Value]) -> None:
        address_of_words, _, start, stop = arguments
        words = Words.load(builder, address_of_words)
        with builder.goto_entry_block():
            array = builder.alloca(ir.ArrayType(FLOAT, self.block_rows * COLUMNS))
            array.align = _LINE_BYTES
            panels = builder.inttoptr(builder.ptrtoint(array, INT), POINTER)  # of any type
        whole = builder.sub(words.num_rows, builder.urem(words.num_rows, constant(self.rows_at_once)))
        with loop(builder, constant(0), words.num_columns, COLUMNS) as first:
            end = builder.add(first, constant(COLUMNS))
            end = builder.select(builder.icmp_signed("<", end, words.num_columns), end, words.num_columns)
            block = Block(start, stop, first, end, panels)
            with loop(builder, start, stop, self._panel_rows) as value:
                self._convert(builder, words, block, value)
            with loop(builder, constant(0), whole, self.rows_at_once) as row, loop(builder, start, stop, self._panel_rows) as value:
                self._ask_for_next(builder, words, block, row, value)
                self._multiply(builder, words, block, row, self.rows_at_once, value)
            for left in range(1, self.rows_at_once):
                is_left = builder.icmp_unsigned("==", builder.sub(words.num_rows, whole), constant(left))
                with builder.if_then(is_left), loop(builder, start, stop, self._panel_rows) as value:
                    self._multiply(builder, words, block, whole, left, value)

    def _panel(self, builder: ir.IRBuilder, block: Block, value: ir.Value) -> ir.Value:
        """The panel whose first row is ``value``."""
        return address(builder, block.panels, builder.mul(builder.sub(value, block.start), constant(COLUMNS)))

    def _convert(self, builder: ir.IRBuilder, words: Words, block: Block, value: ir.Value) -> None:
        """Fill a panel. Beyond the matrix's end it has its last row."""
        panel, last, places = self._panel(builder, block, value), builder.sub(words.num_values, constant(1)), []
        for index in range(self._panel_rows):
            row = builder.add(value, constant(index))
            row = builder.select(builder.icmp_signed("<", row, last), row, last)
            places.append(builder.mul(row, words.num_columns))
        with loop(builder, block.first, block.end, self._width) as column:
            for vector in range(0, self._panel_rows, self._width):
                parts = (builder.add(place, column) for place in places[vector : vector + self._width])
                rows = [load_floats(builder, words.weights, part, self._width, self._stored) for part in parts]
                for index, numbers in enumerate(transpose(builder, rows)):
                    at = builder.add(builder.sub(column, block.first), constant(index))
                    at = builder.add(builder.mul(at, constant(self._panel_rows)), constant(vector))
                    builder.store(numbers, address(builder, panel, at), align=4 * self._width)

    def _ask_for_next(self, builder: ir.IRBuilder, words: Words, block: Block, row: ir.Value, value: ir.Value) -> None:
        """Ask for one row of the next block. Each of the first products of a block asks for another one."""
        is_beside = builder.icmp_signed("<", block.end, words.num_columns)
        start = builder.select(is_beside, block.start, builder.add(block.start, constant(self.block_rows)))
        column = builder.select(is_beside, block.end, constant(0))
        number = builder.add(
            builder.mul(builder.udiv(row, constant(self.rows_at_once)), constant(_PANELS)), self._number(builder, block, value)
        )
        with builder.if_then(builder.icmp_signed("<", number, constant(self.block_rows))):
            place = builder.add(builder.mul(builder.add(start, number), words.num_columns), column)
            in_line = _LINE_BYTES // (4 if isinstance(self._stored, ir.FloatType) else 2)
            for line in range(0, COLUMNS, in_line):
                prefetch(builder, words.weights, builder.add(place, constant(line)), self._stored)

    def _number(self, builder: ir.IRBuilder, block: Block, value: ir.Value) -> ir.Value:
        """Of a panel in its block."""
        return builder.udiv(builder.sub(value, block.start), constant(self._panel_rows))

    def _multiply(self, builder: ir.IRBuilder, words: Words, block: Block, first: ir.Value, num_rows: int, value: ir.Value) -> None:
        """Add the products of rows of activations with a panel to what the blocks of the columns before gave."""
        panel, sums = self._panel(builder, block, value), new_sums(builder, num_rows, _VECTORS, self._floats)
        rows = [builder.add(first, constant(index)) for index in range(num_rows)]
        starts = [builder.add(builder.mul(row, words.out_columns), value) for row in rows]
        places = [[builder.add(start, constant(index * self._width)) for index in range(_VECTORS)] for start in starts]
        self._begin(builder, words, block, places, sums)
        starts = [builder.add(builder.mul(row, words.num_columns), block.first) for row in rows]
        factors = [address(builder, words.x, start) for start in starts]
        count = builder.sub(block.end, block.first)
        add_outer_products(builder, sums, factors, panel, self._panel_rows, count, add=self._add, unrolled=self.unrolled)
        self._finish(builder, words, block, places, sums)

    def _begin(self, builder: ir.IRBuilder, words: Words, block: Block, places: Vectors, sums: Vectors) -> None:
        """Write what the blocks of the columns before gave to variables of rows' vectors, which have these places in the product."""
        is_first = builder.icmp_unsigned("==", block.first, constant(0))
        for place, total in _each(places, sums):
            before = load_vector(builder, words.out, place, self._width)
            builder.store(builder.select(is_first, ir.Constant(self._floats, None), before), total)

    def _finish(self, builder: ir.IRBuilder, words: Words, block: Block, places: Vectors, sums: Vectors) -> None:
        """Write the variables to their places."""
        for place, total in _each(places, sums):
            builder.store(builder.load(total, typ=self._floats), address(builder, words.out, place), align=4)

    def _add(self, builder: ir.IRBuilder, total: ir.Value, one: ir.Value, other: ir.Value) -> None:
        """Add a product to a variable."""
        add_product(builder, total, one, other)


def _each(places: Vectors, sums: Vectors) -> Iterator[tuple[ir.Value, ir.Value]]:
    return zip(chain.from_iterable(places), chain.from_iterable(sums), strict=True)
