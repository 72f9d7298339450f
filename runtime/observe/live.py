"""Follow the flight recorders of a live run: only records that have come since the last look are read.

For an observer that looks every second, such as the gateway's page; ``trace`` and ``inspect`` read everything once. It costs nothing
between looks: an observer that pauses for long misses the records that were overwritten meanwhile.
"""

import time
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...shm.errors import ShmError
from ...shm.flight_recorder import FlightRecorder, kind_of
from ...shm.run_directory import RunDirectory
from ..bus.request_keys import gateway_of
from ..process.exit_status import describe_exit
from ..stage_table import STAGES, SUPERVISOR, stage_of
from .flight import FlightRecord, Kind, merge, signed
from .trace_requests import KINDS_OF_REQUESTS, PlanSpan, PlanSpans, RequestSpan, RequestSpans

NUM_REQUESTS = 48  # kept, the newest
NUM_EVENTS = 64
FIRST_RECORDS = 4096  # of one recorder at the first look; older ones are passed over, for their number would take too long
SETTLE_NS = 20_000_000  # a record is stamped before it is written: younger ones wait, so that all come in order of time
_LOST_PLAN_NS = 60_000_000_000  # after which a plan whose requests are not known is forgotten

# Steps of decode and detokenizer, ticks and gauges are most of all records, and say nothing about single requests.
_IGNORED = (Kind.STEP, Kind.COPY, Kind.TEXT, Kind.TICK, Kind.POOL, Kind.QUEUES, Kind.BUDGETS, Kind.UNSENT)


def _table(kinds: Iterable[Kind]) -> NDArray[np.bool_]:
    """Return for each kind, and for those of later versions together, whether it is one of these."""
    table = np.zeros(max(Kind) + 2, np.bool_)
    table[list(kinds)] = True
    return table


# Kinds whose key is a request's, and a plan's.
_OF_REQUESTS = _table((*KINDS_OF_REQUESTS, Kind.WRITTEN, Kind.PLAN_REQUEST))
_OF_PLANS = _table((Kind.PLAN, Kind.ISSUED, Kind.ACKNOWLEDGED))


class RecordFollower:
    """Reads the new records of some recorders.

    ``num_gaps``: how often some had been overwritten before they were read. ``num_tokens``: of answers, read so far: of
    decode's steps, and first ones that prefill has drawn.
    """

    def __init__(
        self,
        run: RunDirectory,
        names: Sequence[str],
        ignored: Sequence[Kind] = _IGNORED,
        num_first: int = FIRST_RECORDS,
        num_requests: int | None = None,
    ) -> None:
        """``ignored``: kinds of records that are passed over. ``num_first``: records of an actor that the first look takes.
        ``num_requests``: of requests that came and went between two looks, records of so many, the newest; None: of all."""
        self._run = run
        self.names = names
        self._ignored = _table(ignored)
        self._num_first = num_first
        self._num_requests = num_requests
        self.num_gaps = 0
        self.num_tokens = 0
        self._recorders: dict[str, FlightRecorder] = {}
        self._positions: dict[str, int] = {}
        self._waiting: list[FlightRecord] = []

    def close(self) -> None:
        for recorder in self._recorders.values():
            recorder.close()
        self._recorders = {}

    def take(self) -> list[FlightRecord]:
        """Return the records that have come since the last call, in order of time."""
        until_ns = time.monotonic_ns() - SETTLE_NS
        found = {}
        for name in self.names:
            if (recorder := self._attached(name)) is None:
                continue
            written, before = recorder.num_written, self._positions.get(name)
            if written == before:
                continue
            self._positions[name] = written
            if before is None:
                records = recorder.read(None if name == SUPERVISOR else self._num_first)  # the supervisor writes few
            else:
                self.num_gaps += written - before >= recorder.num_records
                records = recorder.read(written - before)
            kinds = kind_of(records)
            self.num_tokens += int((records["b"][kinds == Kind.STEP] & np.uint64(0xFFFFFFFF)).sum())
            self.num_tokens += int((kinds == Kind.FIRST_TOKEN).sum())
            found[name] = records[~_is_in(self._ignored, records)]
        if found and self._num_requests is not None:
            found = _of_newest(found, self._num_requests)
        new = sorted([*self._waiting, *merge(found)], key=lambda record: record.time_ns)
        self._waiting = [record for record in new if record.end_ns > until_ns]
        return [record for record in new if record.end_ns <= until_ns]

    def _attached(self, name: str) -> FlightRecorder | None:
        if name not in self._recorders:
            try:
                self._recorders[name] = FlightRecorder.attach(self._run, name, writable=False)
            except ShmError:
                return None
        return self._recorders[name]


def _of_newest(found: dict[str, NDArray[Any]], num_requests: int) -> dict[str, NDArray[Any]]:
    """Return the records without those of requests that both came and went in them, the newest ``num_requests`` excepted, and without
    the plans made for nobody else."""
    received, ended, shares = (
        np.concatenate([records[kind_of(records) == kind] for records in found.values()])
        for kind in (Kind.RECEIVED, Kind.ENDED, Kind.PLAN_REQUEST)
    )
    if len(received) <= num_requests:
        return found
    older = received["key"][np.argsort(received["time_ns"], kind="stable")][:-num_requests]
    over = np.intersect1d(older, ended["key"])
    is_over = np.isin(shares["key"], over)
    idle = np.setdiff1d(shares["a"][is_over], shares["a"][~is_over])
    for kinds, keys in ((_OF_REQUESTS, over), (_OF_PLANS, idle)):
        found = {name: records[~(_is_in(kinds, records) & np.isin(records["key"], keys))] for name, records in found.items()}
    return found


