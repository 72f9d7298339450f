"""What a worker must know of a plan besides how to do it: whether anybody still needs it, and about how long it may take.

Pure but for looking at phase words in the sequence table.
"""

from ...runtime.bus.messages import Analyse, Encode, Plan, PreprocessSegment
from ...schema.rows import Phase
from ...shm.sequence_table import SequenceTable

_LINEAR = 1024  # tokens or rows up to which attention's quadratic part does not show


def still_wanted(plan: Plan, table: SequenceTable) -> Plan | None:
    """The plan without parts for rows that have ended or are somebody else's by now; None if nothing is left.

    The controller ends a row for good (cancelled, failed, late) before the plans that name it are acknowledged; then it is free.
    """

    def is_alive(row: int, row_generation: int) -> bool:
        generation, phase = table.phase(row)
        return generation == row_generation and phase not in (Phase.ENDING, Phase.FREE)

    if isinstance(plan, Analyse | PreprocessSegment):
        return plan if is_alive(plan.row, plan.row_generation) else None
    if isinstance(plan, Encode):
        parts = [part for part in plan.parts if is_alive(part.row, part.row_generation)]
        return plan if len(parts) == len(plan.parts) else Encode(parts) if parts else None
    chunks = [chunk for chunk in plan.chunks if is_alive(chunk.row, chunk.row_generation)]
    return plan if len(chunks) == len(plan.chunks) else type(plan)(chunks) if chunks else None


def cost_units(plan: Plan) -> float | None:
    """What a step over the plan costs about in proportion to; None where that cannot be told (media: their own time is limited)."""
    if isinstance(plan, Analyse | PreprocessSegment):
        return None
    if isinstance(plan, Encode):
        return sum(part.shape.num_rows * (1 + part.shape.num_rows / _LINEAR) for part in plan.parts)
    return sum((chunk.end - chunk.start) * (1 + chunk.end / _LINEAR) for chunk in plan.chunks)
