"""Traces from records that are written here: stages nest, arrows follow the stages, and whatever is missing still gives a trace."""

import random
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from mmrt.runtime.bus.plan_base import PlanKind
from mmrt.runtime.observe.dumps import Facts, Recording
from mmrt.runtime.observe.flight import POOL_NAMES, Kind, merge, pack_id, pack_pair, pack_plan, unsigned
from mmrt.runtime.observe.trace import make_trace, num_requests
from mmrt.runtime.observe.trace_requests import plan_spans, plans_of, request_spans
from mmrt.runtime.stage_table import ACTORS
from mmrt.schema.rows import Phase
from mmrt.shm.flight_recorder import DTYPE
from mmrt.tests.runtime.observe.trace_schema import Event, check_trace
from mmrt.tests.settings import examples

MS = 1_000_000
REQUEST_ID = "chatcmpl-0123456789abcdef01234567"


class Tape:
    """Records of all actors as they would lie in their recorders."""

    def __init__(self) -> None:
        self.records: dict[str, list[tuple[int, ...]]] = {}
        self.generation = 1

    def add(self, actor: str, kind: Kind, at_ms: float, ms: float = 0, key: int = 0, a: int = 0, b: int = 0, c: int = 0) -> None:
        track = self.records.setdefault(actor, [])
        track.append((int(at_ms * MS), int(ms * MS), self.generation << 16 | kind, key, a, b, c, len(track) + 1))

    def plan(self, number: int, actor: str, kind: PlanKind, keys: list[int], issued: float, begin: float, ms: float) -> None:
        index = ACTORS.index(actor)
        self.add("controller", Kind.ISSUED, issued, 0, number, index, kind, len(keys))
        for key in keys:
            self.add("controller", Kind.PLAN_REQUEST, issued, 0, key, number, 0)
        self.add(actor, Kind.PLAN, begin, ms, number, pack_plan(kind, 0, 0), 100, int((begin - issued) * MS))
        self.add("controller", Kind.ACKNOWLEDGED, begin + ms, 0, number)

    def recording(self, taken_ms: float) -> Recording:
        recorders: dict[str, NDArray[Any]] = {name: np.array(rows, DTYPE) for name, rows in self.records.items()}
        facts = Facts(run_id="r", model_path="/m", reason="", taken_s=1e9, taken_ns=int(taken_ms * MS), records={})
        return Recording(facts, recorders)


def a_video_request(tape: Tape, key: int = 77, at: float = 1000) -> None:
    """Two segments: decoded, encoded and prefilled one behind the other, as far as they can be."""
    tape.add("gateway", Kind.RECEIVED, at, 0, key, *pack_id(REQUEST_ID), 5000)
    tape.add("controller", Kind.SUBMITTED, at + 1, 0, key, 20, 1, 0)
    tape.add("controller", Kind.ROW, at + 2, 0, key, 0, 1)
    tape.add("controller", Kind.PHASE, at + 2, 0, key, 0, 1, Phase.PREPARE)
    tape.add("gateway", Kind.WRITTEN, at + 3, 1, key, 0, 0, 5000)
    tape.add("controller", Kind.FILLED, at + 5, 0, key)
    tape.plan(1, "video", PlanKind.ANALYSE, [key], at + 5, at + 6, 4)
    tape.add("controller", Kind.PREPARED, at + 11, 0, key, 2000, 0, 40)
    tape.plan(2, "video", PlanKind.PREPROCESS, [key], at + 11, at + 12, 20)
    tape.plan(3, "video", PlanKind.PREPROCESS, [key], at + 11, at + 33, 20)
    tape.plan(4, "encoder", PlanKind.ENCODE, [key], at + 33, at + 34, 15)
    tape.plan(5, "prefill", PlanKind.PREFILL, [key], at + 50, at + 51, 9)
    tape.plan(6, "encoder", PlanKind.ENCODE, [key], at + 54, at + 55, 15)
    tape.plan(7, "prefill", PlanKind.PREFILL, [key], at + 71, at + 72, 9)
    tape.add("controller", Kind.PHASE, at + 82, 0, key, 0, 1, Phase.DECODE)
    for step in range(5):
        tape.add("decode", Kind.STEP, at + 83 + 5 * step, 4, step + 1, 1, pack_pair(int(step == 4), 1), 1)
    tape.add("gateway", Kind.FIRST_TEXT, at + 89, 0, key)
    tape.add("decode", Kind.ROW_ENDED, at + 108, 0, 0, 1, 2)
    tape.add("gateway", Kind.OVER, at + 109, 0, key, 5, 0)
    tape.add("controller", Kind.ENDED, at + 110, 0, key)
    tape.add("controller", Kind.PHASE, at + 110, 0, key, 0, 1, Phase.ENDING)


