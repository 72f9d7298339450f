"""decode's side of migration: copies KV pages from the pool of another device into that of its own, between two steps (TI6).

A plan is read from the plan table, as in ``host.plan_loop``; it is answered with the stored result if it comes again. Copying stops
after a few milliseconds for the next step, and goes on after it. A new process begins the plan anew: that writes the same bytes to the
same pages. A process that ends in order has no copy under way, since they are made in its own loop.

Behind a prefill a layer of its pages is copied once it is stored, while the next ones are computed (KT1), and the plan is done when
the last one has been. If the prefill dies before, and another process does its plan anew, all layers are copied anew. Packed pages
are copied when the prefill is done. While a plan waits for its prefill the next one is copied.

Layers with a window may have pages in a pool of their own: of these the ones at the end of the prompt are copied, like the others.
"""

import logging
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ...models.architecture import KvPart
from ...models.lm.kv_packing import KvPacking
from ...runtime.bus.copy_plans import Transfer, TransferChunk
from ...runtime.bus.messages import ItemError, PlanDone, Result, Run, Skipped, Transferred
from ...runtime.bus.plans import Plan, decode_plan
from ...runtime.observe.flight import Kind
from ...runtime.pools import PoolName, log_pool, state_pool, window_pool
from ...shm.layer_progress import DONE, LayerProgress
from ...shm.plan_table import PlanTable
from ...shm.pool import Access, PagePool
from ...shm.sequence_table import SequenceTable
from ..host.actor import Actor
from ..host.device import raise_if_fatal
from ..host.page_packer import PackedPages
from ..host.plan_checks import still_wanted
from ..host.plan_flight import PlanFlight
from .recomputing import AT_ONCE_TOKENS, Pace, Recomputing

log = logging.getLogger(__name__)

COPY_S = 0.005  # between two steps
STATE_PART_BYTES = 1 << 20  # of a recurrent state, between two looks at the clock
KEPT_RESULTS = 256

ReadPage = Callable[[int, slice], tuple[memoryview, int]]
"""Returns a part of a page, of packed ones all of it, and how many bytes were read for it."""
Pages = Sequence[tuple[int, int]]
"""(to, from) each."""


class PlanGone(Exception):
    """The prefill that a plan is behind has left the table, and nobody has done it."""


@dataclass(slots=True)
class _Work:
    """A plan that is being copied. ``pages``: copies a piece and yields its bytes, or 0 if there is nothing to copy for now."""

    plan_id: int
    plan: Plan
    pages: Iterator[int]
    began_ns: int
    num_bytes: int = 0
    waits: bool = False


