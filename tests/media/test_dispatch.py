"""Which segment goes next and what the taker gets, without threads: engines and takers act in any order that a test chooses."""

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmrt.media.dispatch import Absent, Dispatch, Request, Run, State, is_next
from mmrt.media.errors import MediaError
from mmrt.media.segments import Group, Segment

FRAME_BYTES = 8


def segments_of(*sizes: int, start: int = 0) -> list[Segment]:
    cuts = np.cumsum([start, *sizes]).tolist()
    return [Segment((Group(a, b - 1, a, b, ()),)) for a, b in zip(cuts, cuts[1:], strict=False)]


def frame(position: int) -> np.ndarray:
    return np.array([position], np.int64)


def add(dispatch: Dispatch, *sizes: int, kind: str = "cpu", max_running: int = 99) -> Request:
    return dispatch.add(segments_of(*sizes), [1] * sum(sizes), kind, max_running)


def started(dispatch: Dispatch, kind: str = "cpu") -> Run:
    run = dispatch.next_run(kind)
    assert run is not None
    return run


def decode(dispatch: Dispatch, run: Run, positions: Sequence[int] | None = None) -> None:
    """Deliver these frames, by default all that are due, and finish if it goes on to the end."""
    for position in range(run.due, run.stop) if positions is None else positions:
        if not dispatch.deliver(run, position, frame(position)):
            break
    else:
        dispatch.finish(run)
    dispatch.leave(run)


def taken(dispatch: Dispatch, request: Request) -> list[int]:
    """All that can be taken now."""
    frames = []
    while not isinstance(output := dispatch.take(request), Absent):
        frames.append(int(output[0]))
    return frames


def test_the_current_request_goes_first():
    """FC7: two engines, two requests. Whoever is free gets the older one's next segment, and the younger one's when there is none."""
    dispatch = Dispatch(8, 1 << 20)
    first, second = add(dispatch, 2, 2, 2), add(dispatch, 2, 2)
    runs = [started(dispatch), started(dispatch)]
    assert [(run.request, run.segment.start) for run in runs] == [(first, 0), (first, 2)]
    decode(dispatch, runs[1])
    third = started(dispatch)
    assert (third.request, third.segment.start) == (first, 4)
    decode(dispatch, runs[0])
    fourth = started(dispatch)
    assert (fourth.request, fourth.segment.start) == (second, 0)
    decode(dispatch, third)
    fifth = started(dispatch)
    assert (fifth.request, fifth.segment.start) == (second, 2)
    assert dispatch.next_run("cpu") is None
    assert taken(dispatch, first) == [0, 1, 2, 3, 4, 5]
    assert dispatch.take(first) is Absent.ENDED
    assert taken(dispatch, second) == [] and dispatch.take(second) is Absent.PENDING


def test_a_request_whose_taker_waits_goes_before_an_older_one():
    dispatch = Dispatch(8, 1 << 20)
    first, second = add(dispatch, 2, 2, 2), add(dispatch, 2, 2)
    assert dispatch.take(second) is Absent.PENDING
    run = started(dispatch)
    assert run.request is second
    decode(dispatch, run)
    assert taken(dispatch, second) == [0, 1], "and now it waits for the next"
    assert dispatch.take(first) is Absent.PENDING
    assert started(dispatch).request is first, "the older one of two that are waited for"


def test_what_nobody_waits_for_makes_way_in_the_middle_of_a_segment():
    dispatch = Dispatch(8, 1 << 20)
    first, second = add(dispatch, 4), add(dispatch, 2)
    ahead = started(dispatch)
    assert dispatch.deliver(ahead, 0, frame(0)), "nobody waits for anything"
    assert dispatch.take(second) is Absent.PENDING
    assert not dispatch.deliver(ahead, 1, frame(1)) and ahead.state is State.PARKED
    dispatch.leave(ahead)
    awaited = started(dispatch)
    assert awaited.request is second
    resumed = started(dispatch)
    assert resumed is ahead and dispatch.deliver(ahead, 2, frame(2)), "the other one has an engine"
    decode(dispatch, awaited)
    assert taken(dispatch, second) == [0, 1]
    decode(dispatch, ahead)
    assert taken(dispatch, first) == [0, 1, 2, 3]