def slices(events: list[Event], name: str) -> list[Event]:
    return [event for event in events if event["ph"] == "X" and event["name"] == name]


def test_stages_of_a_request() -> None:
    tape = Tape()
    a_video_request(tape)
    (span,) = request_spans(merge(tape.recording(2000).recorders)).values()
    assert span.name == REQUEST_ID
    begins = [(stage.name, (stage.begin_ns - 1000 * MS) / MS, (stage.end_ns - 1000 * MS) / MS) for stage in span.stages]
    assert begins == [
        ("submitted", 0, 1),
        ("queued", 1, 2),
        ("fetching", 2, 5),
        ("analysing", 5, 11),
        ("prefilling", 11, 82),
        ("decoding", 82, 108),
        ("delivering", 108, 110),
    ]
    assert (span.num_sent, span.num_prompt_tokens, span.end_ns) == (5, 2000, 1110 * MS)


def test_cached_tokens_are_marked_once() -> None:
    """The controller repeats itself in answers to the gateway's questions."""
    tape = Tape()
    a_video_request(tape)
    for at in (1012, 1060, 1100):
        tape.add("controller", Kind.CACHED, at, 0, 77, 512)
    (span,) = request_spans(merge(tape.recording(2000).recorders)).values()
    assert span.num_cached_tokens == 512
    assert [what for what, _ in span.marks] == ["512 tokens cached", "first text"]
    trace = make_trace(tape.recording(2000))
    check_trace(trace)
    (begin,) = [event for event in trace["traceEvents"] if event["ph"] == "b" and event["name"] == REQUEST_ID]
    assert begin["args"]["cached_tokens"] == 512


def test_a_preempted_request_is_prefilled_again() -> None:
    tape = Tape()
    tape.add("controller", Kind.SUBMITTED, 1, 0, 5, 10, 0)
    tape.add("controller", Kind.ROW, 2, 0, 5, 3, 9)
    for at, phase in ((2, Phase.PREPARE), (3, Phase.DECODE), (4, Phase.PREPARE), (5, Phase.DECODE)):
        tape.add("controller", Kind.PHASE, at, 0, 5, 3, 9, phase)
    tape.add("decode", Kind.ROW_ENDED, 5.5, 0, 3, 8, 1)  # an older life of the row
    (span,) = request_spans(merge(tape.recording(9).recorders)).values()
    assert [stage.name for stage in span.stages] == ["queued", "prefilling", "decoding", "prefilling", "decoding"]
    assert [what for what, _ in span.marks] == ["preempted"]
    assert not span.end_ns
    check_trace(make_trace(tape.recording(9)))


def test_a_request_that_was_refused_ends_at_the_gateway() -> None:
    tape = Tape()
    tape.add("gateway", Kind.RECEIVED, 1, 0, 5, *pack_id(REQUEST_ID))
    tape.add("gateway", Kind.OVER, 3, 0, 5, 0, 503)
    (span,) = request_spans(merge(tape.recording(9).recorders)).values()
    assert (span.status, span.end_ns) == (503, 3 * MS)


def test_the_plans_of_a_request() -> None:
    tape = Tape()
    a_video_request(tape)
    tape.add("controller", Kind.ISSUED, 1200, 0, 8, 3, PlanKind.ANALYSE, 1)
    tape.add("controller", Kind.PLAN_REQUEST, 1200, 0, 77, 8, 2 << 32 | 5)
    plans = plan_spans(merge(tape.recording(2000).recorders))
    mine = plans_of(77, plans)
    assert [plan.plan_id for plan in mine] == [1, 2, 3, 4, 5, 6, 7, 8]
    assert mine[-1].requests == {77: (2, 5)} and not mine[-1].begin_ns
    assert plans_of(78, plans) == []
    assert (mine[1].begin_ns - mine[1].arrived_ns) == MS


