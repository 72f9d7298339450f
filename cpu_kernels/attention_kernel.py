"""Attention of decode steps over pages on a CPU, in one kernel: K and V are read where they lie, once for all query heads that share
them.

A sequence's result is the same bits in any batch and team of threads. Softmax goes along with the pages: sums so far are scaled again
whenever a page has a larger score. Where the processor has AVX512-BF16, it multiplies bfloat16's queries and K as they are stored; V is
always weighted in float32. Shapes: B sequences, HKV heads of K and V, G query heads for each, D head_dim.
"""

import math
from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import torch
from llvmlite import ir
from torch import Tensor

from .kernel import STORED, Kernel, available_threads, has_bfloat16, load_kernel, vector_width
from .machine_code import (
    FLOAT,
    INT,
    POINTER,
    add_product,
    add_products_of_pairs,
    address,
    clear,
    columns,
    constant,
    exponential,
    load_floats,
    load_vector,
    load_word,
    loop,
    maximum,
    minimum,
    new_sums,
    numbers,
    prefetch,
    reduce,
    spread,
    sums_of_each,
)

_LEAST_WORK = 1 << 17  # numbers of K: fewer are left to one thread
_MOST_PAGE_TOKENS = 64  # code grows with the tokens of a page
_NO_WINDOW = 1 << 30  # tokens, more than a sequence has
_AT_ONCE = 2  # vectors of an output that are added to together: the sums of four query heads fit in registers
_REGISTERS = 32  # of AVX512


class Shape(NamedTuple):
    """The sizes and the number format that a kernel is compiled for."""

    kv_heads: int
    group: int  # G
    head_dim: int
    page_tokens: int
    stored: torch.dtype
    scale: float = 0.0  # of scores; 0: 1 / sqrt(D)


class PagedAttention:
    """Attention over the pages of a pool."""

    def __init__(self, values: Tensor, shape: Shape, window: int = 0) -> None:
        self._values, self._shape, self._window = values, shape, window or _NO_WINDOW
        self._kernel = _kernel(shape)
        self._lengths = self._tables = torch.empty(0, dtype=torch.int64)
        self._is_small = True

    @classmethod
    def of(cls, values: Tensor, kv_heads: int, group: int, scale: float = 0.0, window: int = 0) -> "PagedAttention | None":
        """Of K and V [num_pages, num_layers, page_tokens, 2, kv_heads, head_dim], whose pages and layers may lie apart. ``window``: of
        a sequence's tokens the last so many are attended to; 0: all. None where there is no kernel: on a GPU, for a quantized cache, on
        a processor without AVX2, for heads that are no whole vectors, and for large pages."""
        width, page_tokens, head_dim = vector_width(), values.shape[2], values.shape[-1]
        is_plain = values.dtype in STORED and values.device.type == "cpu"
        if width is None or not is_plain or head_dim % (_AT_ONCE * width) or page_tokens > _MOST_PAGE_TOKENS:
            return None
        return cls(values, Shape(kv_heads, group, head_dim, page_tokens, values.dtype, scale), window)

    def begin(self, lengths: Tensor, block_tables: Tensor) -> None:
        """As ``Attention.begin_decode``.

        Raises: ValueError for a length that is not from 1 to the table's, and for a page beyond the pool, which would be read.
        """
        num_pages, page_tokens = self._values.shape[0], self._shape.page_tokens
        table_tokens = page_tokens * block_tables.shape[1]
        shortest, longest = map(int, torch.aminmax(lengths))
        starts = torch.arange(block_tables.shape[1]) * page_tokens
        is_read = (starts < lengths.unsqueeze(1)) & (starts + page_tokens > (lengths - self._window).unsqueeze(1))
        tables = torch.where(is_read, block_tables, 0)
        first, last = map(int, torch.aminmax(tables))
        if first < 0 or last >= num_pages or shortest < 1 or longest > table_tokens:
            raise ValueError(
                f"pages {first} to {last} of {num_pages}, sequences of {shortest} to {longest} tokens in a table for {table_tokens}"
            )
        self._lengths, self._tables = lengths.long().contiguous(), tables.long()
        work = int(lengths.clamp(max=self._window).sum()) * self._shape.kv_heads * self._shape.head_dim
        self._is_small = work < _LEAST_WORK

    def attend(self, layer: int, q_BHD: Tensor) -> Tensor:
        """float32 [B, G x HKV x D] of queries [B, G x HKV, D] in the pool's dtype, to the tokens of ``begin``.

        Raises: ValueError for queries of other sequences, heads or dtypes.
        """
        kv_heads, group, head_dim, _, stored, _ = self._shape
        num_rows, num_heads = len(self._lengths), kv_heads * group
        if q_BHD.shape != (num_rows, num_heads, head_dim) or q_BHD.dtype != stored:
            raise ValueError(f"queries {q_BHD.dtype} {list(q_BHD.shape)}, not {stored} {[num_rows, num_heads, head_dim]}")
        row_numbers, *inner = q_BHD.stride()
        if inner != [head_dim, 1]:
            q_BHD, row_numbers = q_BHD.contiguous(), num_heads * head_dim
        out = torch.empty(num_rows, num_heads * head_dim, dtype=torch.float32)
        values = self._values
        first = values.data_ptr() + layer * values.stride(1) * values.element_size()
        addresses = self._lengths.data_ptr(), self._tables.data_ptr(), q_BHD.data_ptr(), out.data_ptr()
        words = (1, num_rows * kv_heads, row_numbers, self._tables.shape[1], values.stride(0), first, *addresses, self._window)
        self._kernel.run(words, 1 if self._is_small else available_threads())
        return out


