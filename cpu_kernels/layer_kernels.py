"""A decoder's operations between its matrix products on a CPU, each in one kernel: torch takes three to eight operations for one.

All compute in float32 and read and write float32 or bfloat16. A row is the same bits in any batch and team of threads.
Shapes: N tokens, H hidden, I intermediate, D head_dim.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import cache

import torch
from llvmlite import ir
from torch import Tensor

from .kernel import STORED, Kernel, available_threads, load_kernel, vector_width
from .machine_code import (
    FLOAT,
    POINTER,
    add_product,
    address,
    call_intrinsic,
    clear,
    constant,
    load_floats,
    load_vector,
    load_word,
    loop,
    multiply_add,
    new_sums,
    reduce,
    silu,
    spread,
    to_bfloat16,
)

_LEAST_WORK = 1 << 16  # numbers: fewer are left to one thread


def has_kernels(dtype: torch.dtype, *lengths: int) -> bool:
    """Return whether there are kernels for rows of these lengths: on a processor with AVX2, whole vectors of float32 or bfloat16. A
    process's first such question makes them."""
    width = vector_width()
    if width is None or dtype not in STORED or any(length % width for length in lengths):
        return False
    for name in _KINDS:
        _kernel(name, dtype)
    return True


def add_norm(x_NH: Tensor, residual_NH: Tensor, weight_H: Tensor, epsilon: Tensor) -> Tensor:
    """Add x to the residual, in place, and return its norm [N, H]: residual / sqrt(mean(residual ** 2) + epsilon) x weight.

    All but ``epsilon``, float32 [], are of one dtype. Raises: ValueError for others.
    """
    dtype, shape = residual_NH.dtype, residual_NH.shape
    is_same = x_NH.dtype == weight_H.dtype == dtype and x_NH.shape == shape and weight_H.shape == shape[1:]
    if not is_same or epsilon.dtype != torch.float32:
        described = ", ".join(f"{tensor.dtype} {list(tensor.shape)}" for tensor in (x_NH, residual_NH, weight_H, epsilon))
        raise ValueError(f"add_norm of {described}")
    out = torch.empty_like(residual_NH)
    _run("add_norm", dtype, shape, (x_NH, residual_NH, weight_H, out, epsilon))
    return out


def norm(x_NH: Tensor, weight_H: Tensor, epsilon: Tensor, out: Tensor | None = None) -> Tensor:
    """The norm of x, [N, H], as that of ``add_norm``. ``out``: where it is written; it may be x.

    Raises: ValueError for other dtypes and shapes than those of ``add_norm``.
    """
    out = torch.empty_like(x_NH) if out is None else out
    is_same = weight_H.dtype == out.dtype == x_NH.dtype and out.shape == x_NH.shape and weight_H.shape == x_NH.shape[1:]
    if not is_same or epsilon.dtype != torch.float32:
        described = ", ".join(f"{tensor.dtype} {list(tensor.shape)}" for tensor in (x_NH, weight_H, epsilon, out))
        raise ValueError(f"norm of {described}")
    _run("norm", x_NH.dtype, x_NH.shape, (x_NH, weight_H, out, epsilon))
    return out


