"""Code of ``delta_kernels``: new tokens of sequences, in steps and in prompts. Shapes: as there."""

from llvmlite import ir

from .delta_block import Mixing
from .delta_code import BASE_COLUMNS, DECAYS, KEYS, LOG_COLUMNS, NOTHING, SCRATCH, STATES, VALUES, Array, Known, Row, Shape
from .machine_code import (
    POINTER,
    address,
    constant,
    load_word,
    loop,
    minimum,
    numbers,
)


class Steps(Mixing):
    """Emits one new token of each sequence, which is appended to the log."""

    @property
    def most_new(self) -> int:
        return 1

    def absorb(self, builder: ir.IRBuilder, words: ir.Value, row: Row, index: ir.Value, head: ir.Value) -> None:
        key_heads, value_heads, key_dim, value_dim, conv_size, grid, _ = self.shape
        known = builder.urem(row.place, constant(grid))
        has_state = builder.icmp_signed(">=", row.place, constant(grid))
        keys, values, decays, columns = (self.in_page(builder, words, part, row.log) for part in (KEYS, VALUES, DECAYS, LOG_COLUMNS))
        keys = Array(address(builder, keys, builder.mul(head, constant(key_dim))), key_heads * key_dim)
        block = self.block(builder, known, constant(1), row.first, keys)
        self.prepare(builder, words, row, head, constant(0), block)
        place = builder.urem(row.place, constant(conv_size))
        new = self.new_column(builder, words, row, constant(0))
        self.copy_column(builder, head, new, self.column_at(builder, columns, place))
        states = self.in_page(builder, words, STATES, row.base)
        for number, inputs in enumerate(block.inputs):
            value_head = self.value_head(builder, head, number)
            of_head = address(builder, values, builder.mul(value_head, constant(value_dim)))
            entries = Known(Array(of_head, value_heads * value_dim), Array(address(builder, decays, value_head), value_heads))
            state = self.state(builder, states, value_head)
            self.mix(builder, words, block, value_head, inputs, entries, state, has_state)

    def column(self, builder: ir.IRBuilder, words: ir.Value, row: Row, index: ir.Value) -> ir.Value:
        is_new = builder.icmp_signed("==", index, constant(0))
        place = builder.add(row.place, index)
        is_kept = builder.icmp_signed(">=", place, constant(0))
        kept = builder.urem(builder.select(is_kept, place, constant(0)), constant(self.shape.conv_size))
        earlier = self.column_at(builder, self.in_page(builder, words, LOG_COLUMNS, row.log), kept)
        earlier = builder.select(is_kept, earlier, load_word(builder, words, NOTHING, POINTER))
        return builder.select(is_new, self.new_column(builder, words, row, constant(0)), earlier)


