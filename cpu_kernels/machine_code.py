"""Pieces of LLVM's language. Kernels for a CPU are emitted with them."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from llvmlite import ir

INT, FLOAT, POINTER = ir.IntType(64), ir.FloatType(), ir.PointerType()

_UNROLLED = 4  # indices of ``add_outer_products``
_LINE = 16  # numbers of float32 in a line of cache
_COLUMNS = 128  # for which code is repeated: more of them are a loop
_LANE = 4  # numbers of float32 in 128 bits: most shuffles stay within them

# For the exponential.
_LEAST, _MOST = -87.0, 88.0
_SHIFTER = 12582912.0  # 1.5 x 2^23: a number is rounded to a whole one by adding it, and the sum's last bits are that number
_LOG2_E, _LN2_HIGH, _LN2_LOW = 1.4426950408889634, 0.693145751953125, 1.428606765330187e-06


class _Bfloat16(ir.Type):  # type: ignore[misc]
    """LLVM's type, which llvmlite has no name for. Numbers are kept as 16 bits elsewhere."""

    def _to_string(self) -> str:
        return "bfloat"


_BFLOAT16 = _Bfloat16()


@contextmanager
def loop(builder: ir.IRBuilder, start: ir.Value, stop: ir.Value, step: int) -> Iterator[Any]:
    """Emit what the body emits for each index from ``start`` to ``stop``, int64."""
    before, head, body, after = builder.block, *(builder.append_basic_block() for _ in range(3))
    builder.branch(head)
    builder.position_at_end(head)
    index = builder.phi(INT)
    index.add_incoming(start, before)
    builder.cbranch(builder.icmp_signed("<", index, stop), body, after)
    builder.position_at_end(body)
    yield index
    index.add_incoming(builder.add(index, constant(step)), builder.block)
    builder.branch(head)
    builder.position_at_end(after)


def columns(builder: ir.IRBuilder, count: int, step: int) -> Iterator[tuple[ir.Value, int]]:
    """Emit what the body emits for each ``step`` of so many columns: the place of the first, and how many there are. ``step`` is a
    power of two."""
    whole = count // _COLUMNS * _COLUMNS if count > _COLUMNS else 0
    if whole:
        with loop(builder, constant(0), constant(whole), _COLUMNS) as base:
            for column in range(0, _COLUMNS, step):
                yield builder.add(base, constant(column)), step
    for column in range(whole, count, step):
        yield constant(column), min(step, count - column)


def constant(value: int) -> ir.Constant:
    """An int64."""
    return ir.Constant(INT, value)


def load_word(builder: ir.IRBuilder, words: ir.Value, index: int, kind: ir.Type = INT) -> ir.Value:
    """A word of a product."""
    return builder.load(builder.gep(words, [constant(index)], source_etype=INT), typ=kind)


def address(builder: ir.IRBuilder, base: ir.Value, index: ir.Value, kind: ir.Type = FLOAT) -> ir.Value:
    """Of an element of a contiguous tensor."""
    return builder.gep(base, [index], source_etype=kind)


def load_vector(builder: ir.IRBuilder, base: ir.Value, index: ir.Value, width: int, kind: ir.Type = FLOAT) -> ir.Value:
    """``width`` elements of a contiguous tensor."""
    return builder.load(address(builder, base, index, kind), align=1, typ=ir.VectorType(kind, width))


def load_floats(builder: ir.IRBuilder, base: ir.Value, index: ir.Value, width: int, stored: ir.Type) -> ir.Value:
    """As ``load_vector``, in float32, of a tensor in float32, float16 or bfloat16 (``stored``: FLOAT, half, or 16 bits)."""
    return to_floats(builder, load_vector(builder, base, index, width, stored))


def to_floats(builder: ir.IRBuilder, values: ir.Value) -> ir.Value:
    """A vector of float32, float16 or bfloat16's bits in float32."""
    if isinstance(values.type.element, ir.HalfType):
        return builder.fpext(values, ir.VectorType(FLOAT, values.type.count))
    return values if isinstance(values.type.element, ir.FloatType) else from_bfloat16(builder, values)


