"""Convert flight records to a trace in Chrome's JSON format, for https://ui.perfetto.dev and chrome://tracing (pure).

One process track per actor with its steps as slices, and its waits and generations beside them; one track of nested slices per
request; counters for pools, queues and budgets; arrows from plan to plan of a request, along its stages. Times are microseconds of
CLOCK_MONOTONIC.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ..bus.plan_base import PlanKind
from ..process.exit_status import describe_exit
from ..stage_table import SUPERVISOR
from .breakdown import PARTS, Breakdown, request_breakdown, step_begins
from .dumps import Recording
from .flight import PLAN_NAMES, POOL_NAMES, UNIT_NAMES, FlightRecord, Kind, merge, signed, unpack_pair, unpack_plan
from .request_names import is_named
from .trace_requests import PlanSpan, RequestSpan, plan_spans, plans_by_request, request_spans

Event = dict[str, Any]
Pids = Mapping[str, int]
"""The numbers of the actors' tracks, in the order of the actors' numbers in records; the supervisor's is the last."""

_REQUESTS_PID = 1
_STEPS_TID = 1
_ASIDE_TID = 2
# The last prerequisite of each kind of plan: a request's arrows follow it.
_BEFORE = {
    PlanKind.PREPROCESS: (PlanKind.ANALYSE,),
    PlanKind.ENCODE: (PlanKind.PREPROCESS,),
    PlanKind.LOAD_SEGMENTS: (PlanKind.ANALYSE,),
    PlanKind.PREFILL: (PlanKind.PREFILL, PlanKind.LOAD, PlanKind.ENCODE, PlanKind.LOAD_SEGMENTS),
    PlanKind.TRANSFER: (PlanKind.PREFILL,),
}


def make_trace(recording: Recording, last_s: float | None = None, wanted: str | None = None) -> dict[str, Any]:
    """Make the whole JSON object. ``last_s``: leave out events that ended more than so many seconds before the recording.
    ``wanted``: show no requests but those whose id or key begins so."""
    facts = recording.facts
    records = merge(recording.recorders)
    since_ns = 0 if last_s is None else facts.taken_ns - int(last_s * 1e9)
    requests, plans = request_spans(records), plan_spans(records)
    pids = _number_tracks(recording)
    events = list(_slices(records, plans, requests, pids))
    tracks = {event["args"]["plan"]: event["tid"] for event in events if "plan" in event.get("args", {})}
    events += _plan_tracks(plans, facts.taken_ns, pids)
    events += _generations(records, facts.taken_ns, pids)
    events += _counters(records, pids)
    events += _flows(records, plans, requests, tracks, pids)
    recent = [event for event in events if event["_end"] >= since_ns]
    by_request, begins_ns = plans_by_request(plans), step_begins(records)
    for span in requests.values():
        if wanted is not None and not is_named(wanted, span.request_id, f"{span.key:x}"):
            continue
        if (span.end_ns or facts.taken_ns) >= since_ns:
            parts = request_breakdown(span, by_request.get(span.key, ()), begins_ns, facts.taken_ns)
            recent += _request_track(span, facts.taken_ns, parts)
    for event in recent:
        del event["_end"]
    recent.sort(key=lambda event: event["ts"])  # stable: each track keeps its order
    return {
        "traceEvents": [*_names(pids), *recent],
        "displayTimeUnit": "ms",
        "otherData": {
            "run": facts.run_id,
            "model": facts.model_path,
            "reason": facts.reason,
            "taken_us": facts.taken_ns / 1000,
            "wall_clock_of_ts_0_s": facts.taken_s - facts.taken_ns / 1e9,
        },
    }


def num_requests(trace: dict[str, Any]) -> int:
    """Return how many requests a trace shows."""
    return len({event["id"] for event in trace["traceEvents"] if event.get("cat") == "request"})


