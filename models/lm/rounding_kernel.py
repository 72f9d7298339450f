"""Rounding of rows of activations to whole numbers on a CPU, in one kernel: torch takes eight operations over all numbers for it.

Shapes: M rows, K columns.
"""

from collections.abc import Sequence
from functools import cache

import torch
from llvmlite import ir
from torch import Tensor

from .machine_code import (
    FLOAT,
    POINTER,
    Kernel,
    address,
    call_intrinsic,
    clear,
    constant,
    load_kernel,
    load_vector,
    load_word,
    loop,
    multiply_add,
    new_sums,
    reduce,
    vector_width,
)

_BYTE, _WORD = ir.IntType(8), ir.IntType(32)
_LEAST_WORK = 1 << 16  # numbers: fewer are left to one thread


def has_kernel(x_MK: Tensor) -> bool:
    """Return whether ``round_to`` takes these rows: on a CPU with AVX2, whole vectors."""
    width = vector_width()
    return width is not None and x_MK.device.type == "cpu" and x_MK.shape[1] % width == 0


def round_to(x_MK: Tensor, most: int, least: float, shift: int) -> tuple[Tensor, Tensor, Tensor]:
    """Round contiguous float32 rows to whole numbers of steps. A row's step is its largest number divided by ``most``, or ``least``
    divided by ``most`` if that is more.

    Returns the whole numbers plus ``shift`` as bytes int8 [M, K], the largest number of each row float32 [M] (NaN where one is missing)
    and its Euclidean norm float32 [M].
    """
    codes = torch.empty_like(x_MK, dtype=torch.int8)
    largest, norms = x_MK.new_empty(2, x_MK.shape[0])
    addresses = (tensor.data_ptr() for tensor in (x_MK, codes, largest, norms, _limits(most, least, shift)))
    num_threads = torch.get_num_threads() if x_MK.numel() >= _LEAST_WORK else 1
    _kernel().run((1, *x_MK.shape, *addresses), num_threads)
    return codes, largest, norms


@cache
def _limits(most: int, least: float, shift: int) -> Tensor:
    return torch.tensor([most, least, shift], dtype=torch.float32)


@cache
def _kernel() -> Kernel:
    width = vector_width()
    assert width is not None
    return load_kernel("rounding", _Rows(width), 1)


class _Rows:
    """Emits the rounding of some rows. They are the matrix of a product with one row of activations, which it does not have. The words
    are 1, M, K and the addresses of x, the bytes, the largest numbers, the norms, and of ``most``, ``least`` and ``shift``."""

    def __init__(self, width: int) -> None:
        self._width, self._floats = width, ir.VectorType(FLOAT, width)

    def emit(self, builder: ir.IRBuilder, num_rows: int, arguments: Sequence[ir.Value]) -> None:
        words, _, start, stop = arguments
        num_columns = load_word(builder, words, 2)
        x, codes, largest, norms, limits = (load_word(builder, words, index, POINTER) for index in range(3, 8))
        most, least, shift = (builder.load(address(builder, limits, constant(index)), typ=FLOAT) for index in range(3))
        with loop(builder, start, stop, 1) as row:
            first = builder.mul(row, num_columns)
            found, norm = self._measure(builder, x, first, num_columns)
            builder.store(found, address(builder, largest, row))
            builder.store(norm, address(builder, norms, row))
            bound = builder.select(builder.fcmp_ordered("<", found, least), least, found)
            self._round(builder, (x, codes), first, num_columns, builder.fdiv(most, bound), shift)

    def _measure(self, builder: ir.IRBuilder, x: ir.Value, first: ir.Value, num_columns: ir.Value) -> tuple[ir.Value, ir.Value]:
        """The largest number of a row, and the root of the sum of its squares."""
        sums = new_sums(builder, 1, 2, self._floats)
        clear(builder, sums, self._floats)
        largest, squares = sums[0]
        with loop(builder, constant(0), num_columns, self._width) as column:
            values = load_vector(builder, x, builder.add(first, column), self._width)
            size = call_intrinsic(builder, f"llvm.fabs.v{self._width}f32", self._floats, [values])
            before = builder.load(largest, typ=self._floats)
            builder.store(builder.select(builder.fcmp_ordered(">", size, before), size, before), largest)
            builder.store(multiply_add(builder, values, values, builder.load(squares, typ=self._floats)), squares)

        def larger(one: ir.Value, other: ir.Value) -> ir.Value:
            return builder.select(builder.fcmp_ordered(">", one, other), one, other)

        total = reduce(builder, builder.load(squares, typ=self._floats), builder.fadd)
        found = reduce(builder, builder.load(largest, typ=self._floats), larger)
        is_missing = builder.fcmp_unordered("uno", total, total)
        return builder.select(is_missing, total, found), call_intrinsic(builder, "llvm.sqrt.f32", FLOAT, [total])

    def _round(
        self,
        builder: ir.IRBuilder,
        tensors: tuple[ir.Value, ir.Value],
        first: ir.Value,
        num_columns: ir.Value,
        factor: ir.Value,
        shift: ir.Value,
    ) -> None:
        """Write a row's whole numbers, which are its numbers times a factor."""
        x, codes = tensors
        factors, shifts = (self._spread(builder, value) for value in (factor, shift))
        with loop(builder, constant(0), num_columns, self._width) as column:
            place = builder.add(first, column)
            scaled = builder.fmul(load_vector(builder, x, place, self._width), factors)
            whole = call_intrinsic(builder, f"llvm.rint.v{self._width}f32", self._floats, [scaled])
            words = builder.fptosi(builder.fadd(whole, shifts), ir.VectorType(_WORD, self._width))
            found = builder.trunc(words, ir.VectorType(_BYTE, self._width))
            builder.store(found, address(builder, codes, place, _BYTE), align=1)

    def _spread(self, builder: ir.IRBuilder, value: ir.Value) -> ir.Value:
        lone = builder.insert_element(ir.Constant(self._floats, ir.Undefined), value, ir.Constant(_WORD, 0))
        return builder.shuffle_vector(lone, lone, ir.Constant(ir.VectorType(_WORD, self._width), [0] * self._width))
