"""What video does next: fair shares between requests, by estimated work (pure).

The actor does one plan of large work at a time, beside those of small work (``media_work``). So of its plans in flight one at most is
large: the other is for small ones, which never wait for large ones, and large ones never for small ones. A request has a second plan
only where no other could have it. Of the rest, who has waited for longer than ``MAX_WAIT_S`` goes first, then the least work.

Of large work, streamed segments (of videos) take turns with everything else, so that neither keeps the other waiting. Among
themselves they go in the order of ranks (FC7): a video that is left for another is opened anew, or holds memory meanwhile.
"""

from typing import NamedTuple

from ...bus.media_work import is_large
from .legality import may_take
from .types import ItemChoice, RequestView, SegmentChoice, SegmentStage, View

MAX_WAIT_S = 5.0


class _Candidate(NamedTuple):
    """A plan that video could be sent. ``work`` is 0 for a segment that was decoded with its item's analysis."""

    request: RequestView
    place: int  # of the request in the order of ranks
    choice: ItemChoice | SegmentChoice
    work: int
    is_large: bool
    is_streamed: bool = False


def plan_video(view: View) -> tuple[tuple[ItemChoice, ...], tuple[SegmentChoice, ...]]:
    """Analyses and segments for plans of their own, within the credit."""
    candidates = _candidates(view) if view.video_credit > 0 else []
    num_in_flight = {request.key: request.video_in_flight for request in view.requests}
    has_large = view.large_in_flight
    chosen: list[ItemChoice | SegmentChoice] = []
    while candidates and len(chosen) < view.video_credit:
        large = [] if has_large else [candidate for candidate in candidates if candidate.is_large]
        fitting = large or [candidate for candidate in candidates if not candidate.is_large]
        if not fitting:
            break
        best = min(fitting, key=lambda candidate: (num_in_flight[candidate.request.key] > 0, *_rank(candidate, view)))
        candidates.remove(best)
        chosen.append(best.choice)
        num_in_flight[best.request.key] += 1
        has_large = has_large or best.is_large
    analyse = tuple(choice for choice in chosen if isinstance(choice, ItemChoice))
    return analyse, tuple(choice for choice in chosen if isinstance(choice, SegmentChoice))


def _rank(candidate: _Candidate, view: View) -> tuple[float, ...]:
    """The least goes first."""
    request = candidate.request
    if candidate.is_streamed:
        return view.last_streamed, 0, 0, candidate.place
    waits_s = view.now - request.video_since_s
    waits_s = waits_s if waits_s > MAX_WAIT_S else 0.0
    return not view.last_streamed, -waits_s, candidate.work, candidate.place


def _candidates(view: View) -> list[_Candidate]:
    """In the order in which a request's own are to be done."""
    places = {request.key: place for place, request in enumerate(view.requests)}

    def candidate(choice: ItemChoice | SegmentChoice, is_streamed: bool = False) -> _Candidate:
        place = places[choice.key]
        request = view.requests[place]
        work = request.work[choice.item] if choice.item < len(request.work) else 0
        counted = work if is_streamed or isinstance(choice, ItemChoice) else 0
        return _Candidate(request, place, choice, counted, is_large(work), is_streamed)

    found = [candidate(ItemChoice(request.key, item)) for request in view.requests for item in request.unanalysed]
    return [*found, *(candidate(choice, is_streamed) for choice, is_streamed in _segments(view))]


def _segments(view: View) -> list[tuple[SegmentChoice, bool]]:
    """Those for which there are patch pages, in order, as many of each request as there is credit; and whether they are streamed."""
    found: list[tuple[SegmentChoice, bool]] = []
    num_free = view.num_free_patch_pages
    for request in view.requests:
        held = request.patch_held
        pending = [segment for segment in request.segments if segment.stage == SegmentStage.PENDING]
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
