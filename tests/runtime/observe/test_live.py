"""Following flight recorders: look by look it sees the same as a trace that reads everything at once."""

import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from mmrt.runtime.bus.plan_base import PlanKind
from mmrt.runtime.observe import live as live_module
from mmrt.runtime.observe.flight import Kind, merge, pack_id, pack_pair, pack_plan, unsigned
from mmrt.runtime.observe.live import FIRST_RECORDS, NUM_REQUESTS, LiveRequests
from mmrt.runtime.observe.trace_requests import plan_spans, request_spans
from mmrt.runtime.stage_table import ACTORS
from mmrt.schema.rows import Phase
from mmrt.shm.flight_recorder import NUM_RECORDS, FlightRecorder, FlightWriter, read_recorders
from mmrt.shm.run_directory import RunDirectory

MS = 1_000_000
NAMES = ("gateway", "controller", "encoder", "prefill", "decode", "supervisor")


@pytest.fixture
def run(tmp_path: Path) -> Iterator[RunDirectory]:
    with closing(RunDirectory.create(tmp_path / "run", {})) as run:
        yield run


@pytest.fixture
def writers(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> dict[str, FlightWriter]:
    monkeypatch.setattr(live_module, "SETTLE_NS", 0)
    return {name: FlightRecorder.create(run, name).writer(3) for name in NAMES}


@pytest.fixture
def live(run: RunDirectory, writers: dict[str, FlightWriter]) -> Iterator[LiveRequests]:
    with closing(LiveRequests(run, ACTORS)) as live:
        yield live


def a_request(writers: dict[str, FlightWriter], key: int, at_ns: int) -> Iterator[None]:
    """Write the records of a request with a picture, and pause where a look may come in between."""
    gateway, controller = writers["gateway"], writers["controller"]
    gateway.record(Kind.RECEIVED, at_ns, 0, key, *pack_id(f"chatcmpl-{key:024x}"), 10)
    yield
    controller.record(Kind.SUBMITTED, at_ns + 1 * MS, 0, key, 9, 1)
    controller.record(Kind.ROW, at_ns + 2 * MS, 0, key, key, 1)
    yield
    gateway.record(Kind.WRITTEN, at_ns + 3 * MS, MS, key, 0, 0, 4068)
    controller.record(Kind.FILLED, at_ns + 5 * MS, 0, key)
    for number, (actor, kind) in enumerate((("encoder", PlanKind.ENCODE), ("prefill", PlanKind.PREFILL))):
        plan, begin_ns = key * 10 + number, at_ns + (6 + 4 * number) * MS
        controller.record(Kind.ISSUED, begin_ns, 0, plan, ACTORS.index(actor), kind, 1)
        controller.record(Kind.PLAN_REQUEST, begin_ns, 0, key, plan)
        yield
        writers[actor].record(Kind.PLAN, begin_ns + MS, 2 * MS, plan, pack_plan(kind, 0, 0), 140, MS)
        yield
    controller.record(Kind.PREPARED, at_ns + 9 * MS, 0, key, 55)
    controller.record(Kind.PHASE, at_ns + 15 * MS, 0, key, key, 1, Phase.DECODE)
    writers["decode"].record(Kind.STEP, at_ns + 16 * MS, MS, 1, 1, pack_pair(0, 1))
    gateway.record(Kind.FIRST_TEXT, at_ns + 17 * MS, 0, key)
    yield
    writers["decode"].record(Kind.ROW_ENDED, at_ns + 18 * MS, 0, key, 1)
    gateway.record(Kind.OVER, at_ns + 19 * MS, 0, key, 12)
    controller.record(Kind.ENDED, at_ns + 20 * MS, 0, key)


def test_look_by_look_it_sees_what_a_trace_sees(run: RunDirectory, writers: dict[str, FlightWriter], live: LiveRequests) -> None:
    began_ns = time.monotonic_ns() - 1000 * MS
    revisions = [0]
    for key in (1, 2):
        for _ in a_request(writers, key, began_ns + 100 * key * MS):
            live.look()
            revisions.append(live.revision)
    live.look()
    records = merge(read_recorders(run, NAMES))
    spans, plans = request_spans(records), plan_spans(records)
    assert {key: request.span for key, request in live.requests.items()} == spans and len(spans) == 2
    for key, request in live.requests.items():
        assert request.plans == {id: plan for id, plan in plans.items() if key in plan.requests} and len(request.plans) == 2
        assert [(write.begin_ns - request.span.begin_ns, write.num_bytes) for write in request.writes] == [(3 * MS, 4068)]
    assert live.num_tokens == 2  # a step of one row for each
    writers["prefill"].record(Kind.FIRST_TOKEN, time.monotonic_ns(), 0, 3, 1)
    live.look()
    assert live.num_tokens == 3, "prefill draws first ones"
    assert revisions == sorted(revisions) and live.revision > revisions[1] > 0


def test_only_what_has_changed(writers: dict[str, FlightWriter], live: LiveRequests) -> None:
    now_ns = time.monotonic_ns() - 1000 * MS
    steps = [a_request(writers, key, now_ns + key * MS) for key in (1, 2)]
    for step in steps:
        next(step)
    live.look()
    before = live.revision
    assert {request.span.key for request in live.changed(0)} == {1, 2} and live.changed(before) == []
    next(steps[1])
    live.look()
    assert [request.span.key for request in live.changed(before)] == [2]
    same = live.revision
    live.look()
    assert live.revision == same  # nothing is new


def test_starts_and_ends_of_processes(writers: dict[str, FlightWriter], live: LiveRequests) -> None:
    now_ns = time.monotonic_ns() - 1000 * MS
    decode = ACTORS.index("decode")
    writers["supervisor"].record(Kind.EXIT, now_ns, 0, 4711, decode, 2, unsigned(-9))
    writers["decode"].record(Kind.ACTIVE, now_ns + MS, 0, 4712)
    writers["supervisor"].record(Kind.EXIT, now_ns + 2 * MS, 0, 4713, len(ACTORS), 2, 0)  # of a process whose actor is not known
    live.look()
    assert [(event.actor, event.text) for event in live.events] == [
        ("decode", "generation 2 ended: SIGKILL"),
        ("decode", "generation 3 serves"),
    ]
    assert live.num_ends == {"decode": 1} and live.last_end == {"decode": "SIGKILL"}


def test_requests_that_are_lost_with_their_gateway(writers: dict[str, FlightWriter], live: LiveRequests) -> None:
    now_ns = time.monotonic_ns() - 1000 * MS
    over, decoding, submitted = (a_request(writers, key, now_ns) for key in (1, 2, 3))
    list(over)
    for _ in range(7):
        next(decoding)
    next(submitted)
    gateway = ACTORS.index("gateway")
    writers["supervisor"].record(Kind.EXIT, now_ns + 50 * MS, 0, 4711, gateway, 2, 0)  # of a generation before theirs
    live.look()
    assert not any(request.span.is_lost for request in live.requests.values())
    before = live.revision
    writers["supervisor"].record(Kind.EXIT, now_ns + 60 * MS, 0, 4712, gateway, 3, unsigned(-9))
    live.look()
    assert {request.span.key for request in live.changed(before)} == {2, 3}
    spans = [live.requests[key].span for key in (1, 2, 3)]
    assert [span.is_lost for span in spans] == [False, True, True]
    assert spans[1].marks[-1] == ("its gateway ended", now_ns + 60 * MS) and not spans[1].end_ns
    assert spans[2].end_ns == now_ns + 60 * MS, "the controller does not know it"
    writers["controller"].record(Kind.ENDED, now_ns + 70 * MS, 0, 2)
    live.look()
    assert spans[1].end_ns == now_ns + 70 * MS and spans[1].is_lost


def test_it_keeps_the_newest_requests_and_nothing_of_others(writers: dict[str, FlightWriter], live: LiveRequests) -> None:
    now_ns = time.monotonic_ns() - 100_000 * MS  # plans of forgotten requests are not kept for their age
    for key in range(1, 2 * NUM_REQUESTS + 1):
        for _ in a_request(writers, key, now_ns + 30 * key * MS):
            pass
        live.look()
    kept = set(range(NUM_REQUESTS + 1, 2 * NUM_REQUESTS + 1))
    assert live.requests.keys() == kept
    assert set(live._spans.spans) == kept and set(live._spans.rows.values()) == kept
    assert {key for plan in live._plans.plans.values() for key in plan.requests} == kept


def test_requests_that_come_and_go_between_looks(
    writers: dict[str, FlightWriter], live: LiveRequests, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All are forgotten but the newest, whose records alone are read, and those that live."""
    began_ns = time.monotonic_ns() - 1000 * MS  # plans that nobody is known of would be kept
    lives, shared = 5, 6  # the plan of one that is forgotten is also that of one that lives
    begun = a_request(writers, lives, began_ns)
    next(begun)
    taken = []
    monkeypatch.setattr(live, "_take", lambda record, take=live._take: (taken.append(record), take(record)))
    for key in range(10, 10 + 3 * NUM_REQUESTS):
        for _ in a_request(writers, key, began_ns + key * MS):
            pass
    next(begun)
    writers["controller"].record(Kind.ISSUED, began_ns, 0, shared, 0, PlanKind.PREFILL, 1)
    for key in (lives, 10):
        writers["controller"].record(Kind.PLAN_REQUEST, began_ns + 2 * MS, 0, key, shared)
    live.look()
    newest = list(range(10 + 2 * NUM_REQUESTS, 10 + 3 * NUM_REQUESTS))
    assert list(live.requests) == [lives, *newest[1:]]
    assert len(taken) < 20 * NUM_REQUESTS and set(live.requests[lives].plans) == {shared}
    assert set(live._plans.plans) == {shared, *(10 * key + number for key in newest[1:] for number in (0, 1))}
    for request in list(live.requests.values())[1:]:
        assert request.span.end_ns and request.span.is_over and len(request.plans) == 2 and len(request.writes) == 1


def received(writers: dict[str, FlightWriter], keys: range) -> None:
    now_ns = time.monotonic_ns() - 100_000 * MS
    for key in keys:
        writers["gateway"].record(Kind.RECEIVED, now_ns + key, 0, key, *pack_id(f"chatcmpl-{key:024x}"), 0)


def test_the_first_look_is_bounded(writers: dict[str, FlightWriter], live: LiveRequests) -> None:
    received(writers, range(1, FIRST_RECORDS + 3))
    live.look()
    assert min(live.requests) == 3 and len(live.requests) == FIRST_RECORDS  # none of them has ended


def test_after_a_gap_it_begins_anew(writers: dict[str, FlightWriter], live: LiveRequests) -> None:
    received(writers, range(1, 4))
    live.look()
    assert len(live.requests) == 3 and live.num_gaps == 0
    received(writers, range(10, 10 + NUM_RECORDS))
    live.look()
    assert live.num_gaps == 1 and min(live.requests) == 11
    received(writers, range(5, 6))
    live.look()
    assert live.num_gaps == 1 and 5 in live.requests


def test_young_records_wait_for_those_before_them(
    writers: dict[str, FlightWriter], live: LiveRequests, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live_module, "SETTLE_NS", 10_000_000_000_000)
    now_ns = time.monotonic_ns()
    writers["controller"].record(Kind.SUBMITTED, now_ns + 1, 0, 5, 9, 0)
    live.look()
    assert not live.requests
    writers["gateway"].record(Kind.RECEIVED, now_ns, 0, 5, *pack_id(f"chatcmpl-{5:024x}"), 0)  # sent before, read after
    monkeypatch.setattr(live_module, "SETTLE_NS", -1000)
    live.look()
    assert [stage.name for stage in live.requests[5].span.stages] == ["submitted", "queued"]
