"""A decoder's matrices, by the format in which they are kept (``ModelConfig.weights``): where they are multiplied and looked up.

No process packs a copy of its own: all formats lie in the memory that the run's processes share, so a restarted process has them at
once, and prefill and decode have one copy. Shapes: M rows of activations, N rows of the matrix, K columns.

Few rows are multiplied by kernels that read a matrix as it is (``row_kernels``, ``int8_kernels``), any number of them with int4 and
int8g (``part_tiles``), many rows in float32 with a floating matrix by ``panel_kernels``, in bfloat16 by ``pair_kernels`` unless AMX
multiplies them. Others are multiplied by torch, a converted block of a narrow matrix at a time; under activations in bfloat16 a block
rounds its weights as well. torch (oneDNN) gets few different numbers of rows: it makes machine code for each. int8 is multiplied by
activations in int8 (W8A8), which are whole numbers of 8 bits, or 7 (``int8_rows``). Their sums are exact in int32, so a row's numbers
do not depend on how many are beside it; nor do they with int4 and int8g, which are multiplied by activations of 8 bits with a step for
32 columns, but for many rows in bfloat16 beside AMX (``PackedMatrix``).
Experts of a layer are parts of one matrix: kernels multiply all of them in one call (``products``).
"""

import sys
from collections.abc import Callable
from copy import copy
from functools import cache
from typing import Protocol, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from ...cpu_kernels import (
    int4_kernels,
    int8_kernels,
    int8g_kernels,
    pair_kernels,
    panel_kernels,
    row_kernels,
    scaling_kernel,
    unpacking_kernel,
)
from ...cpu_kernels.choices import fastest
from ...cpu_kernels.groups import Groups
from ...cpu_kernels.int8_rows import FULL, Parts, level_of_rows, round_rows
from ...cpu_kernels.row_kernels import most_rows
from ...schema.weight_layout import INT8G_COLUMNS
from ..checkpoint import int4, int8g
from ..checkpoint.weight_specs import scales_of

_BLOCK_BYTES = 1 << 20  # of a matrix's block in the dtype of the activations: it stays in the cache of a core
_MANY_ROWS = 64  # of activations: from so many on, twice as large blocks are faster
_SMALLEST_SIZE = 4  # of products by oneDNN: so few rows cost less than the 16 of the next size
_LEAST_SIZE, _SIZES_BITS = 16, 3  # of products by oneDNN: rows of activations, and how many sizes there are between two powers of 2
_TRIED = 512, 1024  # N and K of the products that are timed
_BLOCK_ROWS = 64  # a block has a multiple of so many rows, and is larger where these alone are


class Matrix(Protocol):
    """A matrix [N, K]."""

    @property
    def num_rows(self) -> int:
        """N."""
        ...

    def product(self, x_MK: Tensor, bias: Tensor | None = None) -> Tensor:
        """x W^T + bias, [M, N], in the dtype of ``x``. A row of the result depends on that row of ``x`` alone, but for the order of
        sums, which depends on M."""
        ...

    def products(self, x_MK: Tensor, groups: Groups, alike: bool) -> Tensor:
        """As ``product``, of each group of rows with its rows of the matrix: [M, rows of a group's product]. ``alike``: no bit of a row
        depends on the rows beside it, where there is a kernel. The groups' rows of the matrix are parts as those of ``rows``."""
        ...

    def rows(self, first: int, count: int) -> "Matrix":
        """The matrix of rows [first, first + count), without a copy; both are whole sources of the tensor (``weight_specs``)."""
        ...


class Table(Matrix, Protocol):
    """A matrix with a row for each token."""

    def lookup(self, ids: Tensor, dtype: torch.dtype) -> Tensor:
        """Rows of the matrix, [..., K]."""
        ...


def matrix_of(weights: dict[str, Tensor], name: str) -> Matrix:
    """The matrix of this name."""
    values = weights[name]
    if values.dtype != torch.uint8:
        return table_of(weights, name)
    return PackedMatrix(values, weights[scales_of(name)], int4_kernels, int4.unpack)


def table_of(weights: dict[str, Tensor], name: str) -> Table:
    """As ``matrix_of``, for a matrix that is no int4."""
    values = weights[name]
    if values.dtype != torch.int8:
        return FloatMatrix(values)
    scales = weights[scales_of(name)]
    return Int8Matrix(values, scales) if scales.dim() == 1 else PackedTable(values, scales, int8g_kernels, int8g.unpack)


