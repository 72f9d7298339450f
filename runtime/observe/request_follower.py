"""Follow the requests of one gateway through the flight recorders: when each gets its first text, and when it ends.

The gateway looks four times a second, in a thread. It reads records of all actors once, and forgets them with their request. It
leaves out requests whose records were overwritten before a look.
"""

import time
from bisect import bisect_left, insort
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from ...shm.run_directory import RunDirectory
from .flight import FlightRecord, Kind
from .live import RecordFollower
from .request_stages import FirstText
from .trace_requests import PlanSpan, PlanSpans, RequestSpan, RequestSpans

NUM_STEPS = 4096  # of decode, the latest: those in which a first token may have come
_RECORDS_AT_ONCE, _REQUESTS_AT_ONCE = 128, 8  # about 0.4 ms of work each
_LOST_PLAN_NS = 60_000_000_000  # after which a plan of requests that are not followed is forgotten
# Nothing about single requests; decode's steps are needed for the first token.
_IGNORED = (Kind.TEXT, Kind.COPY, Kind.TICK, Kind.POOL, Kind.QUEUES, Kind.BUDGETS, Kind.UNSENT)
_SAID = frozenset({Kind.FIRST_TEXT, Kind.OVER})


@dataclass(slots=True)
class FollowedRequest:
    """A request with its plans. ``first``: None before its first text. ``drawn``: begin and end of the draw of its first token, where
    prefill makes that."""

    span: RequestSpan
    plans: dict[int, PlanSpan] = field(default_factory=dict)
    first: FirstText | None = None
    drawn: tuple[int, int] | None = None


class RequestFollower:
    """Calls ``on_first_text`` once for each request, and ``on_over`` with the time of its end for the client, in ns of
    CLOCK_MONOTONIC. ``gateway``: name and generation of the one whose requests are followed."""

    def __init__(
        self,
        run: RunDirectory,
        actors: Sequence[str],
        gateway: tuple[str, int],
        on_first_text: Callable[[FollowedRequest], None],
        on_over: Callable[[FollowedRequest, int], None],
    ) -> None:
        self._gateway = gateway
        self._on_first_text, self._on_over = on_first_text, on_over
        self._follower = RecordFollower(run, actors, _IGNORED, num_first=0)
        self._requests: dict[int, FollowedRequest] = {}
        self._spans, self._plans = RequestSpans(), PlanSpans()
        self._steps: list[tuple[int, int]] = []  # (begin, end), in order
        self._new: list[tuple[FollowedRequest, FlightRecord]] = []  # first texts and ends of the last look
        self.look()

    def close(self) -> None:
        self._follower.close()

    def follow(self, actors: Sequence[str]) -> None:
        """Follow these actors from now on: those known, and maybe more."""
        self._follower.names = actors

    def look(self, pause: Callable[[], None] = lambda: None) -> None:
        """Take in whatever is new, and say what the last look has found: a step is recorded at its end, when its text may already be
        there. Call it from one thread at a time. ``pause`` is called every few records, to let other threads run."""
        num_gaps = self._follower.num_gaps
        records = self._follower.take()
        if self._follower.num_gaps > num_gaps:
            self._requests.clear()
            self._spans, self._plans = RequestSpans(), PlanSpans()
            self._new = []
        settled, self._new = self._new, []
        for number, record in enumerate(records):
            if not number % _RECORDS_AT_ONCE:
                pause()
            self._take(record)
        for number, (request, record) in enumerate(settled):
            if not number % _REQUESTS_AT_ONCE:
                pause()
            self._say(request, record)
        if records:
            self._forget()

    def _take(self, record: FlightRecord) -> None:
        if record.kind is Kind.STEP:
            insort(self._steps, (record.time_ns, record.end_ns))
            del self._steps[:-NUM_STEPS]
        elif record.kind is Kind.FIRST_TOKEN:
            if (request := self._requests.get(self._spans.rows.get((record.key, record.a), 0))) is not None:
                request.drawn = record.time_ns, record.end_ns
        elif (plan := self._plans.add(record)) is not None:
            for key in (record.key,) if record.kind is Kind.PLAN_REQUEST else plan.requests:
                if (request := self._requests.get(key)) is not None:
                    request.plans[plan.plan_id] = plan
        elif self._is_followed(record):
            span = self._spans.add(record)
            if span is not None:
                self._changed(span, record)

    def _is_followed(self, record: FlightRecord) -> bool:
        if record.key in self._requests:
            return True
        return record.kind is Kind.ROW_ENDED or record.kind is Kind.RECEIVED and (record.actor, record.generation) == self._gateway

    def _changed(self, span: RequestSpan, record: FlightRecord) -> None:
        request = self._requests.setdefault(span.key, FollowedRequest(span))
        if record.kind in _SAID:
            self._new.append((request, record))

    def _say(self, request: FollowedRequest, record: FlightRecord) -> None:
        if record.kind is Kind.FIRST_TEXT and request.first is None:
            request.first = FirstText(*self._first_step(request, record.time_ns), record.time_ns)
            self._on_first_text(request)
        elif record.kind is Kind.OVER and self._requests.pop(record.key, None) is not None:
            del self._spans.spans[record.key]
            self._on_over(request, record.time_ns)

    def _first_step(self, request: FollowedRequest, until_ns: int) -> tuple[int, int]:
        """Begin and end of the draw of its first token, or of the first step of decode with the request; an empty one at its first text
        if none is known."""
        begins = [stage.begin_ns for stage in request.span.stages if stage.name == "decoding" and stage.begin_ns <= until_ns]
        number = bisect_left(self._steps, (max(begins, default=until_ns), 0))
        begin_ns, end_ns = request.drawn or (self._steps[number] if number < len(self._steps) else (until_ns, until_ns))
        return min(begin_ns, until_ns), min(end_ns, until_ns)

    def _forget(self) -> None:
        """Keep what belongs to requests that are not over."""
        self._spans.rows = {row: key for row, key in self._spans.rows.items() if key in self._requests}
        lost_ns = time.monotonic_ns() - _LOST_PLAN_NS
        self._plans.plans = {
            id: plan
            for id, plan in self._plans.plans.items()
            if not self._requests.keys().isdisjoint(plan.requests) or not plan.requests and max(plan.issued_ns, plan.end_ns) > lost_ns
        }
