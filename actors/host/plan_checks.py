"""Check by the phase words of the sequence table whether a plan is still needed."""

from ...runtime.bus.plans import Plan
from ...schema.rows import Phase
from ...shm.sequence_table import SequenceTable


def still_wanted(plan: Plan, table: SequenceTable) -> Plan | None:
    """The plan without parts for rows that have ended or belong to another request by now; None if nothing is left.

    The controller ends a row for good (cancelled, failed, late) before the plans that name it are acknowledged; then it is free.
    """

    def is_alive(row: int, row_generation: int) -> bool:
        generation, phase = table.phase(row)
        return generation == row_generation and phase not in (Phase.ENDING, Phase.FREE)

    return plan.only(is_alive)
