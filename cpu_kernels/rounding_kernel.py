"""Rounding of rows of activations to whole numbers on a CPU, in one kernel: torch takes eight operations over all numbers for it.

Shapes: M rows, K columns.
"""

from collections.abc import Sequence
from functools import cache

import torch
from llvmlite import ir
from torch import Tensor

from .kernel import Kernel, available_threads, load_kernel, vector_width
from .machine_code import (
    FLOAT,
    POINTER,
    add_product,
    address,
    call_intrinsic,
    clear,
    constant,
    load_vector,
    load_word,
    loop,
    new_sums,
    reduce,
    spread,
)

_BYTE, _WORD = ir.IntType(8), ir.IntType(32)
_LEAST_WORK = 1 << 16  # numbers: fewer are left to one thread


def has_kernel(x_MK: Tensor) -> bool:
    """Return whether ``round_to`` takes these rows: on a CPU with AVX2, whole vectors."""
    width = vector_width()
    return width is not None and x_MK.device.type == "cpu" and x_MK.shape[1] % width == 0


def round_to(x_MK: Tensor, most: int, least: float, shift: int, most_of_norm: float) -> tuple[Tensor, Tensor, Tensor]:
    """Round contiguous float32 rows to whole numbers of steps. A row's step is its largest number divided by ``most``, or ``least``
    divided by ``most`` if that is more.

    Returns the whole numbers plus ``shift`` as bytes int8 [M, K], the steps float32 [M, 1] (NaN where a number is missing), and whether
    the largest number is more than ``most_of_norm`` times the row's Euclidean norm, bool [M].
    """
    num_rows = x_MK.shape[0]
    codes = torch.empty_like(x_MK, dtype=torch.int8)
    steps, are_split = torch.empty(num_rows, 1, dtype=torch.float32), torch.empty(num_rows, dtype=torch.bool)
    limits = _limits(most, least, shift, most_of_norm)
    addresses = (tensor.data_ptr() for tensor in (x_MK, codes, steps, are_split, limits))
    num_threads = available_threads() if x_MK.numel() >= _LEAST_WORK else 1
    _kernel().run((1, *x_MK.shape, *addresses), num_threads)
    return codes, steps, are_split


@cache
def _limits(*limits: float) -> Tensor:
    return torch.tensor(limits, dtype=torch.float32)


@cache
def _kernel() -> Kernel:
    width = vector_width()
    assert width is not None
    return load_kernel("rounding", _Rows(width), 1)


class _Rows:
    """Emits the rounding of some rows. The words are 1, M, K and the addresses of x, the bytes, the steps, which rows are split, and of
    ``most``, ``least``, ``shift`` and ``most_of_norm``."""

    most_rows = 1

    def __init__(self, width: int) -> None:
        self._width, self._floats = width, ir.VectorType(FLOAT, width)

    def emit(self, builder: ir.IRBuilder, num_rows: int, arguments: Sequence[ir.Value]) -> None:
        words, _, start, stop = arguments
        num_columns = load_word(builder, words, 2)
        x, codes, steps, are_split, limits = (load_word(builder, words, index, POINTER) for index in range(3, 8))
        most, least, shift, most_of_norm = (builder.load(address(builder, limits, constant(index)), typ=FLOAT) for index in range(4))
        with loop(builder, start, stop, 1) as row:
            first = builder.mul(row, num_columns)
            found = self._largest(builder, x, first, num_columns)
            bound = builder.select(builder.fcmp_ordered("<", found, least), least, found)
            norm = self._round(builder, (x, codes), first, num_columns, builder.fdiv(most, bound), shift)
            step = builder.fdiv(bound, most)
            builder.store(step, address(builder, steps, row))
            is_split = builder.fcmp_ordered(">", builder.fdiv(found, step), builder.fmul(norm, most_of_norm))
            builder.store(builder.zext(is_split, _BYTE), address(builder, are_split, row, _BYTE))

    def _largest(self, builder: ir.IRBuilder, x: ir.Value, first: ir.Value, num_columns: ir.Value) -> ir.Value:
        """The largest number of a row. Bits without a sign are compared as whole numbers: those of NaN are larger than any other's."""
        words = ir.VectorType(_WORD, self._width)
        variable = new_sums(builder, 1, 1, words)[0][0]
        clear(builder, [[variable]], words)

        def larger(one: ir.Value, other: ir.Value) -> ir.Value:
            return builder.select(builder.icmp_signed(">", one, other), one, other)

        with loop(builder, constant(0), num_columns, self._width) as column:
            bits = builder.bitcast(load_vector(builder, x, builder.add(first, column), self._width), words)
            size = builder.and_(bits, ir.Constant(words, [0x7FFFFFFF] * self._width))
            builder.store(larger(size, builder.load(variable, typ=words)), variable)
        return builder.bitcast(reduce(builder, builder.load(variable, typ=words), larger), FLOAT)

    def _round(
        self,
        builder: ir.IRBuilder,
        tensors: tuple[ir.Value, ir.Value],
        first: ir.Value,
        num_columns: ir.Value,
        factor: ir.Value,
        shift: ir.Value,
    ) -> ir.Value:
        """Write a row's whole numbers, which are its numbers times a factor. Returns the norm of these products, which unlike
        that of the numbers is neither too large nor too small for float32."""
        x, codes = tensors
        factors, shifts = (spread(builder, value, self._width) for value in (factor, shift))
        squares = new_sums(builder, 1, 1, self._floats)
        clear(builder, squares, self._floats)
        with loop(builder, constant(0), num_columns, self._width) as column:
            place = builder.add(first, column)
            scaled = builder.fmul(load_vector(builder, x, place, self._width), factors)
            add_product(builder, squares[0][0], scaled, scaled)
            whole = call_intrinsic(builder, f"llvm.rint.v{self._width}f32", self._floats, [scaled])
            words = builder.fptosi(builder.fadd(whole, shifts), ir.VectorType(_WORD, self._width))
            found = builder.trunc(words, ir.VectorType(_BYTE, self._width))
            builder.store(found, address(builder, codes, place, _BYTE), align=1)
        total = reduce(builder, builder.load(squares[0][0], typ=self._floats), builder.fadd)
        return call_intrinsic(builder, "llvm.sqrt.f32", FLOAT, [total])
