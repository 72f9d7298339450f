"""Products with a matrix in int8 in groups of 32 columns on a CPU, in integers, of any number of rows of activations (``part_tiles``).

The layout is that of ``checkpoint.int8g``. Instructions multiply bytes with a sign by bytes without one: a code gives its sign to the
activation. A pair of products is at most 2 x 128 x 127, which fits into 16 bits; pairs are added up in 32. Shapes: M rows of
activations, N rows of the matrix, K columns, G groups.
"""

from collections.abc import Sequence
from functools import cache

from llvmlite import ir
from torch import Tensor

from ..schema.weight_layout import PACKED_ROWS
from . import part_tiles
from .groups import Groups
from .kernel import Kernel, load_kernel
from .machine_code import (
    add_pairs,
    add_product,
    add_products_of_bytes,
    call_intrinsic,
    from_bfloat16,
    load_vector,
    multiply_bytes,
    with_signs,
)
from .part_tiles import PartTiles

_SHORT = ir.IntType(16)


def has_kernel(packed: Tensor) -> bool:
    """Return whether ``multiply`` takes a matrix in int8g. A process's first one makes the kernel."""
    return part_tiles.can_run(packed) and _kernel() is not None


def multiply(x_MK: Tensor, packed: Tensor, scales: Tensor) -> Tensor:
    """As ``part_tiles.multiply``, of a matrix [N, K] with its scales [N, G]."""
    return part_tiles.multiply(_kernel(), x_MK, packed, scales, packed.shape[1])


def multiply_groups(x_MK: Tensor, packed: Tensor, scales: Tensor, groups: Groups) -> Tensor:
    """As ``part_tiles.multiply_groups``, of such a matrix."""
    return part_tiles.multiply_groups(_kernel(), x_MK, packed, scales, packed.shape[1], groups)


@cache
def _kernel() -> Kernel:
    return load_kernel("int8g", _Tiles.for_this_processor(), PACKED_ROWS)


class _Tiles(PartTiles):
    bytes_of_column = PACKED_ROWS

    def values_of(self, piece: int) -> tuple[int, ...]:
        return (piece,)

    def sums_of_part(self) -> ir.VectorType:
        return self.words

    def codes(self, builder: ir.IRBuilder, stored: ir.Value) -> Sequence[ir.Value]:
        return (stored,)

    def added(self, builder: ir.IRBuilder, total: ir.Value, codes: ir.Value, activations: ir.Value) -> ir.Value:
        name = f"llvm.abs.v{self.bytes.count}i8"
        sizes = call_intrinsic(builder, name, self.bytes, [codes, ir.Constant(ir.IntType(1), 0)])  # of -128 it is 128 without a sign
        signed = with_signs(builder, activations, codes)
        if self.with_vnni:
            return add_products_of_bytes(builder, total, sizes, signed)
        return builder.add(total, add_pairs(builder, multiply_bytes(builder, sizes, signed)))

    def joined(self, builder: ir.IRBuilder, total: ir.Value) -> ir.Value:
        return total

    def scales(self, builder: ir.IRBuilder, scales: ir.Value, place: ir.Value) -> tuple[ir.Value, ...]:
        return (from_bfloat16(builder, load_vector(builder, scales, place, self.width, _SHORT)),)

    def scaled(
        self, builder: ir.IRBuilder, variable: ir.Value, scales: tuple[ir.Value, ...], products: ir.Value, total: ir.Value
    ) -> None:
        add_product(builder, variable, products, scales[0])
