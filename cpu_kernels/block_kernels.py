"""Values of GGUF's blocks of 256 (Q4_K, Q5_K, Q6_K), and codes of Q4_K in the order of ``models.checkpoint.int4``, each in one kernel:
torch takes tens of operations over all numbers for them. The bits are those of ``models.checkpoint.gguf_blocks``.

A block of Q4_K or Q5_K begins with two halves (float16), a step and a minimum, and 12 bytes with 6 bits of each for eight groups of 32
numbers; fifth bits follow in Q5_K, then codes. One of Q6_K has the lower 4 bits of codes, the upper 2, 16 scales and a half. Shapes: N
rows, K columns, B blocks of a row.
"""

from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import torch
from llvmlite import ir
from torch import Tensor

from ..schema.weight_layout import INT4_MIDDLE, PACKED_COLUMNS, PACKED_ROWS
from .kernel import Kernel, load_kernel, vector_width
from .machine_code import FLOAT, POINTER, address, constant, load_word, loop, spread, to_bfloat16

_BYTE, _WORD = ir.IntType(8), ir.IntType(32)
_BLOCK = 256  # numbers
_GROUP = 32
_BYTES = {"Q4_K": 144, "Q5_K": 176, "Q6_K": 210}  # of a block
_HALF = PACKED_ROWS // 2
_LANES = 8  # of vectors here, on any processor


def has_kernel(blocks: Tensor, kind: str) -> bool:
    """Return whether there are kernels for blocks of this type: on a CPU with AVX2."""
    return kind in _BYTES and vector_width() is not None and blocks.is_cpu and blocks.is_contiguous()


def values(blocks: Tensor, kind: str) -> Tensor:
    """Those of blocks uint8 [n, bytes]: float32 [n, 256]."""
    found = torch.empty(len(blocks), _BLOCK)
    _values_kernel(kind).run((1, len(blocks), blocks.data_ptr(), found.data_ptr()), 1)
    return found


def can_pack(blocks: Tensor, kind: str) -> bool:
    """Return whether ``pack`` takes blocks of this type."""
    return kind == "Q4_K" and has_kernel(blocks, kind)


