"""The order of ``auto``: a request goes ahead where it would be late otherwise, and nobody is late for that."""

import random

import pytest

from mmrt.runtime.controller.scheduling.auto import Auto, first_in_turn
from mmrt.runtime.controller.scheduling.facts import Cost, Facts, Objective, RequestKind
from mmrt.runtime.controller.scheduling.timely import IN_TIME, SOON, service_s, timely
from mmrt.runtime.controller.scheduling.types import (
    ChunkChoice,
    MemberView,
    RequestView,
    SegmentChoice,
    SegmentStage,
    SegmentView,
    View,
)
from mmrt.tests.runtime.controller.policy_load import Job, serve

FACTS = Facts(100.0, encode=Cost(0.0, 0.001, 4096), prefill=Cost(0.0, 0.001, 4096))  # a millisecond for a row or a token


def request(
    key: int,
    work_ms: int = 100,
    *,
    kind: RequestKind = "text",
    arrived_s: float = 100.0,
    ttft_s: float = 1.0,
    priority: int = 0,
) -> RequestView:
    member = MemberView(0, work_ms, work_ms)
    return RequestView(
        key, key, True, members=(member,), arrived_s=arrived_s, kind=kind, objective=Objective(ttft_s), priority=priority
    )


def picture(key: int, work_ms: int = 400, *, arrived_s: float = 100.0) -> RequestView:
    return request(key, work_ms, kind="image", arrived_s=arrived_s, ttft_s=4.0)


def keys(*requests: RequestView) -> list[int]:
    return [found.key for found in timely(requests, FACTS)[0]]


def test_who_is_in_time_passes_nobody() -> None:
    assert keys(picture(1), request(2, 99)) == [1, 2]


def test_a_text_that_would_be_late_goes_ahead_as_far_as_it_must() -> None:
    assert keys(picture(1), picture(2), request(3)) == [1, 3, 2]
    assert timely([picture(1), picture(2), request(3)], FACTS)[1] == {3}


def test_only_so_many_pass_as_leave_the_first_in_time() -> None:
    assert keys(picture(1, 2950), request(2), request(3), request(4)) == [2, 3, 1, 4]


def test_who_was_promised_as_much_passes_nobody() -> None:
    assert keys(request(1, 600), request(2)) == [1, 2]


def test_nobody_passes_who_is_late_or_would_be() -> None:
    assert keys(picture(1, arrived_s=96.0), picture(2, arrived_s=96.0), request(3)) == [1, 2, 3], "under overload: by arrival"
    assert keys(picture(1, 3150), request(2, 60)) == [1, 2]
    assert keys(picture(1, 3150), request(2, 40)) == [2, 1]


def test_nobody_passes_one_that_was_promised_an_earlier_token_or_has_priority() -> None:
    assert keys(picture(1, 3000), picture(2)) == [1, 2]
    assert keys(picture(1), picture(2), request(3, priority=1)) == [1, 2, 3]
    assert keys(request(1, 400, arrived_s=96.0, ttft_s=4.0, kind="image"), request(2, 400)) == [1, 2]


def test_the_work_left_counts_until_the_first_token() -> None:
    stages = (SegmentStage.PENDING, SegmentStage.PREPROCESSED, SegmentStage.ENCODING)
    segments = tuple(SegmentView(0, n, stage, 64, 1, 1) for n, stage in enumerate(stages))
    seen = RequestView(1, 1, members=(MemberView(20, 20, 120),), segments=segments)
    assert service_s(seen, FACTS) == pytest.approx(0.128 + 0.1)
    assert service_s(seen, Facts(100.0)) == 0.0, "before any measurement all are in time"


@pytest.mark.parametrize("seed", range(20))
def test_nobody_is_made_late(seed: int) -> None:
    """Whoever would be in time by arrival is so in this order, and nobody comes later than by arrival who is not."""
    rng = random.Random(seed)
    arrivals = [
        request(
            key,
            rng.randint(1, 600),
            kind=rng.choice(("text", "image")),
            arrived_s=100 - rng.uniform(0, 6),
            ttft_s=rng.choice((1.0, 4.0)),
        )
        for key in range(30)
    ]
    arrivals.sort(key=lambda found: found.arrived_s)
    order, early = timely(arrivals, FACTS)
    assert sorted(found.key for found in order) == list(range(30))

    def ends_s(requests: list[RequestView]) -> dict[int, float]:
        now, ends = FACTS.now, {}
        for found in requests:
            now += service_s(found, FACTS)
            ends[found.key] = now
        return ends

    before, after = ends_s(arrivals), ends_s(order)
    for found in arrivals:
        due_s = found.arrived_s + IN_TIME * found.objective.ttft_s
        assert after[found.key] <= max(before[found.key], due_s) + 1e-9
        if found.key in early:
            assert before[found.key] > found.arrived_s + SOON * found.objective.ttft_s


def test_a_first_token_goes_before_encoding() -> None:
    first, second = request(1), request(2)
    encode, prefill, part = (SegmentChoice(1, 0, 0),), (ChunkChoice(2, 0, 0, 100),), (ChunkChoice(2, 0, 0, 99),)
    for last in ("encode", "prefill"):
        view = View((first, second), FACTS, num_decoding=1, last=last)  # type: ignore[arg-type]
        in_turn = (encode, ()) if last == "prefill" else ((), prefill)
        assert first_in_turn(view, [first, second], encode, prefill) == in_turn
        assert first_in_turn(view, [second, first], encode, prefill) == ((), prefill)
        in_turn = (encode, ()) if last == "prefill" else ((), part)
        assert first_in_turn(view, [second, first], encode, part) == in_turn, "no first token comes of it"


@pytest.mark.parametrize(("ttft_s", "most_s"), [(1.0, 1.0), (8.0, 8.0)])
def test_a_text_waits_for_pictures_as_long_as_it_may(ttft_s: float, most_s: float) -> None:
    pictures = [Job(number, 0.0, "image", 100, num_segments=8, ttft_s=20.0) for number in range(6)]
    text = Job(100, 0.3, "text", 60, ttft_s=ttft_s)
    serve(Auto(), [*pictures, text], 60.0)
    assert text.wait_s <= most_s and max(job.wait_s for job in pictures) <= 20.0