class FloatMatrix:
    """``values`` are kept in a floating dtype, on any device. On a CPU it may be narrower than the activations, which are then in
    float32."""

    def __init__(self, values: Tensor) -> None:
        self.values = values
        self._few_rows, self._few_rows_bfloat16 = most_rows(values), most_rows(values, torch.bfloat16)
        self._has_panels = panel_kernels.can_multiply(values)
        self._has_pairs = not _has_amx() and pair_kernels.can_multiply(values)

    def product(self, x_MK: Tensor, bias: Tensor | None = None) -> Tensor:
        if x_MK.shape[0] <= self._most_rows(x_MK):
            out = _in_dtype(row_kernels.multiply(x_MK, self.values), x_MK.dtype)
        elif self._has_panels and x_MK.dtype == torch.float32:
            out = panel_kernels.multiply(x_MK, self.values)
        elif self._has_pairs and x_MK.dtype == torch.bfloat16:
            return pair_kernels.multiply(x_MK, self.values, bias)
        elif x_MK.dtype == self.values.dtype:
            return F.linear(_in_few_sizes(x_MK), self.values, bias)[: len(x_MK)]
        else:
            out = _product_by_blocks(x_MK, len(self.values), lambda rows, block: block.copy_(self.values[rows]))
        return out if bias is None else out.add_(bias)

    def products(self, x_MK: Tensor, groups: Groups, alike: bool) -> Tensor:
        most = self._most_rows(x_MK)
        if most and (alike or _are_few(x_MK, groups, most)):
            return _in_dtype(row_kernels.multiply_groups(x_MK, self.values, groups), x_MK.dtype)
        if self._has_panels and x_MK.dtype == torch.float32:
            return panel_kernels.multiply_groups(x_MK, self.values, groups)
        if self._has_pairs and x_MK.dtype == torch.bfloat16:
            return pair_kernels.multiply_groups(x_MK, self.values, groups)
        return _products_one_by_one(self, x_MK, groups)

    def _most_rows(self, x_MK: Tensor) -> int:
        """Rows of activations up to which the kernel of few rows is faster than others; 0 without one."""
        return self._few_rows_bfloat16 if x_MK.dtype == torch.bfloat16 else self._few_rows

    def lookup(self, ids: Tensor, dtype: torch.dtype) -> Tensor:
        return F.embedding(ids, self.values).to(dtype)

    @property
    def num_rows(self) -> int:
        return len(self.values)

    def rows(self, first: int, count: int) -> "FloatMatrix":
        found = copy(self)  # what kernels there are does not depend on the rows
        found.values = self.values[first : first + count]
        return found


