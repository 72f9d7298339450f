"""Plans to encode segments of one or several rows: patch pages in, embedding pages out."""

from collections.abc import Sequence

from ....bus.copy_plans import LoadSegments
from ....bus.messages import Result
from ....bus.plan_base import Place
from ....bus.plans import Encode, EncodePart
from ...caches.embedding_cache import keep_encoded
from ...rows.intake import embedding_pages
from ...rows.poison import absolve
from ...scheduling.budgets import update
from ...scheduling.types import SegmentChoice
from ...state.request import Request
from ...state.state import ControllerState, owner
from ..plan_dispatch import place_plan
from .base import Encoded, Kind
from .prefill import release_consumed


def issue_encode(state: ControllerState, choices: Sequence[SegmentChoice], now: float) -> None:
    """Have segments encoded into new embedding pages, in one plan."""
    parts: list[EncodePart] = []
    requests: dict[int, Request] = {}
    for choice in choices:
        request = requests[choice.key] = state.requests[choice.key]
        shape = request.record.shape_of(choice.item, choice.segment)
        target = state.allocate("embedding", request, embedding_pages(shape, state.limits))
        assert target is not None, "the policy chose a segment without embedding pages for it"
        source = request.record.items[choice.item].segments[choice.segment].begin_encode(target)
        request.end_wait()
        parts.append(EncodePart(*request.key_in_table, shape, source, target))
    for request in requests.values():
        state.save(request)
    place_plan(state, Encode(parts), requests.values(), now)


class EncodeKind(Kind[Encode]):
    """The segments are encoded, and their patch pages free."""

    def learn_cost(self, state: ControllerState, num_units: int, elapsed_s: float) -> None:
        steering = state.steering
        steering.encode = update(steering.encode, num_units, elapsed_s, steering.allowance_s)

    def apply(self, state: ControllerState, plan: Encode, live: list[Request], result: Result) -> Encoded:
        return apply_encoded(state, plan, live)

    def cleared(self, state: ControllerState, plan: Encode, live: list[Request], encoded: Encoded) -> None:
        keep_encoded(state, encoded)


def apply_encoded(state: ControllerState, plan: Encode | LoadSegments, live: list[Request]) -> Encoded:
    """Record that embedding rows are written; the patch pages are no longer needed. Returns the segments."""
    encoded: list[tuple[Request, Place]] = []
    for request in live:
        done = request.segments_of(plan)
        absolved = absolve(request, plan)
        for place, segment in done:
            if (patch := segment.encoded()) is not None:
                state.pools["patch"].retire(owner(request), patch.pages)
            request.media.mark_ready(place)
            encoded.append((request, place))
        if done:
            release_consumed(state, request)
        if done or absolved:
            state.save(request)
    return encoded