def prefetch(builder: ir.IRBuilder, base: ir.Value, index: ir.Value, kind: ir.Type = FLOAT, cache: int = 2) -> None:
    """Ask for the cache line of an element, which need not exist.

    It comes into the second cache, or the first one (1), which is for what is used at once and read in order: lines that are far from
    each other displace one another there, and loads wait until a line is free.
    """
    flags = [ir.Constant(ir.IntType(32), flag) for flag in (0, 4 - cache, 1)]  # to read, how near, data
    call_intrinsic(builder, "llvm.prefetch.p0", ir.VoidType(), [address(builder, base, index, kind), *flags])


def new_sums(builder: ir.IRBuilder, num_rows: int, num_columns: int, kind: ir.VectorType) -> list[list[ir.Value]]:
    """Variables. They are not cleared."""
    with builder.goto_entry_block():
        return [[builder.alloca(kind) for _ in range(num_columns)] for _ in range(num_rows)]


def clear(builder: ir.IRBuilder, sums: Sequence[Sequence[ir.Value]], kind: ir.VectorType) -> None:
    for total in (total for row in sums for total in row):
        builder.store(ir.Constant(kind, None), total)


def add_product(builder: ir.IRBuilder, total: ir.Value, one: ir.Value, other: ir.Value) -> None:
    """Add one x other, vectors of float32, to a variable."""
    builder.store(multiply_add(builder, one, other, builder.load(total, typ=one.type)), total)


def add_outer_products(
    builder: ir.IRBuilder,
    sums: Sequence[Sequence[ir.Value]],
    factors: Sequence[ir.Value],
    vectors: ir.Value,
    distance: int,
    count: ir.Value,
    ahead: tuple[ir.Value, int] | None = None,
    add: Callable[[ir.IRBuilder, ir.Value, ir.Value, ir.Value], None] = add_product,
    unrolled: int = _UNROLLED,
) -> None:
    """Add the products of numbers and vectors of float32, for each index below ``count``, a multiple of 4, to a row's variables.

    ``factors``: where the numbers of each row begin; ``vectors``: where those of index 0 begin, ``distance`` numbers before those of
    index 1. A row has as many variables as an index has vectors. ``ahead``: memory that is asked for meanwhile, so many numbers with
    each index. ``add`` adds a product to a variable: of float32, or of what else 32 bits hold.
    """
    kind = sums[0][0].allocated_type
    with loop(builder, constant(0), count, unrolled) as first:
        for step in range(unrolled):
            index = builder.add(first, constant(step))
            if ahead is not None:
                begin = builder.mul(index, constant(ahead[1]))
                for place in range(0, ahead[1], _LINE):
                    prefetch(builder, ahead[0], builder.add(begin, constant(place)))
            start = builder.mul(index, constant(distance))
            places = (builder.add(start, constant(number * kind.count)) for number in range(len(sums[0])))
            parts = [load_vector(builder, vectors, place, kind.count) for place in places]
            for base, totals in zip(factors, sums, strict=True):
                factor = spread(builder, builder.load(address(builder, base, index), align=4, typ=FLOAT), kind.count)
                for total, part in zip(totals, parts, strict=True):
                    add(builder, total, factor, part)


def call_intrinsic(builder: ir.IRBuilder, name: str, result: ir.Type, arguments: Sequence[ir.Value]) -> ir.Value:
    """Call an operation of LLVM's own."""
    kind = ir.FunctionType(result, [argument.type for argument in arguments])
    function = builder.module.globals.get(name) or ir.Function(builder.module, kind, name)
    return builder.call(function, arguments)


def multiply_add(builder: ir.IRBuilder, one: ir.Value, other: ir.Value, added: ir.Value) -> ir.Value:
    """one x other + added, of vectors of float32, rounded once."""
    return call_intrinsic(builder, f"llvm.fma.v{one.type.count}f32", one.type, [one, other, added])


