"""Products with a matrix in int4 on a CPU, in integers, of any number of rows of activations (``part_tiles``).

As ``row_kernels``, in the layout of ``checkpoint.int4``. A product of a code and an activation is at most 15 x 127, so those of 32
columns are added up in 16 bits, or in 32 by instructions for it (VNNI). Shapes: M rows of activations, N rows of the matrix, K columns,
G groups.
"""

from collections.abc import Sequence
from functools import cache

from llvmlite import ir
from torch import Tensor

from ..schema.weight_layout import INT4_MIDDLE, PACKED_ROWS
from . import part_tiles
from .groups import Groups
from .kernel import Kernel, load_kernel
from .machine_code import add_pairs, add_product, add_products_of_bytes, load_vector, multiply_add, multiply_bytes
from .part_tiles import WORD, PartTiles

_HALF = PACKED_ROWS // 2  # rows in one half of a block's bytes


def has_kernel(packed: Tensor) -> bool:
    """Return whether ``multiply`` takes a matrix in int4. A process's first one makes the kernel."""
    return part_tiles.can_run(packed) and _kernel() is not None


def multiply(x_MK: Tensor, packed: Tensor, scales: Tensor) -> Tensor:
    """As ``part_tiles.multiply``, of a matrix [N, K / 2] with its scales [N, G, 2]."""
    return part_tiles.multiply(_kernel(), x_MK, packed, scales, 2 * packed.shape[1])


def multiply_groups(x_MK: Tensor, packed: Tensor, scales: Tensor, groups: Groups) -> Tensor:
    """As ``part_tiles.multiply_groups``, of such a matrix."""
    return part_tiles.multiply_groups(_kernel(), x_MK, packed, scales, 2 * packed.shape[1], groups)


@cache
def _kernel() -> Kernel:
    return load_kernel("int4", _Tiles.for_this_processor(), PACKED_ROWS)


class _Tiles(PartTiles):
    bytes_of_column = _HALF

    def values_of(self, piece: int) -> tuple[int, ...]:
        return piece, piece + _HALF

    def sums_of_part(self) -> ir.VectorType:
        return self.words if self.with_vnni else ir.VectorType(ir.IntType(16), 2 * self.width)

    def codes(self, builder: ir.IRBuilder, stored: ir.Value) -> Sequence[ir.Value]:
        """Those in the lower and in the upper halves of bytes."""
        low, high = (ir.Constant(self.bytes, [number] * self.bytes.count) for number in (15, 4))
        return builder.and_(stored, low), builder.lshr(stored, high)

    def added(self, builder: ir.IRBuilder, total: ir.Value, codes: ir.Value, activations: ir.Value) -> ir.Value:
        """Products of each four columns are added up in int32 with VNNI, of each two in int16 without."""
        if self.with_vnni:
            return add_products_of_bytes(builder, total, codes, activations)
        return builder.add(total, multiply_bytes(builder, codes, activations))

    def joined(self, builder: ir.IRBuilder, total: ir.Value) -> ir.Value:
        return total if self.with_vnni else add_pairs(builder, total)

    def scales(self, builder: ir.IRBuilder, scales: ir.Value, place: ir.Value) -> tuple[ir.Value, ...]:
        """Scales of ``width`` rows, and the values of code 0. Each is the half of a word."""
        pairs = load_vector(builder, scales, place, self.width, WORD)
        shift, upper = (ir.Constant(self.words, [number] * self.width) for number in (16, -65536))
        scale = builder.bitcast(builder.shl(pairs, shift), self.floats)
        zero = builder.bitcast(builder.and_(pairs, upper), self.floats)
        return scale, multiply_add(builder, scale, ir.Constant(self.floats, [-float(INT4_MIDDLE)] * self.width), zero)

    def scaled(
        self, builder: ir.IRBuilder, variable: ir.Value, scales: tuple[ir.Value, ...], products: ir.Value, total: ir.Value
    ) -> None:
        scale, zero = scales
        add_product(builder, variable, total, zero)
        add_product(builder, variable, products, scale)
