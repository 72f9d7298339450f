"""decode's side of migration: copies KV pages from the pool of another device into that of its own, between two steps (TI6).

A plan is read from the plan table, as in ``host.plan_loop``; it is answered with the stored result if it comes again. Copying stops
after a few milliseconds for the next step, and goes on after it. A new process begins the plan anew: that writes the same bytes to the
same pages. A process that ends in order has no copy under way, since they are made in its own loop.
"""

import logging
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator

from ...models.lm.kv_packing import KvPacking
from ...runtime.bus.copy_plans import Transfer
from ...runtime.bus.messages import ItemError, PlanDone, Result, Run, Skipped, Transferred
from ...runtime.bus.plans import Plan, decode_plan
from ...runtime.pools import log_pool, state_pool
from ...shm.plan_table import PlanTable
from ...shm.pool import Access, PagePool
from ...shm.sequence_table import SequenceTable
from ..host.actor import Actor
from ..host.page_packer import PackedPages
from ..host.plan_checks import still_wanted
from ..host.plan_flight import PlanFlight

log = logging.getLogger(__name__)

COPY_S = 0.005  # between two steps
STATE_PART_BYTES = 1 << 20  # of a recurrent state, between two looks at the clock
KEPT_RESULTS = 256

ReadPage = Callable[[int], tuple[memoryview, int]]
"""Returns the contents of a page, and how many bytes were read for them."""


class PageCopier:
    """The plans that decode has been sent, and the one that it is at."""

    def __init__(self, actor: Actor, kv: PagePool, table: SequenceTable, page_tokens: int, packing: KvPacking | None = None) -> None:
        """``kv``: the pool of this actor's device. ``packing``: of pages that come from others; None: they come as they are."""
        self._actor = actor
        self._kv = kv
        self._table = table
        self._page_tokens = page_tokens
        self._packing = packing
        self._plans = PlanTable.attach(actor.run, writable=False)
        self._pools: dict[str, PagePool] = {}
        self._sources: dict[str, ReadPage] = {}
        self._queue: deque[Run] = deque()
        self._results: OrderedDict[int, PlanDone] = OrderedDict()
        self._flight = PlanFlight(actor.flight)
        self._current: tuple[int, Plan, Iterator[int]] | None = None
        self._num_bytes = 0
        self._began_ns = 0

    @property
    def is_busy(self) -> bool:
        return self._current is not None or bool(self._queue)

    def take(self, command: Run) -> None:
        """Take a command: queue it, or answer it at once."""
        if done := self._results.get(command.plan_id):
            self._actor.send(done)
        elif all(command.plan_id != other.plan_id for other in self._queue) and not self._is_at(command.plan_id):
            self._queue.append(command)
            self._flight.arrived(command.plan_id)

    def go_on(self) -> None:
        """Copy for a while."""
        until_s = time.monotonic() + COPY_S
        while time.monotonic() < until_s and (self._current is not None or self._begin_next()):
            assert self._current is not None
            plan_id, plan, pages = self._current
            try:
                for num_bytes in pages:
                    self._num_bytes += num_bytes
                    if time.monotonic() >= until_s:
                        return
            except ValueError:  # else this process would meet the plan again after every restart
                name = f"plan {plan_id:x} of {self._actor.name}"
                log.exception("%s failed (%s)", name, type(plan).__name__)
                self._finish(plan_id, plan, ItemError(500, f"the request could not be processed: {name} failed, and the log says why"))
            else:
                self._finish(plan_id, plan, Transferred(self._num_bytes))

    def _is_at(self, plan_id: int) -> bool:
        return self._current is not None and self._current[0] == plan_id

    def _begin_next(self) -> bool:
        """Begin the next plan that is still wanted. Returns whether there is one."""
        while self._queue:
            command = self._queue.popleft()
            payload = self._plans.read(command.slot, command.plan_id)
            if payload is None or command.plan_id in self._results:
                self._flight.skipped(command.plan_id)
                continue
            plan = decode_plan(payload)
            self._began_ns, self._num_bytes = time.monotonic_ns(), 0
            is_late = 0 < command.deadline_s <= time.monotonic()
            if is_late or still_wanted(plan, self._table) is None:
                self._finish(command.plan_id, plan, Skipped())
                continue
            assert isinstance(plan, Transfer)
            self._current = command.plan_id, plan, self._copy(plan)
            return True
        return False

    def _copy(self, plan: Transfer) -> Iterator[int]:
        """Copy page by page, and yield the bytes of each. The tables stay as they are until the plan has been answered."""
        source = self._reader(plan.source)
        for chunk in plan.chunks:
            places = slice(chunk.start // self._page_tokens, -(-chunk.end // self._page_tokens))
            theirs = self._table.source_pages(chunk.row, chunk.member)[places].tolist()
            ours = self._table.pages(chunk.row, chunk.member)[places].tolist()
            for target, page in zip(ours, theirs, strict=True):
                contents, num_bytes = source(page)
                self._kv.page(target)[:] = contents
                yield num_bytes
            for pool_beside, pages in ((state_pool, chunk.state), (log_pool, chunk.log)):
                if pages is not None:
                    yield from self._copy_state(pool_beside(plan.source), pool_beside(self._kv.name), *pages)

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
            self._sources[name] = (lambda page: (pool.page(page), pool.page_bytes)) if packed is None else packed.read
        return self._sources[name]

    def _finish(self, plan_id: int, plan: Plan, result: Result) -> None:
        self._current = None
        elapsed_s = (time.monotonic_ns() - self._began_ns) / 1e9
        done = PlanDone(self._actor.name, self._actor.generation, plan_id, elapsed_s, result)
        self._results[plan_id] = done
        if len(self._results) > KEPT_RESULTS:
            self._results.popitem(last=False)
        self._flight.done(plan_id, plan, self._began_ns, result, len(self._queue))
        self._actor.send(done)
