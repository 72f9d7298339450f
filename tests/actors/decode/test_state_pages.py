"""Which pages of recurrent states a step reads and writes: whoever steps, the count alone says it."""

import random

import msgspec
import numpy as np
import pytest
import torch

from mmrt.actors.decode.state_pages import step_states
from mmrt.models.architecture import DeltaConfig, LayerConfig, ModelConfig
from mmrt.models.lm.decoder import StateRows
from mmrt.shm.run_directory import RunDirectory
from mmrt.shm.sequence_table import SequenceTable
from mmrt.tests.actors.bench import PAGE_TOKENS, Bench, Counting, Weights


def test_states_of_a_step(run: RunDirectory) -> None:
    """A state of the last border is in the slot of the prefilled tokens' border, or in the other one, in turns."""
    table = SequenceTable.create(run, 4, 256, 16)
    for row in (1, 3):
        table.begin(row)
        assert (table.state_table[row] == -1).all() and (table.log_page[row] == -1).all()
    table.set_state_pages(1, 0, [10, 11], 5)
    table.set_state_pages(1, 1, [12, 13], 6)
    table.set_state_pages(3, 0, [14, 15], 7)
    table.set_prefilled(1, 0, 40, slot=1)
    table.set_prefilled(1, 1, 7)
    table.set_prefilled(3, 0, 31, slot=0)
    assert table.num_prefilled(1) == (40, 7)
    rows, members = np.array([1, 3, 1]), np.array([0, 0, 1])
    states = step_states(table, rows, members, np.array([41, 32, 8]), 16)
    assert states.rows.bases.tolist() == [11, 14, 12] and states.rows.logs.tolist() == [5, 7, 6]
    assert (states.full, states.borders, states.targets) == ([1], [32], [15])
    later = step_states(table, rows, members, np.array([49, 33, 64]), 16)
    assert later.rows.bases.tolist() == [10, 15, 13]
    assert (later.full, later.borders, later.targets) == ([2], [64], [12])
    assert later.full_rows.bases.tolist() == [13] and later.full_rows.logs.tolist() == [6]


def test_a_row_without_states_is_not_stepped(run: RunDirectory) -> None:
    """Page -1 would be the last one, which is another row's."""
    table = SequenceTable.create(run, 4, 256, 16)
    table.begin(1)
    for states, log in (([10, 11], -1), ([10, -1], 5)):
        table.set_state_pages(1, 0, states, log)
        with pytest.raises(AssertionError, match="a row in decode"):
            step_states(table, np.array([1]), np.array([0]), np.array([8]), 16)


class Remembering(Counting):
    """Its states are the tokens that they have seen: pages of bases and entries of logs, which outlive every process."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__(vocab_size)
        self.bases: dict[int, int] = {}  # page -> tokens absorbed
        self.logs: dict[int, dict[int, int]] = {}  # page -> place in the ring -> token's index

    def decode(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        lengths: torch.Tensor,
        block_tables: torch.Tensor,
        states: StateRows | None = None,
        window_tables: torch.Tensor | None = None,
    ) -> torch.Tensor:
        assert states is not None
        for base, log, place in zip(states.bases.tolist(), states.logs.tolist(), (lengths - 1).tolist(), strict=True):
            border = place // PAGE_TOKENS * PAGE_TOKENS
            assert self.bases[base] == border, f"the state of {border} is lost"
            assert [self.logs[log].get(at % PAGE_TOKENS) for at in range(border, place)] == list(range(border, place))
            self.logs[log][place % PAGE_TOKENS] = place
        return super().decode(ids, positions, lengths, block_tables)

    def fold(self, borders: list[int], states: StateRows, targets: list[int]) -> None:  # type: ignore[override]
        for border, base, target in zip(borders, states.bases.tolist(), targets, strict=True):
            assert self.bases[base] == border - PAGE_TOKENS and target != base
            self.bases[target] = border


def test_steps_that_die_before_their_commit(run: RunDirectory, tiny: tuple[ModelConfig, Weights]) -> None:
    """A pair and a row alone: the next decode finds the states of its predecessor's last commit."""
    config = tiny[0]
    mixer = DeltaConfig(num_key_heads=1, num_value_heads=1, key_dim=8, value_dim=8)
    delta = LayerConfig(mixer=mixer, feed_forward=config.language.layers[0].feed_forward)
    config = msgspec.structs.replace(config, language=msgspec.structs.replace(config.language, layers=(delta, *config.language.layers)))
    model = Remembering(config.language.vocab_size)
    bench = Bench(run, config, {}, model)
    lengths = {0: (21, 6), 1: (48, 0)}
    rows = [
        bench.place([3] * lengths[0][0], [4] * lengths[0][1], row=0, max_new_tokens=60),
        bench.place([5] * 48, row=1, max_new_tokens=60),
    ]
    for row in rows:
        bench.grant_all(row)
        for member, length in enumerate(filter(None, lengths[row.row])):
            place = 4 * row.row + 2 * member
            bench.table.set_state_pages(row.row, member, [place, place + 1], place)
            bench.table.set_prefilled(row.row, member, length - 1, slot=member)
            model.bases[place + member] = (length - 1) // PAGE_TOKENS * PAGE_TOKENS
            model.logs[place] = {at % PAGE_TOKENS: at for at in range(model.bases[place + member], length - 1)}
        bench.to_decode(row)
    dice, dies = random.Random(3), []
    commit = bench.table.commit

    def dying(*arguments: np.ndarray) -> np.ndarray:
        if dice.random() < 0.4:
            raise KeyboardInterrupt
        return commit(*arguments)

    bench.table.commit = dying  # type: ignore[method-assign]
    while bench.running.rows:
        try:
            bench.running.step()
        except KeyboardInterrupt:
            dies.append(bench.committed(rows[0]))
            bench.new_running_set()
            for row in rows:
                bench.running.add(*row.place)
    assert len(dies) > 20 and all(len(bench.committed(row)) == 60 for row in rows)
