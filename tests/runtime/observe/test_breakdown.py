"""The eight parts of a request's latency: each moment in one part, whatever overlaps."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmrt.runtime.bus.plan_base import PlanKind
from mmrt.runtime.observe.breakdown import PARTS, Breakdown, Step, Work, break_down, request_breakdown, waiting_for
from mmrt.runtime.observe.trace_requests import PlanSpan, RequestSpan, Stage

MS = 1_000_000
STEPS: tuple[Step, ...] = ("encode", "prefill", "decode")


def work(step: Step, begin: int, end: int, known: int | None = None) -> Work:
    return Work(step, begin * MS, end * MS, (end if known is None else known) * MS)


def parts_ms(breakdown: Breakdown) -> list[int]:
    return [round(1e3 * seconds) for seconds in msgspec.structs.astuple(breakdown)]


def test_a_picture_passes_all_eight_parts() -> None:
    works = [work("encode", 10, 30, 32), work("prefill", 40, 90, 91), work("decode", 95, 200)]
    assert parts_ms(break_down(0, 210 * MS, works, "decode")) == [10, 20, 2, 8, 50, 1, 4 + 10, 105]


def test_a_text_has_nothing_to_encode() -> None:
    assert parts_ms(break_down(0, 50 * MS, [work("prefill", 5, 15), work("decode", 15, 50)], "decode")) == [0, 0, 0, 5, 10, 0, 0, 35]


def test_works_that_overlap_count_once_as_the_latest_step() -> None:
    """The second picture is encoded while the first is prefilled: overlap hides its encoding (RS2)."""
    works = [work("encode", 0, 20, 21), work("encode", 20, 50, 51), work("prefill", 22, 40, 41), work("prefill", 60, 70, 71)]
    assert parts_ms(break_down(0, 71 * MS, works, "decode")) == [0, 22 + 10, 1, 9, 18 + 10, 1, 0, 0]


def test_what_lies_outside_is_left_out() -> None:
    works = [work("encode", -20, 5, 6), work("prefill", 8, 200, 300)]
    assert parts_ms(break_down(0, 10 * MS, works, "decode")) == [0, 5, 1, 2, 2, 0, 0, 0]


@given(
    st.integers(0, 50),
    st.integers(0, 100),
    st.lists(st.tuples(st.sampled_from(STEPS), st.integers(-20, 180), st.integers(0, 60), st.integers(0, 9)), max_size=12),
    st.sampled_from(STEPS),
)
def test_parts_sum_to_the_latency(begin: int, length: int, drawn: list[tuple[Step, int, int, int]], last: Step) -> None:
    works = [work(step, at, at + took, at + took + more) for step, at, took, more in drawn]
    found = break_down(begin * MS, (begin + length) * MS, works, last)
    assert min(parts_ms(found)) >= 0 and found.total_s == pytest.approx(length / 1e3)
    at_work = {at for w in works for at in range(max(begin * MS, w.begin_ns), min((begin + length) * MS, w.end_ns), MS)}
    assert found.encode_s + found.prefill_s + found.decode_s == pytest.approx(len(at_work) / 1e3)


def span_of(*stages: tuple[str, int, int], num_items: int = 0) -> RequestSpan:
    made = [Stage(name, begin * MS, end * MS) for name, begin, end in stages]
    return RequestSpan(7, num_items=num_items, stages=made, end_ns=made[-1].end_ns)


def plan_of(kind: PlanKind, begin: int, end: int, known: int, status: int = 0) -> PlanSpan:
    return PlanSpan(1, kind, begin_ns=begin * MS, end_ns=end * MS, acknowledged_ns=known * MS, status=status, requests={7: (0, 0)})


def test_the_parts_of_recorded_requests() -> None:
    """A preempted request: prefilled and decoded twice. decode's part begins with a step, a plan that was skipped is no work."""
    span = span_of(
        ("submitted", 0, 2),
        ("queued", 2, 3),
        ("prefilling", 3, 20),
        ("decoding", 20, 50),
        ("prefilling", 50, 80),
        ("decoding", 80, 90),
        ("delivering", 90, 92),
    )
    plans = [
        plan_of(PlanKind.PREFILL, 10, 19, 20),
        plan_of(PlanKind.PREFILL, 60, 79, 80),
        plan_of(PlanKind.ENCODE, 30, 40, 41, status=499),
    ]
    begins_ns = [at * MS for at in (1, 15, 25, 30, 85)]
    found = request_breakdown(span, plans, begins_ns, 1000 * MS)
    assert parts_ms(found) == [0, 0, 0, 10 + 10, 9 + 19, 1 + 1, 5 + 5 + 2, 25 + 5]
    assert parts_ms(request_breakdown(span, plans, begins_ns, 0, begin_ns=-5 * MS, end_ns=95 * MS))[3:7] == [25, 28, 2, 15]


def test_pages_read_from_files_are_prefill() -> None:
    span = span_of(("submitted", 0, 2), ("prefilling", 2, 20), ("decoding", 20, 20))
    assert request_breakdown(span, [plan_of(PlanKind.LOAD, 10, 19, 19)], [], 20 * MS).prefill_s == pytest.approx(0.009)


@pytest.mark.parametrize(
    ("stage", "num_items", "step"),
    [
        ("submitted", 0, "prefill"),
        ("queued", 1, "encode"),
        ("analysing", 2, "encode"),
        ("prefilling", 1, "prefill"),
        ("decoding", 1, "decode"),
    ],
)
def test_a_live_request_waits_for_its_next_step(stage: str, num_items: int, step: Step) -> None:
    span = span_of((stage, 0, 0), num_items=num_items)
    span.end_ns = 0
    assert waiting_for(span) == step
    assert getattr(request_breakdown(span, [], [], 30 * MS), f"{step}_s" if step == "decode" else f"{step}_queue_s") in (0.03, 0.0)


def test_every_part_has_a_name() -> None:
    assert tuple(PARTS) == Breakdown.__struct_fields__
