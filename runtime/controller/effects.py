"""The effects that the pure controller emits (pure). ``actors/controller/io.py`` performs them in order: memory and journal before
messages.

The order makes a crash between any two effects harmless: everything that a message or a word refers to is in memory before it.
"""

from typing import NamedTuple

from ...schema.rows import Phase
from ..bus.messages import PageRun, ToActor
from ..pools import PoolName
from ..stage_table import InstanceId
from .records import JournalRecord


class WriteJournal(NamedTuple):
    record: JournalRecord


class SetPageGenerations(NamedTuple):
    """These pages have been allocated: a holder of an older generation of them is stale from now on."""

    pool: PoolName
    run: PageRun


class KeepEra(NamedTuple):
    """Later runs with the same files begin in this era of the caches."""

    era: bytes


class SetPageKeys(NamedTuple):
    """The contents of these pages have these names: nobody writes them any more."""

    pool: PoolName
    run: PageRun
    keys: list[bytes]
    depths: list[int]


class BeginRow(NamedTuple):
    """Give a free row its next generation, which must be this one."""

    row: int
    generation: int


class WriteState(NamedTuple):
    row: int
    state: bytes


class WriteSpec(NamedTuple):
    """``prompts``: expanded ids per member."""

    row: int
    spec: bytes
    prompts: tuple[list[int], ...]


class AppendPages(NamedTuple):
    row: int
    member: int
    pages: list[int]


class AppendSourcePages(NamedTuple):
    """Pages of the pool in which the row is prefilled, where that is not its own."""

    row: int
    member: int
    pages: list[int]


class ClearSource(NamedTuple):
    """The row no longer holds pages of another pool than its own."""

    row: int


class ClearPages(NamedTuple):
    """The row no longer holds KV pages, of any pool: block tables are empty, nothing is prefilled."""

    row: int


class SetPrefilled(NamedTuple):
    row: int
    member: int
    num_tokens: int


class SetPhase(NamedTuple):
    row: int
    phase: Phase


class SetOwner(NamedTuple):
    """Give the row to a decode actor, or to none: one that has it leaves it at the Drop that follows."""

    row: int
    decode: InstanceId | None


class WritePlan(NamedTuple):
    slot: int
    plan_id: int
    actor: InstanceId
    payload: bytes


class ClearPlan(NamedTuple):
    slot: int


class Send(NamedTuple):
    actor: InstanceId
    generation: int
    message: ToActor


Effect = (
    WriteJournal
    | SetPageGenerations
    | SetPageKeys
    | KeepEra
    | BeginRow
    | WriteState
    | WriteSpec
    | AppendPages
    | AppendSourcePages
    | ClearSource
    | ClearPages
    | SetPrefilled
    | SetPhase
    | SetOwner
    | WritePlan
    | ClearPlan
    | Send
)