@cache
def _kernel(shape: Shape) -> Kernel:
    width = vector_width()
    assert width is not None
    name = f"attention-{shape.kv_heads}-{shape.group}-{shape.head_dim}-{shape.page_tokens}-{STORED[shape.stored]}"
    name += f"-{shape.scale.hex()}" if shape.scale else ""
    with_pairs = shape.stored == torch.bfloat16 and has_bfloat16()
    return load_kernel(name, _Heads(shape, width, with_pairs), None, with_bfloat16=with_pairs)


class _Head(NamedTuple):
    """Where a head of a sequence keeps what it needs, in values of LLVM."""

    q: ir.Value  # float32 [G, D], times the scale; bfloat16 as they come where pairs are multiplied
    sums: ir.Value  # float32 [G, D]: of V so far
    products: ir.Value  # float32 [G, page_tokens, in whole vectors, a vector]: a score is the sum of the last dimension
    scores: ir.Value  # float32 [G, page_tokens, in whole vectors]
    largest: list[ir.Value]  # of the scores so far, by query head, as vectors of one number
    weights: list[ir.Value]  # sums of their exponentials, likewise


class _Memory(NamedTuple):
    """Of a thread, for all heads of a sequence: the parts of ``_Head`` that do not lie in the result."""

    q: ir.Value
    products: ir.Value
    scores: ir.Value
    largest: ir.Value
    weights: ir.Value


