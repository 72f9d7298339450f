"""Extract single requests from flight records: the stages of each, and the plans made for it (pure).

Used by ``mmrt trace`` for its request tracks, by ``mmrt inspect`` for its timings and by ``live`` for the gateway's page.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from ...schema.rows import Phase
from ..bus.plan_base import PlanKind
from .flight import FlightRecord, Kind, unpack_id, unpack_pair, unpack_plan

# In the order in which requests pass them; a preempted one is prefilled again.
STAGES = ("submitted", "queued", "fetching", "analysing", "prefilling", "decoding", "delivering", "failing")


@dataclass(slots=True)
class Stage:
    """A stage of a request. ``end_ns`` 0: the request is still in it, as far as known."""

    name: str
    begin_ns: int
    end_ns: int = 0


@dataclass(slots=True)
class PlanSpan:
    """A plan from its writing to its result. Times are 0 for events that have not happened or were not recorded."""

    plan_id: int
    kind: PlanKind
    actor: str = ""
    issued_ns: int = 0
    arrived_ns: int = 0
    begin_ns: int = 0
    end_ns: int = 0
    acknowledged_ns: int = 0
    units: int = 0
    status: int = 0
    num_queued: int = 0
    generation: int = 0
    requests: dict[int, tuple[int, int]] = field(default_factory=dict)  # request key -> its share, see ``share`` of plans


@dataclass(slots=True)
class RequestSpan:
    """A request's life."""

    key: int
    request_id: str = ""
    row: int = -1
    row_generation: int = 0
    gateway_generation: int = 0  # 0: not recorded
    num_items: int = -1  # -1: not recorded
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0  # of the prompt, in pages found in the cache
    stages: list[Stage] = field(default_factory=list)
    marks: list[tuple[str, int]] = field(default_factory=list)  # (event, time): cached tokens, first text, preempted, failed
    num_sent: int = 0  # tokens
    status: int = 0
    end_ns: int = 0  # 0: it lives
    is_over: bool = False  # its gateway has closed the answer
    is_lost: bool = False  # its gateway has ended before that; where connections are kept, the next one asks again for the same

    @property
    def name(self) -> str:
        return self.request_id or f"request {self.key:x}"

    @property
    def begin_ns(self) -> int:
        return self.stages[0].begin_ns if self.stages else 0

    def enter(self, stage: str, now_ns: int) -> None:
        """Leave the current stage for another one."""
        if self.stages and not self.stages[-1].end_ns:
            if self.stages[-1].name == stage:
                return
            self.stages[-1].end_ns = now_ns
        self.stages.append(Stage(stage, now_ns))

    def finish(self, now_ns: int) -> None:
        """End the request: all actors have forgotten it."""
        if self.stages and not self.stages[-1].end_ns:
            self.stages[-1].end_ns = now_ns
        self.end_ns = now_ns

    def lose(self, now_ns: int) -> None:
        """Note the end of its gateway. One that the controller does not know ends with it."""
        self.is_lost = True
        self.marks.append(("its gateway ended", now_ns))
        if self.stages[-1].name == "submitted":
            self.finish(now_ns)


class RequestSpans:
    """Requests by key, built from records in order of time. ``rows``: the request of each (row, row generation)."""

    def __init__(self) -> None:
        self.spans: dict[int, RequestSpan] = {}
        self.rows: dict[tuple[int, int], int] = {}

    def add(self, record: FlightRecord) -> RequestSpan | None:
        """Take a record; return the request that it is about, if any."""
        change = _CHANGES.get(record.kind)
        if change is None:
            return self._row_ended(record) if record.kind is Kind.ROW_ENDED else None
        if not record.key:
            return None
        span = self.spans.get(record.key)
        if span is None:
            span = self.spans[record.key] = RequestSpan(record.key)
        if change is _row:
            self.rows[record.a, record.b] = record.key
        change(span, record)
        return span

    def _row_ended(self, record: FlightRecord) -> RequestSpan | None:
        span = self.spans.get(self.rows.get((record.key, record.a), 0))
        if span is not None and not span.end_ns:
            span.enter("delivering", record.time_ns)
        return span


def request_spans(records: Iterable[FlightRecord]) -> dict[int, RequestSpan]:
    """Return the requests of these records, which are in order of time, by key."""
    requests = RequestSpans()
    for record in records:
        requests.add(record)
    return {key: span for key, span in requests.spans.items() if span.stages}


def _received(span: RequestSpan, record: FlightRecord) -> None:
    span.request_id = unpack_id(record.a, record.b)
    span.gateway_generation = record.generation
    span.enter("submitted", record.time_ns)


def _submitted(span: RequestSpan, record: FlightRecord) -> None:
    span.num_items = record.b
    span.enter("queued", record.time_ns)


def _row(span: RequestSpan, record: FlightRecord) -> None:
    span.row, span.row_generation = record.a, record.b
    span.enter("fetching" if span.num_items else "prefilling", record.time_ns)


