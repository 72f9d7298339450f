"""Products of activations of 7 bits with a matrix in int8 on a CPU that has AVX2 but no instructions for such products (VNNI).

As ``row_kernels``, in integers: pairs of products of a number from 0 to 128 with one from -127 to 127 fit into 16 bits, so sums are
exact (``int8_rows``). This takes half as long as in float32.
"""

from functools import cache

import torch
from llvmlite import ir
from torch import Tensor

from .kernel import Kernel, check_columns, load_kernel, vector_width
from .machine_code import FLOAT, POINTER, add_pairs, address, load_vector, load_word, multiply_bytes
from .row_kernels import BLOCK_ROWS, LEAST_WORK, RowTiles

_BYTE, _WORD = ir.IntType(8), ir.IntType(32)
_MOST_ROWS = 96  # of activations: with more, torch's products are as fast


def most_rows(values: Tensor) -> int:
    """As that of ``row_kernels``, of a matrix in int8. Its rows are whole vectors of int8."""
    width = vector_width()
    if (
        width is None
        or values.device.type != "cpu"
        or not values.is_contiguous()
        or values.numel() == 0
        or values.shape[1] % (4 * width)
    ):
        return 0
    _kernel()
    return _MOST_ROWS


def multiply(codes_MK: Tensor, values: Tensor, added_N: Tensor, steps_N: Tensor, row_steps_M1: Tensor) -> Tensor:
    """(codes W^T + added) x steps x row_steps, float32 [M, N], of contiguous tensors: codes uint8 from 0 to 128, a matrix int8 [N, K]
    from -127 to 127, ``added`` int32, steps float32."""
    check_columns(codes_MK, values.shape[1])
    out = torch.empty(codes_MK.shape[0], values.shape[0], dtype=torch.float32)
    tensors = codes_MK, values, out, added_N, steps_N, row_steps_M1
    words = (codes_MK.shape[0], *values.shape, *(tensor.data_ptr() for tensor in tensors))
    _kernel().run(words, torch.get_num_threads() if values.numel() >= LEAST_WORK else 1)
    return out


@cache
def _kernel() -> Kernel:
    width = vector_width()
    assert width is not None
    return load_kernel("int8", _CodeTiles(width), BLOCK_ROWS)


class _CodeTiles(RowTiles):
    at_once = {1: 6, 2: 4, 3: 3, 4: 2}

    def __init__(self, floats: int) -> None:
        super().__init__(_BYTE, 4 * floats)
        self.sums = ir.VectorType(_WORD, floats)

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
        added = add_pairs(builder, multiply_bytes(builder, activation, weight))
        builder.store(builder.add(added, builder.load(total, typ=self.sums)), total)
