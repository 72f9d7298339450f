"""A decoder's matrices, by the format in which they are kept (``ModelConfig.weights``): where they are multiplied and looked up.

No process packs a copy of its own: all formats lie in the memory that the run's processes share, so a restarted process has them at
once, and prefill and decode have one copy. Shapes: M rows of activations, N rows of the matrix, K columns.

int8 is multiplied by activations in int8 (W8A8) where the processor has the instructions for it (VNNI, AMX): a row's numbers do not
depend on how many are beside it. Elsewhere torch's kernels for int8, and everywhere those for int4, have vector instructions for
activations and results in bfloat16 alone; they add up in float32. Many rows are multiplied by blocks, which is faster. Blocks round
activations in float32 to bfloat16, as those kernels do, so that a row's numbers do not depend on how many are beside it.
Under activations in bfloat16 they still do: a block rounds its products (int8) or its weights (int4) as well.
"""

from functools import cache
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from ..checkpoint.int4 import unpack
from ..checkpoint.narrowing import MOST
from ..checkpoint.weight_specs import scales_of

_BLOCK_BYTES = 1 << 20  # of a matrix's block in the dtype of the activations: it stays in the cache of a core
_MANY_ROWS = 64  # of activations: from so many on, twice as large blocks are faster
_BLOCK_ROWS = 64  # a block has a multiple of so many rows, and is larger where these alone are
_KERNEL_COLUMNS = 32  # torch's kernel for int8 takes so many at once, and does not check that there are as many
_HAS_AVX512 = torch.backends.cpu.get_cpu_capability() == "AVX512"
_FEW_ROWS = 10 if _HAS_AVX512 else 16  # of activations: up to so many, that kernel is faster than blocks
_MOST_OF_RMS = 16  # an outlier is more than so many times the root mean square of its row
_LEAST = 1e-30  # in a row whose numbers are all smaller, they may be rounded to zero
_TRIED = 64  # rows and columns of the product by which exactness is tried
_FEW_ROWS_INT4 = 48  # as _FEW_ROWS, of torch's kernel for int4


class Matrix(Protocol):
    """A matrix [N, K]."""

    def product(self, x_MK: Tensor, bias: Tensor | None = None) -> Tensor:
        """x W^T + bias, [M, N], in the dtype of ``x``. A row of the result depends on that row of ``x`` alone, but for the order of
        sums, which depends on M."""
        ...

    def rows_from(self, first: int) -> "Matrix":
        """The matrix of rows [first, N); ``first`` is the first row of a source of the tensor (``weight_specs``)."""
        ...


class Table(Matrix, Protocol):
    """A matrix with a row for each token."""

    def lookup(self, ids: Tensor, dtype: torch.dtype) -> Tensor:
        """Rows of the matrix, [..., K]."""
        ...


def matrix_of(weights: dict[str, Tensor], name: str, dtype: torch.dtype) -> Matrix:
    """The matrix of this name, to be multiplied with activations in ``dtype``."""
    values = weights[name]
    return Int4Matrix(values, weights[scales_of(name)]) if values.dtype == torch.uint8 else table_of(weights, name, dtype)


def table_of(weights: dict[str, Tensor], name: str, dtype: torch.dtype) -> Table:
    """As ``matrix_of``, for a matrix that is no int4."""
    values = weights[name]
    if values.dtype == torch.int8:
        form = W8A8Matrix if sums_are_exact() else Int8Matrix
        return form(values, weights[scales_of(name)])
    return PlainMatrix(values) if values.dtype == dtype else HalfMatrix(values)


class PlainMatrix:
    """Kept in the dtype of the activations, on any device."""

    def __init__(self, values: Tensor) -> None:
        self._values = values

    def product(self, x_MK: Tensor, bias: Tensor | None = None) -> Tensor:
        return F.linear(x_MK, self._values, bias)

    def lookup(self, ids: Tensor, dtype: torch.dtype) -> Tensor:
        return F.embedding(ids, self._values)

    def rows_from(self, first: int) -> Table:
        return PlainMatrix(self._values[first:])


