"""What pages of layers with a window hold in the simulated run of ``recovery_world``: values as KV pages have them, of a window alone.

What a plan or a step reads must be there when it begins, and stay the row's until it ends.
"""

from collections.abc import Callable, Sequence
from typing import Any

from mmrt.runtime.bus import plans as p
from mmrt.runtime.bus.copy_plans import LoadChunk, TransferChunk
from mmrt.runtime.controller.scheduling.types import Limits
from mmrt.runtime.pools import window_pool
from mmrt.shm.pool import PagePool
from mmrt.shm.sequence_table import SequenceTable
from mmrt.tests.runtime.controller.kv_contents import PAGE_TOKENS

READ = -1
"""The slot of an entry of writes that is none: the page is read."""


class WindowContents:
    def __init__(
        self, table: SequenceTable, pools: dict[str, PagePool], content: dict[str, list[dict[int, Any]]], limits: Limits
    ) -> None:
        self._table, self._pools, self._content, self._limits = table, pools, content, limits

    def chunk(self, chunk: p.PrefillChunk, kv: str, values: Sequence[int]) -> list[tuple[Any, ...]]:
        pages = self._table.prefill_window_pages(chunk.row, chunk.member).tolist()
        return self._entries(pages, kv, values, chunk.start, chunk.end)

    def token(self, row: int, member: int, kv: str, values: Sequence[int]) -> list[tuple[Any, ...]] | None:
        """Of the last of these; None while there is no page for it."""
        pages = self._table.window_pages(row, member).tolist()
        if len(pages) * PAGE_TOKENS < len(values):
            return None
        return self._entries(pages, kv, values, len(values) - 1, len(values))

    def transfer(
        self, chunk: TransferChunk, source: str, kv: str, values: Sequence[int], start: int, end: int
    ) -> list[tuple[Any, ...]]:
        """Of the tokens [start, end) those that the window of the first token of decode reaches, in whole pages, are copied."""
        assert chunk.windows == max(0, len(values) - self._limits.window_tokens) // PAGE_TOKENS
        theirs = self._table.source_window_pages(chunk.row, chunk.member).tolist()
        ours = self._table.window_pages(chunk.row, chunk.member).tolist()
        entries: list[tuple[Any, ...]] = []
        for at in range(max(start, chunk.windows * PAGE_TOKENS), end):
            page, target = theirs[at // PAGE_TOKENS], ours[at // PAGE_TOKENS]
            found = self._content[window_pool(source)][page].get(at % PAGE_TOKENS)
            assert found == values[at], f"a window holds {found} where {values[at]} should be, and is copied"
            entries.append((window_pool(source), page, int(self._pools[window_pool(source)].generations[page]), READ, 0))
            generation = int(self._pools[window_pool(kv)].generations[target])
            entries.append((window_pool(kv), target, generation, at % PAGE_TOKENS, values[at]))
        return entries

    def load(
        self, chunk: LoadChunk, source: str, kv: str, read_saved: Callable[[str, bytes, int], dict[int, Any] | None]
    ) -> list[tuple[Any, ...]] | None:
        """Those at the end of a chunk; None where one is nowhere, or none is asked for."""
        if chunk.windows is None:
            return None
        (keys, slots), last = (chunk.windows.keys, chunk.windows.slots), chunk.end // PAGE_TOKENS
        pages = self._table.prefill_window_pages(chunk.row, chunk.member).tolist()[last - len(keys) : last]
        assert len(keys) == len(slots) == len(pages) == len({*pages}), "places of windows without pages of their own"
        entries: list[tuple[Any, ...]] = []
        for page, key, slot in zip(pages, keys, slots, strict=True):
            if source:
                assert self._pools[window_pool(source)].read_keys().get(slot) == key, "a page was given away while a plan reads it"
            contents = self._content[window_pool(source)][slot] if source else read_saved("window", key, slot)
            if contents is None:
                return None
            generation = int(self._pools[window_pool(kv)].generations[page])
            entries += [(window_pool(kv), page, generation, at, value) for at, value in contents.items()]
        return entries

    def _entries(self, pages: Sequence[int], kv: str, values: Sequence[int], start: int, end: int) -> list[tuple[Any, ...]]:
        pool = window_pool(kv)
        generations, first = self._pools[pool].generations, max(0, start + 1 - self._limits.window_tokens)
        for at in range(first, start):
            found = self._content[pool][pages[at // PAGE_TOKENS]].get(at % PAGE_TOKENS)
            assert found == values[at], f"a window holds {found} where {values[at]} should be"
        reads = {pages[at // PAGE_TOKENS] for at in range(first, start)}
        entries: list[tuple[Any, ...]] = [(pool, page, int(generations[page]), READ, 0) for page in sorted(reads)]
        for at in range(start, end):
            page = pages[at // PAGE_TOKENS]
            entries.append((pool, page, int(generations[page]), at % PAGE_TOKENS, values[at]))
        return entries
