"""Code of ``delta_kernels``: new tokens of a block, in a key head with its value heads. Shapes: as there."""

import math
from abc import abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

from llvmlite import ir

from .delta_code import (
    BA,
    BA_STRIDE,
    CONV,
    DT_BIAS,
    EPSILON,
    MIXED,
    MIXED_STRIDE,
    NORM,
    OUT,
    RATES,
    Z_STRIDE,
    Array,
    Heads,
    Known,
    Row,
    Z,
)
from .machine_code import (
    POINTER,
    add_outer_products,
    add_product,
    address,
    call_intrinsic,
    clear,
    constant,
    exponential,
    load_floats,
    load_vector,
    load_word,
    loop,
    multiply_add,
    new_sums,
    numbers,
    sigmoid,
    silu,
    softplus,
    to_bfloat16,
    to_floats,
)

_NORM_EPSILON = 1e-6  # of queries and keys


class Block(NamedTuple):
    """A block in a key head. Its first ``known`` tokens are known; new ones follow, which count from 0 in all but ``keys``."""

    known: ir.Value
    num_new: ir.Value
    first: ir.Value  # row of the first new token
    keys: Array
    queries: Array
    inputs: list[Array]  # values, of each value head
    by_keys: Array  # products of a token's key with the block's keys up to its own
    by_queries: Array  # likewise, of its query


