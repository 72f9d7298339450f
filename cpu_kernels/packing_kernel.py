"""Rows of float32 rounded to int8 in groups of 32 columns, and packed as ``models.checkpoint.int8g`` says, in one kernel: torch takes
ten operations over all numbers for it. The bits are those of torch.

Shapes: N rows, a multiple of 32, K columns, G groups.
"""

import struct
from collections.abc import Sequence
from functools import cache

from llvmlite import ir
from torch import Tensor

from ..schema.weight_layout import INT8_MOST, INT8G_COLUMNS, PACKED_COLUMNS, PACKED_ROWS
from .kernel import Kernel, load_kernel, vector_width
from .machine_code import (
    FLOAT,
    POINTER,
    address,
    call_intrinsic,
    constant,
    from_bfloat16,
    load_vector,
    load_word,
    loop,
    numbers,
    reduce,
    spread,
    to_bfloat16,
)

_BYTE, _SHORT, _WORD = ir.IntType(8), ir.IntType(16), ir.IntType(32)
_TINY = struct.unpack("<f", struct.pack("<I", 0x00800000))[0]  # float32's least number with all bits


def has_kernel(x_NK: Tensor) -> bool:
    """Return whether ``pack`` takes these rows: on a CPU with AVX2."""
    return vector_width() is not None and x_NK.is_cpu and x_NK.is_contiguous()


def pack(x_NK: Tensor, target: Tensor, scales: Tensor) -> None:
    """Write rows to contiguous ``target`` int8 [N, K] and ``scales`` bfloat16 [N, G]; scales are not finite where a number is not."""
    assert target.shape == x_NK.shape and scales.shape == (len(x_NK), x_NK.shape[1] // INT8G_COLUMNS)
    assert target.is_contiguous() and scales.is_contiguous() and len(x_NK) % PACKED_ROWS == 0
    _kernel().run((1, *x_NK.shape, x_NK.data_ptr(), target.data_ptr(), scales.data_ptr()), 1)


@cache
def _kernel() -> Kernel:
    width = vector_width()
    assert width is not None
    return load_kernel("packing", _Blocks(width), PACKED_ROWS)


class _Blocks:
    """Emits the packing of a block of rows. The words are 1, N, K and the addresses of x, the codes and the scales."""

    most_rows = 1

    def __init__(self, width: int) -> None:
        self._width, self._floats, self._words = width, ir.VectorType(FLOAT, width), ir.VectorType(_WORD, width)

    def emit(self, builder: ir.IRBuilder, num_rows: int, arguments: Sequence[ir.Value]) -> None:
        words, _, start, stop = arguments
        num_columns = load_word(builder, words, 2)
        x, codes, scales = (load_word(builder, words, index, POINTER) for index in range(3, 6))
        block_codes = builder.mul(start, builder.udiv(num_columns, constant(PACKED_COLUMNS)))
        block_scales = builder.mul(start, builder.udiv(num_columns, constant(INT8G_COLUMNS)))
        with loop(builder, constant(0), num_columns, INT8G_COLUMNS) as column, loop(builder, start, stop, 1) as row:
            place = builder.sub(row, start)
            first = builder.add(builder.mul(row, num_columns), column)
            values = [
                load_vector(builder, x, builder.add(first, constant(at)), self._width) for at in range(0, INT8G_COLUMNS, self._width)
            ]
            bits, inverse = self._scale(builder, values)
            builder.store(bits, address(builder, scales, builder.add(block_scales, builder.add(column, place)), _SHORT), align=2)
            words_of_column = builder.mul(column, constant(PACKED_ROWS // PACKED_COLUMNS))
            at = builder.add(builder.add(block_codes, words_of_column), place)
            for number, word in enumerate(self._codes(builder, values, inverse)):
                builder.store(word, address(builder, codes, builder.add(at, constant(number * PACKED_ROWS)), _WORD), align=4)

    def _scale(self, builder: ir.IRBuilder, values: Sequence[ir.Value]) -> tuple[ir.Value, ir.Value]:
        """bfloat16's bits of a group's scale, and by which its numbers are multiplied. Sizes are compared by their bits: those of NaN
        are larger than any other's."""

        def larger(one: ir.Value, other: ir.Value) -> ir.Value:
            return builder.select(builder.icmp_signed(">", one, other), one, other)

        without_sign = ir.Constant(self._words, [0x7FFFFFFF] * self._width)
        most, *others = (builder.and_(builder.bitcast(each, self._words), without_sign) for each in values)
        for size in others:
            most = larger(most, size)
        largest = spread(builder, builder.bitcast(reduce(builder, most, larger), FLOAT), self._width)
        stored = to_bfloat16(builder, builder.fdiv(largest, numbers(self._floats, INT8_MOST)))
        scale = from_bfloat16(builder, stored)
        is_tiny = builder.fcmp_ordered("<", scale, numbers(self._floats, _TINY))
        inverse = builder.select(is_tiny, numbers(self._floats, 0), builder.fdiv(numbers(self._floats, 1), scale))
        return builder.extract_element(stored, constant(0)), inverse

    def _codes(self, builder: ir.IRBuilder, values: Sequence[ir.Value], inverse: ir.Value) -> list[ir.Value]:
        """A group's codes in words of four."""
        found = []
        for each in values:
            whole = call_intrinsic(builder, f"llvm.rint.v{self._width}f32", self._floats, [builder.fmul(each, inverse)])
            codes = builder.trunc(builder.fptosi(whole, self._words), ir.VectorType(_BYTE, self._width))
            words = builder.bitcast(codes, ir.VectorType(_WORD, self._width // PACKED_COLUMNS))
            found += [builder.extract_element(words, constant(number)) for number in range(self._width // PACKED_COLUMNS)]
        return found
