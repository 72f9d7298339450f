"""Emits attention as ``flash_items``, of bfloat16 on a CPU that multiplies pairs of them (AVX512-BF16).

Two neighbouring numbers lie in 32 bits, which are moved as one number of float32: columns of queries and keys; of weights and values
those of two keys. Scores, their exponentials and sums are in float32; a weight is rounded to bfloat16 where it multiplies a value.
"""

from llvmlite import ir

from .flash_items import Block, Items, Words
from .machine_code import (
    add_products_of_pairs,
    address,
    columns,
    constant,
    exponential,
    load_vector,
    loop,
    rounded_to_bfloat16,
)

_SHORT = ir.IntType(16)
_POWERS = 5  # of the exponential's series: its error is 2^-18, that of a rounded weight 2^-9


class PairItems(Items):
    """``values`` of a block: of two keys after another, and of these by column."""

    rows_at_once, in_word, stored = 8, 2, _SHORT

    def _take_values(self, builder: ir.IRBuilder, words: Words, block: Block, memory: ir.Value) -> None:
        both = ir.Constant(
            ir.VectorType(ir.IntType(32), 2 * self._width),
            [place + self._width * key for place in range(self._width) for key in (0, 1)],
        )
        with loop(builder, constant(0), self._padded(builder, builder.sub(block.end, block.first)), self.in_word) as number:
            keys = (builder.add(builder.add(block.first, number), constant(index)) for index in range(self.in_word))
            rows = [self._row(builder, words.v, words.v_strides, block, key) for key in keys]
            to = address(builder, memory, builder.mul(number, constant(self._key_words)))
            for column, _ in columns(builder, self._head_dim, self._width):
                one, other = (load_vector(builder, row, column, self._width, _SHORT) for row in rows)
                pairs = builder.bitcast(builder.shuffle_vector(one, other, both), self._floats)
                self._store(builder, pairs, to, column)

    def _add(self, builder: ir.IRBuilder, total: ir.Value, one: ir.Value, other: ir.Value) -> None:
        add_products_of_pairs(builder, total, one, other)

    def _exponential(self, builder: ir.IRBuilder, x: ir.Value) -> ir.Value:
        return exponential(builder, x, _POWERS)

    def _store_weights(self, builder: ir.IRBuilder, weights: ir.Value, row: ir.Value, key: ir.Value) -> None:
        builder.store(rounded_to_bfloat16(builder, weights), address(builder, row, key, _SHORT), align=2)