def pack(rows: Tensor, target: Tensor, scales: Tensor) -> None:
    """Write rows of Q4_K uint8 [N, 144 B] to contiguous ``target`` uint8 [N, K / 2] and ``scales`` bfloat16 [N, 8 B, 2]. N is a
    multiple of 32. Scales are not finite where one of a block is not."""
    num_blocks = rows.shape[1] // _BYTES["Q4_K"]
    assert target.shape == (len(rows), num_blocks * _BLOCK // 2) and scales.shape == (len(rows), num_blocks * _BLOCK // _GROUP, 2)
    assert rows.is_contiguous() and target.is_contiguous() and scales.is_contiguous() and len(rows) % PACKED_ROWS == 0
    _packing_kernel().run((1, len(rows), num_blocks, rows.data_ptr(), target.data_ptr(), scales.data_ptr()), 1)


@cache
def _values_kernel(kind: str) -> Kernel:
    return load_kernel(f"blocks-{kind}", _Values(kind), 1)


@cache
def _packing_kernel() -> Kernel:
    return load_kernel("blocks-int4", _Packing(), PACKED_ROWS)


class _Bytes(NamedTuple):
    """A block's bytes from an address on."""

    builder: ir.IRBuilder
    base: ir.Value
    first: ir.Value

    def one(self, at: int) -> ir.Value:
        """A byte, as a word."""
        return self.builder.zext(self.builder.load(self._address(at), typ=_BYTE), _WORD)

    def some(self, at: int, count: int) -> ir.Value:
        return self.builder.load(self._address(at), align=1, typ=ir.VectorType(_BYTE, count))

    def half(self, at: int) -> ir.Value:
        """A number of float16, as float32."""
        pair = self.builder.load(self._address(at), align=1, typ=ir.VectorType(ir.HalfType(), 1))
        return self.builder.extract_element(self.builder.fpext(pair, ir.VectorType(FLOAT, 1)), constant(0))

    def _address(self, at: int) -> ir.Value:
        return address(self.builder, self.base, self.builder.add(self.first, constant(at)), _BYTE)


def _whole(value: ir.Value, number: int) -> ir.Constant:
    kind = value.type
    return ir.Constant(kind, [number] * kind.count) if isinstance(kind, ir.VectorType) else ir.Constant(kind, number)


def _and(builder: ir.IRBuilder, value: ir.Value, mask: int) -> ir.Value:
    return builder.and_(value, _whole(value, mask))


def _right(builder: ir.IRBuilder, value: ir.Value, bits: int) -> ir.Value:
    return builder.lshr(value, _whole(value, bits)) if bits else value


def _left(builder: ir.IRBuilder, value: ir.Value, bits: int) -> ir.Value:
    return builder.shl(value, _whole(value, bits)) if bits else value


def _steps_and_minima(builder: ir.IRBuilder, block: _Bytes) -> list[tuple[ir.Value, ir.Value]]:
    """Of the groups of a block of Q4_K or Q5_K."""
    step, least = block.half(0), block.half(2)
    low, middle, high = ([block.one(first + number) for number in range(4)] for first in (4, 8, 12))
    found = []
    for number in range(8):
        at = number % 4
        if number < 4:
            six = _and(builder, low[at], 63), _and(builder, middle[at], 63)
        else:
            fours = _and(builder, high[at], 15), _right(builder, high[at], 4)
            twos = (_and(builder, _right(builder, part[at], 2), 48) for part in (low, middle))
            six = tuple(map(builder.or_, fours, twos))
        found.append(tuple(builder.fmul(part, builder.uitofp(code, FLOAT)) for part, code in zip((step, least), six, strict=True)))
    return found


class _Values:
    """Emits the values of a block. The words are 1, N blocks and the addresses of blocks and values."""

    most_rows = 1

    def __init__(self, kind: str) -> None:
        self._kind, self._floats = kind, ir.VectorType(FLOAT, _LANES)

    def emit(self, builder: ir.IRBuilder, num_rows: int, arguments: Sequence[ir.Value]) -> None:
        words, _, start, _ = arguments
        base, target = (load_word(builder, words, index, POINTER) for index in (2, 3))
        block = _Bytes(builder, base, builder.mul(start, constant(_BYTES[self._kind])))
        out = address(builder, target, builder.mul(start, constant(_BLOCK)))
        for first, found in self._q6_k(builder, block) if self._kind == "Q6_K" else self._with_minima(builder, block):
            builder.store(found, address(builder, out, constant(first)), align=4)

    def _with_minima(self, builder: ir.IRBuilder, block: _Bytes) -> Sequence[tuple[int, ir.Value]]:
        """Places and values of Q4_K or Q5_K: code x step - minimum."""
        has_fifth, found = self._kind == "Q5_K", []
        codes = 48 if has_fifth else 16
        for number, (step, least) in enumerate(_steps_and_minima(builder, block)):
            steps, minima = (spread(builder, part, _LANES) for part in (step, least))
            for at in range(0, _GROUP, _LANES):
                code = _and(builder, _right(builder, block.some(codes + number // 2 * _GROUP + at, _LANES), number % 2 * 4), 15)
                if has_fifth:
                    bit = _and(builder, _right(builder, block.some(16 + at, _LANES), number), 1)
                    code = builder.or_(code, _left(builder, bit, 4))
                value = builder.uitofp(code, self._floats)
                found.append((number * _GROUP + at, builder.fsub(builder.fmul(value, steps), minima)))
        return found

    def _q6_k(self, builder: ir.IRBuilder, block: _Bytes) -> Sequence[tuple[int, ir.Value]]:
        """Places and values: (code - 32) x scale, a scale for 16 numbers."""
        whole, found = block.half(208), []
        for number in range(0, _BLOCK, _LANES):
            half, quarter, at = number // 128, number // 32 % 4, number % 32
            low = block.some(half * 64 + quarter % 2 * 32 + at, _LANES)
            high = block.some(128 + half * 32 + at, _LANES)
            fours = _and(builder, _right(builder, low, quarter // 2 * 4), 15)
            code = builder.or_(fours, _left(builder, _and(builder, _right(builder, high, 2 * quarter), 3), 4))
            wide = builder.zext(code, ir.VectorType(_WORD, _LANES))
            centred = builder.sub(wide, _whole(wide, 32))
            byte = builder.sext(builder.trunc(block.one(192 + number // 16), _BYTE), _WORD)
            scale = builder.fmul(builder.sitofp(byte, FLOAT), whole)
            found.append((number, builder.fmul(builder.sitofp(centred, self._floats), spread(builder, scale, _LANES))))
        return found


class _Packing:
    """Emits the packing of 32 rows. The words are 1, N, B and the addresses of the rows, the codes and the scales."""

    most_rows = 1

    def emit(self, builder: ir.IRBuilder, num_rows: int, arguments: Sequence[ir.Value]) -> None:
        words, _, start, _ = arguments
        num_blocks = load_word(builder, words, 2)
        base, codes, scales = (load_word(builder, words, index, POINTER) for index in (3, 4, 5))
        before = builder.mul(start, num_blocks)  # blocks of other rows
        with loop(builder, constant(0), num_blocks, 1) as number, loop(builder, constant(0), constant(_HALF), 1) as row:
            rows = row, builder.add(row, constant(_HALF))
            places = [builder.add(builder.add(before, builder.mul(own, num_blocks)), number) for own in rows]
            pair = [_Bytes(builder, base, builder.mul(place, constant(_BYTES["Q4_K"]))) for place in places]
            self._write_codes(builder, pair, address(builder, codes, self._word(builder, before, number, row), _WORD))
            for own, block in zip(rows, pair, strict=True):
                blocks = builder.add(before, builder.mul(number, constant(PACKED_ROWS)))
                place = builder.add(builder.mul(blocks, constant(_BLOCK // _GROUP)), own)
                self._write_scales(builder, block, address(builder, scales, place, _WORD))

    def _word(self, builder: ir.IRBuilder, before: ir.Value, number: ir.Value, row: ir.Value) -> ir.Value:
        """Of codes of 32 rows, the place of the first of a block: a word has four columns of two rows."""
        per_block = _BLOCK // PACKED_COLUMNS
        blocks = builder.add(builder.mul(before, constant(per_block // 2)), builder.mul(number, constant(per_block * _HALF)))
        return builder.add(blocks, row)

    def _write_codes(self, builder: ir.IRBuilder, pair: Sequence[_Bytes], out: ir.Value) -> None:
        """Of two rows, the one 16 behind the other in the upper halves of bytes."""
        for number in range(8):
            for at in range(0, _GROUP, _LANES):
                one, other = (block.some(16 + number // 2 * _GROUP + at, _LANES) for block in pair)
                if number % 2:
                    joined = builder.or_(_right(builder, one, 4), _and(builder, other, 0xF0))
                else:
                    joined = builder.or_(_and(builder, one, 15), _left(builder, other, 4))
                words = builder.bitcast(joined, ir.VectorType(_WORD, _LANES // PACKED_COLUMNS))
                for index in range(_LANES // PACKED_COLUMNS):
                    place = constant(((number * _GROUP + at) // PACKED_COLUMNS + index) * _HALF)
                    builder.store(builder.extract_element(words, constant(index)), address(builder, out, place, _WORD), align=4)

    def _write_scales(self, builder: ir.IRBuilder, block: _Bytes, out: ir.Value) -> None:
        """Of a row's eight groups: the step, and the value of code 8, in the upper half of a word."""
        for number, (step, least) in enumerate(_steps_and_minima(builder, block)):
            shift = builder.fsub(builder.fmul(ir.Constant(FLOAT, float(INT4_MIDDLE)), step), least)
            both = builder.insert_element(spread(builder, step, 2), shift, constant(1))
            word = builder.bitcast(to_bfloat16(builder, both), _WORD)
            builder.store(word, address(builder, out, constant(number * PACKED_ROWS), _WORD), align=4)
