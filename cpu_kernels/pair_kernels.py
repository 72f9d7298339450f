"""Products of many rows of bfloat16 with a matrix in bfloat16 on a CPU that multiplies pairs of them (AVX512-BF16).

As ``panel_kernels``, of words: two neighbouring columns of a row lie in 32 bits, which are moved as one number of float32. Sums are in
float32 and are rounded once, with the bias. torch's products (oneDNN) make machine code for each number of rows, and add up in an order
that depends on it and on the threads; here a row is the same bits beside any number of rows, with any number of threads.
Shapes: M rows of activations, N rows of the matrix, K columns.
"""

from functools import cache

import torch
from llvmlite import ir
from torch import Tensor

from .groups import Groups
from .kernel import Kernel, check_columns, has_bfloat16, load_kernel, threads_for
from .machine_code import (
    FLOAT,
    POINTER,
    add_products_of_pairs,
    address,
    clear,
    constant,
    from_bfloat16,
    load_vector,
    load_word,
    to_bfloat16,
)
from .panel_kernels import COLUMNS, Block, PanelTiles, Vectors, Words, in_panels, panel_rows
from .row_kernels import has_kernel

_SHORT = ir.IntType(16)


def can_multiply(values: Tensor) -> bool:
    """Return whether ``multiply`` takes this matrix. A process's first one makes the kernel."""
    if values.dtype != torch.bfloat16 or not has_kernel(values) or not has_bfloat16() or values.shape[1] % panel_rows():
        return False
    _kernel()
    return True


def multiply(x_MK: Tensor, values: Tensor, bias: Tensor | None = None) -> Tensor:
    """x W^T + bias, bfloat16 [M, N], of activations in bfloat16 and a matrix that has a kernel. ``bias`` bfloat16 [N]."""
    check_columns(x_MK, values.shape[1])
    x, (num_values, num_columns) = x_MK.contiguous(), values.shape
    out, sums, added = _memory(len(x), num_values, num_columns)
    if bias is not None:
        added[:num_values] = bias
    addresses = (tensor.data_ptr() for tensor in (x, values, sums, out, added))
    _kernel().run((1, num_values, num_columns // 2, len(x), out.shape[1], *addresses), threads_for(values.numel()))
    return out[:, :num_values].contiguous()


def multiply_groups(x_MK: Tensor, values: Tensor, groups: Groups) -> Tensor:
    """As ``multiply``, of each group of rows with its rows of the matrix: bfloat16 [M, rows of a group's product]."""
    x, num_columns = x_MK.contiguous(), values.shape[1]
    groups.check(x, *values.shape)
    out, sums, added = _memory(len(x), groups.num_values, num_columns)
    shape = 1, groups.num_values, num_columns // 2, groups.sizes, out.shape[1]
    addresses = groups.of_rows(x), groups.of_values(values), groups.of_rows(sums), groups.of_rows(out), added.data_ptr()
    _kernel().run_all(groups.words(*shape, *addresses), groups.num_threads(num_columns))
    return out[:, : groups.num_values].contiguous()


def _memory(num_rows: int, num_values: int, num_columns: int) -> tuple[Tensor, Tensor, Tensor]:
    """Of a product, of its sums in float32 where there are several blocks of columns, and of a bias, which is 0."""
    out = in_panels(num_rows, num_values, torch.bfloat16)
    sums = in_panels(num_rows if num_columns // 2 > COLUMNS else 0, num_values)
    return out, sums, torch.zeros(out.shape[1], dtype=torch.bfloat16)


@cache
def _kernel() -> Kernel:
    tiles = _PairTiles(FLOAT, panel_rows())
    return load_kernel("pairs", tiles, tiles.block_rows, with_bfloat16=True)


class _PairTiles(PanelTiles):
    """The words are 1, N, K / 2, M, the product's columns, and the addresses of x, the matrix, sums in float32 (where there are several
    blocks of columns), the product, and the bias, which has as many columns."""

    rows_at_once, unrolled = 12, 1  # 24 of 32 registers are sums; unrolled code would need more than the others

    def _begin(self, builder: ir.IRBuilder, words: Words, block: Block, places: Vectors, sums: Vectors) -> None:
        is_first = builder.icmp_unsigned("==", block.first, constant(0))
        with builder.if_else(is_first) as (first, later):
            with first:
                clear(builder, sums, self._floats)
            with later:
                super()._begin(builder, words, block, places, sums)

    def _finish(self, builder: ir.IRBuilder, words: Words, block: Block, places: Vectors, sums: Vectors) -> None:
        is_last = builder.icmp_unsigned("==", block.end, words.num_columns)
        with builder.if_else(is_last) as (last, before):
            with last:
                self._round(builder, words, places, sums)
            with before:
                super()._finish(builder, words, block, places, sums)

    def _round(self, builder: ir.IRBuilder, words: Words, places: Vectors, sums: Vectors) -> None:
        """Write sums with the bias."""
        out, bias = (load_word(builder, words.base, index, POINTER) for index in (8, 9))
        columns = [builder.urem(place, words.out_columns) for place in places[0]]
        added = [from_bfloat16(builder, load_vector(builder, bias, column, self._width, _SHORT)) for column in columns]
        for of_row, totals in zip(places, sums, strict=True):
            for place, total, more in zip(of_row, totals, added, strict=True):
                found = builder.fadd(builder.load(total, typ=self._floats), more)
                builder.store(to_bfloat16(builder, found), address(builder, out, place, _SHORT), align=2)

    def _add(self, builder: ir.IRBuilder, total: ir.Value, one: ir.Value, other: ir.Value) -> None:
        add_products_of_pairs(builder, total, one, other)