class _Heads:
    """Emits attention of some heads of sequences. The words are 1, B x HKV, numbers from one sequence's queries to the next's, pages of
    a row of the table, numbers from one page to the next, the addresses of the layer's values on page 0, the lengths, the table, the
    queries and the result, and the tokens of a window.

    A page is read for all heads before the next one: in memory a token's heads are neighbours.
    """

    most_rows = 1

    def __init__(self, shape: Shape, width: int, with_pairs: bool) -> None:
        """``with_pairs``: K and queries are multiplied by instructions of AVX512-BF16."""
        self._shape, self._width, self._floats, self._with_pairs = shape, width, ir.VectorType(FLOAT, width), with_pairs
        self._scale = shape.scale or 1 / math.sqrt(shape.head_dim)
        self._stored = STORED[shape.stored]
        self._line = 64 // shape.stored.itemsize
        self._padded = -(-shape.page_tokens // width) * width
        twice = 2 * _AT_ONCE
        fits = width == 16 and twice * (shape.group + 1) < _REGISTERS and shape.head_dim % (twice * width) == 0
        self._at_once = twice if fits else _AT_ONCE

    def emit(self, builder: ir.IRBuilder, num_rows: int, arguments: Sequence[ir.Value]) -> None:
        words, _, start, stop = arguments
        kv_heads = constant(self._shape.kv_heads)
        values, lengths, tables = (load_word(builder, words, index, POINTER) for index in (5, 6, 7))
        memory = self._memory(builder)
        after_last = builder.udiv(builder.add(stop, constant(self._shape.kv_heads - 1)), kv_heads)
        with loop(builder, builder.udiv(start, kv_heads), after_last, 1) as sequence:
            first_item = builder.mul(sequence, kv_heads)
            ends = (builder.sub(bound, first_item) for bound in (start, stop))
            low, high = (self._within(builder, end) for end in ends)
            with loop(builder, low, high, 1) as kv_head:
                self._begin(builder, self._head(builder, words, memory, sequence, kv_head), words, sequence, kv_head)
            length = builder.load(address(builder, lengths, sequence, INT), align=8, typ=INT)
            row = address(builder, tables, builder.mul(sequence, load_word(builder, words, 3)), INT)
            num_pages = builder.udiv(builder.add(length, constant(self._shape.page_tokens - 1)), constant(self._shape.page_tokens))
            begin = maximum(builder, builder.sub(length, load_word(builder, words, 10)), constant(0))
            with loop(builder, builder.udiv(begin, constant(self._shape.page_tokens)), num_pages, 1) as index:
                after = builder.add(index, constant(1))
                following = builder.select(builder.icmp_signed("<", after, num_pages), after, index)
                page_numbers = load_word(builder, words, 4)
                page, page_after = (
                    address(builder, values, self._first(builder, row, number, page_numbers), self._stored)
                    for number in (index, following)
                )
                before = builder.mul(index, constant(self._shape.page_tokens))
                last = minimum(builder, builder.sub(length, before), constant(self._shape.page_tokens))
                tokens = maximum(builder, builder.sub(begin, before), constant(0)), last
                with loop(builder, low, high, 1) as kv_head:
                    head = self._head(builder, words, memory, sequence, kv_head)
                    self._add_page(builder, head, kv_head, (page, page_after), tokens)
            with loop(builder, low, high, 1) as kv_head:
                self._divide(builder, self._head(builder, words, memory, sequence, kv_head))

    def _within(self, builder: ir.IRBuilder, number: ir.Value) -> ir.Value:
        """A number of heads of one sequence: at least 0, and not more than there are."""
        least, most = constant(0), constant(self._shape.kv_heads)
        number = builder.select(builder.icmp_signed("<", number, least), least, number)
        return builder.select(builder.icmp_signed(">", number, most), most, number)

    def _memory(self, builder: ir.IRBuilder) -> _Memory:
        kv_heads, group, head_dim, *_ = self._shape
        states = kv_heads * group * self._width
        found = []
        with builder.goto_entry_block():
            products = group * self._padded * self._width
            for length in (kv_heads * group * head_dim, products, group * self._padded, states, states):
                array = builder.alloca(ir.ArrayType(FLOAT, length))
                array.align = 64
                found.append(builder.inttoptr(builder.ptrtoint(array, INT), POINTER))  # of any type
        return _Memory(*found)

    def _head(self, builder: ir.IRBuilder, words: ir.Value, memory: _Memory, sequence: ir.Value, kv_head: ir.Value) -> _Head:
        kv_heads, group, head_dim, *_ = self._shape
        item = builder.add(builder.mul(sequence, constant(kv_heads)), kv_head)
        sums = address(builder, load_word(builder, words, 9, POINTER), builder.mul(item, constant(group * head_dim)))
        q = address(builder, memory.q, builder.mul(kv_head, constant(group * head_dim)))
        place = builder.mul(kv_head, constant(group * self._width))
        places = [builder.add(place, constant(number * self._width)) for number in range(group)]
        largest, weights = ([address(builder, base, place) for place in places] for base in (memory.largest, memory.weights))
        return _Head(q, sums, memory.products, memory.scores, largest, weights)

    def _add_page(
        self,
        builder: ir.IRBuilder,
        head: _Head,
        kv_head: ir.Value,
        pages: tuple[ir.Value, ir.Value],
        tokens: tuple[ir.Value, ir.Value],
    ) -> None:
        """Add these tokens, from the first to before the last, of a page. ``pages``: this page and the next one."""
        kv_heads, group, head_dim, *_ = self._shape
        of_head = builder.mul(kv_head, constant(head_dim))
        k, k_after = (address(builder, page, of_head, self._stored) for page in pages)
        v, v_after = (address(builder, base, constant(kv_heads * head_dim), self._stored) for base in (k, k_after))
        token_numbers = constant(2 * kv_heads * head_dim)
        self._multiply(builder, head, k, token_numbers, tokens, k_after)
        for number in range(group):
            self._weigh(builder, head, number, tokens)
        self._add_values(builder, head, v, token_numbers, tokens, v_after)

    def _first(self, builder: ir.IRBuilder, row: ir.Value, index: ir.Value, page_numbers: ir.Value) -> ir.Value:
        """Where a sequence's page begins."""
        return builder.mul(builder.load(address(builder, row, index, INT), align=8, typ=INT), page_numbers)

    def _begin(self, builder: ir.IRBuilder, head: _Head, words: ir.Value, sequence: ir.Value, kv_head: ir.Value) -> None:
        """Take the queries, and clear the sums."""
        _, group, head_dim, *_ = self._shape
        first = builder.mul(sequence, load_word(builder, words, 2))
        place = builder.add(first, builder.mul(kv_head, constant(group * head_dim)))
        queries = address(builder, load_word(builder, words, 8, POINTER), place, self._stored)
        for number in range(group):
            builder.store(numbers(self._floats, -math.inf), head.largest[number])
            builder.store(numbers(self._floats, 0.0), head.weights[number])
        for column, _ in columns(builder, group * head_dim, self._width):
            self._store(builder, numbers(self._floats, 0.0), head.sums, column)
            if self._with_pairs:
                taken = load_vector(builder, queries, column, self._width, self._stored)
                builder.store(taken, address(builder, head.q, column, self._stored), align=2)
            else:
                scale = numbers(self._floats, self._scale)
                self._store(builder, builder.fmul(self._values(builder, queries, column), scale), head.q, column)

    def _multiply(
        self,
        builder: ir.IRBuilder,
        head: _Head,
        k: ir.Value,
        token_numbers: ir.Value,
        tokens: tuple[ir.Value, ir.Value],
        ahead: ir.Value,
    ) -> None:
        """Write the products of the queries with K of tokens of a page.

        K and V of the next page (``ahead``) are fetched meanwhile. The processor does not do so by itself: a head has a short piece of
        each token's numbers, far from its next one.
        """
        _, group, head_dim, *_ = self._shape
        sums = new_sums(builder, group, 1, self._floats)
        step = 2 * self._width if self._with_pairs else self._width
        with loop(builder, *tokens, 1) as token:
            place = builder.mul(token, token_numbers)
            clear(builder, sums, self._floats)
            for column in range(0, head_dim, self._line):
                prefetch(builder, ahead, builder.add(place, constant(column)), self._stored)
            for column, _ in columns(builder, head_dim, step):
                keys = self._factors(builder, k, builder.add(place, column), self._stored)
                for number, (total,) in enumerate(sums):
                    at = builder.add(constant(number * head_dim), column)
                    queries = self._factors(builder, head.q, at, self._stored if self._with_pairs else FLOAT)
                    (add_products_of_pairs if self._with_pairs else add_product)(builder, total, queries, keys)
            for number, (total,) in enumerate(sums):
                at = builder.mul(builder.add(token, constant(number * self._padded)), constant(self._width))
                self._store(builder, builder.load(total, typ=self._floats), head.products, at)

    def _factors(self, builder: ir.IRBuilder, base: ir.Value, place: ir.Value, stored: ir.Type) -> ir.Value:
        """A vector of float32, or of pairs of bfloat16 in the same bits."""
        if not self._with_pairs:
            return load_floats(builder, base, place, self._width, stored)
        return builder.bitcast(load_vector(builder, base, place, 2 * self._width, stored), self._floats)

    def _scores(self, builder: ir.IRBuilder, head: _Head, first: int, tokens: tuple[ir.Value, ir.Value]) -> ir.Value:
        """Scores by one query head of a vector of tokens, the ``first`` of [G, page_tokens]; those that do not count are -inf."""
        rows = range(first * self._width, (first + self._width) * self._width, self._width)
        found = sums_of_each(builder, [load_vector(builder, head.products, constant(row), self._width) for row in rows])
        if self._with_pairs:
            found = builder.fmul(found, numbers(self._floats, self._scale))
        places = ir.Constant(ir.VectorType(INT, self._width), [first % self._padded + index for index in range(self._width)])
        low, high = (spread(builder, token, self._width) for token in tokens)
        counts = builder.and_(builder.icmp_signed(">=", places, low), builder.icmp_signed("<", places, high))
        return builder.select(counts, found, numbers(self._floats, -math.inf))

    def _weigh(self, builder: ir.IRBuilder, head: _Head, number: int, tokens: tuple[ir.Value, ir.Value]) -> None:
        """Turn a query head's scores on a page into weights, and scale its sums by what a larger score makes of them."""
        vectors = range(number * self._padded, (number + 1) * self._padded, self._width)
        scores = [self._scores(builder, head, column, tokens) for column in vectors]
        before = builder.load(head.largest[number], typ=self._floats)

        def larger(one: ir.Value, other: ir.Value) -> ir.Value:
            return builder.select(builder.fcmp_ordered(">", one, other), one, other)

        found = before
        for part in scores:
            found = larger(part, found)
        largest = reduce(builder, found, larger)
        now = spread(builder, largest, self._width)
        with builder.if_then(builder.fcmp_ordered(">", largest, builder.extract_element(before, ir.Constant(ir.IntType(32), 0)))):
            builder.store(now, head.largest[number])
            self._scale_sums(builder, head, number, exponential(builder, builder.fsub(before, now)))
        total = builder.load(head.weights[number], typ=self._floats)
        whole = numbers(self._floats, 0.0)
        for column, part in zip(vectors, scores, strict=True):
            weight = exponential(builder, builder.fsub(part, now))
            self._store(builder, weight, head.scores, constant(column))
            whole = builder.fadd(whole, weight)
        whole = spread(builder, reduce(builder, whole, builder.fadd), self._width)
        builder.store(builder.fadd(total, whole), head.weights[number])

    def _scale_sums(self, builder: ir.IRBuilder, head: _Head, number: int, scale: ir.Value) -> None:
        weights = builder.load(head.weights[number], typ=self._floats)
        builder.store(builder.fmul(weights, scale), head.weights[number])
        for column, _ in columns(builder, self._shape.head_dim, self._width):
            at = builder.add(constant(number * self._shape.head_dim), column)
            self._store(builder, builder.fmul(load_vector(builder, head.sums, at, self._width), scale), head.sums, at)

    def _add_values(
        self,
        builder: ir.IRBuilder,
        head: _Head,
        v: ir.Value,
        token_numbers: ir.Value,
        tokens: tuple[ir.Value, ir.Value],
        ahead: ir.Value,
    ) -> None:
        """Add V of tokens of a page, times the weights."""
        _, group, head_dim, *_ = self._shape
        variables = new_sums(builder, group, self._at_once, self._floats)
        for column, _ in columns(builder, head_dim, self._at_once * self._width):
            places = [builder.add(column, constant(self._width * index)) for index in range(self._at_once)]
            sums = [[builder.add(constant(number * head_dim), place) for place in places] for number in range(group)]
            for ats, row in zip(sums, variables, strict=True):
                for at, variable in zip(ats, row, strict=True):
                    builder.store(load_vector(builder, head.sums, at, self._width), variable)
            with loop(builder, *tokens, 1) as token:
                first = builder.mul(token, token_numbers)
                for place in places[:: self._line // self._width]:
                    prefetch(builder, ahead, builder.add(first, place), self._stored)
                parts = [self._values(builder, v, builder.add(first, place)) for place in places]
                for number, row in enumerate(variables):
                    weight_address = address(builder, head.scores, builder.add(token, constant(number * self._padded)))
                    weight = spread(builder, builder.load(weight_address, align=4, typ=FLOAT), self._width)
                    for part, variable in zip(parts, row, strict=True):
                        add_product(builder, variable, weight, part)
            for ats, row in zip(sums, variables, strict=True):
                for at, variable in zip(ats, row, strict=True):
                    self._store(builder, builder.load(variable, typ=self._floats), head.sums, at)

    def _divide(self, builder: ir.IRBuilder, head: _Head) -> None:
        for number, weights in enumerate(head.weights):
            total = builder.load(weights, typ=self._floats)
            for column, _ in columns(builder, self._shape.head_dim, self._width):
                at = builder.add(constant(number * self._shape.head_dim), column)
                done = load_vector(builder, head.sums, at, self._width)
                self._store(builder, builder.fdiv(done, total), head.sums, at)

    def _values(self, builder: ir.IRBuilder, base: ir.Value, place: ir.Value) -> ir.Value:
        """Numbers of K or V."""
        return load_floats(builder, base, place, self._width, self._stored)

    def _store(self, builder: ir.IRBuilder, value: ir.Value, base: ir.Value, place: ir.Value) -> None:
        builder.store(value, address(builder, base, place), align=4)
