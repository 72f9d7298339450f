"""What pages of recurrent states hold in the simulated run of ``recovery_world``.

The state of a border depends on every token before it, and so does the value of the last one in the KV cache: this is what the page
holds here. An entry of a log holds the value of its token. A state at the beginning is nothing, and nobody reads it.
"""

from collections.abc import Sequence

import numpy as np

from mmrt.actors.decode.state_pages import step_states
from mmrt.runtime.bus.copy_plans import LoadChunk, TransferChunk
from mmrt.runtime.bus.plan_base import TokenChunk
from mmrt.runtime.bus.plans import PrefillChunk
from mmrt.runtime.pools import log_pool, state_pool
from mmrt.schema.rows import SNAPSHOT_SLOT
from mmrt.shm.pool import PagePool
from mmrt.shm.sequence_table import SequenceTable
from mmrt.tests.runtime.controller.kv_contents import PAGE_TOKENS

Write = tuple[str, int, int, int, int]
"""(pool, page, generation, slot, value)."""


class StateContents:
    """The pages of states and logs of a run, and what plans and steps do to them."""

    def __init__(self, table: SequenceTable, pools: dict[str, PagePool], content: dict[str, list[dict]]) -> None:
        self._table, self._pools, self._content = table, pools, content

    def chunk(self, chunk: PrefillChunk, kv: str, values: Sequence[int], target: int) -> list[Write]:
        """Check what a chunk reads, and return what it writes. ``target``: tokens of its member that are to be prefilled."""
        assert chunk.start % PAGE_TOKENS == 0 and (chunk.end % PAGE_TOKENS == 0 or chunk.end == target), f"{chunk} is off the grid"
        bases, log, snapshot = self._pages(chunk)
        assert chunk.state_to in bases and chunk.state_from in ((*bases, snapshot) if chunk.start else (-1,)), (
            f"{chunk} has states of others"
        )
        assert chunk.state_to != chunk.state_from, "a chunk overwrites what it reads"
        assert chunk.log == (log if chunk.end == target else -1)
        if chunk.start:
            self._check_base(kv, chunk.state_from, values[chunk.start - 1])
        border = chunk.end - chunk.end % PAGE_TOKENS
        writes = [self._write(state_pool(kv), chunk.state_to, 0, values[border - 1] if border else 0)]
        if chunk.log >= 0:
            writes += [self._write(log_pool(kv), log, at % PAGE_TOKENS, values[at]) for at in range(border, chunk.end)]
        for token, page in chunk.snapshots:
            assert chunk.start < token <= chunk.end and token % PAGE_TOKENS == 0 and page not in bases
            writes.append(self._write(state_pool(kv), page, 0, values[token - 1]))
        return writes

    def check_load(self, chunk: LoadChunk) -> None:
        """A state goes to a page of its row that does not have the one of the tokens before it."""
        loaded, member = chunk.state, chunk.member
        assert loaded is not None
        bases, _, snapshot = self._pages(chunk)
        slot = self._table.state_slots(chunk.row)[member]
        current = snapshot if slot == SNAPSHOT_SLOT else bases[slot]
        assert loaded.target in bases and loaded.snapshot not in bases
        has_tokens = self._table.num_prefilled(chunk.row)[member] > 0
        assert not has_tokens or loaded.target != current, "the state of prefilled tokens is overwritten"

    def _pages(self, chunk: TokenChunk) -> tuple[tuple[int, int], int, int]:
        has_source = len(self._table.source_pages(chunk.row, chunk.member)) > 0
        return (self._table.source_state_pages if has_source else self._table.state_pages)(chunk.row, chunk.member)

    def transfer(self, chunk: TransferChunk, source: str, kv: str, values: Sequence[int], target: int) -> list[Write]:
        """Check what a copy reads, and return what it writes: with the last tokens of a member their state and their log."""
        if chunk.end < target:
            assert chunk.state is None and chunk.log is None
            return []
        assert chunk.state is not None and chunk.log is not None
        ours, theirs = (pages_of(chunk.row, chunk.member) for pages_of in (self._table.state_pages, self._table.source_state_pages))
        slot = self._table.state_slots(chunk.row)[chunk.member]
        assert chunk.state == (theirs[0][slot], ours[0][slot]) and chunk.log == (theirs[1], ours[1])
        border = target - target % PAGE_TOKENS
        if border:
            self._check_base(source, chunk.state[0], values[border - 1])
        writes = [self._write(state_pool(kv), chunk.state[1], 0, values[border - 1] if border else 0)]
        for at in range(border, target):
            self._check_log(source, chunk.log[0], at, values[at])
            writes.append(self._write(log_pool(kv), chunk.log[1], at % PAGE_TOKENS, values[at]))
        return writes

    def token(self, row: int, member: int, kv: str, values: Sequence[int]) -> list[Write]:
        """Check what a step reads for a member that has so many tokens, the step's included, and return what it writes."""
        length = len(values)
        step = step_states(self._table, np.array([row]), np.array([member]), np.array([length]), PAGE_TOKENS)
        (base,), (log,) = step.rows.bases.tolist(), step.rows.logs.tolist()
        last = length - 1
        border = last - last % PAGE_TOKENS
        if border:
            self._check_base(kv, base, values[border - 1])
        for at in range(border, last):
            self._check_log(kv, log, at, values[at])
        writes = [self._write(log_pool(kv), log, last % PAGE_TOKENS, values[last])]
        if step.full:
            assert step.borders == [length] and step.targets != [base]
            writes.append(self._write(state_pool(kv), step.targets[0], 0, values[last]))
        return writes

    def _check_base(self, kv: str, page: int, value: int) -> None:
        found = self._content[state_pool(kv)][page].get(0)
        assert found == value, f"a state is {found} where {value} should be"

    def _check_log(self, kv: str, page: int, at: int, value: int) -> None:
        found = self._content[log_pool(kv)][page].get(at % PAGE_TOKENS)
        assert found == value, f"a log holds {found} where {value} should be"

    def _write(self, pool: str, page: int, slot: int, value: int) -> Write:
        return pool, page, int(self._pools[pool].generations[page]), slot, value
