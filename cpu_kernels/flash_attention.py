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

from .kernel import Kernel, available_threads, load_kernel, vector_width
from .machine_code import (
    FLOAT,
    INT,
    POINTER,
    add_outer_products,
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
    new_sums,
    numbers,
    reduce,
    spread,
    transpose,
)

_BLOCK_NUMBERS = 1 << 16  # of keys, and as many of values: a block lies on the stack, 512 KB
_LEAST_KEYS, _MOST_KEYS = 128, 256  # of a block
_QUERIES = 192  # of a block, for each of G heads; less where threads would have nothing to do
_LEAST_QUERIES = 24
_ROWS = 6  # queries that attend at once: with AVX2 12 of 16 registers are sums
_VECTORS = 2  # of scores, or of a result, that are summed up at once
_ITEMS = 4  # of work for each thread, which are not equally large
_LEAST_WORK = 1 << 18  # products of a query and a key: fewer are left to one thread
_MOST_HEAD_DIM = 512
_LOWEST = -1e30  # a score of nothing: unlike -inf it can be taken from itself


def has_kernel(q: Tensor) -> bool:
    """Return whether ``attend`` takes such queries [..., D]: float32 on a processor with AVX2, heads of whole vectors."""
    width, head_dim = vector_width(), q.shape[-1]
    is_plain = q.device.type == "cpu" and q.dtype == torch.float32
    return width is not None and is_plain and head_dim % width == 0 and head_dim <= _MOST_HEAD_DIM


def prepare(head_dim: int, dtype: torch.dtype, scale: float = 0.0) -> None:
    """Load the kernel for such heads, where there is one; otherwise the first call would make it, in 0.2 to 0.7 s."""
    if has_kernel(torch.empty(0, head_dim, dtype=dtype)):
        _kernel(head_dim, scale)


class KeyRanges(NamedTuple):
    """The keys [first, end) that each query attends to, int64 [N] each; where there are none the result is 0. Neither falls from one
    query to the next. ``num_keys``: up to the last of them."""

    firsts: Tensor
    ends: Tensor
    num_keys: int

    @classmethod
    def of(cls, firsts: Tensor, ends: Tensor) -> "KeyRanges":
        """Raises: ValueError for firsts or ends that fall, or are negative."""
        if not len(ends):
            return cls(firsts.long(), ends.long(), 0)
        found = cls(firsts.long().contiguous(), ends.long().contiguous(), int(ends.max()))
        if firsts.shape != ends.shape or any(int(bounds[0]) < 0 or bool((bounds.diff() < 0).any()) for bounds in found[:2]):
            raise ValueError(f"keys from {firsts.tolist()} to {ends.tolist()} are no ranges that rise")
        return found


def causal(num_queries: int, window: int = 0) -> KeyRanges:
    """Query i attends to the keys 0 to i, of which the last ``window`` if that is not 0."""
    ends = torch.arange(1, num_queries + 1)
    return KeyRanges.of((ends - window).clamp_(min=0) if window else torch.zeros_like(ends), ends)


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


