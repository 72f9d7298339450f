"""The order of video's work: fair shares between requests, by estimated work (pure).

The actor does one plan of large work at a time, in parallel with small ones (``media_work``). So at most one of its plans in flight
is large: the other is for small work. Neither kind waits for the other, except for patch pages: a request that is short of them stops
later ones from taking any. A request gets a second plan only if no other request could use it. Then requests that waited longer than
``MAX_WAIT_S`` go first, then the least work.

All that is of one process; of several, each has such plans (``video_rooms``).

Among large work, streamed segments (of videos) alternate with all other work, so that neither delays the other. Among
themselves they go in rank order (FC7): switching between videos means reopening one, or holding its memory meanwhile.
"""

from typing import NamedTuple

from ...bus.media_work import is_large
from .legality import may_take
from .types import ItemChoice, RequestView, SegmentChoice, SegmentStage, View
from .video_rooms import VideoRooms

MAX_WAIT_S = 5.0
PENDING = SegmentStage.PENDING


class _Candidate(NamedTuple):
    """A plan that video could be sent. ``work`` is 0 for a segment that was decoded with its item's analysis."""

    request: RequestView
    place: int  # of the request in rank order
    choice: ItemChoice | SegmentChoice
    work: int
    is_large: bool
    is_streamed: bool = False


def plan_video(view: View) -> tuple[tuple[ItemChoice, ...], tuple[SegmentChoice, ...]]:
    """Choose analyses and segments, each for a plan of its own, within the credit."""
    if view.video_credit <= 0:
        return (), ()
    candidates = _candidates(view)
    if not candidates:
        return (), ()
    num_in_flight = {request.key: request.video_in_flight for request in view.requests}
    rooms = VideoRooms(view)
    chosen: list[ItemChoice | SegmentChoice] = []
    while candidates and len(chosen) < view.video_credit:
        fitting = [candidate for candidate in candidates if rooms.has(candidate.request, candidate.is_large)]
        fitting = [candidate for candidate in fitting if candidate.is_large] or fitting
        if not fitting:
            break
        best = min(fitting, key=lambda candidate: (num_in_flight[candidate.request.key] > 0, *_rank(candidate, view)))
        candidates.remove(best)
        chosen.append(best.choice)
        num_in_flight[best.request.key] += 1
        rooms.take(best.request, best.is_large)
    analyse = tuple(choice for choice in chosen if isinstance(choice, ItemChoice))
    return analyse, tuple(choice for choice in chosen if isinstance(choice, SegmentChoice))


def _rank(candidate: _Candidate, view: View) -> tuple[float, ...]:
    """Return the sort key of a candidate: the least goes first."""
    request = candidate.request
    if candidate.is_streamed:
        return view.last_streamed, 0, 0, candidate.place
    waits_s = view.now - request.video_since_s
    waits_s = waits_s if waits_s > MAX_WAIT_S else 0.0
    return not view.last_streamed, -waits_s, candidate.work, candidate.place


def _candidates(view: View) -> list[_Candidate]:
    """Return all candidates, each request's own in the order of execution."""
    analyses = [ItemChoice(request.key, item) for request in view.requests for item in request.unanalysed]
    segments = _segments(view)
    if not analyses and not segments:
        return []
    places = {request.key: place for place, request in enumerate(view.requests)}

    def candidate(choice: ItemChoice | SegmentChoice, is_streamed: bool = False) -> _Candidate:
        place = places[choice.key]
        request = view.requests[place]
        work = request.work[choice.item] if choice.item < len(request.work) else 0
        counted = work if is_streamed or isinstance(choice, ItemChoice) else 0
        return _Candidate(request, place, choice, counted, is_large(work), is_streamed)

    return [*map(candidate, analyses), *(candidate(choice, is_streamed) for choice, is_streamed in segments)]


def _segments(view: View) -> list[tuple[SegmentChoice, bool]]:
    """Return the segments with free patch pages, in order, at most the credit per request, each with its ``is_streamed``."""
    found: list[tuple[SegmentChoice, bool]] = []
    num_free = view.num_free_patch_pages
    for request in view.requests:
        if not request.segments:
            continue
        held = request.patch_held
        pending = [segment for segment in request.segments if segment.stage == PENDING]
        for segment in pending[: view.video_credit]:
            need = segment.patch_pages
            if not may_take(view.num_patch_pages, num_free, held, need, request.has_kv):
                break
            if need > num_free:
                return found
            num_free -= need
            held += need
            found.append((SegmentChoice(request.key, segment.item, segment.segment), segment.is_streamed))
    return found
