"""The effects that the pure controller emits (pure). ``actors/controller/io.py`` performs them in order: memory and journal before
messages.

The order makes a crash between any two effects harmless: everything that a message or a word refers to is in memory before it.
"""

import msgspec

from ....schema.rows import Phase
from ...bus.messages import PageRun, ToActor
from ...pools import PoolName
from ...stage_table import InstanceId
from .records import JournalRecord


class _Effect(msgspec.Struct, frozen=True, array_like=True):
    """Base of all effects: they are compared and encoded by their fields, in order."""


class WriteJournal(_Effect, frozen=True):
    record: JournalRecord


class SetPageGenerations(_Effect, frozen=True):
    """These pages have been allocated: a holder of an older generation of them is stale from now on."""

    pool: PoolName
    run: PageRun


class KeepEra(_Effect, frozen=True):
    """Later runs with the same files begin in this era of the caches."""

    era: bytes


class SetPageKeys(_Effect, frozen=True):
    """The contents of these pages have these names: nobody writes them any more."""

    pool: PoolName
    run: PageRun
    keys: list[bytes]
    depths: list[int]


class BeginRow(_Effect, frozen=True):
    """Give a free row its next generation, which must be this one."""

    row: int
    generation: int


class WriteState(_Effect, frozen=True):
    row: int
    state: bytes


class WriteSpec(_Effect, frozen=True):
    """``prompts``: expanded ids per member."""

    row: int
    spec: bytes
    prompts: tuple[list[int], ...]


class AppendPages(_Effect, frozen=True):
    row: int
    member: int
    pages: list[int]


class AppendSourcePages(_Effect, frozen=True):
    """Pages of the pool in which the row is prefilled, where that is not its own."""

    row: int
    member: int
    pages: list[int]


class AppendWindowPages(_Effect, frozen=True):
    """Pages for layers with a window. Places before its first window have any page: they are not read."""

    row: int
    member: int
    pages: list[int]


class AppendSourceWindowPages(_Effect, frozen=True):
    """Likewise, of the pool in which the row is prefilled, where that is not its own."""

    row: int
    member: int
    pages: list[int]


class ClearSource(_Effect, frozen=True):
    """The row no longer holds pages of another pool than its own."""

    row: int


class ClearPages(_Effect, frozen=True):
    """The row no longer holds KV pages, of any pool: block tables are empty, nothing is prefilled."""

    row: int


class SetStatePages(_Effect, frozen=True):
    """The member has these two pages of recurrent states, this log, and begins from this snapshot: -1 is none."""

    row: int
    member: int
    states: list[int]
    log: int
    snapshot: int = -1


class SetSourceStatePages(_Effect, frozen=True):
    """The same beside the pool in which the row is prefilled, where that is not its own."""

    row: int
    member: int
    states: list[int]
    log: int
    snapshot: int = -1


class SetPrefilled(_Effect, frozen=True):
    """``slot``: which of the member's two states is that of these tokens' last border, or ``SNAPSHOT_SLOT``."""

    row: int
    member: int
    num_tokens: int
    slot: int = 0


class SetPhase(_Effect, frozen=True):
    row: int
    phase: Phase


class SetOwner(_Effect, frozen=True):
    """Give the row to a decode actor, or to none: one that has it leaves it at the Drop that follows."""

    row: int
    decode: InstanceId | None


class WritePlan(_Effect, frozen=True):
    slot: int
    plan_id: int
    actor: InstanceId
    payload: bytes


class ClearPlan(_Effect, frozen=True):
    slot: int


class Send(_Effect, frozen=True):
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
    | AppendWindowPages
    | AppendSourceWindowPages
    | ClearSource
    | ClearPages
    | SetStatePages
    | SetSourceStatePages
    | SetPrefilled
    | SetPhase
    | SetOwner
    | WritePlan
    | ClearPlan
    | Send
)
