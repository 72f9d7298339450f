"""Plans to load the embedding pages of segments of a row from the file of ``cache.dir`` instead of encoding them."""

from collections.abc import Sequence

from ....bus.copy_plans import LoadPart, LoadSegments
from ....bus.messages import Loaded, Result, Skipped
from ....bus.plan_base import Place
from ...caches.embedding_cache import keep_encoded, num_saved_pages, page_keys, saved_slots
from ...caches.prefix_cache import PAGES_AT_ONCE
from ...scheduling.types import SegmentChoice
from ...state.request import Request
from ...state.state import ControllerState, owner
from ..plan_dispatch import place_plan
from .base import Encoded, Kind
from .encode import apply_encoded


def issue_segment_loads(state: ControllerState, choices: Sequence[SegmentChoice], now: float) -> None:
    """Have segments of one row loaded, as many as one plan loads."""
    request = state.requests[choices[0].key]
    parts: list[LoadPart] = []
    num_left = PAGES_AT_ONCE
    for _, item, number in choices:
        num_left -= num_saved_pages(state, request, (item, number))
        if parts and num_left < 0:
            break
        parts.append(begin_load(state, request, (item, number)))
    request.end_wait()
    state.save(request)
    place_plan(state, LoadSegments(parts), [request], now)


def begin_load(state: ControllerState, request: Request, place: Place) -> LoadPart:
    """Give a segment that files have its pages, to be loaded. The caller saves the record."""
    slots, num_tokens = saved_slots(state, request, place), request.record.shape_of(*place).num_tokens
    target = state.allocate("embedding", request, len(slots))
    assert target is not None and slots, "the policy chose a segment to load without pages for it, or none to load"
    request.record.segment(place).begin_load(target)
    return LoadPart(*request.key_in_table, target, num_tokens, page_keys(state, request, place), slots)


class LoadSegmentsKind(Kind[LoadSegments]):
    """Segments that were loaded count as encoded, as hits of the cache; the others are given up."""

    def answered(self, state: ControllerState, plan: LoadSegments, live: list[Request], result: Result) -> None:
        if not isinstance(result, Skipped):
            for request in live:
                give_up_loading(state, request, plan, result if isinstance(result, Loaded) else None)

    def apply(self, state: ControllerState, plan: LoadSegments, live: list[Request], result: Result) -> Encoded:
        return apply_encoded(state, plan, live)

    def cleared(self, state: ControllerState, plan: LoadSegments, live: list[Request], encoded: Encoded) -> None:
        keep_encoded(state, encoded, are_hits=True)


def give_up_loading(state: ControllerState, request: Request, plan: LoadSegments, result: Loaded | None) -> None:
    """Return the segments that the plan has not loaded to their stage before it. Those that the file lacks are encoded; all of them if
    the plan failed (``result`` None)."""
    ends, more = (result.ends, result.more) if result is not None else ([0] * len(plan.parts), [False] * len(plan.parts))
    segments = request.segments_of(plan)
    for part, end, may_ask_again in zip(plan.parts, ends, more, strict=True):
        if end == part.num_tokens:
            continue
        if not may_ask_again:
            state.saved["embedding"].note_lacking(part.keys[0])
            state.touch_preparing()
        for _, segment in segments:
            if segment.embedding == part.target:
                state.pools["embedding"].retire(owner(request), segment.give_back()[1].pages)
                state.save(request)