def test_who_waits_does_not_make_way():
    dispatch = Dispatch(8, 1 << 20)
    first, second = add(dispatch, 4), add(dispatch, 2)
    run = started(dispatch)
    assert dispatch.take(first) is Absent.PENDING and dispatch.take(second) is Absent.PENDING
    assert dispatch.deliver(run, 0, frame(0))


def test_no_more_segments_run_than_engines_ask():
    """The printed algorithm's test lets one decode too many in; and a segment that has to wait is not lost."""
    dispatch = Dispatch(8, 1 << 20)
    request = add(dispatch, 1, 1, 1)
    running = [started(dispatch), started(dispatch)]
    assert request.num_running == 2 and [run.state for run in request.runs] == [State.RUNNING, State.RUNNING, State.WAITING]
    for run in running:
        decode(dispatch, run)
    decode(dispatch, started(dispatch))
    assert request.num_running == 0 and taken(dispatch, request) == [0, 1, 2]


def test_a_request_is_ahead_of_its_taker_by_so_many_segments():
    dispatch = Dispatch(2, 1 << 20)
    request = add(dispatch, 1, 1, 1, 1)
    decode(dispatch, started(dispatch))
    decode(dispatch, started(dispatch))
    assert dispatch.next_run("cpu") is None
    dispatch.take(request)
    assert started(dispatch).segment.start == 2
    assert dispatch.next_run("cpu") is None


def test_a_request_has_so_many_engines_at_most():
    dispatch = Dispatch(8, 1 << 20)
    large, other = add(dispatch, 3, 3, 3, max_running=2), add(dispatch, 1)
    runs = [started(dispatch) for _ in range(3)]
    assert [run.request for run in runs] == [large, large, other]
    assert dispatch.next_run("cpu") is None
    decode(dispatch, runs[1])
    assert started(dispatch).segment.start == 6


def test_a_full_request_is_parked_and_another_one_decoded():
    dispatch = Dispatch(4, 3 * FRAME_BYTES)
    full, other = add(dispatch, 9, 9), add(dispatch, 2)
    decode(dispatch, started(dispatch))
    assert full.runs[0].state is State.PARKED and full.num_bytes == 3 * FRAME_BYTES
    decode(dispatch, started(dispatch))
    assert taken(dispatch, other) == [0, 1]
    assert dispatch.next_run("cpu") is None
    dispatch.take(full)
    resumed = started(dispatch)
    assert resumed is full.runs[0] and resumed.due == 3
    decode(dispatch, resumed)
    assert taken(dispatch, full) == [1, 2, 3]


def test_a_segment_that_is_through_is_not_parked():
    """Its frames may be taken before anybody looks at it again, and nobody would ever close its decoder."""
    dispatch = Dispatch(4, 2 * FRAME_BYTES)
    request = add(dispatch, 2, 2)
    run = started(dispatch)
    assert dispatch.deliver(run, 0, frame(0)) and dispatch.deliver(run, 1, frame(1))
    assert taken(dispatch, request) == [0, 1] and run.state is State.RUNNING
    dispatch.finish(run)
    assert run.state is State.DONE


def test_another_plan_may_take_over_from_a_segment_whose_frames_are_all_taken():
    """Hardware that fails while it is reset for the next one."""
    dispatch = Dispatch(4, 1 << 20)
    request = add(dispatch, 2, 2)
    run = started(dispatch)
    assert dispatch.deliver(run, 0, frame(0)) and dispatch.deliver(run, 1, frame(1))
    assert taken(dispatch, request) == [0, 1]
    dispatch.replan(run, segments_of(2, start=2), "other", 1)
    dispatch.leave(run)
    decode(dispatch, started(dispatch, "other"))
    assert taken(dispatch, request) == [2, 3]


