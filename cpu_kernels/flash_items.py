"""Emits attention of many queries in float32: what an item of ``flash_attention`` computes, and how its words lie.

Shapes: as there.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

from llvmlite import ir

from .machine_code import (
    FLOAT,
    INT,
    POINTER,
    add_outer_products,
    add_product,
    address,
    clear,
    columns,
    constant,
    exponential,
    load_vector,
    load_word,
    loop,
    maximum,
    minimum,
    multiply_add,
    new_sums,
    numbers,
    reduce,
    spread,
    transpose,
)

_BLOCK_NUMBERS = 1 << 16  # of keys, and as many of values: a block lies on the stack, 512 KB
_LEAST_KEYS, _MOST_KEYS = 128, 256  # of a block
_LOWEST = -1e30  # a score of nothing: unlike -inf it can be taken from itself


class Strides(NamedTuple):
    """Numbers from one sequence, row and head to the next."""

    sequence: ir.Value
    row: ir.Value
    head: ir.Value


class Words(NamedTuple):
    """The words, loaded."""

    num_queries: ir.Value
    num_keys: ir.Value
    kv_heads: ir.Value
    group: ir.Value
    range_step: ir.Value  # numbers from a query's first key to the next query's: 0 where all attend to the same
    q_strides: Strides
    k_strides: Strides
    v_strides: Strides
    q: ir.Value
    k: ir.Value
    v: ir.Value
    output: ir.Value
    largest: ir.Value
    weight: ir.Value
    firsts: ir.Value
    ends: ir.Value
    in_block: ir.Value  # queries


class Memory(NamedTuple):
    """Of a thread. ``keys``: panels of ``vectors`` vectors of keys, of each their numbers by column of the head; ``values`` [keys, D];
    ``scores`` [rows, keys]."""

    keys: ir.Value
    values: ir.Value
    scores: ir.Value


class Block(NamedTuple):
    """The keys [first, end) of a sequence's head."""

    sequence: ir.Value
    head: ir.Value
    first: ir.Value
    end: ir.Value


