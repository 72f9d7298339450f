"""What video does next: small work first, nobody left waiting, one large plan at a time, no request with both plans of two."""

from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from mmrt.runtime.bus.media_work import SMALL_WORK, estimated_work, is_large
from mmrt.runtime.bus.messages import MediaItem
from mmrt.runtime.controller.scheduling.types import (
    ItemChoice,
    RequestView,
    SegmentChoice,
    SegmentStage,
    SegmentView,
    VideoRoom,
    View,
)
from mmrt.runtime.controller.scheduling.video_order import MAX_WAIT_S, plan_video
from mmrt.runtime.stage_table import InstanceId
from mmrt.tests.settings import examples

LARGE = SMALL_WORK + 1
FIRST, SECOND = InstanceId("video"), InstanceId("video.1")
PIXELS_PER_S = SMALL_WORK  # of a simulated core


def pictures(key: int, *work: int, **more: object) -> RequestView:
    return RequestView(key, key, unanalysed=tuple(range(len(work))), work=work, **more)  # type: ignore[arg-type]


def streamed(key: int, num_segments: int = 4, **more: object) -> RequestView:
    segments = tuple(SegmentView(0, number, SegmentStage.PENDING, 10, 1, 1, True) for number in range(num_segments))
    return RequestView(key, key, has_kv=True, segments=segments, work=(LARGE,), **more)  # type: ignore[arg-type]


def chosen(*requests: RequestView, credit: int = 2, **view: object) -> list[ItemChoice | SegmentChoice]:
    values = {"num_patch_pages": 64, "num_free_patch_pages": 64} | view
    analyse, decode = plan_video(View(requests, video_credit=credit, **values))  # type: ignore[arg-type]
    return [*analyse, *decode]


def test_a_small_picture_goes_before_and_beside_large_ones() -> None:
    large = [pictures(key, *[10 * LARGE] * 16) for key in range(4)]
    small = pictures(9, 5)
    assert chosen(*large, small) == [(0, 0), (9, 0)]
    assert chosen(*large, small, credit=1, large_in_flight=True) == [(9, 0)]
    assert chosen(*large, credit=1, large_in_flight=True) == [], "a slot is free for the small ones that come"
    assert chosen(*large, small, pictures(10, 3), credit=1, large_in_flight=True) == [(10, 0)]
    assert chosen(*large, small, credit=1) == [(0, 0)], "nor do small ones take both"


def test_no_request_has_both_plans_while_others_wait() -> None:
    mixed, other = pictures(1, 5, 6, 7), pictures(2, 100)
    assert chosen(mixed, other) == [(1, 0), (2, 0)]
    assert chosen(replace(mixed, video_in_flight=1), other, credit=1) == [(2, 0)]
    assert chosen(mixed) == [(1, 0), (1, 1)]
    assert chosen(streamed(1, video_in_flight=1), streamed(2), credit=1) == [(2, 0, 0)]


def test_who_has_waited_for_long_goes_first() -> None:
    old, older = (pictures(key, 1000, video_since_s=-MAX_WAIT_S - key) for key in (1, 2))
    assert chosen(pictures(0, 5, video_since_s=-MAX_WAIT_S), old, older, credit=1) == [(2, 0)]


def test_videos_take_turns_with_other_large_work_and_go_on_in_order_of_arrival() -> None:
    waiting = [streamed(1, video_since_s=-9.0), streamed(2, video_since_s=-99.0), pictures(3, LARGE, video_since_s=-999.0)]
    assert chosen(*waiting, credit=1, last_streamed=False) == [(1, 0, 0)]
    assert chosen(*waiting, credit=1, last_streamed=True) == [(3, 0)]
    assert chosen(*waiting[:2], credit=1, last_streamed=True) == [(1, 0, 0)]


def test_a_large_segment_that_waits_keeps_its_patch_pages_from_younger_ones() -> None:
    small = SegmentView(0, 0, SegmentStage.PENDING, 10, 1, 1)
    younger = RequestView(2, 2, has_kv=True, segments=(small,), work=(5,))
    assert chosen(streamed(1, 1), younger, credit=1, large_in_flight=True, num_free_patch_pages=1) == []
    assert chosen(streamed(1, 1), younger, credit=1, large_in_flight=True, num_free_patch_pages=2) == [(2, 0, 0)]


def test_each_of_several_processes_has_a_large_plan_and_its_own_requests() -> None:
    rooms = (VideoRoom(FIRST, 2), VideoRoom(SECOND, 2))
    ours, theirs = streamed(1, video=FIRST), streamed(2, video=SECOND)
    assert chosen(ours, theirs, credit=4, videos=rooms) == [(1, 0, 0), (2, 0, 0)], "the rest is for small work"
    assert chosen(ours, streamed(2, video=FIRST), credit=4, videos=rooms) == [(1, 0, 0)]
    busy = (VideoRoom(FIRST, 0, True), VideoRoom(SECOND, 2))
    assert chosen(ours, theirs, credit=2, videos=busy) == [(2, 0, 0)], "a request's media stay where they are"
    assert chosen(pictures(3, 5, 6, video=FIRST), credit=2, videos=busy) == []
    assert chosen(streamed(1, video="video.7"), credit=2, videos=busy) == [(1, 0, 0)], "that one has left"