def test_later_segments_that_fill_the_memory_do_not_stop_the_one_that_is_needed():
    dispatch = Dispatch(4, 2 * FRAME_BYTES)
    request = add(dispatch, 3, 3)
    head = started(dispatch)
    decode(dispatch, started(dispatch))
    assert request.num_bytes == 2 * FRAME_BYTES
    assert not dispatch.deliver(head, 0, frame(0))
    dispatch.leave(head)
    for position in range(3):
        assert int(dispatch.take(request)[0]) == position
        if position < 2:
            decode(dispatch, started(dispatch), [position + 1])
    assert taken(dispatch, request) == [3, 4]


def test_frames_that_are_not_delivered_are_replaced():
    dispatch = Dispatch(4, 1 << 20)
    request = add(dispatch, 4, 4)
    decode(dispatch, started(dispatch), [1, 3])
    decode(dispatch, started(dispatch), [4, 5])
    assert taken(dispatch, request) == [1, 1, 1, 3, 4, 5, 5, 5]


def test_the_first_frame_that_follows_is_waited_for():
    dispatch = Dispatch(4, 1 << 20)
    request = add(dispatch, 2, 2)
    decode(dispatch, started(dispatch), [])
    assert dispatch.take(request) is Absent.PENDING
    decode(dispatch, started(dispatch))
    assert taken(dispatch, request) == [2, 2, 2, 3]


def test_no_frame_at_all_is_an_error():
    dispatch = Dispatch(4, 1 << 20)
    request = add(dispatch, 2)
    decode(dispatch, started(dispatch), [])
    with pytest.raises(MediaError, match="no frame"):
        dispatch.take(request)


def test_repeated_frames_are_taken_so_often():
    dispatch = Dispatch(2, 1 << 20)
    request = dispatch.add(segments_of(3), [2, 1, 3], "cpu", 1)
    decode(dispatch, started(dispatch))
    assert taken(dispatch, request) == [0, 0, 1, 2, 2, 2]


def test_another_plan_takes_over_from_the_first_undelivered_frame():
    dispatch = Dispatch(8, 1 << 20)
    request = add(dispatch, 2, 4, 2)
    first, failing, later = started(dispatch), started(dispatch), started(dispatch)
    decode(dispatch, first)
    dispatch.deliver(failing, 2, frame(2))
    dispatch.deliver(later, 6, frame(6))
    assert dispatch.replan(failing, segments_of(5, start=3), "other", 1) == [later]
    dispatch.leave(failing)
    assert not dispatch.deliver(later, 7, frame(7)) and later.state is State.DROPPED
    dispatch.leave(later)
    assert dispatch.next_run("cpu") is None and request.num_running == 0
    assert taken(dispatch, request) == [0, 1, 2]
    decode(dispatch, started(dispatch, "other"))
    assert taken(dispatch, request) == [3, 4, 5, 6, 7] and request.num_bytes == 0


def test_another_plan_may_take_over_when_all_that_came_is_taken():
    dispatch = Dispatch(8, 1 << 20)
    request = add(dispatch, 4)
    run = started(dispatch)
    dispatch.deliver(run, 0, frame(0))
    assert taken(dispatch, request) == [0]
    dispatch.replan(run, segments_of(3, start=1), "cpu", 1)
    dispatch.leave(run)
    assert dispatch.take(request) is Absent.PENDING
    decode(dispatch, started(dispatch))
    assert taken(dispatch, request) == [1, 2, 3]


def test_a_failed_request_leaves_the_others_alone():
    dispatch = Dispatch(8, 1 << 20)
    failing, other = add(dispatch, 2, 2), add(dispatch, 1)
    run = started(dispatch)
    dispatch.deliver(run, 0, frame(0))
    assert len(dispatch.fail(run, MediaError("broken"))) == 2
    dispatch.leave(run)
    with pytest.raises(MediaError, match="broken"):
        dispatch.take(failing)
    decode(dispatch, started(dispatch))
    assert taken(dispatch, other) == [0] and failing.num_bytes == 0


