"""The stages of a request: each moment of the time to the first text in one of them, from what the flight recorders hold."""

from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmrt.runtime.bus.plan_base import PlanKind
from mmrt.runtime.observe import live as live_module
from mmrt.runtime.observe.flight import Kind, pack_plan
from mmrt.runtime.observe.request_follower import FollowedRequest, RequestFollower
from mmrt.runtime.observe.request_stages import TTFT_STAGES, FirstText, stage_of_stretch, stages_to_end, stages_to_first_text
from mmrt.runtime.observe.trace_requests import PlanSpan, RequestSpan, Stage
from mmrt.runtime.stage_table import ACTORS
from mmrt.schema.rows import Phase
from mmrt.shm.flight_recorder import NUM_RECORDS, FlightRecorder, FlightWriter
from mmrt.shm.run_directory import RunDirectory

MS = 1_000_000
OLD, NOW = 2, 3  # generations of the gateway
KEY, ROW = 7, 4


def span_of(*stages: tuple[str, int, int]) -> RequestSpan:
    return RequestSpan(KEY, stages=[Stage(name, begin * MS, end * MS) for name, begin, end in stages])


def plan_of(kind: PlanKind, begin: int, end: int, status: int = 0) -> PlanSpan:
    return PlanSpan(1, kind, begin_ns=begin * MS, end_ns=end * MS, status=status)


def in_ms(stages: dict[str, float]) -> dict[str, int]:
    return {stage: round(1000 * seconds) for stage, seconds in stages.items() if seconds}


PICTURE = span_of(
    ("submitted", 10, 11), ("queued", 11, 14), ("fetching", 14, 16), ("analysing", 16, 25), ("prefilling", 25, 60), ("decoding", 60, 90)
)
PLANS = [
    plan_of(PlanKind.ANALYSE, 18, 20),
    plan_of(PlanKind.PREPROCESS, 26, 30),
    plan_of(PlanKind.ENCODE, 33, 40),
    plan_of(PlanKind.PREFILL, 35, 36, status=499),
    plan_of(PlanKind.PREFILL, 45, 58),
]


def test_a_picture_passes_all_stages() -> None:
    found = stages_to_first_text(PICTURE, PLANS, FirstText(63 * MS, 70 * MS, 72 * MS))
    assert tuple(found) == TTFT_STAGES
    assert in_ms(found) == {
        "admission": 4,
        "media_write": 2,
        "media_decode_queue": 2 + 6,
        "media_decode": 2 + 4,
        "encode_queue": 3,
        "encode": 7,
        "prefill_queue": 5,
        "prefill": 13,
        "first_step_queue": 5,
        "first_step": 7,
        "text": 2,
    }