def _filled(span: RequestSpan, record: FlightRecord) -> None:
    span.enter("analysing", record.time_ns)


def _prepared(span: RequestSpan, record: FlightRecord) -> None:
    span.num_prompt_tokens = record.a
    span.enter("prefilling", record.time_ns)


def _cached(span: RequestSpan, record: FlightRecord) -> None:
    if not span.num_cached_tokens:  # it is said again with every answer to the gateway
        span.marks.append((f"{record.a} tokens cached", record.time_ns))
    span.num_cached_tokens = record.a


def _phase(span: RequestSpan, record: FlightRecord) -> None:
    if record.c == Phase.DECODE:
        span.enter("decoding", record.time_ns)
    elif record.c == Phase.PREPARE and span.stages and span.stages[-1].name == "decoding":
        span.marks.append(("preempted", record.time_ns))
        span.enter("prefilling", record.time_ns)


def _failed(span: RequestSpan, record: FlightRecord) -> None:
    span.status = record.a
    span.marks.append((f"failed with {record.a}", record.time_ns))
    span.enter("failing", record.time_ns)


def _first_text(span: RequestSpan, record: FlightRecord) -> None:
    span.marks.append(("first text", record.time_ns))


def _sent(span: RequestSpan, record: FlightRecord) -> None:
    span.num_sent = record.a


def _over(span: RequestSpan, record: FlightRecord) -> None:
    span.is_over = True
    span.num_sent = record.a
    span.status = span.status or record.b
    if all(stage.name == "submitted" for stage in span.stages):
        span.finish(record.time_ns)  # refused, or given up before the controller recorded it


def _ended(span: RequestSpan, record: FlightRecord) -> None:
    span.finish(record.time_ns)


# Tables, not comparisons: CPython 3.11 takes ten times as long for a member of an enum as for a key.
_CHANGES: Mapping[Kind, Callable[[RequestSpan, FlightRecord], None]] = {
    Kind.RECEIVED: _received,
    Kind.SUBMITTED: _submitted,
    Kind.ROW: _row,
    Kind.FILLED: _filled,
    Kind.PREPARED: _prepared,
    Kind.CACHED: _cached,
    Kind.PHASE: _phase,
    Kind.FAILED: _failed,
    Kind.ENDED: _ended,
    Kind.FIRST_TEXT: _first_text,
    Kind.SENT: _sent,
    Kind.OVER: _over,
}
KINDS_OF_REQUESTS = frozenset(_CHANGES)


_KINDS_OF_PLANS = frozenset({Kind.PLAN, Kind.ISSUED, Kind.PLAN_REQUEST, Kind.ACKNOWLEDGED})


class PlanSpans:
    """Plans by id, built from records in order of time. A plan done twice appears as it was done last."""

    def __init__(self) -> None:
        self.plans: dict[int, PlanSpan] = {}

    def add(self, record: FlightRecord) -> PlanSpan | None:
        """Take a record; return the plan that it is about, if any."""
        if record.kind not in _KINDS_OF_PLANS:
            return None
        plans = self.plans
        if record.kind is Kind.PLAN:
            kind, status, num_queued = unpack_plan(record.a)
            plan = plans.setdefault(record.key, PlanSpan(record.key, kind))
            plan.actor, plan.generation = record.actor, record.generation
            plan.begin_ns, plan.end_ns, plan.arrived_ns = record.time_ns, record.end_ns, record.time_ns - record.c
            plan.units, plan.status, plan.num_queued = record.b, status, num_queued
            return plan
        if record.kind is Kind.ISSUED:
            plan = plans.setdefault(record.key, PlanSpan(record.key, PlanKind(record.b)))
            plan.issued_ns = record.time_ns
            return plan
        if record.kind is Kind.PLAN_REQUEST and record.a in plans:
            plans[record.a].requests[record.key] = unpack_pair(record.b)
            return plans[record.a]
        if record.kind is Kind.ACKNOWLEDGED and record.key in plans:
            plans[record.key].acknowledged_ns = record.time_ns
            return plans[record.key]
        return None


def plan_spans(records: Iterable[FlightRecord]) -> dict[int, PlanSpan]:
    """Return the plans of these records, which are in order of time, by id."""
    plans = PlanSpans()
    for record in records:
        plans.add(record)
    return plans.plans


def plans_by_request(plans: Mapping[int, PlanSpan]) -> dict[int, list[PlanSpan]]:
    """Return the plans made for each request, by its key."""
    found: dict[int, list[PlanSpan]] = {}
    for plan in plans.values():
        for key in plan.requests:
            found.setdefault(key, []).append(plan)
    return found


def plans_of(key: int, plans: dict[int, PlanSpan]) -> list[PlanSpan]:
    """Return the plans made for a request in the order of their execution, followed by those not done."""
    mine = [plan for plan in plans.values() if key in plan.requests]
    return sorted(mine, key=lambda plan: (not plan.begin_ns, plan.begin_ns or plan.issued_ns))