def _number_tracks(recording: Recording) -> Pids:
    """Number the tracks by the recording's own actors, which need not be those of this build."""
    names = dict.fromkeys((*recording.facts.actors, *recording.recorders))
    names.pop(SUPERVISOR, None)
    return {name: pid for pid, name in enumerate((*names, SUPERVISOR), _REQUESTS_PID + 1)}


def _actor(index: int, pids: Pids) -> str:
    """Return the actor with this number in records, "?" if the recording has none."""
    actors = [*pids][:-1]  # the supervisor has no number
    return actors[index] if index < len(actors) else "?"


def _names(pids: Pids) -> Iterator[Event]:
    for name, pid in [("requests", _REQUESTS_PID), *pids.items()]:
        yield {"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "ts": 0, "args": {"name": name}}
        yield {"ph": "M", "name": "process_sort_index", "pid": pid, "tid": 0, "ts": 0, "args": {"sort_index": pid}}
        for tid, name in (_STEPS_TID, "steps"), (_ASIDE_TID, "steps at the same time"):
            yield {"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "ts": 0, "args": {"name": name}}


def _event(ph: str, name: str, time_ns: int, pid: int, end_ns: int = 0, **more: Any) -> Event:
    """Make an event. ``end_ns``: its end, if that differs from its time."""
    return {"ph": ph, "name": name, "ts": time_ns / 1000, "pid": pid, "tid": _STEPS_TID, "_end": end_ns or time_ns, **more}


def _pair(name: str, begin_ns: int, end_ns: int, pid: int, category: str, id: str, **args: Any) -> Iterator[Event]:
    """Yield the events of an asynchronous slice."""
    end_ns = max(begin_ns, end_ns)
    yield _event("b", name, begin_ns, pid, end_ns, cat=category, id=id, args=args)
    yield _event("e", name, end_ns, pid, cat=category, id=id)


# -------------------------------------------------------------------------------------------------------------- actors


def _slices(
    records: Sequence[FlightRecord], plans: dict[int, PlanSpan], requests: dict[int, RequestSpan], pids: Pids
) -> Iterator[Event]:
    """Yield the work of processes as slices. A process that does two plans at once has a second track for what overlaps."""
    ends_ns: dict[int, int] = {}  # of the first track, by process
    for record in sorted(records, key=lambda record: record.time_ns):
        described = _describe(record, plans, requests)
        if described is not None:
            name, args = described
            dur = record.duration_ns / 1000
            pid = pids[record.actor]
            tid = _STEPS_TID if record.time_ns >= ends_ns.get(pid, 0) else _ASIDE_TID
            if tid == _STEPS_TID:
                ends_ns[pid] = record.end_ns
            yield _event("X", name, record.time_ns, pid, record.end_ns, tid=tid, cat="step", dur=dur, args=args)
        elif record.kind is Kind.FIRST_TOKEN:  # within a plan, whose slice it would cross
            yield _event("i", "first token", record.end_ns, pids[record.actor], s="p", args={"row": record.key})
        elif record.kind is Kind.UNSENT:
            name = f"a message to {_actor(record.a, pids)} did not leave"
            yield _event("i", name, record.time_ns, pids[record.actor], s="p")
        elif record.kind is Kind.EXIT:
            name = f"generation {record.b} ended: {describe_exit(signed(record.c))}"
            yield _event("i", name, record.time_ns, pids.get(_actor(record.a, pids), pids[SUPERVISOR]), s="p", args={"pid": record.key})


def _describe(record: FlightRecord, plans: dict[int, PlanSpan], requests: dict[int, RequestSpan]) -> tuple[str, dict[str, Any]] | None:
    """Return name and arguments of a record that is a slice; None otherwise."""
    match record.kind:
        case Kind.PLAN:
            plan = plans[record.key]
            args: dict[str, Any] = {
                "plan": f"{record.key:#x}",
                UNIT_NAMES[plan.kind]: record.b,
                "waited_ms": record.c / 1e6,
                "generation": record.generation,
                "requests": [requests[key].name for key in plan.requests if key in requests],
            }
            if plan.status:
                args["status"] = plan.status
            return PLAN_NAMES[plan.kind], args
        case Kind.STEP:
            ended, tokens = unpack_pair(record.b)
            return "step", {"step": record.key, "rows": record.a, "tokens": tokens, "ended": ended, "members": record.c}
        case Kind.COPY:
            return "copy", {"plan": f"{record.key:#x}", "copied": record.a}
        case Kind.TEXT:
            return "text", {}
        case Kind.TICK:
            return "tick", {"effects": record.a}
        case Kind.WRITTEN:
            return "write media", {"bytes": record.c, "request": requests[record.key].name if record.key in requests else ""}
    return None


def _plan_tracks(plans: dict[int, PlanSpan], taken_ns: int, pids: Pids) -> Iterator[Event]:
    """Yield, beside the slices, the time of plans in flight and in their actor's queue."""
    for plan in plans.values():
        name, id = PLAN_NAMES[plan.kind], f"{plan.plan_id:#x}"
        if plan.issued_ns:
            end_ns = plan.acknowledged_ns or plan.end_ns or taken_ns
            yield from _pair(f"{name} in flight", plan.issued_ns, end_ns, pids["controller"], "plan", id)
        if plan.begin_ns > plan.arrived_ns > 0:
            yield from _pair(f"{name} waits", plan.arrived_ns, plan.begin_ns, pids[plan.actor], "wait", id)


def _generations(records: Sequence[FlightRecord], taken_ns: int, pids: Pids) -> Iterator[Event]:
    """Yield the phases of processes: starting, standby, active."""
    ends: dict[tuple[str, int], int] = {}
    for record in records:
        if record.kind is Kind.STOPPING:
            ends.setdefault((record.actor, record.key), record.time_ns)
        elif record.kind is Kind.EXIT:
            ends.setdefault((_actor(record.a, pids), record.key), record.time_ns)
    for record in records:
        if record.kind is not Kind.ACTIVE:
            continue
        pid, id = pids[record.actor], f"{record.actor}-{record.generation}"
        began_ns, standby_ns, active_ns = record.a, record.b or record.time_ns, record.time_ns
        end_ns = max(active_ns, ends.get((record.actor, record.key), taken_ns))
        name = f"generation {record.generation}"
        yield _event("b", name, began_ns, pid, end_ns, cat="generation", id=id, args={"pid": record.key})
        for stage, begin, end in (
            ("starting", began_ns, standby_ns),
            ("standby", standby_ns, active_ns),
            ("active", active_ns, end_ns),
        ):
            yield from _pair(stage, begin, max(begin, end), pid, "generation", id)
        yield _event("e", name, end_ns, pid, cat="generation", id=id)


def _counters(records: Sequence[FlightRecord], pids: Pids) -> Iterator[Event]:
    """Yield counters of pools, queues, budgets, and rows per step."""
    rows, queued = -1, dict[str, int]()
    for record in records:
        pid = pids[record.actor]
        if record.kind is Kind.POOL and record.a < len(POOL_NAMES):
            yield _event("C", f"{POOL_NAMES[record.a]} pages", record.time_ns, pid, args={"used": record.b, "evictable": record.key})
        elif record.kind is Kind.QUEUES:
            args = {"waiting": record.a, "preparing": record.b, "running": record.c}
            yield _event("C", "requests", record.time_ns, pid, args=args)
            yield _event("C", "plans in flight", record.time_ns, pid, args={"plans": record.key})
        elif record.kind is Kind.BUDGETS:
            yield _event("C", "budgets", record.time_ns, pid, args={"prefill_tokens": record.a, "encode_rows": record.b})
        elif record.kind is Kind.STEP and record.a != rows:
            rows = record.a
            yield _event("C", "rows of a step", record.time_ns, pid, args={"rows": rows})
        elif record.kind is Kind.PLAN:
            num_queued = unpack_plan(record.a)[2]
            if queued.get(record.actor) != num_queued:
                queued[record.actor] = num_queued
                yield _event("C", "plans queued", record.time_ns, pid, args={"plans": num_queued})


# ------------------------------------------------------------------------------------------------------------ requests


def _request_track(span: RequestSpan, taken_ns: int, parts: Breakdown) -> list[Event]:
    """Return a request and its stages, nested, with instant events; the order gives the nesting at equal times. ``parts``: of its
    latency."""
    id, end_ns = f"{span.key:#x}", max(span.end_ns or taken_ns, span.begin_ns)
    args = {
        "row": span.row,
        "prompt_tokens": span.num_prompt_tokens,
        "cached_tokens": span.num_cached_tokens,
        "tokens_sent": span.num_sent,
        "status": span.status,
        **{f"{name}, ms": 1e3 * getattr(parts, field) for field, name in PARTS.items()},
    }
    inner: list[Event] = []
    for stage in span.stages:
        begin_ns = min(stage.begin_ns, end_ns)
        inner += _pair(stage.name, begin_ns, min(stage.end_ns or end_ns, end_ns), _REQUESTS_PID, "request", id)
    for what, time_ns in span.marks:
        inner.append(_event("n", what, min(time_ns, end_ns), _REQUESTS_PID, cat="request", id=id))
    inner.sort(key=lambda event: event["ts"])
    begin = _event("b", span.name, span.begin_ns, _REQUESTS_PID, cat="request", id=id, args={**args, "unfinished": not span.end_ns})
    return [begin, *inner, _event("e", span.name, end_ns, _REQUESTS_PID, cat="request", id=id)]


def _flows(
    records: Sequence[FlightRecord], plans: dict[int, PlanSpan], requests: dict[int, RequestSpan], tracks: dict[str, int], pids: Pids
) -> Iterator[Event]:
    """Yield arrows to each plan of a request from its last prerequisite, and from its last prefill to decode.

    ``tracks``: the track of each plan's slice.
    """
    steps = [record for record in records if record.kind is Kind.STEP]
    by_request = plans_by_request({number: plan for number, plan in plans.items() if plan.begin_ns})

    def track(plan: PlanSpan) -> int:
        return tracks.get(f"{plan.plan_id:#x}", _STEPS_TID)

    number = 0
    for key, mine in by_request.items():
        mine.sort(key=lambda plan: plan.begin_ns)
        arrows = [
            (source, PLAN_NAMES[plan.kind], plan.begin_ns, plan.actor, track(plan)) for plan in mine if (source := _source(plan, mine))
        ]
        prefills = [plan for plan in mine if plan.kind in (PlanKind.PREFILL, PlanKind.TRANSFER)]
        decoding = [stage.begin_ns for stage in requests[key].stages if stage.name == "decoding"] if key in requests else []
        if prefills and decoding:
            first = next((step for step in steps if step.time_ns >= decoding[-1]), None)
            if first is not None and prefills[-1].end_ns <= first.time_ns:
                arrows.append((prefills[-1], "step", first.time_ns, first.actor, _STEPS_TID))
        for source, name, begin_ns, actor, tid in arrows:
            number += 1
            shared = {"cat": "flow", "id": number}
            start_ns = max(source.begin_ns, source.end_ns - 1)  # inside its slice
            yield _event("s", name, start_ns, pids[source.actor], source.end_ns, tid=track(source), **shared)
            # With its start or not at all.
            yield _event("f", name, begin_ns, pids[actor], source.end_ns, tid=tid, bp="e", **shared)


def _source(plan: PlanSpan, mine: Sequence[PlanSpan]) -> PlanSpan | None:
    """Return the last plan of the request that ended before this one began and is of a prerequisite kind."""
    before = [other for other in mine if other.kind in _BEFORE.get(plan.kind, ()) and other.end_ns <= plan.begin_ns]
    return max(before, key=lambda other: other.end_ns, default=None)