def add_products_of_pairs(builder: ir.IRBuilder, total: ir.Value, one: ir.Value, other: ir.Value) -> None:
    """Add products of bfloat16, of each two neighbours in one number of float32's bits, to a variable of float32. Only with
    AVX512-BF16, which takes subnormal numbers as 0."""
    pairs = ir.VectorType(_BFLOAT16, 2 * one.type.count)
    factors = (builder.bitcast(values, pairs) for values in (one, other))
    name = f"llvm.x86.avx512bf16.dpbf16ps.{32 * one.type.count}"
    builder.store(call_intrinsic(builder, name, one.type, [builder.load(total, typ=one.type), *factors]), total)


def multiply_bytes(builder: ir.IRBuilder, unsigned: ir.Value, signed: ir.Value) -> ir.Value:
    """Products of bytes uint8 and int8, each pair of neighbours added up in int16, where too large a sum is cut."""
    name = {32: "llvm.x86.avx2.pmadd.ub.sw", 64: "llvm.x86.avx512.pmaddubs.w.512"}[unsigned.type.count]
    return call_intrinsic(builder, name, ir.VectorType(ir.IntType(16), unsigned.type.count // 2), [unsigned, signed])


def add_pairs(builder: ir.IRBuilder, shorts: ir.Value) -> ir.Value:
    """Sums in int32 of each pair of neighbours in int16."""
    return multiply_shorts(builder, shorts, ir.Constant(shorts.type, [1] * shorts.type.count))


def multiply_shorts(builder: ir.IRBuilder, one: ir.Value, other: ir.Value) -> ir.Value:
    """Products of int16, each pair of neighbours added up in int32."""
    name = {16: "llvm.x86.avx2.pmadd.wd", 32: "llvm.x86.avx512.pmaddw.d.512"}[one.type.count]
    return call_intrinsic(builder, name, ir.VectorType(ir.IntType(32), one.type.count // 2), [one, other])


def add_products_of_bytes(builder: ir.IRBuilder, total: ir.Value, unsigned: ir.Value, signed: ir.Value) -> ir.Value:
    """Add products of bytes uint8 and int8, of each four neighbours, to int32. Only with VNNI."""
    words = (builder.bitcast(values, total.type) for values in (unsigned, signed))
    return call_intrinsic(builder, "llvm.x86.avx512.vpdpbusd.512", total.type, [total, *words])


def with_signs(builder: ir.IRBuilder, values: ir.Value, signs: ir.Value) -> ir.Value:
    """Bytes x the signs of other bytes. Where these are 0 the result is any."""
    if values.type.count == 32:
        return call_intrinsic(builder, "llvm.x86.avx2.psign.b", values.type, [values, signs])
    none = ir.Constant(values.type, None)
    return builder.select(builder.icmp_signed("<", signs, none), builder.sub(none, values), values)


def spread(builder: ir.IRBuilder, value: ir.Value, width: int) -> ir.Value:
    """A vector of one number."""
    lone = builder.insert_element(ir.Constant(ir.VectorType(value.type, width), ir.Undefined), value, ir.Constant(ir.IntType(32), 0))
    return builder.shuffle_vector(lone, lone, ir.Constant(ir.VectorType(ir.IntType(32), width), [0] * width))


def from_bfloat16(builder: ir.IRBuilder, bits: ir.Value) -> ir.Value:
    """float32 of bfloat16's bits, which are float32's upper half."""
    words = ir.VectorType(ir.IntType(32), bits.type.count)
    shifted = builder.shl(builder.zext(bits, words), ir.Constant(words, [16] * bits.type.count))
    return builder.bitcast(shifted, ir.VectorType(FLOAT, bits.type.count))


def to_bfloat16(builder: ir.IRBuilder, values: ir.Value) -> ir.Value:
    """The bits of float32 rounded to bfloat16, to even where two are as near. NaN stays NaN."""
    words = ir.VectorType(ir.IntType(32), values.type.count)

    def whole(number: int) -> ir.Constant:
        return ir.Constant(words, [number] * words.count)

    bits = builder.bitcast(values, words)
    last = builder.and_(builder.lshr(bits, whole(16)), whole(1))
    rounded = builder.add(bits, builder.add(last, whole(0x7FFF)))
    is_missing = builder.fcmp_unordered("uno", values, values)
    upper = builder.lshr(builder.select(is_missing, whole(0x7FC00000), rounded), whole(16))
    return builder.trunc(upper, ir.VectorType(ir.IntType(16), words.count))


def rounded_to_bfloat16(builder: ir.IRBuilder, values: ir.Value) -> ir.Value:
    """As ``to_bfloat16``, in one instruction. Only with AVX512-BF16, which rounds subnormal numbers to 0."""
    kind = ir.VectorType(_BFLOAT16, values.type.count)
    name = f"llvm.x86.avx512bf16.cvtneps2bf16.{32 * values.type.count}"
    return builder.bitcast(call_intrinsic(builder, name, kind, [values]), ir.VectorType(ir.IntType(16), values.type.count))


def numbers(kind: ir.VectorType, value: float) -> ir.Constant:
    """A vector of one number of float32."""
    return ir.Constant(kind, [value] * kind.count)


def exponential(builder: ir.IRBuilder, x: ir.Value, powers: int = 7) -> ir.Value:
    """e^x of a vector of float32, within 2 units in the last place: 2^n e^r, with r from -ln(2) / 2 to ln(2) / 2. Numbers below -87 and
    above 88 count as these; NaN stays NaN. ``powers``: of the series of e^r; with 5 its error is 3e-6 of the result."""
    kind = x.type
    for limit, relation in ((_LEAST, "<"), (_MOST, ">")):
        x = builder.select(builder.fcmp_ordered(relation, x, numbers(kind, limit)), numbers(kind, limit), x)
    shifted = multiply_add(builder, x, numbers(kind, _LOG2_E), numbers(kind, _SHIFTER))
    whole = builder.fsub(shifted, numbers(kind, _SHIFTER))
    rest = multiply_add(builder, whole, numbers(kind, -_LN2_HIGH), x)
    rest = multiply_add(builder, whole, numbers(kind, -_LN2_LOW), rest)
    total = numbers(kind, 1 / math.factorial(powers))
    for power in range(powers - 1, -1, -1):
        total = multiply_add(builder, total, rest, numbers(kind, 1 / math.factorial(power)))
    words = ir.VectorType(ir.IntType(32), kind.count)
    exponent = builder.shl(builder.bitcast(shifted, words), ir.Constant(words, [23] * kind.count))
    found = builder.bitcast(builder.add(builder.bitcast(total, words), exponent), kind)
    return builder.select(builder.fcmp_unordered("uno", x, x), x, found)  # a missing number's last bits are no exponent


def sigmoid(builder: ir.IRBuilder, x: ir.Value) -> ir.Value:
    """1 / (1 + e^-x) of a vector of float32."""
    one = numbers(x.type, 1.0)
    return builder.fdiv(one, builder.fadd(exponential(builder, builder.fneg(x)), one))


def silu(builder: ir.IRBuilder, x: ir.Value) -> ir.Value:
    """x / (1 + e^-x) of a vector of float32. Numbers below -87 count as -87, so it is 0 to 36 digits, of -inf too."""
    least = numbers(x.type, _LEAST)
    x = builder.select(builder.fcmp_ordered("<", x, least), least, x)
    return builder.fdiv(x, builder.fadd(exponential(builder, builder.fneg(x)), numbers(x.type, 1.0)))


def softplus(builder: ir.IRBuilder, x: ir.Value) -> ir.Value:
    """log(1 + e^x) of a vector of float32: max(x, 0) + log(1 + e^-|x|), the logarithm by the series of 2 artanh(y / (2 + y)), which
    loses no digits of a small y."""
    kind = x.type
    size = call_intrinsic(builder, f"llvm.fabs.v{kind.count}f32", kind, [x])
    small = exponential(builder, builder.fneg(size))
    ratio = builder.fdiv(small, builder.fadd(small, numbers(kind, 2.0)))
    square, total = builder.fmul(ratio, ratio), numbers(kind, 1 / 15)
    for power in range(6, -1, -1):
        total = multiply_add(builder, total, square, numbers(kind, 1 / (2 * power + 1)))
    rest = builder.fmul(builder.fmul(ratio, total), numbers(kind, 2.0))
    none = numbers(kind, 0.0)
    return builder.fadd(builder.select(builder.fcmp_ordered(">", x, none), x, none), rest)


def minimum(builder: ir.IRBuilder, one: ir.Value, other: ir.Value) -> ir.Value:
    """Of int64."""
    return builder.select(builder.icmp_signed("<", one, other), one, other)


def maximum(builder: ir.IRBuilder, one: ir.Value, other: ir.Value) -> ir.Value:
    """Of int64."""
    return builder.select(builder.icmp_signed(">", one, other), one, other)


def reduce(builder: ir.IRBuilder, values: ir.Value, join: Callable[[ir.Value, ir.Value], ir.Value]) -> ir.Value:
    """One number of a vector's: its halves are joined until one is left."""
    width = values.type.count
    while width > 1:
        width //= 2
        kind = ir.VectorType(ir.IntType(32), width)
        halves = (ir.Constant(kind, list(range(first, first + width))) for first in (0, width))
        values = join(*(builder.shuffle_vector(values, values, half) for half in halves))
    return builder.extract_element(values, ir.Constant(ir.IntType(32), 0))


def sums_of_each(builder: ir.IRBuilder, vectors: Sequence[ir.Value]) -> ir.Value:
    """One vector: the sum of each of so many vectors of float32 as one has numbers, added up as ``reduce`` does.

    A step adds halves of two vectors, so that as many sums are in one: 3 instructions for each vector instead of 3 for each halving.
    """
    width, found, owners = len(vectors), list(vectors), [[index] for index in range(len(vectors))]
    size = width
    while size > 1:
        half, block = size // 2, width if size > _LANE else _LANE  # what crosses lanes takes one vector's, then the other's
        starts = [(other, start) for first in range(0, width, block) for other in (0, 1) for start in range(first, first + block, size)]
        low = [other * width + start + index for other, start in starts for index in range(half)]
        kind = ir.VectorType(ir.IntType(32), width)
        sides = ir.Constant(kind, low), ir.Constant(kind, [place + half for place in low])
        pairs = list(zip(found[::2], found[1::2], strict=True))
        found = [builder.fadd(*(builder.shuffle_vector(one, other, side) for side in sides)) for one, other in pairs]
        joined = zip(owners[::2], owners[1::2], strict=True)
        owners = [[two[other][start // size] for other, start in starts] for two in joined]
        size = half
    order = ir.Constant(ir.VectorType(ir.IntType(32), width), [owners[0].index(index) for index in range(width)])
    return builder.shuffle_vector(found[0], found[0], order)


def transpose(builder: ir.IRBuilder, rows: Sequence[ir.Value]) -> list[ir.Value]:
    """The columns of a square, given as vectors of its rows, 8 or 16 of them."""
    width, vectors, distance = len(rows), list(rows), 1
    while distance < width:
        swapped = list(vectors)
        for low in (index for index in range(width) if not index & distance):
            for side in range(2):
                indices = ir.Constant(ir.VectorType(ir.IntType(32), width), _exchanged(width, distance, side))
                swapped[low + side * distance] = builder.shuffle_vector(vectors[low], vectors[low + distance], indices)
        vectors, distance = swapped, 2 * distance
    return [vectors[index & ~3 | (index & 1) << 1 | (index & 2) >> 1] for index in range(width)]


def _exchanged(width: int, distance: int, side: int) -> list[int]:
    """Where one of two vectors takes its numbers from in a step of ``transpose``. Within 128 bits numbers of both are interleaved,
    further away halves are exchanged: each is one instruction."""
    if distance < _LANE:
        first = [lane + side * _LANE // 2 for lane in range(0, width, _LANE)]
        return [
            start + part + number + other * width
            for start in first
            for part in range(0, _LANE // 2, distance)
            for other in range(2)
            for number in range(distance)
        ]
    return [place + side * distance + (width - distance if place & distance else 0) for place in range(width)]
