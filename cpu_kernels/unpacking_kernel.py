"""Values of matrices in int4 and int8g (``models.checkpoint``) as rows of bfloat16, for products by processors that multiply bfloat16
faster than bytes with steps (AMX): torch takes ten operations over all numbers for them. Values are computed in float32, and rounded.

Shapes: N rows, a multiple of 32, K columns, a multiple of 32, G groups.
"""

from collections.abc import Sequence
from functools import cache

import torch
from llvmlite import ir
from torch import Tensor

from ..schema.weight_layout import INT4_MIDDLE, PACKED_COLUMNS, PACKED_ROWS
from .kernel import Kernel, load_kernel, threads_for, vector_width
from .machine_code import (
    FLOAT,
    POINTER,
    address,
    constant,
    load_word,
    loop,
    multiply_add,
    spread,
    to_bfloat16,
    transpose,
)

_BYTE, _SHORT, _WORD = ir.IntType(8), ir.IntType(16), ir.IntType(32)
_LANES = 8  # of a square of words, on any processor
_COLUMNS = _LANES * PACKED_COLUMNS  # at once: no group has fewer


def has_kernel(packed: Tensor) -> bool:
    """Return whether ``unpack`` takes such a matrix: on a CPU with AVX2."""
    return vector_width() is not None and packed.is_cpu and packed.is_contiguous()


def unpack(packed: Tensor, scales: Tensor, out_NK: Tensor) -> None:
    """Write the values of a contiguous matrix, uint8 [N, K / 2] with scales [N, G, 2] or int8 [N, K] with scales [N, G], to contiguous
    ``out_NK`` in bfloat16."""
    (num_rows, num_columns), num_groups = out_NK.shape, scales.shape[1]
    is_int4 = packed.dtype == torch.uint8
    assert packed.shape == (num_rows, num_columns // 2 if is_int4 else num_columns) and len(scales) == num_rows
    assert out_NK.dtype == torch.bfloat16 and out_NK.is_contiguous() and packed.is_contiguous() and scales.is_contiguous()
    assert num_rows % PACKED_ROWS == 0 and num_columns % (_COLUMNS * num_groups) == 0
    words = (1, num_rows, num_columns, num_groups, packed.data_ptr(), scales.data_ptr(), out_NK.data_ptr())
    _kernel(is_int4).run(words, threads_for(packed.numel()))


@cache
def _kernel(is_int4: bool) -> Kernel:
    return load_kernel(f"unpacking-{'int4' if is_int4 else 'int8g'}", _Blocks(is_int4), PACKED_ROWS)


class _Blocks:
    """Emits the values of a block. The words are 1, N, K, G and the addresses of the codes, the scales and the values."""

    most_rows = 1

    def __init__(self, is_int4: bool) -> None:
        self._is_int4 = is_int4
        self._stored_rows = PACKED_ROWS // 2 if is_int4 else PACKED_ROWS  # a byte has a code of each, and of the row as far below

    def emit(self, builder: ir.IRBuilder, num_rows: int, arguments: Sequence[ir.Value]) -> None:
        words, _, start, _ = arguments
        num_columns, num_groups = load_word(builder, words, 2), load_word(builder, words, 3)
        codes, scales, out = (load_word(builder, words, index, POINTER) for index in (4, 5, 6))
        of_block = builder.mul(builder.udiv(start, constant(PACKED_ROWS // self._stored_rows)), num_columns)  # its first byte
        scales_of_block, of_group = builder.mul(start, num_groups), builder.udiv(num_columns, num_groups)
        with loop(builder, constant(0), num_columns, _COLUMNS) as column:
            group = builder.add(scales_of_block, builder.mul(builder.udiv(column, of_group), constant(PACKED_ROWS)))
            first_code = builder.add(of_block, builder.mul(column, constant(self._stored_rows)))
            with loop(builder, constant(0), constant(self._stored_rows), _LANES) as row:
                for index, stored in enumerate(self._rows(builder, codes, first_code, row)):
                    for half, found in enumerate(self._codes(builder, stored)):
                        place = builder.add(row, constant(index + half * self._stored_rows))
                        values = self._scaled(builder, scales, builder.add(group, place), found)
                        at = builder.add(builder.mul(builder.add(start, place), num_columns), column)
                        builder.store(to_bfloat16(builder, values), address(builder, out, at, _SHORT), align=2)

    def _rows(self, builder: ir.IRBuilder, codes: ir.Value, first: ir.Value, row: ir.Value) -> list[ir.Value]:
        """The bytes of 32 columns of 8 rows."""
        squares = []
        for word in range(_LANES):
            place = builder.add(first, builder.mul(builder.add(constant(word * self._stored_rows), row), constant(PACKED_COLUMNS)))
            squares.append(builder.load(address(builder, codes, place, _BYTE), align=1, typ=ir.VectorType(_WORD, _LANES)))
        return [builder.bitcast(words, ir.VectorType(_BYTE, _COLUMNS)) for words in transpose(builder, squares)]

    def _codes(self, builder: ir.IRBuilder, stored: ir.Value) -> list[ir.Value]:
        """Those of a row in float32; in int4 also those of the row 16 further on."""
        words, floats = ir.VectorType(_WORD, _COLUMNS), ir.VectorType(FLOAT, _COLUMNS)
        if not self._is_int4:
            return [builder.sitofp(builder.sext(stored, words), floats)]
        low, high = (ir.Constant(stored.type, [number] * _COLUMNS) for number in (15, 4))
        halves, middle = (builder.and_(stored, low), builder.lshr(stored, high)), ir.Constant(words, [INT4_MIDDLE] * _COLUMNS)
        return [builder.sitofp(builder.sub(builder.zext(half, words), middle), floats) for half in halves]

    def _scaled(self, builder: ir.IRBuilder, scales: ir.Value, place: ir.Value, codes: ir.Value) -> ir.Value:
        """Codes x a row's scale in a group, and its zero where it has one. Both are bfloat16, the upper half of float32's bits."""
        if not self._is_int4:
            bits = builder.zext(builder.load(address(builder, scales, place, _SHORT), align=2, typ=_SHORT), _WORD)
            scale = builder.bitcast(builder.shl(bits, ir.Constant(_WORD, 16)), FLOAT)
            return builder.fmul(codes, spread(builder, scale, _COLUMNS))
        pair = builder.load(address(builder, scales, place, _WORD), align=4, typ=_WORD)
        scale = builder.bitcast(builder.shl(pair, ir.Constant(_WORD, 16)), FLOAT)
        zero = builder.bitcast(builder.and_(pair, ir.Constant(_WORD, -65536)), FLOAT)
        return multiply_add(builder, codes, spread(builder, scale, _COLUMNS), spread(builder, zero, _COLUMNS))
