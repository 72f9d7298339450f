"""Attention of many queries on a CPU, in float32: from the tokens of a prompt or the rows of a picture to keys and values that lie in
order.

Keys and values are taken in blocks, which stay in the second cache while a block of queries attends to them; sums so far are scaled
again whenever a block has a larger score (FlashAttention, arXiv 2205.14135). A query's result is the same bits whatever queries are
beside it, and however many threads there are. Shapes: S sequences of N queries and M keys each, HKV heads of keys and values, G query
heads for each, D head_dim.
"""

import math
from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import torch
from llvmlite import ir
from torch import Tensor

from .kernel import Kernel, load_kernel, vector_width
from .machine_code import (
    FLOAT,
    INT,
    POINTER,
    add_outer_products,
    address,
    clear,
    constant,
    exponential,
    load_vector,
    load_word,
    loop,
    new_sums,
    numbers,
    reduce,
    spread,
    transpose,
)

_KEYS = 256  # of a block
_QUERIES = 192  # of a block, for each of G heads; less where threads would have nothing to do
_LEAST_QUERIES = 24
_ROWS = 6  # queries that attend at once: with AVX2 12 of 16 registers are sums
_VECTORS = 2  # of scores, or of a result, that are summed up at once
_ITEMS = 4  # of work for each thread, which are not equally large
_LEAST_WORK = 1 << 18  # products of a query and a key: fewer are left to one thread
_MOST_HEAD_DIM = 256  # a block of keys and values lies on the stack: 512 KB


def has_kernel(q: Tensor) -> bool:
    """Return whether ``attend`` takes such queries [..., D]: float32 on a processor with AVX2, heads of whole vectors."""
    width, head_dim = vector_width(), q.shape[-1]
    is_plain = q.device.type == "cpu" and q.dtype == torch.float32
    return width is not None and is_plain and head_dim % width == 0 and head_dim <= _MOST_HEAD_DIM


def prepare(head_dim: int, dtype: torch.dtype) -> None:
    """Load the kernel for such heads, where there is one; otherwise the first call would make it, in 0.2 to 0.7 s."""
    if has_kernel(torch.empty(0, head_dim, dtype=dtype)):
        _kernel(head_dim)


class Attended(NamedTuple):
    """``output`` [S, N, HKV x G, D]; ``largest`` score of each query, and the ``weight`` of all: the sum of exponentials of scores less
    the largest one, [S, N, HKV x G]. float32."""

    output: Tensor
    largest: Tensor
    weight: Tensor

    @property
    def log_sum_exp(self) -> Tensor:
        """Of the scores."""
        return self.largest + self.weight.log()