class Items:
    """Emits attention of blocks of queries, each of all G heads of a head of keys: what one item computes."""

    most_rows = 1
    rows_at_once = 6  # queries that attend at once
    vectors = 2  # of scores, or of a result, that are summed up at once for each: with AVX2 12 of 16 registers are sums
    in_word = 1  # numbers of a query, a key, a value or a weight in 32 bits, which are multiplied by as many others at once
    stored = FLOAT

    def __init__(self, head_dim: int, scale: float, width: int) -> None:
        self._head_dim, self._scale, self._width, self._panel = head_dim, scale, width, self.vectors * width
        self._key_words = head_dim // self.in_word
        self._keys = min(_BLOCK_NUMBERS // self._key_words // _LEAST_KEYS * _LEAST_KEYS, _MOST_KEYS)
        self._floats = ir.VectorType(FLOAT, width)

    def emit(self, builder: ir.IRBuilder, num_rows: int, arguments: Sequence[ir.Value]) -> None:
        words, memory = self._words(builder, arguments[0]), self._memory(builder)
        _, _, start, stop = arguments
        with loop(builder, start, stop, 1) as item:
            num_blocks = builder.udiv(builder.sub(builder.add(words.num_queries, words.in_block), constant(1)), words.in_block)
            first = builder.mul(builder.urem(item, num_blocks), words.in_block)
            last = minimum(builder, builder.add(first, words.in_block), words.num_queries)
            head = builder.udiv(item, num_blocks)
            sequence, head = builder.udiv(head, words.kv_heads), builder.urem(head, words.kv_heads)
            _, end = self._range(builder, words, builder.sub(last, constant(1)))
            lowest, _ = self._range(builder, words, first)
            with loop(builder, builder.and_(lowest, constant(-self._keys)), end, self._keys) as key:
                block = Block(sequence, head, key, minimum(builder, builder.add(key, constant(self._keys)), end))
                self._take_keys(builder, words, block, memory.keys)
                self._take_values(builder, words, block, memory.values)
                with loop(builder, constant(0), words.group, 1) as member:
                    whole = builder.sub(last, builder.urem(builder.sub(last, first), constant(self.rows_at_once)))
                    for low, high, rows in ((first, whole, self.rows_at_once), (whole, last, 1)):
                        with loop(builder, low, high, rows) as query:
                            self._attend(builder, words, memory, block, member, query, rows)
            with loop(builder, constant(0), words.group, 1) as member, loop(builder, first, last, 1) as query:
                self._divide(builder, words, self._place(builder, words, sequence, head, member, query), query)

    def _words(self, builder: ir.IRBuilder, base: ir.Value) -> Words:
        counts = [load_word(builder, base, 2 + index) for index in range(5)]
        strides = (Strides(*(load_word(builder, base, 7 + 3 * number + index) for index in range(3))) for number in range(3))
        rest = (load_word(builder, base, 16 + index, POINTER if index < 8 else INT) for index in range(9))
        return Words(*counts, *strides, *rest)

    def _memory(self, builder: ir.IRBuilder) -> Memory:
        found = []
        with builder.goto_entry_block():
            for length in (self._keys * self._key_words, self._keys * self._key_words, self.rows_at_once * self._keys):
                array = builder.alloca(ir.ArrayType(FLOAT, length))
                array.align = 64
                found.append(builder.inttoptr(builder.ptrtoint(array, INT), POINTER))  # of any type
        return Memory(*found)

    def _range(self, builder: ir.IRBuilder, words: Words, query: ir.Value) -> tuple[ir.Value, ir.Value]:
        """A query's first key and the one after its last."""
        place = builder.mul(query, words.range_step)
        first, end = (builder.load(address(builder, base, place, INT), align=8, typ=INT) for base in (words.firsts, words.ends))
        return first, end

    def _start(self, builder: ir.IRBuilder, strides: Strides, sequence: ir.Value, row: ir.Value, head: ir.Value) -> ir.Value:
        places = zip(strides, (sequence, row, head), strict=True)
        first, second, third = (builder.mul(stride, number) for stride, number in places)
        return builder.add(builder.add(first, second), third)

    def _row(self, builder: ir.IRBuilder, base: ir.Value, strides: Strides, block: Block, key: ir.Value) -> ir.Value:
        """Where a key or a value begins. After the block's last one that one is repeated: its weight is 0 there."""
        last = builder.sub(block.end, constant(1))
        return address(
            builder, base, self._start(builder, strides, block.sequence, minimum(builder, key, last), block.head), self.stored
        )

    def _padded(self, builder: ir.IRBuilder, count: ir.Value) -> ir.Value:
        """Keys of whole panels."""
        return builder.and_(builder.add(count, constant(self._panel - 1)), constant(-self._panel))

    def _take_keys(self, builder: ir.IRBuilder, words: Words, block: Block, panels: ir.Value) -> None:
        with loop(builder, constant(0), self._padded(builder, builder.sub(block.end, block.first)), self._panel) as number:
            panel = address(builder, panels, builder.mul(number, constant(self._key_words)))
            for vector in range(0, self._panel, self._width):
                keys = (builder.add(builder.add(block.first, number), constant(vector + index)) for index in range(self._width))
                rows = [self._row(builder, words.k, words.k_strides, block, key) for key in keys]
                with loop(builder, constant(0), constant(self._key_words), self._width) as first:
                    column = minimum(builder, first, constant(self._key_words - self._width))
                    square = [load_vector(builder, row, column, self._width) for row in rows]
                    for index, values in enumerate(transpose(builder, square)):
                        at = builder.mul(builder.add(column, constant(index)), constant(self._panel))
                        self._store(builder, values, panel, builder.add(at, constant(vector)))

    def _take_values(self, builder: ir.IRBuilder, words: Words, block: Block, memory: ir.Value) -> None:
        """By key, and of each by column of the head."""
        with loop(builder, constant(0), self._padded(builder, builder.sub(block.end, block.first)), 1) as number:
            row = self._row(builder, words.v, words.v_strides, block, builder.add(block.first, number))
            to = address(builder, memory, builder.mul(number, constant(self._head_dim)))
            for column, _ in columns(builder, self._head_dim, self._width):
                self._store(builder, load_vector(builder, row, column, self._width), to, column)

    def _place(
        self, builder: ir.IRBuilder, words: Words, sequence: ir.Value, head: ir.Value, member: ir.Value, query: ir.Value
    ) -> ir.Value:
        """The number of a query's head among those of the result."""
        row = builder.add(builder.mul(sequence, words.num_queries), query)
        head = builder.add(builder.mul(head, words.group), member)
        return builder.add(builder.mul(row, builder.mul(words.kv_heads, words.group)), head)

    def _attend(
        self, builder: ir.IRBuilder, words: Words, memory: Memory, block: Block, member: ir.Value, first: ir.Value, num_rows: int
    ) -> None:
        """Add what some queries of one head find in a block."""
        queries = [builder.add(first, constant(index)) for index in range(num_rows)]
        bounds = [self._range(builder, words, query) for query in queries]
        counts = [builder.sub(minimum(builder, end, block.end), block.first) for _, end in bounds]
        lowest, _ = bounds[0]
        sees_some = builder.icmp_signed(">", counts[-1], constant(0))
        with builder.if_then(builder.and_(sees_some, builder.icmp_signed("<", lowest, block.end))):
            num_keys = self._padded(builder, counts[-1])
            scores = [address(builder, memory.scores, constant(index * self._keys)) for index in range(num_rows)]
            self._score(builder, words, memory, block, member, queries, scores, num_keys)
            is_first = builder.icmp_signed("<=", block.first, lowest)
            places = [self._place(builder, words, block.sequence, block.head, member, query) for query in queries]
            seen = [(builder.sub(begin, block.first), count) for (begin, _), count in zip(bounds, counts, strict=True)]
            states = zip(scores, seen, places, strict=True)
            scales = [self._weigh(builder, words, row, its, num_keys, place, is_first) for row, its, place in states]
            self._add_values(builder, words, memory, scores, scales, places, num_keys, is_first)

    def _score(
        self,
        builder: ir.IRBuilder,
        words: Words,
        memory: Memory,
        block: Block,
        member: ir.Value,
        queries: Sequence[ir.Value],
        scores: Sequence[ir.Value],
        num_keys: ir.Value,
    ) -> None:
        head = builder.add(builder.mul(block.head, words.group), member)
        starts = (self._start(builder, words.q_strides, block.sequence, query, head) for query in queries)
        factors = [address(builder, words.q, start, self.stored) for start in starts]
        sums = new_sums(builder, len(queries), self.vectors, self._floats)
        with loop(builder, constant(0), num_keys, self._panel) as key:
            panel = address(builder, memory.keys, builder.mul(key, constant(self._key_words)))
            clear(builder, sums, self._floats)
            add_outer_products(builder, sums, factors, panel, self._panel, constant(self._key_words), add=self._add)
            for row, totals in zip(scores, sums, strict=True):
                for index, total in enumerate(totals):
                    self._store(builder, builder.load(total, typ=self._floats), row, builder.add(key, constant(index * self._width)))

    def _weigh(
        self,
        builder: ir.IRBuilder,
        words: Words,
        scores: ir.Value,
        seen: tuple[ir.Value, ir.Value],
        num_keys: ir.Value,
        place: ir.Value,
        is_first: ir.Value,
    ) -> ir.Value:
        """Turn a query's scores into weights. The weights of keys that it has not ``seen`` are 0. Returns the factor for the sums so
        far."""

        def larger(one: ir.Value, other: ir.Value) -> ir.Value:
            return builder.select(builder.fcmp_ordered(">", one, other), one, other)

        low, high = (minimum(builder, maximum(builder, bound, constant(0)), num_keys) for bound in seen)
        self._fill(builder, scores, low, high, num_keys, ir.Constant(FLOAT, -math.inf))
        scale = numbers(self._floats, self._scale)
        largest, weight = (address(builder, base, place) for base in (words.largest, words.weight))
        before = builder.select(is_first, ir.Constant(FLOAT, _LOWEST), builder.load(largest, align=4, typ=FLOAT))
        ((found, total),) = new_sums(builder, 1, 2, self._floats)
        builder.store(numbers(self._floats, -math.inf), found)
        builder.store(numbers(self._floats, 0.0), total)
        with loop(builder, constant(0), num_keys, self._width) as key:
            builder.store(larger(load_vector(builder, scores, key, self._width), builder.load(found, typ=self._floats)), found)
        here = reduce(builder, builder.load(found, typ=self._floats), larger)
        now = larger(builder.fmul(here, ir.Constant(FLOAT, self._scale)), before)
        builder.store(now, largest, align=4)
        all_now = spread(builder, now, self._width)
        less = builder.fneg(all_now)
        with loop(builder, constant(0), num_keys, self._width) as key:
            scaled = multiply_add(builder, load_vector(builder, scores, key, self._width), scale, less)
            part = self._exponential(builder, scaled)
            self._store_weights(builder, part, scores, key)
            builder.store(builder.fadd(builder.load(total, typ=self._floats), part), total)
        self._fill(builder, scores, low, high, num_keys, ir.Constant(self.stored, 0))  # the exponential of -inf is not 0
        factor = exponential(builder, builder.fsub(spread(builder, before, self._width), all_now))
        earlier = builder.select(is_first, ir.Constant(FLOAT, 0.0), builder.load(weight, align=4, typ=FLOAT))
        earlier = builder.fmul(earlier, builder.extract_element(factor, ir.Constant(ir.IntType(32), 0)))
        builder.store(builder.fadd(earlier, reduce(builder, builder.load(total, typ=self._floats), builder.fadd)), weight, align=4)
        return factor

    def _fill(
        self, builder: ir.IRBuilder, scores: ir.Value, low: ir.Value, high: ir.Value, num_keys: ir.Value, value: ir.Constant
    ) -> None:
        """Put a value in the place of the scores before ``low`` and from ``high`` on."""
        for start, stop in ((constant(0), low), (high, num_keys)):
            with loop(builder, start, stop, 1) as key:
                builder.store(value, address(builder, scores, key, value.type))

    def _add_values(
        self,
        builder: ir.IRBuilder,
        words: Words,
        memory: Memory,
        scores: Sequence[ir.Value],
        scales: Sequence[ir.Value],
        places: Sequence[ir.Value],
        num_keys: ir.Value,
        is_first: ir.Value,
    ) -> None:
        outputs = [address(builder, words.output, builder.mul(place, constant(self._head_dim))) for place in places]
        for column, count in columns(builder, self._head_dim, self._panel):
            places = [builder.add(column, constant(at)) for at in range(0, count, self._width)]
            sums = new_sums(builder, len(scores), len(places), self._floats)
            for output, scale, totals in zip(outputs, scales, sums, strict=True):
                for at, total in zip(places, totals, strict=True):
                    before = builder.fmul(load_vector(builder, output, at, self._width), scale)
                    builder.store(builder.select(is_first, numbers(self._floats, 0.0), before), total)
            num_words = builder.udiv(num_keys, constant(self.in_word))
            values = address(builder, memory.values, column)
            add_outer_products(builder, sums, scores, values, self._head_dim, num_words, add=self._add)
            for output, totals in zip(outputs, sums, strict=True):
                for at, total in zip(places, totals, strict=True):
                    self._store(builder, builder.load(total, typ=self._floats), output, at)

    def _divide(self, builder: ir.IRBuilder, words: Words, place: ir.Value, query: ir.Value) -> None:
        """A query without any key has written nothing."""
        first, end = self._range(builder, words, query)
        is_empty = builder.icmp_signed(">=", first, end)
        largest, weight = (address(builder, base, place) for base in (words.largest, words.weight))
        with builder.if_then(is_empty):
            builder.store(ir.Constant(FLOAT, -math.inf), largest, align=4)
            builder.store(ir.Constant(FLOAT, 1.0), weight, align=4)
        total = spread(builder, builder.load(weight, align=4, typ=FLOAT), self._width)
        output = address(builder, words.output, builder.mul(place, constant(self._head_dim)))
        for column, _ in columns(builder, self._head_dim, self._width):
            done = load_vector(builder, output, column, self._width)
            found = builder.select(is_empty, numbers(self._floats, 0.0), builder.fdiv(done, total))
            self._store(builder, found, output, column)

    def _add(self, builder: ir.IRBuilder, total: ir.Value, one: ir.Value, other: ir.Value) -> None:
        """Add a product of words to a variable."""
        add_product(builder, total, one, other)

    def _exponential(self, builder: ir.IRBuilder, x: ir.Value) -> ir.Value:
        """e^x, as exactly as weights are kept."""
        return exponential(builder, x)

    def _store_weights(self, builder: ir.IRBuilder, weights: ir.Value, row: ir.Value, key: ir.Value) -> None:
        """Write the weights of the keys from ``key`` on, in the place of scores before them or of their own."""
        self._store(builder, weights, row, key)

    def _store(self, builder: ir.IRBuilder, value: ir.Value, base: ir.Value, place: ir.Value) -> None:
        builder.store(value, address(builder, base, place), align=4)
