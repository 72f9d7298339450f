"""Code of ``delta_kernels``: what is computed of a key head with its value heads, or of a value head.

A block is the tokens between two borders; some of its first tokens may be known already. Shapes: as in ``delta_kernels``; G value heads
of a key head.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from itertools import chain
from typing import Any, NamedTuple

import torch
from llvmlite import ir

from .kernel import STORED
from .machine_code import (
    FLOAT,
    INT,
    POINTER,
    add_product,
    address,
    clear,
    constant,
    exponential,
    load_floats,
    load_vector,
    load_word,
    loop,
    new_sums,
    numbers,
    reduce,
    spread,
)

ROW_WORDS = 6  # of a sequence: first token's row, tokens, first token's place, pages of the bases before and after, and of the log
ROWS, STATES, BASE_COLUMNS, KEYS, VALUES, DECAYS, LOG_COLUMNS, BASE_BYTES, LOG_BYTES = range(2, 11)
MIXED, MIXED_STRIDE, Z, Z_STRIDE, BA, BA_STRIDE = range(11, 17)
CONV, RATES, DT_BIAS, NORM, EPSILON, NOTHING, OUT, SCRATCH = range(17, 25)
NUM_ROWS, LAYER_BASE_BYTES, LAYER_LOG_BYTES = range(11, 14)  # of a fold

_KEYS_AT_ONCE = 4  # rows of a state that are folded together: their sums fit in registers
BYTE, NONE = ir.IntType(8), ir.Constant(ir.IntType(32), 0)


class Shape(NamedTuple):
    """The sizes and the number format that kernels are compiled for. ``grid``: tokens between borders, and entries of a log."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    conv_size: int
    grid: int
    stored: torch.dtype

    @property
    def group(self) -> int:
        return self.value_heads // self.key_heads

    @property
    def mixed_size(self) -> int:
        """W."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim

    @property
    def state_numbers(self) -> int:
        """Of a head."""
        return self.key_dim * self.value_dim


class Row(NamedTuple):
    """A sequence's words."""

    first: ir.Value
    count: ir.Value
    place: ir.Value
    base: ir.Value
    target: ir.Value
    log: ir.Value


class Array(NamedTuple):
    """Vectors or numbers of a block's tokens in float32: where those of its first token begin, and numbers from one to the next."""

    base: ir.Value
    stride: int

    def of(self, builder: ir.IRBuilder, token: ir.Value) -> ir.Value:
        return address(builder, self.base, builder.mul(token, constant(self.stride)))


class Known(NamedTuple):
    """A block in a value head: corrected values u, and sums of log decays since the border."""

    values: Array
    decays: Array