class HalfMatrix:
    """Kept in bfloat16 or float16, multiplied in float32."""

    def __init__(self, values: Tensor) -> None:
        self._values = values

    def product(self, x_MK: Tensor, bias: Tensor | None = None) -> Tensor:
        out = _product_by_blocks(x_MK, self._values)
        return out if bias is None else out.add_(bias)

    def lookup(self, ids: Tensor, dtype: torch.dtype) -> Tensor:
        return F.embedding(ids, self._values).to(dtype)

    def rows_from(self, first: int) -> Table:
        return HalfMatrix(self._values[first:])


class Int8Matrix:
    """Kept in int8 with a scale in bfloat16 for each row, multiplied by activations in bfloat16."""

    def __init__(self, values: Tensor, scales: Tensor) -> None:
        self._values, self._scales = values, scales

    def product(self, x_MK: Tensor, bias: Tensor | None = None) -> Tensor:
        if x_MK.shape[0] <= _FEW_ROWS and x_MK.shape[1] % _KERNEL_COLUMNS == 0:
            out = torch._weight_int8pack_mm(x_MK.bfloat16(), self._values, self._scales).to(x_MK.dtype)
        else:
            out = _rounded(_product_by_blocks(_rounded(x_MK), self._values).mul_(self._scales.to(x_MK.dtype)))
        return out if bias is None else out.add_(bias)

    def lookup(self, ids: Tensor, dtype: torch.dtype) -> Tensor:
        return F.embedding(ids, self._values).to(dtype).mul_(F.embedding(ids, self._scales.unsqueeze(1)))

    def rows_from(self, first: int) -> Table:
        return type(self)(self._values[first:], self._scales[first:])