class Prompts(Mixing):
    """Emits new tokens that begin at a border, block by block; the base after them, and the log of what is behind it."""

    def __init__(self, shape: Shape, width: int) -> None:
        super().__init__(shape, width)
        self.tokens_at_once = width // 4

    def absorb(self, builder: ir.IRBuilder, words: ir.Value, row: Row, index: ir.Value, head: ir.Value) -> None:
        grid, key_dim, value_dim = self.shape.grid, self.shape.key_dim, self.shape.value_dim
        states = self._begin(builder, words, row, head)
        keys = Array(self.memory(builder, grid * key_dim), key_dim)
        known = Known(Array(self.memory(builder, grid * value_dim), value_dim), Array(self.memory(builder, grid), 1))
        scaled = self.memory(builder, grid * value_dim)
        has_log = builder.icmp_signed(">=", row.log, constant(0))
        yes = ir.Constant(ir.IntType(1), 1)
        with loop(builder, constant(0), row.count, grid) as begin:
            num_new = minimum(builder, builder.sub(row.count, begin), constant(grid))
            is_full = builder.icmp_signed("==", num_new, constant(grid))
            block = self.block(builder, constant(0), num_new, builder.add(row.first, begin), keys)
            self.prepare(builder, words, row, head, begin, block)
            is_logged = builder.and_(has_log, builder.not_(is_full))
            with builder.if_then(is_logged):
                self._log(builder, words, row, num_new, (KEYS, keys), head, key_dim)
            for number, (inputs, state) in enumerate(zip(block.inputs, states, strict=True)):
                value_head = self.value_head(builder, head, number)
                self.mix(builder, words, block, value_head, inputs, known, state, yes)
                with builder.if_then(is_full):
                    self.fold(builder, state, state, keys, known, scaled)
                with builder.if_then(is_logged):
                    self._log(builder, words, row, num_new, (VALUES, known.values), value_head, value_dim)
                    self._log(builder, words, row, num_new, (DECAYS, known.decays), value_head, 1)
        self._end(builder, words, row, head)

    def _begin(self, builder: ir.IRBuilder, words: ir.Value, row: Row, head: ir.Value) -> list[ir.Value]:
        """The states of the value heads, where they are computed: copies of those before, or zeros."""
        state_numbers = self.shape.state_numbers
        is_kept = builder.icmp_signed(">=", row.target, constant(0))
        number = builder.sub(constant(-1), row.target)
        place = builder.mul(number, constant(self.shape.value_heads * state_numbers))
        scratch = address(builder, load_word(builder, words, SCRATCH, POINTER), place)
        targets = builder.select(is_kept, self.in_page(builder, words, STATES, row.target), scratch)
        sources = self.in_page(builder, words, STATES, row.base)
        found = []
        for index in range(self.shape.group):
            source, target = (self.state(builder, base, self.value_head(builder, head, index)) for base in (sources, targets))
            with builder.if_else(self._is_behind(builder, row)) as (behind, at_start):
                with behind, self.vectors(builder, state_numbers) as number:
                    self.store(builder, self.load(builder, source, number), target, number)
                with at_start, self.vectors(builder, state_numbers) as number:
                    self.store(builder, numbers(self.floats, 0.0), target, number)
            found.append(target)
        return found

    def _end(self, builder: ir.IRBuilder, words: ir.Value, row: Row, head: ir.Value) -> None:
        """Keep the last columns before the border and before the next token."""
        grid, earlier = self.shape.grid, self.shape.conv_size - 1
        with builder.if_then(builder.icmp_signed(">=", row.target, constant(0))):
            end = builder.add(row.place, row.count)
            border = builder.sub(builder.sub(end, builder.urem(end, constant(grid))), row.place)
            columns = self.in_page(builder, words, BASE_COLUMNS, row.target)
            for number in range(earlier):
                source = self.column(builder, words, row, builder.add(border, constant(number - earlier)))
                self.copy_column(builder, head, source, self.column_at(builder, columns, constant(number)))
        with builder.if_then(builder.icmp_signed(">=", row.log, constant(0))):
            columns = self.in_page(builder, words, LOG_COLUMNS, row.log)
            for number in range(earlier):
                index = builder.add(row.count, constant(number - earlier))
                token = builder.add(row.place, index)
                with builder.if_then(builder.icmp_signed(">=", token, constant(0))):
                    place = builder.urem(token, constant(self.shape.conv_size))
                    self.copy_column(builder, head, self.column(builder, words, row, index), self.column_at(builder, columns, place))

    def _log(
        self,
        builder: ir.IRBuilder,
        words: ir.Value,
        row: Row,
        count: ir.Value,
        part: tuple[int, Array],
        head: ir.Value,
        length: int,
    ) -> None:
        """Copy a block's tokens to the log: a part of ``length`` numbers in each head."""
        number, array = part
        heads = self.shape.key_heads if number == KEYS else self.shape.value_heads
        page = self.in_page(builder, words, number, row.log)
        entries = Array(address(builder, page, builder.mul(head, constant(length))), heads * length)
        with loop(builder, constant(0), count, 1) as token:
            source, target = array.of(builder, token), entries.of(builder, token)
            if length == 1:
                self.store_number(builder, self.number(builder, source, constant(0)), target, constant(0))
            else:
                with self.vectors(builder, length) as place:
                    self.store(builder, self.load(builder, source, place), target, place)

    def column(self, builder: ir.IRBuilder, words: ir.Value, row: Row, index: ir.Value) -> ir.Value:
        is_new = builder.icmp_signed(">=", index, constant(0))
        kept = builder.add(index, constant(self.shape.conv_size - 1))
        earlier = self.column_at(builder, self.in_page(builder, words, BASE_COLUMNS, row.base), kept)
        earlier = builder.select(self._is_behind(builder, row), earlier, load_word(builder, words, NOTHING, POINTER))
        return builder.select(is_new, self.new_column(builder, words, row, index), earlier)

    def _is_behind(self, builder: ir.IRBuilder, row: Row) -> ir.Value:
        """Return whether tokens come before the new ones."""
        return builder.icmp_signed(">", row.place, constant(0))
