"""Plans to decode a segment of an item into patch pages."""

from ....bus.messages import ItemError, Result
from ....bus.plans import PreprocessSegment
from ...caches.media_sharing import forget_medium, learn_large
from ...rows.intake import patch_pages
from ...rows.poison import absolve
from ...scheduling.types import SegmentChoice
from ...state.request import Request
from ...state.state import ControllerState
from ..plan_dispatch import place_video_plan
from .base import Encoded, Kind


def issue_segment(state: ControllerState, choice: SegmentChoice, now: float) -> None:
    """Have a segment decoded into new patch pages."""
    request = state.requests[choice.key]
    item = request.record.items[choice.item]
    assert item.shape is not None
    target = state.allocate("patch", request, patch_pages(item.shape.segments[choice.segment], state.limits))
    assert target is not None, "the policy chose a segment without patch pages for it"
    item.segments[choice.segment].begin_preprocess(target)
    request.end_wait()
    state.save(request)
    media = request.spec.items[choice.item]
    plan = PreprocessSegment(*request.key_in_table, choice.item, choice.segment, media, item.shape, item.source, target)
    place_video_plan(state, request, plan, now)


class PreprocessKind(Kind[PreprocessSegment]):
    """The segment is decoded. A medium that cannot be decoded is analysed again."""

    def answered(self, state: ControllerState, plan: PreprocessSegment, live: list[Request], result: Result) -> None:
        if isinstance(result, ItemError):
            for request in [request for request in live if request.awaits(plan)]:
                forget_medium(state, request, plan.item)

    def apply(self, state: ControllerState, plan: PreprocessSegment, live: list[Request], result: Result) -> Encoded:
        for request in live:
            for _, segment in request.segments_of(plan):
                segment.preprocessed()
                absolve(request, plan)
                state.save(request)
        return ()

    def correct_work(self, state: ControllerState, plan: PreprocessSegment, request: Request) -> None:
        learn_large(state, request, plan.item)