class W8A8Matrix(Int8Matrix):
    """As ``Int8Matrix``, multiplied by activations in int8: a row of the result is the same bits in any batch."""

    def __init__(self, values: Tensor, scales: Tensor) -> None:
        super().__init__(values, scales)
        self._steps = scales.float()

    def product(self, x_MK: Tensor, bias: Tensor | None = None) -> Tensor:
        parts = round_rows(x_MK)
        num_values = self._values.shape[0]
        num_rows = max(1, _BLOCK_BYTES // (4 * parts.codes.shape[0] * _BLOCK_ROWS)) * _BLOCK_ROWS  # sums of a block stay in cache
        if num_rows >= num_values:
            out = self._block(parts, slice(None)).to(x_MK.dtype)
        else:
            out = x_MK.new_empty(x_MK.shape[0], num_values)
            for first in range(0, num_values, num_rows):
                rows = slice(first, first + num_rows)
                out[:, rows] = self._block(parts, rows)
        return out if bias is None else out.add_(bias)

    def _block(self, parts: "Parts", rows: slice) -> Tensor:
        """Products with some rows of the matrix, float32."""
        sums = torch._int_mm(parts.codes, self._values[rows].t()).float().mul_(self._steps[rows]).mul_(parts.steps)
        if parts.split is None:
            return sums
        first, second = sums.tensor_split([len(sums) - len(parts.split)])
        return first.index_add_(0, parts.split, second)


class Int4Matrix:
    """Kept in int4 in groups of columns, in the layout of torch's kernel (``checkpoint.int4``)."""

    def __init__(self, packed: Tensor, scales: Tensor) -> None:
        self._packed, self._scales = packed, scales.contiguous()
        self._group = 2 * packed.shape[1] // scales.shape[0]

    def product(self, x_MK: Tensor, bias: Tensor | None = None) -> Tensor:
        if x_MK.shape[0] <= _FEW_ROWS_INT4:
            product = torch.ops.aten._weight_int4pack_mm_for_cpu
            out: Tensor = product(x_MK.bfloat16(), self._packed, self._group, self._scales).to(x_MK.dtype)
        else:
            out = _rounded(self._product_by_blocks(_rounded(x_MK)))
        return out if bias is None else out.add_(bias)

    def rows_from(self, first: int) -> Matrix:
        return Int4Matrix(self._packed[first:], self._scales[:, first:])

    def _product_by_blocks(self, x_MK: Tensor) -> Tensor:
        num_values, num_inputs = self._packed.shape[0], x_MK.shape[1]
        num_rows = _block_rows(x_MK)
        out = x_MK.new_empty(x_MK.shape[0], num_values)
        block = x_MK.new_empty(num_inputs * min(num_rows, num_values))
        for first in range(0, num_values, num_rows):
            rows = slice(first, min(first + num_rows, num_values))
            values_KR = block[: num_inputs * (rows.stop - first)].view(num_inputs, -1)
            unpack(self._packed[rows], self._scales[:, rows], values_KR)
            torch.mm(x_MK, values_KR, out=out[:, rows])
        return out


class Parts(NamedTuple):
    """Rows of activations in int8. A row is its part's codes x steps, plus those of its second part if it has one."""

    codes: Tensor  # int8 [P, K], P >= M: a part of each row, then the second ones
    steps: Tensor  # float32 [P, 1]
    split: Tensor | None  # int64 [P - M]: the rows that have a second part


def round_rows(x_MK: Tensor) -> Parts:
    """Round each row by itself. Its largest number is 127 steps. Where that leaves too few steps for the others, because the largest is
    an outlier, a second part holds what the first leaves, in steps 254 times as fine."""
    x = x_MK.float()
    most = torch.linalg.vector_norm(x, float("inf"), 1, keepdim=True)
    steps = most.clamp(min=_LEAST).div_(MOST)
    scaled = x / steps
    codes = scaled.round()
    has_outlier = most > torch.linalg.vector_norm(x, 2, 1, keepdim=True).mul_(_MOST_OF_RMS / x.shape[1] ** 0.5)
    if not has_outlier.any():
        return Parts(codes.to(torch.int8), steps, None)
    split = has_outlier.squeeze(1).nonzero().squeeze(1)
    left = scaled[split].sub_(codes[split]).mul_(2 * MOST).round_()
    return Parts(torch.cat([codes, left]).to(torch.int8), torch.cat([steps, steps[split] / (2 * MOST)]), split)


@cache
def sums_are_exact() -> bool:
    """Return whether products of int8 are added up exactly. Without an instruction that adds in 32 bits, oneDNN adds pairs of them in
    16 bits and cuts larger sums. ONEDNN_MAX_CPU_ISA also limits what it uses, so a product is tried."""
    largest = torch.full((_TRIED, _TRIED), MOST, dtype=torch.int8)
    expected = _TRIED * MOST * MOST
    return all(bool((torch._int_mm(largest[:rows], largest.t()) == expected).all()) for rows in (1, _TRIED))


def _rounded(values: Tensor) -> Tensor:
    """The nearest numbers of bfloat16, in the dtype of ``values``."""
    return values.bfloat16().to(values.dtype)


def _block_rows(x_MK: Tensor) -> int:
    """Rows of a matrix's block in the dtype of ``x``."""
    num_bytes = _BLOCK_BYTES if x_MK.shape[0] < _MANY_ROWS else 2 * _BLOCK_BYTES
    return max(1, num_bytes // (x_MK.shape[1] * x_MK.element_size() * _BLOCK_ROWS)) * _BLOCK_ROWS


def _product_by_blocks(x_MK: Tensor, values: Tensor) -> Tensor:
    """x W^T, where W is converted to the dtype of ``x`` a block of rows at a time, into memory that stays in cache."""
    num_values, num_inputs = values.shape
    num_rows = _block_rows(x_MK)
    out = x_MK.new_empty(x_MK.shape[0], num_values)
    block = x_MK.new_empty(min(num_rows, num_values), num_inputs)
    for first in range(0, num_values, num_rows):
        rows = slice(first, min(first + num_rows, num_values))
        converted = block[: rows.stop - first].copy_(values[rows])
        torch.mm(x_MK, converted.t(), out=out[:, rows])
    return out