def test_a_trace_of_a_video_request() -> None:
    tape = Tape()
    a_video_request(tape)
    trace = make_trace(tape.recording(2000))
    events = check_trace(trace)
    assert num_requests(trace) == 1
    request = [(event["ph"], event["name"]) for event in events if event.get("cat") == "request"]
    assert request[0] == ("b", REQUEST_ID) and request[-1] == ("e", REQUEST_ID)
    assert ("n", "first text") in request
    assert [event["args"]["requests"] for event in slices(events, "encode")] == [[REQUEST_ID]] * 2
    assert len(slices(events, "step")) == 5
    assert trace["otherData"]["wall_clock_of_ts_0_s"] == pytest.approx(1e9 - 2)


def test_tracks_are_those_of_the_recordings_actors() -> None:
    """It may be of a build with other stages, or be damaged."""
    tape = Tape()
    tape.add("talker.1", Kind.ACTIVE, 1, 0, 99, 0, 0)
    tape.add("memory", Kind.UNSENT, 2, 0, 0, 2)
    tape.add("memory", Kind.UNSENT, 3, 0, 0, 7)
    tape.add("supervisor", Kind.EXIT, 4, 0, 99, 2, 1)
    tape.add("supervisor", Kind.EXIT, 5, 0, 98, 7, 1)
    recording = tape.recording(9)
    facts = msgspec.structs.replace(recording.facts, actors=("memory", "talker", "talker.1"))
    trace = make_trace(Recording(facts, recording.recorders))
    events = check_trace(trace)
    names = {event["args"]["name"]: event["pid"] for event in trace["traceEvents"] if event["name"] == "process_name"}
    assert names == {"requests": 1, "memory": 2, "talker": 3, "talker.1": 4, "supervisor": 5}
    assert [event["name"] for event in events if event["ph"] == "i"][:2] == [
        "a message to talker.1 did not leave",
        "a message to ? did not leave",
    ]
    assert [event["pid"] for event in events if "ended" in event["name"]] == [4, 5]


def test_two_plans_at_once_lie_on_two_tracks() -> None:
    tape = Tape()
    tape.plan(1, "video", PlanKind.PREPROCESS, [], 1000, 1000, 100)
    tape.plan(2, "video", PlanKind.ANALYSE, [], 1010, 1010, 20)
    tape.plan(3, "video", PlanKind.ANALYSE, [], 1040, 1040, 90)
    tape.plan(4, "video", PlanKind.PREPROCESS, [], 1110, 1110, 5)
    trace = make_trace(tape.recording(2000))
    check_trace(trace)
    tracks = {event["args"]["plan"]: event["tid"] for event in trace["traceEvents"] if event["ph"] == "X"}
    assert tracks["0x1"] == tracks["0x4"] != tracks["0x2"] == tracks["0x3"]
    names = {(event["pid"], event["tid"]): event["args"]["name"] for event in trace["traceEvents"] if event["name"] == "thread_name"}
    assert all((event["pid"], event["tid"]) in names for event in trace["traceEvents"] if event["ph"] == "X")


def test_arrows_bind_to_the_track_of_their_plan() -> None:
    tape = Tape()
    tape.plan(1, "video", PlanKind.PREPROCESS, [77], 1000, 1000, 100)
    tape.plan(2, "video", PlanKind.ANALYSE, [78], 1010, 1010, 20)
    tape.plan(3, "video", PlanKind.PREPROCESS, [78], 1040, 1040, 90)
    tape.plan(4, "encoder", PlanKind.ENCODE, [78], 1140, 1140, 90)
    events = check_trace(make_trace(tape.recording(2000)))
    tracks = {event["args"]["plan"]: event["tid"] for event in events if event["ph"] == "X"}
    assert tracks["0x2"] == tracks["0x3"] != tracks["0x1"]
    ends = [(event["ph"], event["name"], event["tid"]) for event in events if event.get("cat") == "flow"]
    aside, first = tracks["0x2"], tracks["0x1"]
    assert sorted(ends) == sorted(
        [("s", "preprocess", aside), ("f", "preprocess", aside), ("s", "encode", aside), ("f", "encode", first)]
    )