def test_of_requests_without_a_process_one_at_a_time_gets_one() -> None:
    rooms = (VideoRoom(FIRST, 2), VideoRoom(SECOND, 2))
    assert chosen(pictures(1, 5), pictures(2, 6), credit=4, videos=rooms) == [(1, 0)]
    assert chosen(pictures(1, 7, 8), pictures(2, 6, 7, video=SECOND), credit=4, videos=rooms) == [(2, 0), (1, 0)]


def test_estimates() -> None:
    assert estimated_work(MediaItem("image", 10, num_pixels=100, work=300)) == 300
    small, large = (estimated_work(MediaItem("video", num_bytes)) for num_bytes in (10, 20))
    assert is_large(small) and small < large and is_large(estimated_work(MediaItem("audio", 1)))
    assert not is_large(SMALL_WORK)


@dataclass
class Job:
    """A request of the simulation: works of pictures, or of a video's segments, that are left."""

    key: int
    comes_s: float
    left: list[int]
    is_video: bool
    served_s: float
    in_flight: int = 0
    longest_wait_s: float = 0.0
    taken: set[int] = field(default_factory=set)

    def view(self, now: float) -> RequestView:
        numbers = [number for number in range(len(self.left)) if number not in self.taken]
        share = {"video_in_flight": self.in_flight, "video_since_s": self.served_s - now}
        if self.is_video:
            segments = tuple(SegmentView(0, number, SegmentStage.PENDING, 1, 1, 1, True) for number in numbers)
            return RequestView(self.key, self.key, has_kv=True, segments=segments, work=(LARGE,), **share)  # type: ignore[arg-type]
        return RequestView(self.key, self.key, unanalysed=tuple(numbers), work=tuple(self.left), **share)  # type: ignore[arg-type]


def simulate(jobs: list[Job]) -> None:
    """An actor that does one large plan and one small plan at once, each in the order in which it got them, two plans at most."""
    now, last_streamed = 0.0, False
    running: list[tuple[float, Job, bool]] = []  # (when it ends, of which request, whether it is large)
    while any(len(job.taken) < len(job.left) for job in jobs):
        while True:
            views = tuple(job.view(now) for job in jobs if job.comes_s <= now and len(job.taken) < len(job.left))
            has_large = any(large for _, _, large in running)
            credit = 2 - len(running)
            choices = chosen(*views, credit=credit, large_in_flight=has_large, last_streamed=last_streamed) if views else []
            if not choices:
                break
            for choice in choices:
                job = jobs[choice.key]
                number = choice.segment if isinstance(choice, SegmentChoice) else choice.item
                large = job.is_video or is_large(job.left[number])
                assert number not in job.taken and not (large and any(other for _, _, other in running)), "two large plans at once"
                others = [end for end, _, other in running if other == large]
                running.append((max([now, *others]) + job.left[number] / PIXELS_PER_S, job, large))
                job.taken.add(number)
                job.in_flight += 1
                job.longest_wait_s = max(job.longest_wait_s, now - job.served_s)
                job.served_s = now
                last_streamed = job.is_video if large else last_streamed
            assert len(running) <= 2
        coming = [job.comes_s for job in jobs if job.comes_s > now]
        now = min([*coming, *(end for end, _, _ in running)])
        for end, job, _ in running:
            job.in_flight -= end <= now
        running = [one for one in running if one[0] > now]


works = st.lists(st.integers(1, SMALL_WORK), min_size=1, max_size=4) | st.lists(st.integers(LARGE, 12 * LARGE), min_size=1, max_size=8)


@settings(deadline=None, max_examples=examples(150))
@given(st.lists(st.tuples(st.floats(0, 20), works, st.booleans()), min_size=1, max_size=8))
def test_nobody_starves(arrivals: list[tuple[float, list[int], bool]]) -> None:
    """Whoever comes: small work waits for small work alone, and a request of pictures waits no longer than the age limit and one
    round of everybody that is there."""
    jobs = [Job(key, comes_s, left, video and is_large(min(left)), comes_s) for key, (comes_s, left, video) in enumerate(arrivals)]
    simulate(jobs)
    small = [job for job in jobs if not is_large(max(job.left))]
    all_small_s = sum(sum(job.left) for job in small) / PIXELS_PER_S
    longest_s = max(max(job.left) for job in jobs) / PIXELS_PER_S
    for job in small:
        assert job.longest_wait_s <= all_small_s + 1e-6
    for job in jobs:
        if not job.is_video:
            assert job.longest_wait_s <= MAX_WAIT_S + 2 * len(jobs) * longest_s + 1e-6