def _is_in(kinds: NDArray[np.bool_], records: NDArray[Any]) -> NDArray[np.bool_]:
    return kinds[np.minimum(kind_of(records), len(kinds) - 1)]


class Write(NamedTuple):
    """Media of a request were written into their pages by the gateway."""

    begin_ns: int
    end_ns: int
    num_bytes: int


@dataclass(slots=True)
class LiveRequest:
    """A request with its plans, in the order of their issue. ``revision``: of its last change."""

    span: RequestSpan
    revision: int = 0
    writes: list[Write] = field(default_factory=list)
    plans: dict[int, PlanSpan] = field(default_factory=dict)


class Event(NamedTuple):
    """A process began to serve, or ended."""

    revision: int
    time_ns: int
    actor: str
    text: str


class LiveRequests:
    """The latest requests of a run and the latest starts and ends of its processes. Each change gets the number of its look.

    If records were overwritten unread, all requests are forgotten: the ends of some are not known.
    """

    def __init__(self, run: RunDirectory, actors: Sequence[str]) -> None:
        self.revision = 0
        self.requests: dict[int, LiveRequest] = {}
        self.events: deque[Event] = deque(maxlen=NUM_EVENTS)
        self.num_ends: Counter[str] = Counter()  # of processes, by actor
        self.last_end: dict[str, str] = {}
        self._actors = actors
        self._follower = RecordFollower(run, (*actors, SUPERVISOR), num_requests=NUM_REQUESTS)
        self._spans, self._plans = RequestSpans(), PlanSpans()
        self._takers = {Kind.EXIT: self._ended, Kind.ACTIVE: self._began, Kind.WRITTEN: self._written}

    def close(self) -> None:
        self._follower.close()

    def follow(self, actors: Sequence[str]) -> None:
        """Follow these actors from now on: those known, and maybe more behind them."""
        self._actors = actors
        self._follower.names = (*actors, SUPERVISOR)

    @property
    def num_tokens(self) -> int:
        """Tokens of answers seen so far; only differences mean something."""
        return self._follower.num_tokens

    @property
    def num_gaps(self) -> int:
        """How often all requests were forgotten."""
        return self._follower.num_gaps

    def look(self) -> None:
        """Take in whatever is new."""
        num_gaps = self._follower.num_gaps
        records = self._follower.take()
        if self._follower.num_gaps > num_gaps:
            self.requests.clear()
            self._spans, self._plans = RequestSpans(), PlanSpans()
        if not records:
            return
        self.revision += 1
        for record in records:
            self._take(record)
        self._forget()

    def changed(self, after: int) -> list[LiveRequest]:
        """Return the requests that have changed since revision ``after``, the oldest first."""
        return [request for request in self.requests.values() if request.revision > after]

    def _take(self, record: FlightRecord) -> None:
        if (take := self._takers.get(record.kind)) is not None:
            take(record)
        elif (plan := self._plans.add(record)) is not None:
            self._assign(plan, plan.requests if record.kind is not Kind.PLAN_REQUEST else (record.key,))
        elif (span := self._spans.add(record)) is not None and span.stages:
            request = self.requests.setdefault(span.key, LiveRequest(span))
            request.revision = self.revision

    def _assign(self, plan: PlanSpan, keys: Iterable[int]) -> None:
        for key in keys:
            if (request := self.requests.get(key)) is not None:
                request.plans[plan.plan_id] = plan
                request.revision = self.revision

    def _began(self, record: FlightRecord) -> None:
        self._say(record.time_ns, record.actor, f"generation {record.generation} serves")

    def _written(self, record: FlightRecord) -> None:
        if (request := self.requests.get(record.key)) is not None:
            request.writes.append(Write(record.time_ns, record.end_ns, record.c))
            request.revision = self.revision

    def _ended(self, record: FlightRecord) -> None:
        if record.a < len(self._actors):
            actor, how = self._actors[record.a], describe_exit(signed(record.c))
            self.num_ends[actor] += 1
            self.last_end[actor] = how
            self._say(record.time_ns, actor, f"generation {record.b} ended: {how}")
            if STAGES[stage_of(actor)].listens:
                self._lose(actor, record.b, record.time_ns)

    def _lose(self, gateway: str, generation: int, now_ns: int) -> None:
        """Note the end of a gateway in the requests whose answers it had not closed."""
        for request in self.requests.values():
            span = request.span
            is_its = span.gateway_generation == generation and gateway_of(span.key) == gateway
            if is_its and not span.is_over and not span.is_lost:
                span.lose(now_ns)
                request.revision = self.revision

    def _say(self, time_ns: int, actor: str, text: str) -> None:
        self.events.append(Event(self.revision, time_ns, actor, text))

    def _forget(self) -> None:
        """Keep the newest requests, and what belongs to them."""
        if len(self.requests) > NUM_REQUESTS:
            over = [key for key, request in self.requests.items() if request.span.end_ns]
            for key in over[: len(self.requests) - NUM_REQUESTS]:
                del self.requests[key]
        kept, spans, plans = self.requests, self._spans, self._plans
        spans.spans = {key: span for key, span in spans.spans.items() if key in kept}
        spans.rows = {row: key for row, key in spans.rows.items() if key in kept}
        lost_ns = time.monotonic_ns() - _LOST_PLAN_NS
        plans.plans = {
            id: plan
            for id, plan in plans.plans.items()
            if not kept.keys().isdisjoint(plan.requests) or not plan.requests and max(plan.issued_ns, plan.end_ns) > lost_ns
        }
