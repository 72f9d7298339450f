"""Segments hold every wanted frame once, feed what it takes and no more, and keep temporal patches whole."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmrt.media.segments import MAX_THREADS, Group, Segment, plan_groups, plan_segments, sequential_segment, share_engines
from mmrt.media.video_info import PacketIndex


def make_index(sizes: list[int], random: np.random.Generator, num_leading: int = 0, disposable: float = 0.0) -> PacketIndex:
    """Groups of pictures of these sizes with time stamps at random distances, decoded in a random order after their key frame.

    Of each group but the last, up to ``num_leading`` of its last frames lie behind the next key frame (open GOP).
    """
    timeline = np.cumsum(random.integers(1, 5, sum(sizes))) - 7
    pts: list[int] = []
    keys: list[int] = []
    leading: list[int] = []
    start = 0
    for number, size in enumerate(sizes):
        key, *others = timeline[start : start + size].tolist()
        keys.append(len(pts))
        num_late = int(random.integers(0, min(num_leading, len(others)) + 1)) if number < len(sizes) - 1 else 0
        own = others[: len(others) - num_late]
        pts += [key, *leading, *random.permutation(own).tolist()]
        leading = others[len(others) - num_late :]
        start += size
    is_disposable = random.random(len(pts)) < disposable
    is_disposable[keys] = False
    num_bytes = random.integers(1, 1000, len(pts))
    return PacketIndex(np.array(pts, np.int64), num_bytes, is_disposable, np.array(keys, np.int64), timeline)


@dataclass
class Video:
    index: PacketIndex
    wanted: list[int]

    def frames(self, segment: Segment) -> list[int]:
        """Positions that come out when the segment's groups are fed, in the order in which they are shown."""
        position_of = {int(pts): position for position, pts in enumerate(self.index.timeline[self.wanted])}
        positions = []
        for group in segment.groups:
            assert group.first in self.index.keys
            fed = set(self.index.pts[group.first : group.last + 1].tolist())
            assert int(self.index.pts[group.last]) in group.pts, "fed beyond the last wanted frame"
            assert set(group.pts) <= fed
            assert [position_of[pts] for pts in group.pts] == list(range(group.start, group.stop))
            positions += range(group.start, group.stop)
        return positions

    def num_bytes(self, groups: Sequence[Group]) -> int:
        return sum(int(self.index.num_bytes[group.first : group.last + 1].sum()) for group in groups)


@st.composite
def videos(draw: st.DrawFn) -> Video:
    sizes = draw(st.lists(st.integers(1, 9), min_size=1, max_size=12))
    random = np.random.default_rng(draw(st.integers(0, 2**32)))
    index = make_index(sizes, random, draw(st.integers(0, 3)), draw(st.sampled_from([0.0, 0.4])))
    chosen = draw(st.sets(st.integers(0, sum(sizes) - 1), min_size=1))
    return Video(index, sorted(chosen))


@given(videos(), st.integers(1, 6), st.integers(1, 4), st.integers(0, 5))
def test_every_wanted_frame_once_in_order_and_in_whole_patches(video, num_parts, patch, start):
    start = min(start, len(video.wanted))
    segments = plan_segments(video.index, video.wanted, num_parts=num_parts, temporal_patch_size=patch, start=start)
    assert len(segments) <= num_parts
    positions = [position for segment in segments for position in video.frames(segment)]
    assert positions == list(range(start, len(video.wanted)))
    assert all((segment.stop - segment.start) % patch == 0 for segment in segments[:-1])
    for segment in segments:
        for before, after in zip(segment.groups, segment.groups[1:], strict=False):
            assert before.last + 1 < after.first, "a packet is fed twice, or a decoder starts anew for nothing"


@given(videos(), st.integers(1, 6))
def test_shares_differ_by_the_bytes_of_a_group_at_most(video, num_parts):
    groups = plan_groups(video.index, video.wanted)
    largest = max(video.num_bytes([group]) for group in groups)
    segments = plan_segments(video.index, video.wanted, num_parts=num_parts)
    share = video.num_bytes(groups) / num_parts
    assert all(video.num_bytes(segment.groups) <= share + largest for segment in segments)


def test_segments_are_balanced_by_bytes():
    """Of four groups the first is as large as the other three."""
    index = make_index([4] * 4, np.random.default_rng(0))
    index.num_bytes[:] = [30] * 4 + [10] * 12
    segments = plan_segments(index, range(16), num_parts=2)
    assert [(segment.start, segment.stop) for segment in segments] == [(0, 4), (4, 16)]


@given(videos())
def test_one_group_per_group_of_pictures_that_holds_a_wanted_frame(video):
    shown = video.index.timeline[video.wanted]
    key_pts = video.index.pts[video.index.keys]
    owners = [int(np.flatnonzero(key_pts <= pts)[-1]) for pts in shown]
    groups = plan_groups(video.index, video.wanted)
    assert [group.first for group in groups] == [int(video.index.keys[owner]) for owner in dict.fromkeys(owners)]
    assert [pts for group in groups for pts in group.pts] == shown.tolist()


def test_counts_are_increased_never_decreased():
    """Three groups of 5 wanted frames for 3 engines and patches of 2: the first takes a frame of the second group."""
    index = make_index([10, 10, 10], np.random.default_rng(0))
    wanted = [*range(0, 5), *range(10, 15), *range(20, 25)]
    segments = plan_segments(index, wanted, num_parts=3, temporal_patch_size=2)
    assert [segment.stop - segment.start for segment in segments] == [6, 4, 5]
    assert [len(segment.groups) for segment in segments] == [2, 1, 1]


def test_a_whole_group_that_completes_a_patch_is_taken_rather_than_split():
    """At one wanted frame per group, pairs of groups: nothing is decoded twice."""
    index = make_index([4] * 8, np.random.default_rng(0))
    segments = plan_segments(index, range(0, 32, 4), num_parts=8, temporal_patch_size=2)
    assert [[group.first for group in segment.groups] for segment in segments] == [[0, 4], [8, 12], [16, 20], [24, 28]]


def test_packets_without_a_gap_are_fed_as_one_group():
    index = make_index([6, 6, 6], np.random.default_rng(1), num_leading=2)
    (segment,) = plan_segments(index, range(18), num_parts=1)
    (group,) = segment.groups
    assert (group.first, group.last, group.start, group.stop) == (0, 17, 0, 18)


@pytest.mark.parametrize("num_parts", [1, 4])
def test_nothing_wanted(num_parts):
    assert plan_segments(make_index([5], np.random.default_rng(0)), [], num_parts=num_parts) == []


def test_without_an_index_there_is_one_segment():
    segment = sequential_segment(3, 9)
    assert (segment.start, segment.stop, len(segment.groups)) == (3, 9, 1)


@given(num_segments=st.integers(0, 40), num_engines=st.integers(1, 16))
def test_the_last_segments_use_the_engines_that_would_stand_idle(num_segments, num_engines):
    segments = [sequential_segment(number, number + 1) for number in range(num_segments)]
    shared = share_engines(segments, num_engines)
    assert [segment.groups for segment in shared] == [segment.groups for segment in segments]
    num_last = num_segments % num_engines
    before = shared[: num_segments - num_last]
    assert all(segment.num_threads == 1 for segment in before)
    for segment in shared[len(before) :]:
        enough = num_engines <= segment.num_threads * num_last < num_engines + num_last
        assert enough or segment.num_threads == MAX_THREADS < num_engines / num_last
