"""What the results of plans change.

Results are idempotent: one is applied where the record still names the pages that its plan wrote. Whatever a plan came to, it is
acknowledged then: its slot is free, and nobody holds pages because of it.
"""

import msgspec

from ..bus.messages import Analyse, Analysed, Died, Encode, ItemError, Overran, Prefill, PreprocessSegment, Result, Skipped
from ..errors import RequestError
from .effects import SetPrefilled
from .intake import check_record, timed_out
from .lifecycle import fail, settle
from .poison import absolve, blame, give_back, segments_by_target
from .request import Request
from .scheduling.budgets import update
from .scheduling.media_work import corrected
from .scheduling.types import SegmentStage
from .state import ControllerState, InflightPlan, owner


def finish_plan(state: ControllerState, inflight: InflightPlan, result: Result, elapsed_s: float) -> None:
    """Apply a plan's result to the rows it was for, free its slot, and let go of what it held."""
    plan = inflight.plan
    live = [request for request in inflight.requests if not request.ending]
    if isinstance(plan, Analyse):
        for request in live:
            request.analysing.discard(plan.item)
    if isinstance(result, ItemError | Died):
        blame(state, inflight, live, result)
    elif isinstance(result, Skipped):
        _skip(state, plan, live)
    elif isinstance(result, Overran):
        _correct_work(state, plan, live)
    elif isinstance(plan, Analyse):
        if isinstance(result, Analysed):
            _apply_shape(state, plan, live, result)
    elif isinstance(plan, PreprocessSegment):
        _apply_decoded(state, plan, live)
    else:
        rows = {(request.row, request.row_generation): request for request in live}
        if isinstance(plan, Encode):
            num_rows = sum(part.shape.num_rows for part in plan.parts if (part.row, part.row_generation) in rows)
            state.steering.encode = update(state.steering.encode, num_rows, elapsed_s, state.steering.allowance_s)
            _apply_encoded(state, plan, live)
        else:
            chunks = [chunk for chunk in plan.chunks if (chunk.row, chunk.row_generation) in rows]
            num_tokens = sum(chunk.end - chunk.start for chunk in chunks)
            state.steering.prefill = update(state.steering.prefill, num_tokens, elapsed_s, state.steering.allowance_s)
            _apply_prefilled(state, plan, rows)
    state.clear_plan(inflight)
    for request in inflight.requests:
        settle(state, request)


def _skip(state: ControllerState, plan: Analyse | PreprocessSegment | Encode | Prefill, live: list[Request]) -> None:
    """The actor found nobody who needs it: by the clock that all processes share, who is still here is late."""
    for request in live:
        if 0 < request.spec.deadline_s <= state.now and not request.is_finished:
            fail(state, request, timed_out())
        else:
            give_back(state, request, plan)
            state.save(request)


def _correct_work(state: ControllerState, plan: Analyse | PreprocessSegment | Encode | Prefill, live: list[Request]) -> None:
    """The work is to be done again, as a large one. A new controller finds out anew."""
    assert isinstance(plan, Analyse | PreprocessSegment), "video alone estimates its work"
    for request in live:
        items = list(request.spec.items)
        items[plan.item] = corrected(items[plan.item])
        request.spec = msgspec.structs.replace(request.spec, items=items)
        give_back(state, request, plan)
        state.save(request)


def _apply_shape(state: ControllerState, plan: Analyse, live: list[Request], result: Analysed) -> None:
    for request in live:
        item = request.record.items[plan.item]
        if item.shape is not None:
            continue
        item.shape = result.shape
        try:
            check_record(state, request)
        except RequestError as error:
            item.shape = None
            fail(state, request, error)
            continue
        absolve(request, plan)
        state.save(request)


def _apply_decoded(state: ControllerState, plan: PreprocessSegment, live: list[Request]) -> None:
    for request in live:
        segment = request.record.items[plan.item].segments[plan.segment]
        if segment.stage == SegmentStage.PREPROCESSING and segment.patch == plan.target:
            segment.stage = SegmentStage.PREPROCESSED
            absolve(request, plan)
            state.save(request)


def _apply_encoded(state: ControllerState, plan: Encode, live: list[Request]) -> None:
    """Embedding rows are there; patch pages have done their service."""
    for request in live:
        done = segments_by_target(request, plan)
        absolved = absolve(request, plan)
        for (index, number), segment in done:
            assert segment.patch is not None and request.tracker is not None
            state.pools["patch"].retire(owner(request), segment.patch.pages)
            segment.stage, segment.patch = SegmentStage.ENCODED, None
            request.tracker.mark_ready(index, number)
        if done:
            release_consumed(state, request)
        if done or absolved:
            state.save(request)


def _apply_prefilled(state: ControllerState, plan: Prefill, rows: dict[tuple[int, int], Request]) -> None:
    """Tokens are in the KV cache; embedding pages that were read to their end are free (RS2, US4). The word goes first."""
    for chunk in plan.chunks:
        request = rows.get((chunk.row, chunk.row_generation))
        if request is None or request.record.evicting or request.prefilled[chunk.member] >= chunk.end:
            continue
        assert request.prefilled[chunk.member] == chunk.start, "a chunk was prefilled out of order"
        request.prefilled[chunk.member] = chunk.end
        state.emit(SetPrefilled(request.row, chunk.member, chunk.end))
        if chunk.spans and release_consumed(state, request):
            state.save(request)
    for request in rows.values():
        if absolve(request, plan):
            state.save(request)


def release_consumed(state: ControllerState, request: Request) -> bool:
    """Give back embedding pages whose rows are all prefilled, as ``prefilled`` says. True if the record changed."""
    changed = False
    assert request.tracker is not None
    for part in request.tracker.overlapping(0, request.prefilled[0]):
        segment = request.record.items[part.item].segments[part.segment]
        if segment.stage != SegmentStage.ENCODED or segment.embedding is None:
            continue
        place = (part.item, part.segment)
        before = request.num_consumed.get(place, 0)
        count = request.tracker.num_consumed_pages(part, request.prefilled[0])
        state.pools["embedding"].retire(owner(request), segment.embedding.pages[before:count])
        request.num_consumed[place] = count
        if request.prefilled[0] >= part.end:
            segment.embedding = None
            del request.num_consumed[place]
            changed = True
    return changed
