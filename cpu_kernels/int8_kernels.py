"""Products of few rows of activations in whole numbers with a matrix in int8 on a CPU.

As ``row_kernels``, in integers: sums are exact, however long they are. Activations of 7 bits, which have a processor without
instructions for bytes (VNNI), are multiplied as bytes: pairs of products of a number from 0 to 128 with one from -127 to 127 fit into
16 bits (``int8_rows``). Those of 8 bits are widened to 16 bits with the matrix, and pairs of products to 32.
"""

import sys
from functools import cache

import torch
from llvmlite import ir
from torch import Tensor

from .choices import fastest
from .groups import Groups
from .kernel import Kernel, check_columns, load_kernel, threads_for, vector_width
from .machine_code import FLOAT, POINTER, add_pairs, address, load_vector, load_word, multiply_bytes, multiply_shorts
from .row_kernels import BLOCK_ROWS, RowTiles

_BYTE, _SHORT, _WORD = ir.IntType(8), ir.IntType(16), ir.IntType(32)
# Of activations: with more, torch's products are as fast, where they are fast at all.
_MOST_ROWS = {torch.uint8: 96, torch.int8: 4}
_TRIED = (64, 256, 512)  # M, N and K of the products that are timed


def most_rows(values: Tensor, codes: torch.dtype) -> int:
    """As that of ``row_kernels``, of a matrix in int8 and activations of this dtype, as ``multiply`` takes them."""
    width = vector_width()
    if (
        width is None
        or values.device.type != "cpu"
        or not values.is_contiguous()
        or values.numel() == 0
        or values.shape[1] % _TILES[codes](width).width
    ):
        return 0
    return _MOST_ROWS[codes] if _torch_is_fast(codes) else sys.maxsize


def multiply(codes_MK: Tensor, values: Tensor, added_N: Tensor, steps_N: Tensor, row_steps_M1: Tensor) -> Tensor:
    """(codes W^T + added) x steps x row_steps, float32 [M, N], of contiguous tensors: codes uint8 from 0 to 128 or int8 from -127 to
    127, a matrix int8 [N, K] from -127 to 127, ``added`` int32, steps float32."""
    check_columns(codes_MK, values.shape[1])
    out = torch.empty(codes_MK.shape[0], values.shape[0], dtype=torch.float32)
    tensors = codes_MK, values, out, added_N, steps_N, row_steps_M1
    words = (codes_MK.shape[0], *values.shape, *(tensor.data_ptr() for tensor in tensors))
    _kernel(codes_MK.dtype).run(words, threads_for(values.numel()))
    return out


def multiply_groups(codes_MK: Tensor, values: Tensor, added_N: Tensor, steps_N: Tensor, row_steps_M1: Tensor, groups: Groups) -> Tensor:
    """As ``multiply``, of each group of rows with its rows of the matrix: float32 [M, rows of a group's product]."""
    num_columns = values.shape[1]
    groups.check(codes_MK, *values.shape)
    out = torch.empty(codes_MK.shape[0], groups.num_values, dtype=torch.float32)
    words = groups.words(
        groups.sizes,
        groups.num_values,
        num_columns,
        groups.of_rows(codes_MK),
        groups.of_values(values),
        groups.of_rows(out),
        groups.of_values(added_N),
        groups.of_values(steps_N),
        groups.of_rows(row_steps_M1),
    )
    _kernel(codes_MK.dtype).run_all(words, groups.num_threads(num_columns))
    return out


@cache
def _torch_is_fast(codes: torch.dtype) -> bool:
    """Return whether torch multiplies many rows faster. On a processor with AVX2 alone its products of bytes can be forty times as
    slow."""
    num_rows, num_values, num_columns = _TRIED
    rows = torch.ones(num_rows, num_columns, dtype=codes)
    values = torch.ones(num_values, num_columns, dtype=torch.int8)
    added, steps, row_steps = torch.zeros(num_values, dtype=torch.int32), torch.ones(num_values), torch.ones(num_rows, 1)
    candidates = {
        "torch": lambda: torch._int_mm(rows.view(torch.int8), values.t()),
        "kernel": lambda: multiply(rows, values, added, steps, row_steps),
    }
    return fastest(f"many-rows-of-{str(codes).removeprefix('torch.')}", candidates) == "torch"


@cache
def _kernel(codes: torch.dtype) -> Kernel:
    width = vector_width()
    assert width is not None
    tiles = _TILES[codes](width)
    return load_kernel(tiles.name, tiles, BLOCK_ROWS)


class _ByteTiles(RowTiles):
    """Of codes uint8."""

    name = "int8"
    at_once = {1: 6, 2: 4, 3: 3, 4: 2}
    num_products = 4  # in each of the sums of a vector

    def __init__(self, floats: int) -> None:
        super().__init__(_BYTE, self.num_products * floats)
        self.sums = ir.VectorType(_WORD, floats)

    @property
    def width(self) -> int:
        """Columns at once: a row of the matrix has a multiple of so many."""
        return self._width

    def activation(self, builder: ir.IRBuilder, x: ir.Value, place: ir.Value) -> ir.Value:
        return load_vector(builder, x, place, self._width, _BYTE)

    def converted(self, builder: ir.IRBuilder, values: ir.Value) -> ir.Value:
        return values

    def finished(self, builder: ir.IRBuilder, words: ir.Value, total: ir.Value, row: ir.Value, value: ir.Value) -> ir.Value:
        added, steps, row_steps = (load_word(builder, words, index, POINTER) for index in (6, 7, 8))
        whole = builder.add(total, builder.load(address(builder, added, value, _WORD), typ=_WORD))
        scaled = builder.fmul(builder.sitofp(whole, FLOAT), builder.load(address(builder, steps, value), typ=FLOAT))
        return builder.fmul(scaled, builder.load(address(builder, row_steps, row), typ=FLOAT))

    def add(self, builder: ir.IRBuilder, total: ir.Value, activation: ir.Value, weight: ir.Value) -> None:
        builder.store(builder.add(self.products(builder, activation, weight), builder.load(total, typ=self.sums)), total)

    def products(self, builder: ir.IRBuilder, activation: ir.Value, weight: ir.Value) -> ir.Value:
        """Products of neighbours, added up in int32."""
        return add_pairs(builder, multiply_bytes(builder, activation, weight))


class _ShortTiles(_ByteTiles):
    """Of codes int8."""

    name = "int8-full"
    num_products = 2

    def activation(self, builder: ir.IRBuilder, x: ir.Value, place: ir.Value) -> ir.Value:
        return self.converted(builder, super().activation(builder, x, place))

    def converted(self, builder: ir.IRBuilder, values: ir.Value) -> ir.Value:
        return builder.sext(values, ir.VectorType(_SHORT, self._width))

    def products(self, builder: ir.IRBuilder, activation: ir.Value, weight: ir.Value) -> ir.Value:
        return multiply_shorts(builder, activation, weight)


_TILES: dict[torch.dtype, type[_ByteTiles]] = {torch.uint8: _ByteTiles, torch.int8: _ShortTiles}
