"""The eight parts of a request's latency: queue, execution and migration of encode, prefill and decode (pure; TI22).

Each moment of a request belongs to one part, so the parts sum to its latency. Called by ``inspect`` and ``trace`` for single requests,
and by the judge (``mmrt_lab.goodput``) for all requests of a load, live and simulated. ``request_stages`` cuts with it more finely.
"""

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple

import msgspec

from ..bus.plan_base import PlanKind
from .flight import FlightRecord, Kind
from .trace_requests import PlanSpan, RequestSpan

Step = Literal["encode", "prefill", "decode"]
_BEFORE_ENCODED = frozenset({"submitted", "queued", "fetching", "analysing"})


class Breakdown(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds of a request's latency by part. A wait belongs to the step that comes next.

    ``encode``: video's work and the encoder's. Migrations: from a plan's end until the controller knows of it, and copies of KV pages
    between devices. All stages of a device share its pages, so nothing else is copied. ``decode_queue``: also from the last token to
    the end of the answer.
    """

    encode_queue_s: float = 0.0
    encode_s: float = 0.0
    encode_migration_s: float = 0.0
    prefill_queue_s: float = 0.0
    prefill_s: float = 0.0
    prefill_migration_s: float = 0.0
    decode_queue_s: float = 0.0
    decode_s: float = 0.0

    @property
    def total_s(self) -> float:
        """The latency."""
        return float(sum(msgspec.structs.astuple(self)))


PARTS = {
    "encode_queue_s": "encode queue",
    "encode_s": "encode execution",
    "encode_migration_s": "EP migration",
    "prefill_queue_s": "prefill queue",
    "prefill_s": "prefill execution",
    "prefill_migration_s": "PD migration",
    "decode_queue_s": "decode queue",
    "decode_s": "decode execution",
}
"""Names of the fields, as the text has them."""


class Work(NamedTuple):
    """A stretch of work on a request, in ns. ``known_ns``: when the controller knew of its end, not before ``end_ns``."""

    step: str
    begin_ns: int
    end_ns: int
    known_ns: int


class Stretch(NamedTuple):
    """A stretch of a request's time: the execution of a step, the migration behind it, or the wait for it."""

    step: str
    state: Literal["queue", "execution", "migration"]
    begin_ns: int
    end_ns: int


STEPS: tuple[Step, ...] = ("encode", "prefill", "decode")


def stretches(begin_ns: int, end_ns: int, works: Iterable[Work], last: str, steps: Sequence[str] = STEPS) -> list[Stretch]:
    """Cut [begin_ns, end_ns] into what was done for a request, in order of time and without gaps.

    ``steps``: those of the works, in the order of the pipeline; ``last``: that to which a wait after all works belongs. Works that
    overlap count as the latest step among them; work hides a migration, and a migration a wait. Behind the last step nothing migrates.
    """
    inside = [_clipped(work, begin_ns, end_ns) for work in works]
    inside = sorted((work for work in inside if work.known_ns > work.begin_ns), key=lambda work: work.begin_ns)
    changes: list[tuple[int, _What, int]] = []
    for step, begin, end, known in inside:
        changes += [(begin, (step, "execution"), 1), (end, (step, "execution"), -1)]
        if step != steps[-1]:
            changes += [(end, (step, "migration"), 1), (known, (step, "migration"), -1)]
    changes.sort(key=lambda change: change[0])
    order: list[_What] = [(step, state) for state in _STATES for step in reversed(steps)]
    at_work = dict.fromkeys(order, 0)
    found: list[Stretch] = []
    now_ns, number = begin_ns, 0
    for time_ns, what, change in [*changes, (end_ns, order[0], 0)]:
        if time_ns > now_ns:
            while number < len(inside) and inside[number].begin_ns <= now_ns:
                number += 1
            waits_for = inside[number].step if number < len(inside) else last
            step, state = next((one for one in order if at_work[one]), (waits_for, "queue"))
            if found and found[-1][:2] == (step, state):
                found[-1] = found[-1]._replace(end_ns=time_ns)
            else:
                found.append(Stretch(step, state, now_ns, time_ns))
            now_ns = time_ns
        at_work[what] += change
    return found


_What = tuple[str, Literal["queue", "execution", "migration"]]
_STATES: tuple[Literal["execution"], Literal["migration"]] = ("execution", "migration")


def break_down(begin_ns: int, end_ns: int, works: Iterable[Work], last: Step) -> Breakdown:
    """The parts of [begin_ns, end_ns], summed up from its ``stretches``."""
    found = dict.fromkeys(PARTS, 0)
    for step, state, since_ns, until_ns in stretches(begin_ns, end_ns, works, last):
        found[f"{step}_s" if state == "execution" else f"{step}_{state}_s"] += until_ns - since_ns
    return Breakdown(**{part: time_ns / 1e9 for part, time_ns in found.items()})


def _clipped(work: Work, begin_ns: int, end_ns: int) -> Work:
    step, begin, end, known = work
    begin = min(max(begin, begin_ns), end_ns)
    end = max(begin, min(end, end_ns))
    return Work(step, begin, end, max(end, min(known, end_ns)))


def step_begins(records: Iterable[FlightRecord]) -> list[int]:
    """When the steps of decode began, in order: from records in order of time."""
    return [record.time_ns for record in records if record.kind is Kind.STEP]


def request_works(span: RequestSpan, plans: Iterable[PlanSpan], begins_ns: Sequence[int], now_ns: int) -> list[Work]:
    """The works on a request. ``plans``: those made for it; ``begins_ns``: of decode's steps; ``now_ns``: of what is not over."""
    works = []
    for plan in plans:
        if plan.begin_ns and not plan.status:
            step: Step = "prefill" if plan.kind in (PlanKind.PREFILL, PlanKind.LOAD, PlanKind.TRANSFER) else "encode"
            end_ns = plan.begin_ns if plan.kind == PlanKind.TRANSFER else plan.end_ns
            works.append(Work(step, plan.begin_ns, end_ns, max(plan.end_ns, plan.acknowledged_ns)))
    for stage in span.stages:
        if stage.name == "decoding":
            end_ns = stage.end_ns or now_ns
            number = bisect_left(begins_ns, stage.begin_ns)
            begin_ns = begins_ns[number] if number < len(begins_ns) else end_ns
            works.append(Work("decode", min(begin_ns, end_ns), end_ns, end_ns))
    return works


def waiting_for(span: RequestSpan) -> Step:
    """The step that a request without further works waits for."""
    stage = span.stages[-1].name if span.stages else "submitted"
    if stage in _BEFORE_ENCODED:
        return "encode" if span.num_items > 0 else "prefill"
    return "prefill" if stage == "prefilling" else "decode"


def request_breakdown(
    span: RequestSpan,
    plans: Iterable[PlanSpan],
    begins_ns: Sequence[int],
    now_ns: int,
    begin_ns: int | None = None,
    end_ns: int | None = None,
) -> Breakdown:
    """The parts of a request's latency so far. ``begin_ns`` and ``end_ns``: as its client knows them; else as the run does."""
    until_ns = end_ns or span.end_ns or now_ns
    works = request_works(span, plans, begins_ns, until_ns)
    return break_down(span.begin_ns if begin_ns is None else begin_ns, until_ns, works, waiting_for(span))