def attend(q_SNHD: Tensor, k_SMHD: Tensor, v_SMHD: Tensor, *, is_causal: bool = False) -> Attended:
    """softmax(q k' / sqrt(D)) v. ``is_causal``: query i attends to the keys 0 to i; there are as many.

    Raises: ValueError for shapes and dtypes that do not fit each other, which would read beyond them.
    """
    (num_sequences, num_queries, num_heads, head_dim), (_, num_keys, kv_heads, _) = q_SNHD.shape, k_SMHD.shape
    tensors = q_SNHD, k_SMHD, v_SMHD
    is_alike = k_SMHD.shape == v_SMHD.shape == (num_sequences, num_keys, kv_heads, head_dim) and num_heads % kv_heads == 0
    if not is_alike or num_keys < 1 or (is_causal and num_keys != num_queries) or not all(map(has_kernel, tensors)):
        shapes = ", ".join(f"{tensor.dtype} {list(tensor.shape)}" for tensor in tensors)
        raise ValueError(f"queries, keys and values are {shapes}: they do not fit each other")
    q, k, v = (tensor if tensor.stride(3) == 1 else tensor.contiguous() for tensor in tensors)
    output = torch.empty(q.shape, dtype=torch.float32)
    largest, weight = torch.empty(2, *q.shape[:3], dtype=torch.float32)
    has_team = num_sequences * num_heads * num_queries * num_keys >= _LEAST_WORK
    num_threads, block = torch.get_num_threads() if has_team else 1, _QUERIES
    while num_threads > 1 and block > _LEAST_QUERIES and num_sequences * kv_heads * -(-num_queries // block) < _ITEMS * num_threads:
        block //= 2
    num_items = num_sequences * kv_heads * -(-num_queries // block)
    strides = (tensor.stride(dimension) for tensor in (q, k, v) for dimension in range(3))
    addresses = (tensor.data_ptr() for tensor in (q, k, v, output, largest, weight))
    words = (1, num_items, num_queries, num_keys, kv_heads, num_heads // kv_heads, int(is_causal), *strides, *addresses, block)
    _kernel(head_dim).run(words, num_threads)
    return Attended(output, largest, weight)


@cache
def _kernel(head_dim: int) -> Kernel:
    width = vector_width()
    assert width is not None
    return load_kernel(f"flash-{head_dim}", _Items(head_dim, width), 1)


class _Strides(NamedTuple):
    """Numbers from one sequence, row and head to the next."""

    sequence: ir.Value
    row: ir.Value
    head: ir.Value


class _Words(NamedTuple):
    """The words, loaded."""

    num_queries: ir.Value
    num_keys: ir.Value
    kv_heads: ir.Value
    group: ir.Value
    is_causal: ir.Value
    q_strides: _Strides
    k_strides: _Strides
    v_strides: _Strides
    q: ir.Value
    k: ir.Value
    v: ir.Value
    output: ir.Value
    largest: ir.Value
    weight: ir.Value
    in_block: ir.Value  # queries


class _Memory(NamedTuple):
    """Of a thread. ``keys``: panels of ``_VECTORS`` vectors of keys, of each their numbers by column of the head; ``values`` [keys, D];
    ``scores`` [rows, keys]."""

    keys: ir.Value
    values: ir.Value
    scores: ir.Value


class _Block(NamedTuple):
    """The keys [first, end) of a sequence's head."""

    sequence: ir.Value
    head: ir.Value
    first: ir.Value
    end: ir.Value


class _Items:
    """Emits attention of blocks of queries, each of all G heads of a head of keys: what one item computes."""

    most_rows = 1

    def __init__(self, head_dim: int, width: int) -> None:
        self._head_dim, self._width, self._panel = head_dim, width, _VECTORS * width
        self._floats = ir.VectorType(FLOAT, width)

    def emit(self, builder: ir.IRBuilder, num_rows: int, arguments: Sequence[ir.Value]) -> None:
        words, memory = self._words(builder, arguments[0]), self._memory(builder)
        _, _, start, stop = arguments
        with loop(builder, start, stop, 1) as item:
            num_blocks = builder.udiv(builder.sub(builder.add(words.num_queries, words.in_block), constant(1)), words.in_block)
            first = builder.mul(builder.urem(item, num_blocks), words.in_block)
            last = self._least(builder, builder.add(first, words.in_block), words.num_queries)
            head = builder.udiv(item, num_blocks)
            sequence, head = builder.udiv(head, words.kv_heads), builder.urem(head, words.kv_heads)
            num_seen = builder.select(words.is_causal, last, words.num_keys)
            with loop(builder, constant(0), num_seen, _KEYS) as key:
                block = _Block(sequence, head, key, self._least(builder, builder.add(key, constant(_KEYS)), num_seen))
                self._take_keys(builder, words, block, memory.keys)
                self._take_values(builder, words, block, memory.values)
                with loop(builder, constant(0), words.group, 1) as member:
                    whole = builder.sub(last, builder.urem(builder.sub(last, first), constant(_ROWS)))
                    for low, high, rows in ((first, whole, _ROWS), (whole, last, 1)):
                        with loop(builder, low, high, rows) as query:
                            self._attend(builder, words, memory, block, member, query, rows)
            with loop(builder, constant(0), words.group, 1) as member, loop(builder, first, last, 1) as query:
                self._divide(builder, words, self._place(builder, words, block, member, query))

    def _words(self, builder: ir.IRBuilder, base: ir.Value) -> _Words:
        counts = [load_word(builder, base, 2 + index) for index in range(5)]
        counts[4] = builder.icmp_unsigned("!=", counts[4], constant(0))
        strides = (_Strides(*(load_word(builder, base, 7 + 3 * number + index) for index in range(3))) for number in range(3))
        rest = (load_word(builder, base, 16 + index, POINTER if index < 6 else INT) for index in range(7))
        return _Words(*counts, *strides, *rest)

    def _memory(self, builder: ir.IRBuilder) -> _Memory:
        found = []
        with builder.goto_entry_block():
            for length in (_KEYS * self._head_dim, _KEYS * self._head_dim, _ROWS * _KEYS):
                array = builder.alloca(ir.ArrayType(FLOAT, length))
                array.align = 64
                found.append(builder.inttoptr(builder.ptrtoint(array, INT), POINTER))  # of any type
        return _Memory(*found)

    def _least(self, builder: ir.IRBuilder, one: ir.Value, other: ir.Value) -> ir.Value:
        return builder.select(builder.icmp_signed("<", one, other), one, other)

    def _start(self, builder: ir.IRBuilder, strides: _Strides, sequence: ir.Value, row: ir.Value, head: ir.Value) -> ir.Value:
        places = zip(strides, (sequence, row, head), strict=True)
        first, second, third = (builder.mul(stride, number) for stride, number in places)
        return builder.add(builder.add(first, second), third)

    def _row(self, builder: ir.IRBuilder, base: ir.Value, strides: _Strides, block: _Block, key: ir.Value) -> ir.Value:
        """Where a key or a value begins. After the block's last one that one is repeated: its weight is 0 there."""
        last = builder.sub(block.end, constant(1))
        return address(builder, base, self._start(builder, strides, block.sequence, self._least(builder, key, last), block.head))

    def _padded(self, builder: ir.IRBuilder, count: ir.Value) -> ir.Value:
        """Keys of whole panels."""
        return builder.and_(builder.add(count, constant(self._panel - 1)), constant(-self._panel))

    def _take_keys(self, builder: ir.IRBuilder, words: _Words, block: _Block, panels: ir.Value) -> None:
        with loop(builder, constant(0), self._padded(builder, builder.sub(block.end, block.first)), self._panel) as number:
            panel = address(builder, panels, builder.mul(number, constant(self._head_dim)))
            for vector in range(0, self._panel, self._width):
                keys = (builder.add(builder.add(block.first, number), constant(vector + index)) for index in range(self._width))
                rows = [self._row(builder, words.k, words.k_strides, block, key) for key in keys]
                with loop(builder, constant(0), constant(self._head_dim), self._width) as column:
                    square = [load_vector(builder, row, column, self._width) for row in rows]
                    for index, values in enumerate(transpose(builder, square)):
                        at = builder.mul(builder.add(column, constant(index)), constant(self._panel))
                        self._store(builder, values, panel, builder.add(at, constant(vector)))

    def _take_values(self, builder: ir.IRBuilder, words: _Words, block: _Block, memory: ir.Value) -> None:
        with loop(builder, constant(0), self._padded(builder, builder.sub(block.end, block.first)), 1) as number:
            row = self._row(builder, words.v, words.v_strides, block, builder.add(block.first, number))
            to = address(builder, memory, builder.mul(number, constant(self._head_dim)))
            for column in range(0, self._head_dim, self._width):
                self._store(builder, load_vector(builder, row, constant(column), self._width), to, constant(column))

    def _place(self, builder: ir.IRBuilder, words: _Words, block: _Block, member: ir.Value, query: ir.Value) -> ir.Value:
        """The number of a query's head among those of the result."""
        row = builder.add(builder.mul(block.sequence, words.num_queries), query)
        head = builder.add(builder.mul(block.head, words.group), member)
        return builder.add(builder.mul(row, builder.mul(words.kv_heads, words.group)), head)

    def _attend(
        self, builder: ir.IRBuilder, words: _Words, memory: _Memory, block: _Block, member: ir.Value, first: ir.Value, num_rows: int
    ) -> None:
        """Add what some queries of one head find in a block."""
        queries = [builder.add(first, constant(index)) for index in range(num_rows)]
        ends = [builder.select(words.is_causal, builder.add(query, constant(1)), block.end) for query in queries]
        counts = [builder.sub(self._least(builder, end, block.end), block.first) for end in ends]
        with builder.if_then(builder.icmp_signed(">", counts[-1], constant(0))):
            num_keys = self._padded(builder, counts[-1])
            scores = [address(builder, memory.scores, constant(index * _KEYS)) for index in range(num_rows)]
            self._score(builder, words, memory, block, member, queries, scores, num_keys)
            is_first = builder.icmp_unsigned("==", block.first, constant(0))
            places = [self._place(builder, words, block, member, query) for query in queries]
            states = zip(scores, counts, places, strict=True)
            scales = [self._weigh(builder, words, row, count, num_keys, place, is_first) for row, count, place in states]
            self._add_values(builder, words, memory, scores, scales, places, num_keys, is_first)

    def _score(
        self,
        builder: ir.IRBuilder,
        words: _Words,
        memory: _Memory,
        block: _Block,
        member: ir.Value,
        queries: Sequence[ir.Value],
        scores: Sequence[ir.Value],
        num_keys: ir.Value,
    ) -> None:
        head = builder.add(builder.mul(block.head, words.group), member)
        starts = (self._start(builder, words.q_strides, block.sequence, query, head) for query in queries)
        factors = [address(builder, words.q, start) for start in starts]
        sums = new_sums(builder, len(queries), _VECTORS, self._floats)
        with loop(builder, constant(0), num_keys, self._panel) as key:
            panel = address(builder, memory.keys, builder.mul(key, constant(self._head_dim)))
            clear(builder, sums, self._floats)
            add_outer_products(builder, sums, factors, panel, self._panel, constant(self._head_dim))
            for row, totals in zip(scores, sums, strict=True):
                for index, total in enumerate(totals):
                    self._store(builder, builder.load(total, typ=self._floats), row, builder.add(key, constant(index * self._width)))

    def _weigh(
        self,
        builder: ir.IRBuilder,
        words: _Words,
        scores: ir.Value,
        count: ir.Value,
        num_keys: ir.Value,
        place: ir.Value,
        is_first: ir.Value,
    ) -> ir.Value:
        """Turn a query's scores into weights, which are 0 from ``count`` on. Returns the factor of what was summed up before."""

        def larger(one: ir.Value, other: ir.Value) -> ir.Value:
            return builder.select(builder.fcmp_ordered(">", one, other), one, other)

        start = builder.select(builder.icmp_signed("<", count, constant(0)), constant(0), count)
        with loop(builder, start, num_keys, 1) as key:
            builder.store(ir.Constant(FLOAT, -math.inf), address(builder, scores, key))
        scale = numbers(self._floats, 1 / math.sqrt(self._head_dim))
        largest, weight = (address(builder, base, place) for base in (words.largest, words.weight))
        before = builder.select(is_first, ir.Constant(FLOAT, -math.inf), builder.load(largest, align=4, typ=FLOAT))
        ((found, total),) = new_sums(builder, 1, 2, self._floats)
        builder.store(spread(builder, before, self._width), found)
        builder.store(numbers(self._floats, 0.0), total)
        with loop(builder, constant(0), num_keys, self._width) as key:
            scaled = builder.fmul(load_vector(builder, scores, key, self._width), scale)
            self._store(builder, scaled, scores, key)
            builder.store(larger(scaled, builder.load(found, typ=self._floats)), found)
        now = reduce(builder, builder.load(found, typ=self._floats), larger)
        builder.store(now, largest, align=4)
        all_now = spread(builder, now, self._width)
        with loop(builder, constant(0), num_keys, self._width) as key:
            part = exponential(builder, builder.fsub(load_vector(builder, scores, key, self._width), all_now))
            self._store(builder, part, scores, key)
            builder.store(builder.fadd(builder.load(total, typ=self._floats), part), total)
        with loop(builder, start, num_keys, 1) as key:  # the exponential of -inf is not 0
            builder.store(ir.Constant(FLOAT, 0.0), address(builder, scores, key))
        factor = exponential(builder, builder.fsub(spread(builder, before, self._width), all_now))
        earlier = builder.select(is_first, ir.Constant(FLOAT, 0.0), builder.load(weight, align=4, typ=FLOAT))
        earlier = builder.fmul(earlier, builder.extract_element(factor, ir.Constant(ir.IntType(32), 0)))
        builder.store(builder.fadd(earlier, reduce(builder, builder.load(total, typ=self._floats), builder.fadd)), weight, align=4)
        return factor

    def _add_values(
        self,
        builder: ir.IRBuilder,
        words: _Words,
        memory: _Memory,
        scores: Sequence[ir.Value],
        scales: Sequence[ir.Value],
        places: Sequence[ir.Value],
        num_keys: ir.Value,
        is_first: ir.Value,
    ) -> None:
        outputs = [address(builder, words.output, builder.mul(place, constant(self._head_dim))) for place in places]
        for column in range(0, self._head_dim, self._panel):
            columns = range(column, min(column + self._panel, self._head_dim), self._width)
            sums = new_sums(builder, len(scores), len(columns), self._floats)
            for output, scale, totals in zip(outputs, scales, sums, strict=True):
                for at, total in zip(columns, totals, strict=True):
                    before = builder.fmul(load_vector(builder, output, constant(at), self._width), scale)
                    builder.store(builder.select(is_first, numbers(self._floats, 0.0), before), total)
            add_outer_products(builder, sums, scores, address(builder, memory.values, constant(column)), self._head_dim, num_keys)
            for output, totals in zip(outputs, sums, strict=True):
                for at, total in zip(columns, totals, strict=True):
                    self._store(builder, builder.load(total, typ=self._floats), output, constant(at))

    def _divide(self, builder: ir.IRBuilder, words: _Words, place: ir.Value) -> None:
        weight = spread(builder, builder.load(address(builder, words.weight, place), align=4, typ=FLOAT), self._width)
        output = address(builder, words.output, builder.mul(place, constant(self._head_dim)))
        for column in range(0, self._head_dim, self._width):
            done = load_vector(builder, output, constant(column), self._width)
            self._store(builder, builder.fdiv(done, weight), output, constant(column))

    def _store(self, builder: ir.IRBuilder, value: ir.Value, base: ir.Value, place: ir.Value) -> None:
        builder.store(value, address(builder, base, place), align=4)