def test_reports_on_dropped_runs_change_nothing():
    dispatch = Dispatch(8, 1 << 20)
    request = add(dispatch, 2, 2)
    runs = [started(dispatch), started(dispatch)]
    assert dispatch.cancel(request) == runs and dispatch.cancel(request) == []
    assert not dispatch.deliver(runs[0], 0, frame(0))
    assert dispatch.replan(runs[0], segments_of(2), "cpu", 1) == [] and dispatch.fail(runs[1], MediaError("late")) == []
    dispatch.finish(runs[1])
    for run in runs:
        dispatch.leave(run)
    assert request.num_running == 0 and dispatch.requests == ()
    with pytest.raises(ValueError, match="cancelled"):
        dispatch.take(request)


def test_too_small_a_window():
    with pytest.raises(ValueError, match="max_ahead of 1"):
        Dispatch(1, 1)


@given(
    sizes=st.lists(st.lists(st.integers(1, 5), min_size=1, max_size=6), min_size=1, max_size=4),
    num_engines=st.integers(1, 3),
    max_running=st.integers(1, 3),
    frames_ahead=st.integers(1, 12),
    seed=st.integers(0, 2**32),
)
def test_whatever_happens_first_all_frames_come_in_order_and_memory_is_bounded(sizes, num_engines, max_running, frames_ahead, seed):
    random = np.random.default_rng(seed)
    dispatch = Dispatch(2 * num_engines, frames_ahead * FRAME_BYTES)
    requests = [add(dispatch, *parts, max_running=max_running) for parts in sizes]
    outputs: dict[Request, list[int]] = {request: [] for request in requests}
    running: list[Run] = []
    for _ in range(100_000):
        actions = [lambda request=request: _take(dispatch, request, outputs[request]) for request in requests]
        actions += [lambda run=run: _deliver(dispatch, run, running) for run in running]
        if len(running) < num_engines and (run := dispatch.next_run("cpu")) is not None:
            running.append(run)
        actions[random.integers(len(actions))]()
        assert all(request.num_bytes <= (frames_ahead + num_engines) * FRAME_BYTES for request in requests)
        assert all(_num_decoders(request) <= min(num_engines, max_running) for request in requests)
        if all(len(outputs[request]) == sum(parts) for request, parts in zip(requests, sizes, strict=True)):
            break
    assert list(outputs.values()) == [list(range(sum(parts))) for parts in sizes]


def _num_decoders(request: Request) -> int:
    return sum(run.state in (State.RUNNING, State.PARKED) for run in request.runs)


def _take(dispatch: Dispatch, request: Request, outputs: list[int]) -> None:
    output = dispatch.take(request)
    if not isinstance(output, Absent):
        outputs.append(int(output[0]))


def _deliver(dispatch: Dispatch, run: Run, running: list[Run]) -> None:
    if run.due < run.stop:
        if dispatch.deliver(run, run.due, frame(run.due)):
            return
    else:
        dispatch.finish(run)
    dispatch.leave(run)
    running.remove(run)


@given(st.lists(st.integers(0, 1), max_size=60), st.sets(st.integers(0, 8), max_size=8))
def test_a_taker_that_waits_is_told_of_whatever_it_may_take(turns: list[int], lost: set[int]):
    """Two engines in any order, some frames never delivered: where nobody is told there is nothing to be had."""
    dispatch = Dispatch(8, 1 << 20)
    request = add(dispatch, 3, 3, 3)
    busy: list[Run | None] = [None, None]
    num_taken = len(taken(dispatch, request))
    for engine in [*turns, *(0, 1) * 12]:
        run = busy[engine] = busy[engine] or dispatch.next_run("cpu")
        if run is None:
            continue
        position = next((due for due in range(run.due, run.stop) if due not in lost), None)
        if position is not None:
            assert dispatch.deliver(run, position, frame(position))
            if not is_next(run):
                assert dispatch.take(request) is Absent.PENDING
                continue
        else:
            dispatch.finish(run)
            dispatch.leave(run)
            busy[engine] = None
        num_taken += len(taken(dispatch, request))
    assert num_taken == 9