def attend(q_SNHD: Tensor, k_SMHD: Tensor, v_SMHD: Tensor, ranges: KeyRanges | None = None, scale: float = 0.0) -> Attended:
    """softmax(scale q k') v; ``scale`` 0: 1 / sqrt(D). Without ``ranges`` each query attends to all keys.

    Raises: ValueError for shapes and dtypes that do not fit each other, which would read beyond them.
    """
    (num_sequences, num_queries, num_heads, head_dim), (_, num_keys, kv_heads, _) = q_SNHD.shape, k_SMHD.shape
    tensors = q_SNHD, k_SMHD, v_SMHD
    is_alike = k_SMHD.shape == v_SMHD.shape == (num_sequences, num_keys, kv_heads, head_dim) and num_heads % kv_heads == 0
    is_within = ranges is None or (len(ranges.firsts) == num_queries and ranges.num_keys <= num_keys)
    if not is_alike or num_keys < 1 or not is_within or not all(map(has_kernel, tensors)):
        shapes = ", ".join(f"{tensor.dtype} {list(tensor.shape)}" for tensor in tensors)
        raise ValueError(f"queries, keys and values are {shapes}: they do not fit each other")
    q, k, v = (tensor if tensor.stride(3) == 1 else tensor.contiguous() for tensor in tensors)
    output = torch.empty(q.shape, dtype=torch.float32)
    largest, weight = torch.empty(2, *q.shape[:3], dtype=torch.float32)
    has_team = num_sequences * num_heads * num_queries * num_keys >= _LEAST_WORK
    num_threads, block = available_threads() if has_team else 1, _QUERIES
    while num_threads > 1 and block > _LEAST_QUERIES and num_sequences * kv_heads * -(-num_queries // block) < _ITEMS * num_threads:
        block //= 2
    num_items = num_sequences * kv_heads * -(-num_queries // block)
    firsts, ends = (torch.tensor([0]), torch.tensor([num_keys])) if ranges is None else ranges[:2]
    strides = (tensor.stride(dimension) for tensor in (q, k, v) for dimension in range(3))
    addresses = (tensor.data_ptr() for tensor in (q, k, v, output, largest, weight, firsts, ends))
    counts = num_queries, num_keys, kv_heads, num_heads // kv_heads, int(ranges is not None)
    _kernel(head_dim, scale).run((1, num_items, *counts, *strides, *addresses, block), num_threads)
    return Attended(output, largest, weight)


@cache
def _kernel(head_dim: int, scale: float) -> Kernel:
    width = vector_width()
    assert width is not None
    name = f"flash-{head_dim}-{scale.hex()}" if scale else f"flash-{head_dim}"
    return load_kernel(name, _Items(head_dim, scale or 1 / math.sqrt(head_dim), width), 1)


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
    range_step: ir.Value  # numbers from a query's first key to the next query's: 0 where all attend to the same
    q_strides: _Strides
    k_strides: _Strides
    v_strides: _Strides
    q: ir.Value
    k: ir.Value
    v: ir.Value
    output: ir.Value
    largest: ir.Value
    weight: ir.Value
    firsts: ir.Value
    ends: ir.Value
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

    def __init__(self, head_dim: int, scale: float, width: int) -> None:
        self._head_dim, self._scale, self._width, self._panel = head_dim, scale, width, _VECTORS * width
        self._keys = min(_BLOCK_NUMBERS // head_dim // _LEAST_KEYS * _LEAST_KEYS, _MOST_KEYS)
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
                block = _Block(sequence, head, key, minimum(builder, builder.add(key, constant(self._keys)), end))
                self._take_keys(builder, words, block, memory.keys)
                self._take_values(builder, words, block, memory.values)
                with loop(builder, constant(0), words.group, 1) as member:
                    whole = builder.sub(last, builder.urem(builder.sub(last, first), constant(_ROWS)))
                    for low, high, rows in ((first, whole, _ROWS), (whole, last, 1)):
                        with loop(builder, low, high, rows) as query:
                            self._attend(builder, words, memory, block, member, query, rows)
            with loop(builder, constant(0), words.group, 1) as member, loop(builder, first, last, 1) as query:
                self._divide(builder, words, self._place(builder, words, sequence, head, member, query), query)

    def _words(self, builder: ir.IRBuilder, base: ir.Value) -> _Words:
        counts = [load_word(builder, base, 2 + index) for index in range(5)]
        strides = (_Strides(*(load_word(builder, base, 7 + 3 * number + index) for index in range(3))) for number in range(3))
        rest = (load_word(builder, base, 16 + index, POINTER if index < 8 else INT) for index in range(9))
        return _Words(*counts, *strides, *rest)

    def _memory(self, builder: ir.IRBuilder) -> _Memory:
        found = []
        with builder.goto_entry_block():
            for length in (self._keys * self._head_dim, self._keys * self._head_dim, _ROWS * self._keys):
                array = builder.alloca(ir.ArrayType(FLOAT, length))
                array.align = 64
                found.append(builder.inttoptr(builder.ptrtoint(array, INT), POINTER))  # of any type
        return _Memory(*found)

    def _range(self, builder: ir.IRBuilder, words: _Words, query: ir.Value) -> tuple[ir.Value, ir.Value]:
        """A query's first key and the one after its last."""
        place = builder.mul(query, words.range_step)
        first, end = (builder.load(address(builder, base, place, INT), align=8, typ=INT) for base in (words.firsts, words.ends))
        return first, end

    def _start(self, builder: ir.IRBuilder, strides: _Strides, sequence: ir.Value, row: ir.Value, head: ir.Value) -> ir.Value:
        places = zip(strides, (sequence, row, head), strict=True)
        first, second, third = (builder.mul(stride, number) for stride, number in places)
        return builder.add(builder.add(first, second), third)

    def _row(self, builder: ir.IRBuilder, base: ir.Value, strides: _Strides, block: _Block, key: ir.Value) -> ir.Value:
        """Where a key or a value begins. After the block's last one that one is repeated: its weight is 0 there."""
        last = builder.sub(block.end, constant(1))
        return address(builder, base, self._start(builder, strides, block.sequence, minimum(builder, key, last), block.head))

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
            for column, _ in columns(builder, self._head_dim, self._width):
                self._store(builder, load_vector(builder, row, column, self._width), to, column)

    def _place(
        self, builder: ir.IRBuilder, words: _Words, sequence: ir.Value, head: ir.Value, member: ir.Value, query: ir.Value
    ) -> ir.Value:
        """The number of a query's head among those of the result."""
        row = builder.add(builder.mul(sequence, words.num_queries), query)
        head = builder.add(builder.mul(head, words.group), member)
        return builder.add(builder.mul(row, builder.mul(words.kv_heads, words.group)), head)

    def _attend(
        self, builder: ir.IRBuilder, words: _Words, memory: _Memory, block: _Block, member: ir.Value, first: ir.Value, num_rows: int
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
        seen: tuple[ir.Value, ir.Value],
        num_keys: ir.Value,
        place: ir.Value,
        is_first: ir.Value,
    ) -> ir.Value:
        """Turn a query's scores into weights, which are 0 but for the keys that it has ``seen``. Returns the factor of what was summed
        up before."""

        def larger(one: ir.Value, other: ir.Value) -> ir.Value:
            return builder.select(builder.fcmp_ordered(">", one, other), one, other)

        low, high = (minimum(builder, maximum(builder, bound, constant(0)), num_keys) for bound in seen)
        self._fill(builder, scores, low, high, num_keys, -math.inf)
        scale = numbers(self._floats, self._scale)
        largest, weight = (address(builder, base, place) for base in (words.largest, words.weight))
        before = builder.select(is_first, ir.Constant(FLOAT, _LOWEST), builder.load(largest, align=4, typ=FLOAT))
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
        self._fill(builder, scores, low, high, num_keys, 0.0)  # the exponential of -inf is not 0
        factor = exponential(builder, builder.fsub(spread(builder, before, self._width), all_now))
        earlier = builder.select(is_first, ir.Constant(FLOAT, 0.0), builder.load(weight, align=4, typ=FLOAT))
        earlier = builder.fmul(earlier, builder.extract_element(factor, ir.Constant(ir.IntType(32), 0)))
        builder.store(builder.fadd(earlier, reduce(builder, builder.load(total, typ=self._floats), builder.fadd)), weight, align=4)
        return factor

    def _fill(self, builder: ir.IRBuilder, scores: ir.Value, low: ir.Value, high: ir.Value, num_keys: ir.Value, value: float) -> None:
        """Put a value in the place of the scores before ``low`` and from ``high`` on."""
        for start, stop in ((constant(0), low), (high, num_keys)):
            with loop(builder, start, stop, 1) as key:
                builder.store(ir.Constant(FLOAT, value), address(builder, scores, key))

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
        for column, count in columns(builder, self._head_dim, self._panel):
            places = [builder.add(column, constant(at)) for at in range(0, count, self._width)]
            sums = new_sums(builder, len(scores), len(places), self._floats)
            for output, scale, totals in zip(outputs, scales, sums, strict=True):
                for at, total in zip(places, totals, strict=True):
                    before = builder.fmul(load_vector(builder, output, at, self._width), scale)
                    builder.store(builder.select(is_first, numbers(self._floats, 0.0), before), total)
            add_outer_products(builder, sums, scores, address(builder, memory.values, column), self._head_dim, num_keys)
            for output, totals in zip(outputs, sums, strict=True):
                for at, total in zip(places, totals, strict=True):
                    self._store(builder, builder.load(total, typ=self._floats), output, at)

    def _divide(self, builder: ir.IRBuilder, words: _Words, place: ir.Value, query: ir.Value) -> None:
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

    def _store(self, builder: ir.IRBuilder, value: ir.Value, base: ir.Value, place: ir.Value) -> None:
        builder.store(value, address(builder, base, place), align=4)