def silu_mul(gate_up: Tensor) -> Tensor:
    """silu(gate) x up, [N, I], of rows [N, 2 I]. A gate below -87 counts as -87, so its silu is 0 to 36 digits, of -inf too."""
    out = torch.empty(gate_up.shape[0], gate_up.shape[1] // 2, dtype=gate_up.dtype)
    _run("silu_mul", out.dtype, out.shape, (gate_up, out))
    return out


def rotate(heads: Tensor, num_turning: int, cosines: Tensor, sines: Tensor) -> None:
    """Turn the first heads of each token, in place: [N, heads, D], cosines and sines float32 [N, 1, D / 2]."""
    shape = len(heads), heads.shape[2] // 2
    angles = {(part.dtype, part.numel()) for part in (cosines, sines)}
    if angles != {(torch.float32, math.prod(shape))} or not 0 <= num_turning <= heads.shape[1]:
        raise ValueError(
            f"rotate {num_turning} of heads {list(heads.shape)} by {cosines.dtype} {list(cosines.shape)}, {list(sines.shape)}"
        )
    _run("rotate", heads.dtype, shape, (heads, cosines, sines), heads.shape[1], num_turning)


def _run(name: str, dtype: torch.dtype, shape: Sequence[int], tensors: Sequence[Tensor], *more: int) -> None:
    """Raises: ValueError for tensors that are not contiguous on a CPU, and for rows that are no whole vectors."""
    width = vector_width()
    addresses = [tensor.data_ptr() for tensor in tensors if tensor.is_contiguous() and tensor.is_cpu]
    if width is None or shape[1] % width or len(addresses) < len(tensors):
        described = ", ".join(f"{list(tensor.shape)} of strides {tensor.stride()} on {tensor.device}" for tensor in tensors)
        raise ValueError(f"{name}: not contiguous on a CPU, or no whole vectors: {described}")
    num_threads = available_threads() if tensors[0].numel() >= _LEAST_WORK else 1
    _kernel(name, dtype).run((1, *shape, *addresses, *more), num_threads)


@cache
def _kernel(name: str, dtype: torch.dtype) -> Kernel:
    width = vector_width()
    assert width is not None
    return load_kernel(f"{name}-{STORED[dtype]}", _KINDS[name](STORED[dtype], width), 1)


class _Rows(ABC):
    """Emits an operation on some rows. The words are 1, N, the length of a row, and then the addresses of the tensors."""

    most_rows = 1

    def __init__(self, stored: ir.Type, width: int) -> None:
        self._stored, self._width, self._floats = stored, width, ir.VectorType(FLOAT, width)

    def emit(self, builder: ir.IRBuilder, num_rows: int, arguments: Sequence[ir.Value]) -> None:
        words, _, start, stop = arguments
        with loop(builder, start, stop, 1) as row:
            self.emit_row(builder, words, row, load_word(builder, words, 2))

    @abstractmethod
    def emit_row(self, builder: ir.IRBuilder, words: ir.Value, row: ir.Value, length: ir.Value) -> None:
        """Emit the operation on one row."""

    def load(self, builder: ir.IRBuilder, base: ir.Value, place: ir.Value) -> ir.Value:
        """A vector in float32."""
        return load_floats(builder, base, place, self._width, self._stored)

    def store(self, builder: ir.IRBuilder, value: ir.Value, base: ir.Value, place: ir.Value) -> None:
        bits = value if isinstance(self._stored, ir.FloatType) else to_bfloat16(builder, value)
        builder.store(bits, address(builder, base, place, self._stored), align=1)


class _Norm(_Rows):
    def emit_row(self, builder: ir.IRBuilder, words: ir.Value, row: ir.Value, length: ir.Value) -> None:
        x, weight, out, epsilon = (load_word(builder, words, index, POINTER) for index in range(3, 7))
        self.emit_norm(builder, builder.mul(row, length), length, None, x, weight, out, epsilon)

    def emit_norm(
        self,
        builder: ir.IRBuilder,
        first: ir.Value,
        length: ir.Value,
        added: ir.Value | None,
        x: ir.Value,
        weight: ir.Value,
        out: ir.Value,
        epsilon: ir.Value,
    ) -> None:
        """The norm of the row of x that begins at ``first``, to which that of another tensor is ``added`` before."""
        [[squares]] = new_sums(builder, 1, 1, self._floats)
        clear(builder, [[squares]], self._floats)
        with loop(builder, constant(0), length, self._width) as column:
            place = builder.add(first, column)
            if added is not None:
                self.store(builder, builder.fadd(self.load(builder, x, place), self.load(builder, added, place)), x, place)
            value = self.load(builder, x, place)  # as it is rounded
            add_product(builder, squares, value, value)
        total = reduce(builder, builder.load(squares, typ=self._floats), builder.fadd)
        mean = builder.fadd(builder.fdiv(total, builder.uitofp(length, FLOAT)), builder.load(epsilon, align=4, typ=FLOAT))
        size = call_intrinsic(builder, "llvm.sqrt.f32", FLOAT, [mean])
        scale = spread(builder, builder.fdiv(ir.Constant(FLOAT, 1.0), size), self._width)
        with loop(builder, constant(0), length, self._width) as column:
            place = builder.add(first, column)
            scaled = builder.fmul(self.load(builder, x, place), scale)
            self.store(builder, builder.fmul(scaled, self.load(builder, weight, column)), out, place)


class _AddNorm(_Norm):
    def emit_row(self, builder: ir.IRBuilder, words: ir.Value, row: ir.Value, length: ir.Value) -> None:
        added, residual, weight, out, epsilon = (load_word(builder, words, index, POINTER) for index in range(3, 8))
        self.emit_norm(builder, builder.mul(row, length), length, added, residual, weight, out, epsilon)


class _SiluMul(_Rows):
    def emit_row(self, builder: ir.IRBuilder, words: ir.Value, row: ir.Value, length: ir.Value) -> None:
        gate_up, out = (load_word(builder, words, index, POINTER) for index in (3, 4))
        first = builder.mul(row, length)
        with loop(builder, constant(0), length, self._width) as column:
            place = builder.add(builder.add(first, first), column)
            gate, up = (self.load(builder, gate_up, other) for other in (place, builder.add(place, length)))
            self.store(builder, builder.fmul(silu(builder, gate), up), out, builder.add(first, column))


class _Rotate(_Rows):
    """The length of a row is that of half a head. The words after the addresses are the heads of a token, and how many turn."""

    def emit_row(self, builder: ir.IRBuilder, words: ir.Value, row: ir.Value, length: ir.Value) -> None:
        heads, cosines, sines = (load_word(builder, words, index, POINTER) for index in (3, 4, 5))
        num_heads, num_turning = (load_word(builder, words, index) for index in (6, 7))
        angles, first = builder.mul(row, length), builder.mul(row, num_heads)
        with loop(builder, constant(0), num_turning, 1) as head:
            begin = builder.mul(builder.add(first, head), builder.add(length, length))
            with loop(builder, constant(0), length, self._width) as column:
                places = builder.add(begin, column), builder.add(builder.add(begin, column), length)
                low, high = (self.load(builder, heads, place) for place in places)
                angle = builder.add(angles, column)
                cosine, sine = (load_vector(builder, base, angle, self._width) for base in (cosines, sines))
                self.store(builder, multiply_add(builder, low, cosine, builder.fneg(builder.fmul(high, sine))), heads, places[0])
                self.store(builder, multiply_add(builder, high, cosine, builder.fmul(low, sine)), heads, places[1])


_KINDS: dict[str, type[_Rows]] = {"add_norm": _AddNorm, "norm": _Norm, "silu_mul": _SiluMul, "rotate": _Rotate}