class Int8Matrix:
    """Kept in int8 with a scale in bfloat16 for each row, multiplied by activations in int8 (``int8_rows``): a row of the result is the
    same bits in any batch."""

    def __init__(self, values: Tensor, scales: Tensor) -> None:
        self._values, self._scales = values, scales
        self._level = level_of_rows()
        self._codes = torch.int8 if self._level == FULL else torch.uint8  # of few rows
        self._few_rows = int8_kernels.most_rows(values, self._codes)
        self._steps = scales.float()
        self._of_zeros = torch.zeros(values.shape[0], dtype=torch.int32)  # a row's products where it is zero
        if self._level.shift:
            zeros = torch.full((1, values.shape[1]), -self._level.shift, dtype=torch.int8)
            self._of_zeros = torch._int_mm(zeros, values.t())[0]

    def product(self, x_MK: Tensor, bias: Tensor | None = None) -> Tensor:
        shift = self._level.shift
        if x_MK.shape[0] <= self._few_rows:
            parts = round_rows(x_MK, self._level.most, shift)
            codes = parts.codes.view(self._codes)
            products = int8_kernels.multiply(codes, self._values, self._of_zeros, self._steps, parts.steps)
            out = _in_dtype(_joined(products, parts), x_MK.dtype)
        else:
            out = self._product_by_blocks(x_MK, round_rows(x_MK, self._level.most, -shift))
        return out if bias is None else out.add_(bias)

    def products(self, x_MK: Tensor, groups: Groups, alike: bool) -> Tensor:
        if not _are_few(x_MK, groups, self._few_rows):
            return _products_one_by_one(self, x_MK, groups)
        parts = round_rows(x_MK, self._level.most, self._level.shift)
        codes, steps, order = parts.codes, parts.steps, None
        if parts.split is not None:  # a second part follows its row's first, so that the group's rows of the matrix are read once
            order = torch.cat([torch.arange(len(x_MK)), parts.split]).argsort(stable=True)
            codes, steps, groups = codes[order], steps[order], groups.doubled(parts.split.numpy())
        products = int8_kernels.multiply_groups(codes.view(self._codes), self._values, self._of_zeros, self._steps, steps, groups)
        if order is not None:
            products = torch.empty_like(products).index_copy_(0, order, products)
        return _in_dtype(_joined(products, parts), x_MK.dtype)

    def lookup(self, ids: Tensor, dtype: torch.dtype) -> Tensor:
        return F.embedding(ids, self._values).to(dtype).mul_(F.embedding(ids, self._scales.unsqueeze(1)))

    @property
    def num_rows(self) -> int:
        return len(self._values)

    def rows(self, first: int, count: int) -> "Int8Matrix":
        found, taken = copy(self), slice(first, first + count)
        found._values, found._scales = self._values[taken], self._scales[taken]
        found._steps, found._of_zeros = self._steps[taken], self._of_zeros[taken]
        return found

    def _product_by_blocks(self, x_MK: Tensor, parts: Parts) -> Tensor:
        num_values, num_parts, codes = self._values.shape[0], len(parts.codes), _in_few_sizes(parts.codes)
        num_rows = max(1, _BLOCK_BYTES // (4 * num_parts * _BLOCK_ROWS)) * _BLOCK_ROWS  # sums of a block stay in cache
        out = x_MK.new_empty(num_parts, num_values, dtype=torch.float32 if parts.split is not None else x_MK.dtype)
        firsts = range(0, max(1, num_values // num_rows) * num_rows, num_rows)  # the last block also has what is left
        memory = torch.empty(len(codes) * (num_values - firsts[-1]), dtype=torch.int32)
        for first in firsts:
            rows = slice(first, first + num_rows if first < firsts[-1] else num_values)
            sums = memory[: len(codes) * (rows.stop - first)].view(len(codes), -1)
            torch._int_mm(codes, self._values[rows].t(), out=sums)
            _scale(sums[:num_parts], self._of_zeros[rows], self._steps[rows], parts.steps, out[:, rows])
        return _in_dtype(_joined(out, parts), x_MK.dtype)


def _scale(sums: Tensor, less: Tensor, steps: Tensor, row_steps: Tensor, out: Tensor) -> None:
    """As ``scaling_kernel.scale``, of any number of columns."""
    if scaling_kernel.has_kernel(out.shape[1], out.dtype):
        scaling_kernel.scale(sums, less, steps, row_steps, out)
    else:
        out.copy_(torch.mul(sums - less, steps).mul_(row_steps))


def _joined(products: Tensor, parts: Parts) -> Tensor:
    """Products of rows, from those of their parts."""
    if parts.split is None:
        return products
    first, second = products.tensor_split([len(products) - len(parts.split)])
    return first.index_add_(0, parts.split, second)


class _Kernels(Protocol):
    """A module of ``cpu_kernels``."""

    def has_kernel(self, packed: Tensor) -> bool: ...

    def multiply(self, x_MK: Tensor, packed: Tensor, scales: Tensor) -> Tensor: ...

    def multiply_groups(self, x_MK: Tensor, packed: Tensor, scales: Tensor, groups: Groups) -> Tensor: ...


class PackedMatrix:
    """Kept in integers in groups of columns, in the layout of ``checkpoint.int4`` or ``int8g``, multiplied by activations in int8 where
    there are kernels: a row of the result is the same bits in any batch. Beside AMX, many rows in bfloat16 are multiplied by blocks of
    values where trials say that it is faster; their bits, as those of a floating matrix in bfloat16, depend on the batch. ``unpack``
    writes the values of some rows to a tensor."""

    def __init__(self, packed: Tensor, scales: Tensor, kernels: _Kernels, unpack: Callable[[Tensor, Tensor, Tensor], None]) -> None:
        self._packed, self._scales, self._kernels, self._unpack = packed, scales, kernels, unpack
        self._has_kernel = kernels.has_kernel(packed)
        self._unpacks_fast = self._has_kernel and unpacking_kernel.has_kernel(packed)
        self._most_in_integers = _most_in_integers(packed.dtype) if self._unpacks_fast and _has_amx() else sys.maxsize

    def product(self, x_MK: Tensor, bias: Tensor | None = None) -> Tensor:
        if self._has_kernel and (x_MK.dtype != torch.bfloat16 or len(x_MK) <= self._most_in_integers):
            out = _in_dtype(self._kernels.multiply(x_MK, self._packed, self._scales), x_MK.dtype)
        else:
            out = self._product_by_blocks(x_MK)
        return out if bias is None else out.add_(bias)

    def products(self, x_MK: Tensor, groups: Groups, alike: bool) -> Tensor:
        if not self._has_kernel:
            return _products_one_by_one(self, x_MK, groups)
        return _in_dtype(self._kernels.multiply_groups(x_MK, self._packed, self._scales, groups), x_MK.dtype)

    @property
    def num_rows(self) -> int:
        return len(self._packed)

    def rows(self, first: int, count: int) -> Self:
        found, taken = copy(self), slice(first, first + count)
        found._packed, found._scales = self._packed[taken], self._scales[taken]
        return found

    def _product_by_blocks(self, x_MK: Tensor) -> Tensor:
        unpack = unpacking_kernel.unpack if self._unpacks_fast and x_MK.dtype == torch.bfloat16 else self._unpack
        return _product_by_blocks(x_MK, len(self._packed), lambda rows, block: unpack(self._packed[rows], self._scales[rows], block))


def _has_amx() -> bool:
    """Return whether torch multiplies bfloat16 and int8 by AMX, which has several times the speed of vectors."""
    return torch.cpu._is_amx_tile_supported()


@cache
def _most_in_integers(dtype: torch.dtype) -> int:
    """Rows of activations in bfloat16 up to which a matrix in int4 (uint8) or int8g (int8) is multiplied in integers beside AMX: few,
    or any number where that is faster. Without AMX it always was."""
    num_values, num_columns = _TRIED
    num_groups, is_int4 = num_columns // INT8G_COLUMNS, dtype == torch.uint8
    packed = torch.ones(num_values, num_columns // 2 if is_int4 else num_columns, dtype=dtype)
    scales = torch.ones((num_values, num_groups, 2) if is_int4 else (num_values, num_groups), dtype=torch.bfloat16)
    x = torch.ones(2 * _MANY_ROWS, num_columns, dtype=torch.bfloat16)
    kernels = int4_kernels if is_int4 else int8g_kernels

    def by_blocks() -> Tensor:
        return _product_by_blocks(x, num_values, lambda rows, block: unpacking_kernel.unpack(packed[rows], scales[rows], block))

    candidates = {"integers": lambda: kernels.multiply(x, packed, scales), "blocks": by_blocks}
    found = fastest(f"many-rows-by-{'int4' if is_int4 else 'int8g'}", candidates)
    return sys.maxsize if found == "integers" else _MANY_ROWS


class PackedTable(PackedMatrix):
    """In int8g."""

    def lookup(self, ids: Tensor, dtype: torch.dtype) -> Tensor:
        return int8g.unpack_rows(self._packed, self._scales, ids, dtype)


def _are_few(x_MK: Tensor, groups: Groups, most: int) -> bool:
    """Return whether groups have up to so many rows of activations, on average: one kernel multiplies all of them."""
    return len(x_MK) <= most * len(groups.sizes)


def _products_one_by_one(matrix: Matrix, x_MK: Tensor, groups: Groups) -> Tensor:
    parts = zip(torch.split(x_MK, groups.sizes.tolist()), groups.firsts.tolist(), strict=True)
    found = [matrix.rows(first, groups.num_values).product(rows) for rows, first in parts]
    return found[0] if len(found) == 1 else torch.cat(found)


def _in_dtype(values: Tensor, dtype: torch.dtype) -> Tensor:
    """As ``values.to``, which takes longer where there is nothing to do than a kernel's call."""
    return values if values.dtype == dtype else values.to(dtype)


def _in_few_sizes(x_MK: Tensor) -> Tensor:
    """The rows, with rows of zeros behind them where oneDNN would else make machine code for this number of rows: on a processor, in
    bfloat16 and int8. There are 8 sizes between two powers of 2, all multiples of 32, or 16 rows; a few rows stay as they are."""
    num_rows = len(x_MK)
    if not x_MK.is_cpu or x_MK.dtype == torch.float32 or num_rows <= _SMALLEST_SIZE:
        return x_MK
    unit = _LEAST_SIZE if num_rows <= _LEAST_SIZE else max(2 * _LEAST_SIZE, 1 << (num_rows - 1).bit_length() - 1 >> _SIZES_BITS)
    return F.pad(x_MK, (0, 0, 0, missing)) if (missing := -num_rows % unit) else x_MK


def _block_rows(x_MK: Tensor) -> int:
    """Rows of a matrix's block in the dtype of ``x``."""
    num_bytes = _BLOCK_BYTES if x_MK.shape[0] < _MANY_ROWS else 2 * _BLOCK_BYTES
    return max(1, num_bytes // (x_MK.shape[1] * x_MK.element_size() * _BLOCK_ROWS)) * _BLOCK_ROWS


def _product_by_blocks(x_MK: Tensor, num_values: int, convert: Callable[[slice, Tensor], object]) -> Tensor:
    """x W^T, where ``convert`` writes some of W's rows in the dtype of ``x``, a block at a time, to memory that stays in cache."""
    x, num_rows = _in_few_sizes(x_MK), _block_rows(x_MK)
    out = x.new_empty(x.shape[0], num_values)
    memory = x.new_empty(min(num_rows, num_values), x.shape[1])
    for first in range(0, num_values, num_rows):
        rows = slice(first, min(first + num_rows, num_values))
        block = memory[: rows.stop - first]
        convert(rows, block)
        torch.mm(x, block.t(), out=out[:, rows])
    return out[: len(x_MK)]
