"""The pages of recurrent states that a step of decode reads and writes, from the words of the sequence table.

Nothing is stored for it: the count of committed ids says which of a sequence's two states is that of the last border. The controller
wrote which one it was when the prompt was prefilled, and each border since has changed it. So a decode that takes over finds what its
predecessor's last commit left, whatever that one was doing. Arrays have one element per sequence of the step, [B].
"""

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from ...models.lm.decoder import StateRows
from ...schema.rows import SNAPSHOT_SLOT
from ...shm.sequence_table import SequenceTable, split_prefilled

Ints = NDArray[np.int64]


class StepStates(NamedTuple):
    """``rows``: what the step reads. After it, before its commit, the sequences ``full`` have their next state to be written: theirs of
    ``borders``, into ``targets``."""

    rows: StateRows
    full: list[int]
    borders: list[int]
    targets: list[int]

    @property
    def full_rows(self) -> StateRows:
        return StateRows(self.rows.bases[self.full], self.rows.logs[self.full])


def step_states(table: SequenceTable, row_B: Ints, member_B: Ints, length_B: Ints, grid: int) -> StepStates:
    """``length_B``: tokens, the step's included. ``grid``: tokens between two states of a sequence."""
    assert table.log_page[row_B, member_B].min(initial=0) >= 0, "a row in decode has no log"
    assert table.state_table[row_B, member_B].min(initial=0) >= 0, "a row in decode lacks states"
    prefilled_B, slot_B = split_prefilled(table.prefilled[row_B, member_B])
    assert slot_B.max(initial=0) < SNAPSHOT_SLOT, "a row in decode has no state of its own"
    slot_B = (slot_B ^ ((length_B - 1) // grid - prefilled_B // grid)) & 1
    bases, logs = table.state_table[row_B, member_B, slot_B], table.log_page[row_B, member_B]
    full = np.flatnonzero(length_B % grid == 0)
    targets = table.state_table[row_B[full], member_B[full], 1 - slot_B[full]]
    return StepStates(
        StateRows(torch.from_numpy(bases), torch.from_numpy(logs)), full.tolist(), length_B[full].tolist(), targets.tolist()
    )
