"""Consistent reads of rows and plans outside the controller. Used by ``inspect`` and by captures.

A row that is reassigned while it is read is read again.
"""

from collections.abc import Sequence
from typing import NamedTuple

from ...schema.rows import EndCode, Phase
from ...shm.errors import StaleRow
from ...shm.plan_table import PlanTable
from ...shm.sequence_table import SequenceTable
from ..bus.messages import SequenceSpec, decode_sequence_spec
from ..bus.plan_base import RowKey
from ..bus.plans import Plan, decode_plan
from ..controller.state.row_record import RowRecord, decode_record
from ..stage_table import instance_id

_ATTEMPTS = 5


class Row(NamedTuple):
    """A consistent copy of a row."""

    row: int
    generation: int
    phase: Phase
    record: RowRecord | None
    spec: SequenceSpec | None
    block_tables: tuple[list[int], list[int]]
    prefilled: tuple[int, int]
    committed: int
    end: EndCode
    decode: str  # that owns it; "": none does

    @property
    def key(self) -> RowKey:
        """The row's name in plans."""
        return self.row, self.generation


class LivePlan(NamedTuple):
    """A plan in the plan table."""

    plan_id: int
    slot: int
    actor: str
    plan: Plan


def read_row(table: SequenceTable, row: int) -> Row | None:
    """Read the row; None if it is free or keeps changing."""
    for _ in range(_ATTEMPTS):
        generation, phase = table.phase(row)
        if phase == Phase.FREE:
            return None
        end = table.end(row, generation)
        committed = table.committed(row, generation)
        try:
            spec = decode_sequence_spec(table.read_spec(row, generation))
        except StaleRow:
            spec = None
        prefilled = table.num_prefilled(row)  # before the values that bound it, which grow
        state = table.read_state(row)
        tables = table.pages(row, 0).tolist(), table.pages(row, 1).tolist()
        owner = table.owner(row, generation)
        decode = "" if owner is None or phase != Phase.DECODE else instance_id("decode", owner)
        if table.phase(row) == (generation, phase):
            record = None if state is None else decode_record(state)
            return Row(row, generation, phase, record, spec, tables, prefilled, committed, end, decode)
    return None


def live_plans(table: PlanTable, actors: Sequence[str]) -> list[LivePlan]:
    """Return every plan in the plan table. ``actors``: those of the run, in the order of their numbers."""
    return [LivePlan(plan.plan_id, plan.slot, actors[plan.actor], decode_plan(plan.payload)) for plan in table.live()]
