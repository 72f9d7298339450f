"""Pages that are there already come back: prefill and encoder read them from the files that ``memory`` writes (``cache.dir``), or
prefill from the pool of another device, instead of computing them. The controller knows their places. Each page of a file is checked
when it is read; one of a pool stays while the plan is in the plan table."""

import logging
import time
from collections.abc import Sequence
from pathlib import Path

from ...runtime.bus.copy_plans import Load, LoadChunk, LoadSegments
from ...runtime.bus.messages import Loaded
from ...runtime.pools import PoolName, kind_of_pool, state_pool, window_pool
from ...runtime.process.saved_pages import read_saved_pages
from ...shm.page_file import PageFileReader
from ...shm.pool import PagePool
from ...shm.run_directory import RunDirectory
from ...shm.sequence_table import SequenceTable

log = logging.getLogger(__name__)

LOAD_S = 0.5  # for a chunk, or a plan of segments, at most: others wait
LEAST_PAGES = 4  # of a chunk in that time: a slower disk is asked for no more


class PageLoader:
    """Loads pages of one pool. It opens what it reads when it is first asked. A file that cannot be read has no pages."""

    def __init__(
        self,
        run: RunDirectory,
        pool: PagePool,
        cache: Path,
        states: "PageLoader | None" = None,
        windows: "PageLoader | None" = None,
    ) -> None:
        """``cache``: where the configuration has the files. ``states``: what loads the recurrent states of a model that has some.
        ``windows``: what loads pages of layers with a window, where they lie in a pool of their own."""
        self._run = run
        self._cache = cache
        self._pool = pool
        self._states = states
        self._windows = windows
        self._reader: PageFileReader | None = None
        self._others: dict[str, PagePool] = {}

    def load_chunks(self, plan: Load, table: SequenceTable) -> Loaded:
        """Load leading pages of each chunk into the pages of its row, as far as the source has them and time allows; and behind them
        all the state at their end, or the pages of windows."""
        ends, more, states, num_bytes = list[int](), list[bool](), list[bool](), 0
        for chunk in plan.chunks:
            page_tokens = (chunk.end - chunk.start) // len(chunk.keys)
            pages = table.prefill_pages(chunk.row, chunk.member)[chunk.start // page_tokens : chunk.end // page_tokens].tolist()
            until_s = time.monotonic() + LOAD_S
            if plan.source:
                num_loaded, is_late = self._copy(pages, plan.source, chunk.slots, until_s)
                num_bytes += num_loaded * self._pool.page_bytes
            else:
                num_loaded, is_late = self._load(pages, chunk.keys, chunk.slots, until_s)
            ends.append(chunk.start + num_loaded * page_tokens)
            more.append(num_loaded >= LEAST_PAGES if is_late else num_loaded == len(pages))
            load_rest = self._load_state if self._windows is None else self._load_windows
            states.append(num_loaded == len(pages) and load_rest(chunk, plan.source, table))
            if plan.source and states[-1] and self._windows is not None and chunk.windows is not None:
                num_bytes += len(chunk.windows.keys) * self._windows._pool.page_bytes
        has_more = self._states is not None or self._windows is not None
        return Loaded(ends, more, num_bytes, states if has_more else [])

    def _load_windows(self, chunk: LoadChunk, source: PoolName, table: SequenceTable) -> bool:
        """Load the pages of windows at a chunk's end into those of its row. Returns whether they are there."""
        if chunk.windows is None or self._windows is None:
            return False
        keys, slots = chunk.windows.keys, chunk.windows.slots
        last = chunk.end // ((chunk.end - chunk.start) // len(chunk.keys))
        pages = table.prefill_window_pages(chunk.row, chunk.member)[last - len(keys) : last].tolist()
        if source:
            return self._windows._copy(pages, window_pool(source), slots, float("inf"))[0] == len(keys)
        return self._windows._load(pages, keys, slots)[0] == len(keys)

    def _load_state(self, chunk: LoadChunk, source: PoolName, table: SequenceTable) -> bool:
        """Load a state into the page of its row, and from there into that of the cache. Returns whether it is there."""
        del table
        state = chunk.state
        if state is None or self._states is None:
            return False
        if source:
            self._states._copy([state.target], state_pool(source), [state.slot], float("inf"))
        elif not self._states._load([state.target], [state.key], [state.slot])[0]:
            return False
        if state.snapshot >= 0:
            self._states._pool.page(state.snapshot)[:] = self._states._pool.page(state.target)
        return True

    def load_segments(self, plan: LoadSegments) -> Loaded:
        """Load the pages of segments, of each all or none; of all but the first only while there is time."""
        ends, more = list[int](), list[bool]()
        until_s = time.monotonic() + LOAD_S
        for part in plan.parts:
            is_late = bool(ends) and time.monotonic() >= until_s
            self._pool.check(part.target.pages, part.target.generations)
            num_loaded = 0 if is_late else self._load(part.target.pages, part.keys, part.slots)[0]
            ends.append(part.num_tokens if num_loaded == len(part.keys) else 0)
            more.append(is_late)
        return Loaded(ends, more)

    def _copy(self, pages: Sequence[int], source: str, theirs: Sequence[int], until_s: float) -> tuple[int, bool]:
        """Copy pages of another pool. Returns how many, and whether time was short."""
        if source not in self._others:
            self._others[source] = PagePool.attach(self._run, source, "read")
        for num_copied, (page, other) in enumerate(zip(pages, theirs, strict=True)):
            if time.monotonic() >= until_s:
                return num_copied, True
            self._pool.page(page)[:] = self._others[source].page(other)
        return len(pages), False

    def _load(
        self, pages: Sequence[int], keys: Sequence[bytes], slots: Sequence[int], until_s: float = float("inf")
    ) -> tuple[int, bool]:
        """Write these pages, up to the first that the file lacks. Returns how many, and whether time was short."""
        num_loaded = 0
        try:
            if (reader := self._open()) is None:
                return 0, False
            for page, key, slot in zip(pages, keys, slots, strict=True):
                if time.monotonic() >= until_s:
                    return num_loaded, True
                if (contents := reader.read(key, slot)) is None:
                    break
                self._pool.write_bytes([page], contents)
                num_loaded += 1
        except (OSError, ValueError) as error:
            log.warning("cache.dir: saved %s pages cannot be read: %s", self._pool.name, error)
        return num_loaded, False

    def _open(self) -> PageFileReader | None:
        if self._reader is None:
            saved = read_saved_pages(self._run.path, self._cache).get(kind_of_pool(self._pool.name))
            if saved is None:
                return None
            self._reader = PageFileReader.open(Path(saved.path), saved.secret, saved.page_bytes)
        return self._reader
