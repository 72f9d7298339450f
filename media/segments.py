"""The packets needed for the wanted frames of a video, cut into segments that engines decode at the same time.

Pure: functions of the packet index that ``video_info.analyse`` makes. A *group* is a run of packets that is fed to one decoder, from a
key frame up to the last wanted frame *in decode order*, past the next key frame if need be (open GOP), so that no unneeded picture
is decoded (FC2, FC9). A *segment* is what one engine decodes in one go: the groups of consecutive wanted frames. Called
by ``decoding``.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from .video_info import PacketIndex

MAX_THREADS = 8  # of a decoder: each holds pictures and a stack
END = 1 << 62
"""The packet number behind the last packet of any file."""


@dataclass(frozen=True, slots=True, eq=False)
class Group:
    """Packets ``first`` to ``last``, both included, that give the wanted frames at positions ``start`` to ``stop`` - 1.

    ``pts`` [stop - start] are the time stamps of these frames, in the order in which they are shown; empty without an index.
    """

    first: int
    last: int
    start: int
    stop: int
    pts: tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Segment:
    """Groups of consecutive wanted frames; never empty. ``num_threads``: engines' worth of work that its decoder may do.

    ``is_full``: nothing is left out that a decoder in sequence is fed.
    """

    groups: tuple[Group, ...]
    num_threads: int = 1
    is_full: bool = False

    @property
    def start(self) -> int:
        return self.groups[0].start

    @property
    def stop(self) -> int:
        return self.groups[-1].stop


def share_engines(segments: Sequence[Segment], num_engines: int) -> list[Segment]:
    """Give the threads of otherwise idle engines to the last segments, which are too few for all engines."""
    num_last = len(segments) % num_engines
    if not num_last:
        return list(segments)
    num_threads = min(-(-num_engines // num_last), MAX_THREADS)
    return [*segments[:-num_last], *(replace(segment, num_threads=num_threads) for segment in segments[-num_last:])]


def sequential_segment(start: int, stop: int) -> Segment:
    """The one segment of a file without an index: everything is fed, and frames are counted."""
    return Segment((Group(0, END, start, stop, ()),))


def full_segment(index: PacketIndex, wanted: Sequence[int], start: int) -> Segment:
    """All wanted frames from ``start`` on, and all packets."""
    pts = index.timeline[np.asarray(wanted[start:], np.int64)]
    return Segment((Group(0, END, start, len(wanted), tuple(pts.tolist())),), is_full=True)


class _Frames:
    """The wanted frames as packets: where each one's picture starts to be decodable, and which packet holds it."""

    def __init__(self, index: PacketIndex, wanted: Sequence[int]) -> None:
        self.pts = index.timeline[np.asarray(wanted, np.int64)]
        by_pts = np.argsort(index.pts)
        self.packet = by_pts[np.searchsorted(index.pts, self.pts, sorter=by_pts)]
        owner = np.searchsorted(index.pts[index.keys], self.pts, side="right") - 1
        self.key = index.keys[np.maximum(owner, 0)]

    def group(self, start: int, stop: int) -> Group:
        """The group that gives frames ``start`` to ``stop``, all of one key frame."""
        last = int(self.packet[start:stop].max())
        return Group(int(self.key[start]), last, start, stop, tuple(self.pts[start:stop].tolist()))


def plan_groups(index: PacketIndex, wanted: Sequence[int], start: int = 0) -> list[Group]:
    """One group for each group of pictures that holds a wanted frame. ``wanted`` ascends without repetition, and is used from
    ``start`` on.

    Group of pictures k owns the frames shown from its key frame to the next one, wherever their packets lie.
    """
    frames = _Frames(index, wanted)
    cuts = [start, *(np.flatnonzero(np.diff(frames.key[start:])) + start + 1).tolist(), len(wanted)]
    return [frames.group(a, b) for a, b in zip(cuts, cuts[1:], strict=False) if a < b]


def plan_segments(
    index: PacketIndex,
    wanted: Sequence[int],
    *,
    num_parts: int,
    temporal_patch_size: int = 1,
    start: int = 0,
) -> list[Segment]:
    """At most ``num_parts`` segments of about as many bytes, in order, that hold every wanted frame from ``start`` on exactly once.

    A packet's decoding cost is proportional to its bytes. All segments except the last hold a multiple of ``temporal_patch_size``
    frames (FC5), so that a vision tower reads the same rows as from a single engine. A segment that would end within a temporal patch
    takes the missing frames from the next group. It never gives frames back: the next engine would decode nearly the whole group again
    for them (FC6: 10T against 3T in the paper's figure).
    """
    costs = np.concatenate(([0], np.cumsum(index.num_bytes)))
    waiting = deque(plan_groups(index, wanted, start))
    if not waiting:
        return []
    frames = _Frames(index, wanted)
    share = sum(_cost(group, costs) for group in waiting) / num_parts
    segments: list[Segment] = []
    spent = 0
    while waiting:
        due = (len(segments) + 1) * share
        taken: list[Group] = []
        while waiting and (
            not taken
            or spent + _cost(waiting[0], costs) / 2 < due
            or waiting[0].stop - waiting[0].start <= _num_missing(taken, temporal_patch_size)
        ):
            spent += _cost(waiting[0], costs)
            taken.append(waiting.popleft())
        if waiting and (num_missing := _num_missing(taken, temporal_patch_size)):
            split = waiting.popleft()
            taken.append(frames.group(split.start, split.start + num_missing))
            waiting.appendleft(frames.group(split.start + num_missing, split.stop))
        segments.append(Segment(_merged(taken)))
    return segments


def _cost(group: Group, costs: npt.NDArray[np.int64]) -> int:
    """``costs`` [packets + 1] are those of all packets before."""
    return int(costs[group.last + 1] - costs[group.first])


def _num_missing(groups: Sequence[Group], temporal_patch_size: int) -> int:
    """Frames that these groups lack for whole temporal patches."""
    return -(groups[-1].stop - groups[0].start) % temporal_patch_size


def _merged(groups: Sequence[Group]) -> tuple[Group, ...]:
    """Groups whose packets follow each other without a gap are fed as one: the decoder need not start anew between them."""
    merged = [groups[0]]
    for group in groups[1:]:
        before = merged[-1]
        if group.first <= before.last + 1:
            merged[-1] = replace(before, last=max(before.last, group.last), stop=group.stop, pts=before.pts + group.pts)
        else:
            merged.append(group)
    return tuple(merged)