def test_all_of_a_request_is_in_its_stages_up_to_its_end() -> None:
    span = span_of(("submitted", 0, 2), ("prefilling", 2, 20), ("decoding", 20, 50), ("delivering", 50, 0))
    found = stages_to_end(span, [plan_of(PlanKind.PREFILL, 5, 19)], FirstText(22 * MS, 24 * MS, 25 * MS), 53 * MS)
    names = [(stage_of_stretch(one), one.begin_ns // MS, one.end_ns // MS) for one in found]
    assert names == [
        ("admission", 0, 2),
        ("prefill_queue", 2, 5),
        ("prefill", 5, 19),
        ("first_step_queue", 19, 22),
        ("first_step", 22, 24),
        ("text", 24, 25),
        ("decode", 25, 50),
        ("delivery", 50, 53),
    ]
    refused = stages_to_end(span_of(("submitted", 0, 4)), [], None, 4 * MS)
    assert [stage_of_stretch(one) for one in refused] == ["admission"]


def test_an_answer_may_end_in_decode_before_its_text_is_there() -> None:
    span = span_of(("submitted", 0, 2), ("prefilling", 2, 20), ("decoding", 20, 24), ("delivering", 24, 0))
    found = stages_to_first_text(span, [plan_of(PlanKind.PREFILL, 2, 20)], FirstText(20 * MS, 24 * MS, 26 * MS))
    assert in_ms(found) == {"admission": 2, "prefill": 18, "first_step": 4, "text": 2}


@given(
    st.lists(st.tuples(st.sampled_from(list(PlanKind)), st.integers(1, 120), st.integers(0, 40)), max_size=8),
    st.integers(0, 60),
    st.integers(0, 30),
    st.integers(0, 30),
)
def test_stages_sum_to_the_time(drawn: list[tuple[PlanKind, int, int]], step: int, took: int, text: int) -> None:
    first = FirstText((60 + step) * MS, (60 + step + took) * MS, (60 + step + took + text) * MS)
    plans = [plan_of(kind, begin, begin + length) for kind, begin, length in drawn]
    found = stages_to_first_text(PICTURE, plans, first)
    assert min(found.values()) >= 0 and sum(found.values()) == pytest.approx((first.time_ns - PICTURE.begin_ns) / 1e9)
    cut = stages_to_end(PICTURE, plans, first, first.time_ns + 5 * MS)
    assert [one.begin_ns for one in cut] == [PICTURE.begin_ns, *(one.end_ns for one in cut[:-1])], "no gaps"
    assert cut[-1].end_ns == first.time_ns + 5 * MS


@pytest.fixture
def run(tmp_path: Path) -> Iterator[RunDirectory]:
    with closing(RunDirectory.create(tmp_path / "run", {})) as run:
        yield run


@pytest.fixture
def writers(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> dict[str, FlightWriter]:
    monkeypatch.setattr(live_module, "SETTLE_NS", 0)
    return {name: FlightRecorder.create(run, name).writer(NOW) for name in ("gateway", "controller", "prefill", "decode")}


class Seen:
    def __init__(self) -> None:
        self.stages: list[dict[str, int]] = []
        self.ends: list[tuple[int, int]] = []

    def first_text(self, request: FollowedRequest) -> None:
        assert request.first is not None
        self.stages.append(in_ms(stages_to_first_text(request.span, request.plans.values(), request.first)))

    def over(self, request: FollowedRequest, end_ns: int) -> None:
        self.ends.append((request.span.key, end_ns // MS))


def write_request(writers: dict[str, FlightWriter], pause: Callable[[], None] = lambda: None) -> None:
    """A text: 2 ms until its row, 3 to 9 prefill, and the second step after that is its first."""
    gateway, controller = writers["gateway"], writers["controller"]
    gateway.record(Kind.RECEIVED, 100 * MS, 0, KEY, 1, 2)
    controller.record(Kind.SUBMITTED, 101 * MS, 0, KEY, 9, 0)
    controller.record(Kind.ROW, 102 * MS, 0, KEY, ROW, 1)
    pause()
    controller.record(Kind.ISSUED, 102 * MS, 0, 50, ACTORS.index("prefill"), PlanKind.PREFILL, 1)
    controller.record(Kind.PLAN_REQUEST, 102 * MS, 0, KEY, 50)
    writers["prefill"].record(Kind.PLAN, 103 * MS, 6 * MS, 50, pack_plan(PlanKind.PREFILL, 0, 0), 9)
    writers["decode"].record(Kind.STEP, 105 * MS, 6 * MS, 1, 1)
    controller.record(Kind.PHASE, 110 * MS, 0, KEY, ROW, 1, Phase.DECODE)
    pause()
    writers["decode"].record(Kind.STEP, 112 * MS, 5 * MS, 2, 2)
    gateway.record(Kind.FIRST_TEXT, 119 * MS, 0, KEY)
    writers["decode"].record(Kind.STEP, 118 * MS, 5 * MS, 3, 2)
    pause()
    writers["decode"].record(Kind.ROW_ENDED, 123 * MS, 0, ROW, 1)
    gateway.record(Kind.OVER, 125 * MS, 0, KEY, 2, 0)
    controller.record(Kind.ENDED, 126 * MS, 0, KEY)


EXPECTED = {"admission": 2, "prefill_queue": 1, "prefill": 6, "first_step_queue": 3, "first_step": 5, "text": 2}


@pytest.mark.parametrize("is_looked_at_often", [False, True])
def test_a_request_is_followed_to_its_end(run: RunDirectory, writers: dict[str, FlightWriter], is_looked_at_often: bool) -> None:
    seen = Seen()
    with closing(RequestFollower(run, ACTORS, ("gateway", NOW), seen.first_text, seen.over)) as follower:
        write_request(writers, follower.look if is_looked_at_often else lambda: None)
        follower.look()
        follower.look()
    assert seen.stages == [EXPECTED] and seen.ends == [(KEY, 125)]


def test_only_requests_of_this_gateway_count(run: RunDirectory, writers: dict[str, FlightWriter]) -> None:
    seen = Seen()
    write_request(writers)
    with closing(RequestFollower(run, ACTORS, ("gateway", NOW), seen.first_text, seen.over)) as follower:
        follower.look()
        assert seen.stages == [], "that was before this gateway"
        write_request({**writers, "gateway": FlightRecorder.attach(run, "gateway").writer(OLD)})
        follower.look()
        follower.look()
    assert seen.stages == [] and seen.ends == []


def test_requests_with_lost_records_are_left_out(run: RunDirectory, writers: dict[str, FlightWriter]) -> None:
    seen = Seen()

    def flood() -> None:
        follower.look()
        for number in range(NUM_RECORDS + 1):
            writers["controller"].record(Kind.TICK, (90 + number) * MS)

    with closing(RequestFollower(run, ACTORS, ("gateway", NOW), seen.first_text, seen.over)) as follower:
        write_request(writers, flood)
        follower.look()
        assert seen.stages == [] and seen.ends == []
        write_request(writers)
        follower.look()
        follower.look()
    assert seen.stages == [EXPECTED], "the next one is whole"


def test_prefill_may_draw_the_first_token(run: RunDirectory, writers: dict[str, FlightWriter]) -> None:
    """Then no step of decode made it, not even one that began before the text was there."""
    seen = Seen()
    gateway, controller, prefill = (writers[name] for name in ("gateway", "controller", "prefill"))
    with closing(RequestFollower(run, ACTORS, ("gateway", NOW), seen.first_text, seen.over)) as follower:
        gateway.record(Kind.RECEIVED, 100 * MS, 0, KEY, 1, 2)
        controller.record(Kind.SUBMITTED, 101 * MS, 0, KEY, 9, 0)
        controller.record(Kind.ROW, 102 * MS, 0, KEY, ROW, 1)
        prefill.record(Kind.FIRST_TOKEN, 108 * MS, 1 * MS, ROW, 1)
        prefill.record(Kind.FIRST_TOKEN, 108 * MS, 1 * MS, ROW + 1, 1)
        controller.record(Kind.PHASE, 110 * MS, 0, KEY, ROW, 1, Phase.DECODE)
        writers["decode"].record(Kind.STEP, 111 * MS, 9 * MS, 2, 2)
        gateway.record(Kind.FIRST_TEXT, 112 * MS, 0, KEY)
        follower.look()
        follower.look()
    assert seen.stages == [{"admission": 2, "first_step_queue": 6, "first_step": 1, "text": 3}]


def test_a_step_may_be_recorded_after_its_text(run: RunDirectory, writers: dict[str, FlightWriter]) -> None:
    """decode records a step at its end, and others are quicker than that."""
    seen = Seen()
    gateway, controller = writers["gateway"], writers["controller"]
    with closing(RequestFollower(run, ACTORS, ("gateway", NOW), seen.first_text, seen.over)) as follower:
        gateway.record(Kind.RECEIVED, 100 * MS, 0, KEY, 1, 2)
        controller.record(Kind.SUBMITTED, 101 * MS, 0, KEY, 9, 0)
        controller.record(Kind.ROW, 102 * MS, 0, KEY, ROW, 1)
        controller.record(Kind.PHASE, 110 * MS, 0, KEY, ROW, 1, Phase.DECODE)
        gateway.record(Kind.FIRST_TEXT, 119 * MS, 0, KEY)
        gateway.record(Kind.OVER, 120 * MS, 0, KEY, 2, 0)
        follower.look()
        assert seen.stages == []
        writers["decode"].record(Kind.STEP, 112 * MS, 9 * MS, 2, 2)
        follower.look()
        follower.look()
    assert seen.stages == [{"admission": 2, "first_step_queue": 10, "first_step": 7}] and seen.ends == [(KEY, 120)]