def test_arrows_follow_the_stages() -> None:
    tape = Tape()
    a_video_request(tape)
    events = check_trace(make_trace(tape.recording(2000)))
    begins = {event["id"]: event for event in events if event["ph"] == "s"}
    arrows = sorted((round(begins[event["id"]]["ts"] / 1000), round(event["ts"] / 1000)) for event in events if event["ph"] == "f")
    ms = [(begin - 1000, end - 1000) for begin, end in arrows]
    # analyse to both segments, segments to their encoding, encodings to prefill, the last prefill to the first step
    assert ms == [(10, 12), (10, 33), (32, 34), (49, 51), (53, 55), (70, 72), (81, 83)]


def test_only_the_last_seconds() -> None:
    tape = Tape()
    a_video_request(tape, 77, 1000)
    tape.add("controller", Kind.SUBMITTED, 9000, 0, 88, 10, 0)
    trace = make_trace(tape.recording(9500), last_s=1)
    events = check_trace(trace)
    assert {event.get("id") for event in events if event["ph"] == "b"} == {"0x58"}
    assert not [event for event in events if event["ph"] == "X"]
    assert num_requests(make_trace(tape.recording(9500), last_s=8.45)) == 2


def test_generations_and_their_ends() -> None:
    tape = Tape()
    tape.add("decode", Kind.ACTIVE, 100, 0, 4711, 50 * MS, 90 * MS)
    tape.add("supervisor", Kind.EXIT, 150, 0, 4711, ACTORS.index("decode"), 1, unsigned(-9))
    tape.generation = 2
    tape.add("decode", Kind.ACTIVE, 160, 0, 4712, 110 * MS, 120 * MS)
    events = check_trace(make_trace(tape.recording(200)))
    stages = [(event["ph"], event["name"], event["ts"] / 1000) for event in events if event.get("cat") == "generation"]
    assert ("e", "active", 150) in stages and ("b", "standby", 90) in stages and ("e", "active", 200) in stages
    assert [event["name"] for event in events if event["ph"] == "i"] == ["generation 1 ended: SIGKILL"]


def test_counters() -> None:
    tape = Tape()
    tape.add("controller", Kind.POOL, 1, 0, 25, 3, 40, 100)
    tape.add("controller", Kind.POOL, 2, 0, 0, 4, 7, 100)
    tape.add("controller", Kind.POOL, 2, 0, 0, len(POOL_NAMES), 40, 100)  # a pool of a later version
    tape.add("controller", Kind.QUEUES, 1, 0, 2, 3, 4, 5)
    tape.add("controller", Kind.BUDGETS, 1, 0, 0, 512, 1024, 5000)
    tape.add("controller", Kind.UNSENT, 1, 0, 0, 6)
    events = check_trace(make_trace(tape.recording(200)))
    counters = {event["name"]: event["args"] for event in events if event["ph"] == "C"}
    assert counters == {
        "kv pages": {"used": 40, "evictable": 25},
        "kv.1 pages": {"used": 7, "evictable": 0},
        "requests": {"waiting": 3, "preparing": 4, "running": 5},
        "plans in flight": {"plans": 2},
        "budgets": {"prefill_tokens": 512, "encode_rows": 1024},
    }
    assert [event["name"] for event in events if event["ph"] == "i"] == ["a message to decode did not leave"]


def test_nothing_recorded() -> None:
    assert check_trace(make_trace(Tape().recording(5))) == []


def parts(seed: int) -> Iterator[Tape]:
    """The records of two requests, with some of them missing, as in a ring that has been round."""
    whole = Tape()
    a_video_request(whole, 77, 1000)
    a_video_request(whole, 78, 2000)
    whole.add("decode", Kind.ACTIVE, 900, 0, 4711, 50 * MS, 90 * MS)
    dice = random.Random(seed)
    part = Tape()
    for actor, records in whole.records.items():
        first = dice.randrange(len(records))
        part.records[actor] = sorted(record for record in records[first:] if dice.random() < 0.9)
    yield part


@settings(max_examples=examples(150), deadline=None)
@given(st.integers(0, 2**32), st.floats(0.001, 5))
def test_whatever_is_left_of_the_records_is_a_trace(seed: int, last_s: float) -> None:
    for tape in parts(seed):
        check_trace(make_trace(tape.recording(3000)))
        check_trace(make_trace(tape.recording(3000), last_s))