class Mixing(Heads):
    """Emits what prompts and steps share: items are the key heads of sequences. The words are 1, their number, and those that have
    names."""

    tokens_at_once = 1
    """New tokens that a state is multiplied by at once."""

    def emit(self, builder: ir.IRBuilder, num_rows: int, arguments: Sequence[ir.Value]) -> None:
        words, _, start, stop = arguments
        key_heads = constant(self.shape.key_heads)
        with loop(builder, start, stop, 1) as item:
            row = self.row(builder, words, builder.udiv(item, key_heads))
            self.absorb(builder, words, row, builder.udiv(item, key_heads), builder.urem(item, key_heads))

    @abstractmethod
    def absorb(self, builder: ir.IRBuilder, words: ir.Value, row: Row, index: ir.Value, head: ir.Value) -> None:
        """Emit a key head of a sequence. ``index``: of the sequence."""

    @abstractmethod
    def column(self, builder: ir.IRBuilder, words: ir.Value, row: Row, index: ir.Value) -> ir.Value:
        """The column of a sequence's token; ``index`` counts from its first new one."""

    def new_column(self, builder: ir.IRBuilder, words: ir.Value, row: Row, index: ir.Value) -> ir.Value:
        place = builder.mul(builder.add(row.first, index), load_word(builder, words, MIXED_STRIDE))
        return address(builder, load_word(builder, words, MIXED, POINTER), place, self.stored)

    def column_at(self, builder: ir.IRBuilder, columns: ir.Value, place: ir.Value) -> ir.Value:
        """One of the columns in a page."""
        return address(builder, columns, builder.mul(place, constant(self.shape.mixed_size)), self.stored)

    def parts(self, builder: ir.IRBuilder, head: ir.Value) -> list[tuple[ir.Value, int]]:
        """Where a key head's parts of a column begin, and their lengths: query, key, and values of each value head."""
        key_heads, _, key_dim, value_dim, *_ = self.shape
        query = builder.mul(head, constant(key_dim))
        key = builder.add(query, constant(key_heads * key_dim))
        value = builder.add(constant(2 * key_heads * key_dim), builder.mul(head, constant(self.shape.group * value_dim)))
        values = [builder.add(value, constant(number * value_dim)) for number in range(self.shape.group)]
        return [(query, key_dim), (key, key_dim), *((value, value_dim) for value in values)]

    def copy_column(self, builder: ir.IRBuilder, head: ir.Value, source: ir.Value, target: ir.Value) -> None:
        """A key head's parts."""
        for first, length in self.parts(builder, head):
            with self.vectors(builder, length) as place:
                column = builder.add(first, place)
                value = load_vector(builder, source, column, self.width, self.stored)
                builder.store(value, address(builder, target, column, self.stored), align=1)

    def block(self, builder: ir.IRBuilder, known: ir.Value, num_new: ir.Value, first: ir.Value, keys: Array) -> Block:
        key_dim, value_dim, grid, most = self.shape.key_dim, self.shape.value_dim, self.shape.grid, self.most_new
        inputs = [Array(self.memory(builder, most * value_dim), value_dim) for _ in range(self.shape.group)]
        products = [Array(self.memory(builder, most * grid), grid) for _ in range(2)]
        return Block(known, num_new, first, keys, Array(self.memory(builder, most * key_dim), key_dim), inputs, *products)

    @property
    def most_new(self) -> int:
        return self.shape.grid

    def prepare(self, builder: ir.IRBuilder, words: ir.Value, row: Row, head: ir.Value, begin: ir.Value, block: Block) -> None:
        """Queries, keys, values and products of a block's new tokens. ``begin``: how many new tokens the sequence has before them."""
        key_dim = self.shape.key_dim
        with loop(builder, constant(0), block.num_new, 1) as index:
            back = (builder.sub(builder.add(begin, index), constant(lag)) for lag in reversed(range(self.shape.conv_size)))
            columns = [self.column(builder, words, row, place) for place in back]
            token = builder.add(block.known, index)
            query, key = block.queries.of(builder, index), block.keys.of(builder, token)
            targets = [query, key, *(values.of(builder, index) for values in block.inputs)]
            for target, (first, length) in zip(targets, self.parts(builder, head), strict=True):
                self._convolve(builder, words, columns, first, length, target)
            self._normalise(builder, query, 1 / math.sqrt(key_dim))
            self._normalise(builder, key, 1.0)
            with loop(builder, constant(0), builder.add(token, constant(1)), 1) as other:
                found = self.dot(builder, block.keys.of(builder, other), (key, query), key_dim)
                for products, product in zip((block.by_keys, block.by_queries), found, strict=True):
                    self.store_number(builder, product, products.of(builder, index), other)

    def _convolve(
        self, builder: ir.IRBuilder, words: ir.Value, columns: Sequence[ir.Value], first: ir.Value, length: int, target: ir.Value
    ) -> None:
        conv = load_word(builder, words, CONV, POINTER)
        with self.vectors(builder, length) as place:
            total, at = numbers(self.floats, 0.0), builder.add(first, place)
            for number, column in enumerate(columns):
                weight = self.load(builder, conv, builder.add(at, constant(number * self.shape.mixed_size)))
                total = multiply_add(builder, load_floats(builder, column, at, self.width, self.stored), weight, total)
            self.store(builder, self._rounded(builder, silu(builder, self._rounded(builder, total))), target, place)

    def _rounded(self, builder: ir.IRBuilder, value: ir.Value) -> ir.Value:
        """As the model's numbers hold it, in float32."""
        return value if isinstance(self.stored, ir.FloatType) else to_floats(builder, to_bfloat16(builder, value))

    def _normalise(self, builder: ir.IRBuilder, vector: ir.Value, scale: float) -> None:
        """Of length ``scale``, in place."""
        [squares] = self.dot(builder, vector, [vector], self.shape.key_dim)
        size = self._root(builder, builder.fadd(squares, numbers(self.floats, _NORM_EPSILON)))
        with self.vectors(builder, self.shape.key_dim) as place:
            scaled = builder.fdiv(self.load(builder, vector, place), size)
            self.store(builder, builder.fmul(scaled, numbers(self.floats, scale)), vector, place)

    def _root(self, builder: ir.IRBuilder, value: ir.Value) -> ir.Value:
        return call_intrinsic(builder, f"llvm.sqrt.v{self.width}f32", self.floats, [value])

    def mix(
        self,
        builder: ir.IRBuilder,
        words: ir.Value,
        block: Block,
        value_head: ir.Value,
        inputs: Array,
        known: Known,
        state: ir.Value,
        has_state: ir.Value,
    ) -> None:
        """A block's new tokens in a value head: their outputs, and what is known of them then."""
        most, value_dim = self.most_new, self.shape.value_dim
        betas = Array(self.memory(builder, most), 1)
        of_keys, of_queries = (Array(self.memory(builder, most * value_dim), value_dim) for _ in range(2))
        with loop(builder, constant(0), block.num_new, 1) as index:
            self._gates(builder, words, block, value_head, index, betas, known.decays)
        with builder.if_else(has_state) as (some, none):
            with some:
                whole = constant(0)
                if self.tokens_at_once > 1:
                    whole = builder.sub(block.num_new, builder.urem(block.num_new, constant(self.tokens_at_once)))
                    with loop(builder, constant(0), whole, self.tokens_at_once) as index:
                        self._from_state(builder, block, state, known.decays, index, self.tokens_at_once, (of_keys, of_queries))
                with loop(builder, whole, block.num_new, 1) as index:
                    self._from_state(builder, block, state, known.decays, index, 1, (of_keys, of_queries))
            with none, loop(builder, constant(0), builder.mul(block.num_new, constant(value_dim)), self.width) as place:
                for part in (of_keys, of_queries):
                    self.store(builder, numbers(self.floats, 0.0), part.base, place)
        factors = [self.memory(builder, self.shape.grid) for _ in range(2)]
        out = self.memory(builder, value_dim)
        with loop(builder, constant(0), block.num_new, 1) as index:
            parts = [part.of(builder, index) for part in (of_keys, of_queries, inputs)]
            beta = self.number(builder, betas.of(builder, index), constant(0))
            self._correct(builder, block, known, index, parts, beta, factors, out)
            self._finish(builder, words, builder.add(block.first, index), value_head, out)

    def _gates(
        self,
        builder: ir.IRBuilder,
        words: ir.Value,
        block: Block,
        value_head: ir.Value,
        index: ir.Value,
        betas: Array,
        decays: Array,
    ) -> None:
        """Of a new token: its beta, and the sum of log decays up to it."""
        gates = load_word(builder, words, BA, POINTER)
        first = builder.mul(builder.add(block.first, index), load_word(builder, words, BA_STRIDE))
        b, a = (builder.add(builder.add(first, constant(start)), value_head) for start in (0, self.shape.value_heads))
        beta = self._rounded(builder, sigmoid(builder, self.number(builder, gates, b, self.stored)))
        self.store_number(builder, beta, betas.of(builder, index), constant(0))
        rate, bias = (self.number(builder, load_word(builder, words, word, POINTER), value_head) for word in (RATES, DT_BIAS))
        decay = builder.fmul(rate, softplus(builder, builder.fadd(self.number(builder, gates, a, self.stored), bias)))
        token = builder.add(block.known, index)
        is_first = builder.icmp_signed("==", token, constant(0))
        earlier = builder.select(is_first, token, builder.sub(token, constant(1)))
        before = self.number(builder, decays.of(builder, earlier), constant(0))
        before = builder.select(is_first, numbers(self.floats, 0.0), before)
        self.store_number(builder, builder.fadd(before, decay), decays.of(builder, token), constant(0))

    def _from_state(
        self,
        builder: ir.IRBuilder,
        block: Block,
        state: ir.Value,
        decays: Array,
        index: ir.Value,
        num_tokens: int,
        outputs: tuple[Array, Array],
    ) -> None:
        """Keys and queries of some new tokens times what is left of a state."""
        key_dim, value_dim = self.shape.key_dim, self.shape.value_dim
        indices = [builder.add(index, constant(number)) for number in range(num_tokens)]
        tokens = [builder.add(block.known, number) for number in indices]
        left = [exponential(builder, self.number(builder, decays.of(builder, token), constant(0))) for token in tokens]
        factors = [*(block.keys.of(builder, token) for token in tokens), *(block.queries.of(builder, number) for number in indices)]
        vectors = self.at_once(self.width // 2 if num_tokens == 1 else 2)
        sums = new_sums(builder, len(factors), vectors, self.floats)
        with loop(builder, constant(0), constant(value_dim), vectors * self.width) as column:
            clear(builder, sums, self.floats)
            ahead = None
            if num_tokens == 1:  # the next head's, as much of it as is read of this one meanwhile
                place = builder.add(builder.mul(column, constant(key_dim)), constant(self.shape.state_numbers))
                ahead = address(builder, state, place), vectors * self.width
            add_outer_products(builder, sums, factors, address(builder, state, column), value_dim, constant(key_dim), ahead)
            targets = (part.of(builder, number) for part in outputs for number in indices)
            for totals, target, kept in zip(sums, targets, [*left, *left], strict=True):
                for number, total in enumerate(totals):
                    value = builder.fmul(builder.load(total, typ=self.floats), kept)
                    self.store(builder, value, target, builder.add(column, constant(number * self.width)))

    def _correct(
        self,
        builder: ir.IRBuilder,
        block: Block,
        known: Known,
        index: ir.Value,
        parts: Sequence[ir.Value],
        beta: ir.Value,
        factors: Sequence[ir.Value],
        out: ir.Value,
    ) -> None:
        """A new token's corrected value and output, from what the state gives its key and query, and its value. ``factors``: memory for
        what earlier tokens of the block count."""
        token = builder.add(block.known, index)
        products = [part.of(builder, index) for part in (block.by_keys, block.by_queries)]
        with loop(builder, constant(0), token, 1) as other:
            left = self.left(builder, known.decays, other, token)
            for product, factor in zip(products, factors, strict=True):
                self.store_number(builder, builder.fmul(self.number(builder, product, other), left), factor, other)
        own = self.number(builder, products[1], token)
        vectors = self.at_once(self.width // 2)
        sums = new_sums(builder, 2, vectors, self.floats)
        with loop(builder, constant(0), constant(self.shape.value_dim), vectors * self.width) as column:
            columns = [builder.add(column, constant(number * self.width)) for number in range(vectors)]
            for part, totals in zip(parts[:2], sums, strict=True):
                for place, total in zip(columns, totals, strict=True):
                    builder.store(self.load(builder, part, place), total)
            with loop(builder, constant(0), token, 1) as other:
                values = known.values.of(builder, other)
                counts = [self.number(builder, factor, other) for factor in factors]
                for number, place in enumerate(columns):
                    value = self.load(builder, values, place)
                    for count, totals in zip(counts, sums, strict=True):
                        add_product(builder, totals[number], count, value)
            for place, from_key, from_query in zip(columns, *sums, strict=True):
                difference = builder.fsub(self.load(builder, parts[2], place), builder.load(from_key, typ=self.floats))
                value = builder.fmul(difference, beta)
                self.store(builder, value, known.values.of(builder, token), place)
                self.store(builder, multiply_add(builder, own, value, builder.load(from_query, typ=self.floats)), out, place)

    def _finish(self, builder: ir.IRBuilder, words: ir.Value, row: ir.Value, value_head: ir.Value, out: ir.Value) -> None:
        """Norm and gate of a token's output."""
        value_dim = self.shape.value_dim
        with self.vectors(builder, value_dim) as place:
            self.store(builder, self._rounded(builder, self.load(builder, out, place)), out, place)
        [squares] = self.dot(builder, out, [out], value_dim)
        mean = builder.fdiv(squares, numbers(self.floats, float(value_dim)))
        epsilon = self.number(builder, load_word(builder, words, EPSILON, POINTER), constant(0))
        scale = builder.fdiv(numbers(self.floats, 1.0), self._root(builder, builder.fadd(mean, epsilon)))
        z, norm, target = (load_word(builder, words, word, POINTER) for word in (Z, NORM, OUT))
        of_head = builder.mul(value_head, constant(value_dim))
        gates = builder.add(builder.mul(row, load_word(builder, words, Z_STRIDE)), of_head)
        first = builder.add(builder.mul(row, constant(self.shape.value_heads * value_dim)), of_head)
        with self.vectors(builder, value_dim) as place:
            normed = builder.fmul(builder.fmul(self.load(builder, out, place), scale), self.load(builder, norm, place))
            gate = silu(builder, load_floats(builder, z, builder.add(gates, place), self.width, self.stored))
            value = builder.fmul(normed, gate)
            bits = value if isinstance(self.stored, ir.FloatType) else to_bfloat16(builder, value)
            builder.store(bits, address(builder, target, builder.add(first, place), self.stored), align=1)

    def value_head(self, builder: ir.IRBuilder, head: ir.Value, number: int) -> ir.Value:
        return builder.add(builder.mul(head, constant(self.shape.group)), constant(number))

    def state(self, builder: ir.IRBuilder, states: ir.Value, value_head: ir.Value) -> ir.Value:
        return address(builder, states, builder.mul(value_head, constant(self.shape.state_numbers)))
