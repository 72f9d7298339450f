"""The eight parts of a request's latency: queue, execution and migration of encode, prefill and decode (pure; TI22).

Each moment of a request belongs to one part, so the parts sum to its latency. Called by ``inspect`` and ``trace`` for single requests,
and by the judge (``bench.goodput``) for all requests of a load, live and simulated.
"""

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple

import msgspec

from ..bus.plans import PlanKind
from .flight import FlightRecord, Kind
from .trace_requests import PlanSpan, RequestSpan

Step = Literal["encode", "prefill", "decode"]
_BEFORE_ENCODED = frozenset({"submitted", "queued", "fetching", "analysing"})


class Breakdown(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds of a request's latency by part. A wait belongs to the step that comes next.

    ``encode``: video's work and the encoder's. Migrations: from a plan's end until the controller knows of it. All stages of a device
    share its pages, so nothing is copied. ``decode_queue``: also from the last token to the end of the answer.
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

    step: Step
    begin_ns: int
    end_ns: int
    known_ns: int


def break_down(begin_ns: int, end_ns: int, works: Iterable[Work], last: Step) -> Breakdown:
    """The parts of [begin_ns, end_ns]. ``last``: the step to which a wait after all works belongs.

    Works that overlap count as the latest step among them; work hides a migration, and a migration a wait.
    """
    inside = [_clipped(work, begin_ns, end_ns) for work in works]
    inside = sorted((work for work in inside if work.known_ns > work.begin_ns), key=lambda work: work.begin_ns)
    changes: list[tuple[int, str, int]] = []
    for step, begin, end, known in inside:
        changes += [(begin, f"{step}_s", 1), (end, f"{step}_s", -1)]
        if step != "decode":
            changes += [(end, f"{step}_migration_s", 1), (known, f"{step}_migration_s", -1)]
    changes.sort(key=lambda change: change[0])
    at_work = dict.fromkeys(_ORDER, 0)
    found = dict.fromkeys(PARTS, 0)
    now_ns, number = begin_ns, 0
    for time_ns, part, change in [*changes, (end_ns, _ORDER[0], 0)]:
        if time_ns > now_ns:
            while number < len(inside) and inside[number].begin_ns <= now_ns:
                number += 1
            waits_for = inside[number].step if number < len(inside) else last
            found[next((part for part in _ORDER if at_work[part]), f"{waits_for}_queue_s")] += time_ns - now_ns
            now_ns = time_ns
        at_work[part] += change
    return Breakdown(**{part: time_ns / 1e9 for part, time_ns in found.items()})


_ORDER = ("decode_s", "prefill_s", "encode_s", "prefill_migration_s", "encode_migration_s")


def _clipped(work: Work, begin_ns: int, end_ns: int) -> Work:
    begin, end, known = (min(max(time_ns, begin_ns), end_ns) for time_ns in work[1:])
    return Work(work.step, begin, max(begin, end), max(begin, end, known))


def step_begins(records: Iterable[FlightRecord]) -> list[int]:
    """When the steps of decode began, in order: from records in order of time."""
    return [record.time_ns for record in records if record.kind is Kind.STEP]


def request_works(span: RequestSpan, plans: Iterable[PlanSpan], begins_ns: Sequence[int], now_ns: int) -> list[Work]:
    """The works on a request. ``plans``: those made for it; ``begins_ns``: of decode's steps; ``now_ns``: of what is not over."""
    works = []
    for plan in plans:
        if plan.begin_ns and not plan.status:
            step: Step = "prefill" if plan.kind == PlanKind.PREFILL else "encode"
            works.append(Work(step, plan.begin_ns, plan.end_ns, max(plan.end_ns, plan.acknowledged_ns)))
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