class Heads(ABC):
    """Emits code with what all kinds share."""

    most_rows = 1

    def __init__(self, shape: Shape, width: int) -> None:
        self.shape, self.width, self.floats = shape, width, ir.VectorType(FLOAT, width)
        self.stored = STORED[shape.stored]

    @abstractmethod
    def emit(self, builder: ir.IRBuilder, num_rows: int, arguments: Sequence[ir.Value]) -> None: ...

    def row(self, builder: ir.IRBuilder, words: ir.Value, index: ir.Value) -> Row:
        row = address(builder, load_word(builder, words, ROWS, POINTER), builder.mul(index, constant(ROW_WORDS)), INT)
        return Row(*(load_word(builder, row, number) for number in range(ROW_WORDS)))

    def memory(self, builder: ir.IRBuilder, length: int) -> ir.Value:
        """Of the thread, for so many numbers."""
        with builder.goto_entry_block():
            array = builder.alloca(ir.ArrayType(FLOAT, length))
            array.align = 64
            return builder.inttoptr(builder.ptrtoint(array, INT), POINTER)  # of any type

    def in_page(self, builder: ir.IRBuilder, words: ir.Value, part: int, page: ir.Value) -> ir.Value:
        """Where a layer's part of a page begins."""
        page_bytes = load_word(builder, words, BASE_BYTES if part in (STATES, BASE_COLUMNS) else LOG_BYTES)
        return address(builder, load_word(builder, words, part, POINTER), builder.mul(page, page_bytes), BYTE)

    def vectors(self, builder: ir.IRBuilder, length: int) -> Any:
        """Emit the body for each place of a vector among so many numbers."""
        return loop(builder, constant(0), constant(length), self.width)

    def load(self, builder: ir.IRBuilder, base: ir.Value, place: ir.Value | int) -> ir.Value:
        return load_vector(builder, base, place if isinstance(place, ir.Value) else constant(place), self.width)

    def store(self, builder: ir.IRBuilder, value: ir.Value, base: ir.Value, place: ir.Value | int) -> None:
        place = place if isinstance(place, ir.Value) else constant(place)
        builder.store(value, address(builder, base, place), align=4)

    def number(self, builder: ir.IRBuilder, base: ir.Value, place: ir.Value, stored: ir.Type = FLOAT) -> ir.Value:
        """A vector of one number."""
        value = load_floats(builder, base, place, 1, stored)
        return spread(builder, builder.extract_element(value, NONE), self.width)

    def store_number(self, builder: ir.IRBuilder, value: ir.Value, base: ir.Value, place: ir.Value) -> None:
        builder.store(builder.extract_element(value, NONE), address(builder, base, place), align=4)

    def dot(self, builder: ir.IRBuilder, one: ir.Value, others: Sequence[ir.Value], length: int) -> list[ir.Value]:
        """Products of a vector in memory with others, as vectors of one number."""
        [totals] = new_sums(builder, 1, len(others), self.floats)
        clear(builder, [totals], self.floats)
        with self.vectors(builder, length) as place:
            value = self.load(builder, one, place)
            for total, other in zip(totals, others, strict=True):
                add_product(builder, total, value, self.load(builder, other, place))
        sums = (reduce(builder, builder.load(total, typ=self.floats), builder.fadd) for total in totals)
        return [spread(builder, total, self.width) for total in sums]

    def left(self, builder: ir.IRBuilder, decays: Array, since: ir.Value, until: ir.Value) -> ir.Value:
        """Return the factor by which a token's part has decayed at a later token, a vector of one number."""
        late, early = (self.number(builder, decays.of(builder, token), constant(0)) for token in (until, since))
        return exponential(builder, builder.fsub(late, early))

    def at_once(self, most: int) -> int:
        """Vectors of a head's values that are computed together: as many as divide them, up to ``most``."""
        return next(number for number in range(most, 0, -1) if self.shape.value_dim // self.width % number == 0)

    def fold(
        self, builder: ir.IRBuilder, source: ir.Value | None, target: ir.Value, keys: Array, known: Known, scaled: ir.Value
    ) -> None:
        """Write a head's state after a full block, from that before it, if there was one. ``scaled``: memory for a block's values."""
        key_dim, value_dim, grid = self.shape.key_dim, self.shape.value_dim, self.shape.grid
        last = constant(grid - 1)
        with loop(builder, constant(0), constant(grid), 1) as token:
            left, values = self.left(builder, known.decays, token, last), known.values.of(builder, token)
            out = Array(scaled, value_dim).of(builder, token)
            with self.vectors(builder, value_dim) as place:
                self.store(builder, builder.fmul(self.load(builder, values, place), left), out, place)
        kept = exponential(builder, self.number(builder, known.decays.of(builder, last), constant(0)))
        vectors = self.at_once(2)
        sums = new_sums(builder, _KEYS_AT_ONCE, vectors, self.floats)
        with (
            loop(builder, constant(0), constant(key_dim), _KEYS_AT_ONCE) as first,
            loop(builder, constant(0), constant(value_dim), vectors * self.width) as column,
        ):
            begin = builder.add(builder.mul(first, constant(value_dim)), column)
            places = [
                [builder.add(begin, constant(row * value_dim + number * self.width)) for number in range(vectors)]
                for row in range(_KEYS_AT_ONCE)
            ]
            for total, place in zip(chain(*sums), chain(*places), strict=True):
                before = numbers(self.floats, 0.0) if source is None else builder.fmul(self.load(builder, source, place), kept)
                builder.store(before, total)
            for token in range(grid):
                key = address(builder, keys.of(builder, constant(token)), first)
                values = address(builder, scaled, builder.add(column, constant(token * value_dim)))
                parts = [self.load(builder, values, number * self.width) for number in range(vectors)]
                for row, totals in enumerate(sums):
                    factor = self.number(builder, key, constant(row))
                    for total, part in zip(totals, parts, strict=True):
                        add_product(builder, total, factor, part)
            for total, place in zip(chain(*sums), chain(*places), strict=True):
                self.store(builder, builder.load(total, typ=self.floats), target, place)


class Folds(Heads):
    """Emits bases at the ends of full logs. Items are value heads of sequences, of one layer after another. The words are 1, their
    number, and those that have names."""

    def emit(self, builder: ir.IRBuilder, num_rows: int, arguments: Sequence[ir.Value]) -> None:
        words, _, start, stop = arguments
        scaled = self.memory(builder, self.shape.grid * self.shape.value_dim)
        heads = constant(self.shape.value_heads)
        with loop(builder, start, stop, 1) as item:
            number, head = builder.udiv(item, heads), builder.urem(item, heads)
            num_rows_word = load_word(builder, words, NUM_ROWS)
            layer, row = builder.udiv(number, num_rows_word), self.row(builder, words, builder.urem(number, num_rows_word))
            self._fold_row(builder, words, layer, row, head, scaled)

    def _fold_row(self, builder: ir.IRBuilder, words: ir.Value, layer: ir.Value, row: Row, head: ir.Value, scaled: ir.Value) -> None:
        key_heads, value_heads, key_dim, value_dim, *_ = self.shape

        def part(number: int, page: ir.Value, heads: ir.Value, length: int) -> ir.Value:
            of_layer = load_word(builder, words, LAYER_BASE_BYTES if number == STATES else LAYER_LOG_BYTES)
            begin = address(builder, self.in_page(builder, words, number, page), builder.mul(layer, of_layer), BYTE)
            return address(builder, begin, builder.mul(heads, constant(length)))

        key_head = builder.udiv(head, constant(self.shape.group))
        keys = Array(part(KEYS, row.log, key_head, key_dim), key_heads * key_dim)
        values = Array(part(VALUES, row.log, head, value_dim), value_heads * value_dim)
        known = Known(values, Array(part(DECAYS, row.log, head, 1), value_heads))
        source, target = (part(STATES, page, head, self.shape.state_numbers) for page in (row.base, row.target))
        with builder.if_else(builder.icmp_signed(">", row.place, constant(0))) as (behind, at_start):
            with behind:
                self.fold(builder, source, target, keys, known, scaled)
            with at_start:
                self.fold(builder, None, target, keys, known, scaled)