class PageCopier:
    """The plans that decode has been sent, and those that it is at."""

    def __init__(
        self,
        actor: Actor,
        kv: PagePool,
        table: SequenceTable,
        page_tokens: int,
        packing: KvPacking | None = None,
        layers: Sequence[KvPart] = (),
        recomputing: Recomputing | None = None,
    ) -> None:
        """``kv``: the pool of this actor's device. ``packing``: of pages that come from others; None: they come as they are.
        ``layers``: where those with K and V of their own have these, in order. ``recomputing``: computes what a slow link would bring
        later."""
        self._actor = actor
        self._kv = kv
        self._table = table
        self._page_tokens = page_tokens
        self._packing = packing
        self._layers = [KvPart(DONE - 1, slice(0, kv.page_bytes))] if packing is not None or not layers else layers
        self._plans = PlanTable.attach(actor.run, writable=False)
        self._progress: LayerProgress | None = None
        self._recomputing = recomputing
        self._pace = Pace()  # of bytes
        self._pools: dict[str, PagePool] = {}
        self._sources: dict[str, ReadPage] = {}
        self._queue: deque[Run] = deque()
        self._results: OrderedDict[int, PlanDone] = OrderedDict()
        self._flight = PlanFlight(actor.flight)
        self._works: list[_Work] = []

    @property
    def is_busy(self) -> bool:
        return bool(self._works or self._queue)

    @property
    def is_waiting(self) -> bool:
        """True if it has plans, and there was nothing to copy for any of them."""
        return bool(self._works) and not self._queue and all(work.waits for work in self._works)

    def take(self, command: Run) -> None:
        """Take a command: queue it, or answer it at once."""
        if done := self._results.get(command.plan_id):
            self._actor.send(done)
        elif all(command.plan_id != other.plan_id for other in self._queue) and not self._is_at(command.plan_id):
            self._queue.append(command)
            self._flight.arrived(command.plan_id)

    def go_on(self) -> None:
        """Copy for a while: the oldest plan that has something to copy."""
        if not self.is_busy:
            return
        for work in self._works:
            work.waits = False
        until_s = time.monotonic() + COPY_S
        while time.monotonic() < until_s:
            at_hand = next((work for work in self._works if not work.waits), None) or self._begin_next()
            if at_hand is None:
                return
            self._copy_for(at_hand, until_s)

    def _copy_for(self, work: _Work, until_s: float) -> None:
        """Copy for a plan until it waits, it is done, or time is up."""
        began_ns, before = time.monotonic_ns(), work.num_bytes
        result: Result | None = None
        try:
            for num_bytes in work.pages:
                work.num_bytes += num_bytes
                work.waits = not num_bytes
                if work.waits or time.monotonic() >= until_s:
                    break
            else:
                result = Transferred(work.num_bytes)
        except PlanGone:
            result = Skipped()
        except ValueError:  # else this process would meet the plan again after every restart
            name = f"plan {work.plan_id:x} of {self._actor.name}"
            log.exception("%s failed (%s)", name, type(work.plan).__name__)
            result = ItemError(500, f"the request could not be processed: {name} failed, and the log says why")
        if work.num_bytes > before:
            num_bytes = work.num_bytes - before
            self._actor.flight.record(Kind.COPY, began_ns, time.monotonic_ns() - began_ns, work.plan_id, num_bytes)
        if result is not None:
            self._works.remove(work)
            self._finish(work.plan_id, work.plan, work.began_ns, result)

    def _is_at(self, plan_id: int) -> bool:
        return any(work.plan_id == plan_id for work in self._works)

    def _begin_next(self) -> _Work | None:
        """Begin the next plan that is still wanted. Returns it, or None if there is none."""
        while self._queue:
            command = self._queue.popleft()
            payload = self._plans.read(command.slot, command.plan_id)
            if payload is None or command.plan_id in self._results:
                self._flight.skipped(command.plan_id)
                continue
            plan, began_ns = decode_plan(payload), time.monotonic_ns()
            is_late = 0 < command.deadline_s <= time.monotonic()
            if is_late or still_wanted(plan, self._table) is None:
                self._finish(command.plan_id, plan, began_ns, Skipped())
                continue
            assert isinstance(plan, Transfer)
            self._works.append(_Work(command.plan_id, plan, self._copy(command.plan_id, plan), began_ns))
            return self._works[-1]
        return None

    def _copy(self, plan_id: int, plan: Transfer) -> Iterator[int]:
        """Copy page by page, or behind a prefill layer by layer, and yield the bytes of each piece. The tables stay as they are until
        the plan has been answered."""
        for chunk in plan.chunks:
            filled = chunk.end if plan.behind is None else chunk.filled
            start = yield from self._compute(plan_id, chunk, filled)
            yield from self._move(plan.source, self._pages(chunk, start, filled))
            yield from self._move(plan.source, self._windows(chunk, chunk.start, filled), in_window=True)
        if plan.behind is not None:
            pages, windows = (
                [pair for chunk in plan.chunks for pair in of(chunk, chunk.filled, chunk.end)] for of in (self._pages, self._windows)
            )
            yield from self._follow(*plan.behind, plan.source, pages, windows)
        for chunk in plan.chunks:
            for pool_beside, both in ((state_pool, chunk.state), (log_pool, chunk.log)):
                if both is not None:
                    yield from self._copy_state(pool_beside(plan.source), pool_beside(self._kv.name), *both)

    def _compute(self, plan_id: int, chunk: TransferChunk, end: int) -> Generator[int, None, int]:
        """Compute a chunk's tokens, a piece at a time, while that is faster than to copy them (KT2). Returns the first that is not
        computed."""
        start = chunk.start
        while self._recomputing is not None and start < end:
            self._progress = progress = self._progress or LayerProgress.attach(self._actor.run)
            copy_s = len(self._pages(chunk, start, end)) * self._kv.page_bytes * self._pace.unit_s
            if not self._recomputing.pays(chunk, end - start, copy_s, progress.token_s):
                break
            until = min(end, start + AT_ONCE_TOKENS // self._page_tokens * self._page_tokens or end)
            try:
                self._recomputing.compute(plan_id, chunk, start, until)
            except MemoryError:
                raise
            except Exception as error:
                raise_if_fatal(error)
                log.exception("tokens %d to %d of plan %x could not be computed and are copied", start, until, plan_id)
                self._recomputing = None
                break
            start = until
            yield 0
        return start

    def _follow(self, plan_id: int, slot: int, source: PoolName, pages: Pages, windows: Pages) -> Iterator[int]:
        """Copy the pages that a prefill plan fills, of each layer once it is stored. Raises: PlanGone."""
        generation, num_copied = -1, 0
        self._progress = progress = self._progress or LayerProgress.attach(self._actor.run)
        while True:
            is_held = self._plans.holds(slot, plan_id)  # before the word, which says so if the plan was done before it left
            at = progress.read(plan_id)
            is_done = at is not None and at.num_layers == DONE
            if not is_held and not is_done:
                raise PlanGone
            if at is not None and at.generation != generation:  # what the process before wrote last need not have been whole
                generation, num_copied = at.generation, 0
            stored = [] if at is None else [part for part in self._layers[num_copied:] if part.layer < at.num_layers]
            if not stored and is_done:
                return
            for part in stored:
                yield from self._move(source, windows if part.in_window else pages, part.place, in_window=part.in_window)
            num_copied += len(stored)
            if not stored:
                yield 0

    def _pages(self, chunk: TransferChunk, start: int, end: int) -> Pages:
        """Return the pages of a chunk's tokens [start, end); ``start`` is the first token of one."""
        tables = self._table.pages(chunk.row, chunk.member), self._table.source_pages(chunk.row, chunk.member)
        return self._pairs(tables, start, end)

    def _windows(self, chunk: TransferChunk, start: int, end: int) -> Pages:
        """Return the pages of layers with a window that go with them, if there are such."""
        if chunk.windows < 0:
            return []
        tables = self._table.window_pages(chunk.row, chunk.member), self._table.source_window_pages(chunk.row, chunk.member)
        return self._pairs(tables, max(start, chunk.windows * self._page_tokens), end)

    def _pairs(self, tables: Sequence[NDArray[np.uint32]], start: int, end: int) -> Pages:
        places = slice(start // self._page_tokens, -(-end // self._page_tokens) if start < end else 0)
        ours, theirs = (table[places].tolist() for table in tables)
        return list(zip(ours, theirs, strict=True))

    def _move(self, source: PoolName, pages: Pages, part: slice | None = None, *, in_window: bool = False) -> Iterator[int]:
        """Copy a part of each of these pages, or all of them, from the pool of another device, or that of windows beside it."""
        if not pages:
            return
        ours = self._pool(window_pool(self._kv.name), "fill") if in_window else self._kv
        read, part = self._reader(window_pool(source) if in_window else source), part or slice(0, ours.page_bytes)
        for target, page in pages:
            began_ns = time.monotonic_ns()
            contents, num_bytes = read(page, part)
            ours.page(target)[part] = contents
            self._pace.took(num_bytes, (time.monotonic_ns() - began_ns) / 1e9)
            yield num_bytes

    def _copy_state(self, source: str, target: str, page: int, to: int) -> Iterator[int]:
        """Copy a page of recurrent states, or of their log, part by part."""
        contents, place = self._pool(source, "read").page(page), self._pool(target, "fill").page(to)
        for start in range(0, len(contents), STATE_PART_BYTES):
            part = contents[start : start + STATE_PART_BYTES]
            place[start : start + len(part)] = part
            yield len(part)

    def _pool(self, name: str, access: Access) -> PagePool:
        if name not in self._pools:
            self._pools[name] = PagePool.attach(self._actor.run, name, access)
        return self._pools[name]

    def _reader(self, name: str) -> ReadPage:
        """Return what reads the pages of another device's pool. This process never writes there."""
        if name not in self._sources:
            pool = self._pool(name, "read")
            packed = None if self._packing is None else PackedPages(self._actor, pool, self._packing, "read")
            if packed is None:
                self._sources[name] = lambda page, part: (pool.page(page)[part], part.stop - part.start)
            else:
                self._sources[name] = lambda page, _: packed.read(page)
        return self._sources[name]

    def _finish(self, plan_id: int, plan: Plan, began_ns: int, result: Result) -> None:
        elapsed_s = (time.monotonic_ns() - began_ns) / 1e9
        done = PlanDone(self._actor.name, self._actor.generation, plan_id, elapsed_s, result)
        self._results[plan_id] = done
        if len(self._results) > KEPT_RESULTS:
            self._results.popitem(last=False)
        self._flight.done(plan_id, plan, began_ns, result, len(self._queue))
        self._actor.send(done)
