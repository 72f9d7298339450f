"""Apply the results of plans.

Results are idempotent: one is applied where the record still names the pages that its plan wrote. Any result acknowledges the
plan: its slot is free, and it no longer holds pages.
"""

from collections.abc import Collection

from ...bus.copy_plans import Load, LoadSegments, Transfer
from ...bus.messages import Analysed, Died, ItemError, Loaded, Overran, Result, Skipped, Transferred
from ...bus.plan_base import Place
from ...bus.plans import Analyse, Encode, Plan, Prefill, PreprocessSegment
from ...stage_table import InstanceId
from ..caches.embedding_cache import give_up_loading, keep_encoded
from ..caches.media_sharing import forget_medium, learn_large, learn_shape
from ..caches.prefix_cache import apply_loaded, name_pages, note_hits
from ..rows.absence import leaves_plan
from ..rows.intake import set_shape, timed_out
from ..rows.lifecycle import fail, settle
from ..rows.poison import absolve, blame, give_back
from ..scheduling.budgets import update
from ..scheduling.types import SegmentStage
from ..state.effects import SetPrefilled
from ..state.inflight_plan import InflightPlan
from ..state.request import Request
from ..state.state import ControllerState, owner
from .migration import apply_transferred, leave_source
from .plan_dispatch import clear_plan


def finish_plan(state: ControllerState, inflight: InflightPlan, result: Result, elapsed_s: float) -> None:
    """Apply a plan's result to its rows, free its slot, and release the pages that it held."""
    plan = inflight.plan
    encoded: list[tuple[Request, Place]] = []
    live = [request for request in inflight.requests if not request.ending]
    for request in live if isinstance(plan, Load) else ():
        request.may_load = False
    if isinstance(plan, LoadSegments) and not isinstance(result, Skipped):
        for request in live:
            give_up_loading(state, request, plan, result if isinstance(result, Loaded) else None)
    if isinstance(result, (ItemError, Died)):
        if isinstance(plan, PreprocessSegment) and isinstance(result, ItemError):
            for request in [request for request in live if request.awaits(plan)]:
                forget_medium(state, request, plan.item)
        blame(state, inflight, live, result)
    elif isinstance(result, Skipped):
        _skip(state, plan, live)
    elif isinstance(result, Overran):
        _correct_work(state, plan, live)
    else:
        _learn_cost(state, inflight, live, elapsed_s)
        for request in live:
            request.has_moved = False
        match plan:
            case Analyse():
                if isinstance(result, Analysed):
                    _apply_shape(state, plan, live, result)
            case PreprocessSegment():
                _apply_preprocessed(state, plan, live)
            case Encode() | LoadSegments():
                encoded = _apply_encoded(state, plan, live)
            case Prefill():
                _apply_prefilled(state, plan, live)
            case Load():
                assert isinstance(result, Loaded)
                for request in live:
                    apply_loaded(state, request, plan, result)
            case Transfer():
                assert isinstance(result, Transferred)
                for request in live:
                    apply_transferred(state, request, plan, result)
    clear_plan(state, inflight)
    keep_encoded(state, encoded, are_hits=isinstance(plan, LoadSegments))
    for request in live if isinstance(plan, (Prefill, Load)) else ():  # only now: a plan in the table may be done again
        name_pages(state, request)
        if isinstance(plan, Load) and request.has_kv and not request.ending:
            note_hits(state, request)
        if request.is_computed:
            state.ask(request.key, request.gateway_generation)
    for request in live if isinstance(plan, Transfer) else ():
        leave_source(state, request)
    for request in inflight.requests:
        settle(state, request)


def skip_plans(state: ControllerState, actors: Collection[InstanceId]) -> None:
    """Give back the plans of these actors: nobody works on them, since their role locks were free after all effects up to now."""
    for inflight in [one for one in state.plans.values() if one.actor in actors and leaves_plan(state, one)]:
        for request in inflight.requests:
            request.has_moved = inflight.actor in state.away
        finish_plan(state, inflight, Skipped(), 0.0)


def _learn_cost(state: ControllerState, inflight: InflightPlan, live: list[Request], elapsed_s: float) -> None:
    """Learn the cost of the parts of live rows: for policies, and for the budgets of encode and prefill."""
    plan = inflight.plan
    if isinstance(plan, (Load, LoadSegments, Transfer)):
        return  # nothing was computed
    keys = {request.key_in_table for request in live}
    steering = state.steering
    done = plan.only(lambda row, generation: (row, generation) in keys)
    units = done.units if done is not None else 0
    if inflight.disturbs_decode or plan.is_streamed:
        state.costs.observe(inflight.actor, units, elapsed_s)
    if plan.STAGE == "encoder":
        steering.encode = update(steering.encode, units, elapsed_s, steering.allowance_s)
    elif plan.STAGE == "prefill":
        steering.prefill = update(steering.prefill, units, elapsed_s, steering.allowance_s)


def _skip(state: ControllerState, plan: Plan, live: list[Request]) -> None:
    """Handle a skipped plan: live requests past their deadlines fail, for all processes share a clock; others get the work back."""
    for request in live:
        if 0 < request.spec.deadline_s <= state.now and not request.is_finished:
            fail(state, request, timed_out())
        else:
            give_back(state, request, plan)
            state.save(request)


def _correct_work(state: ControllerState, plan: Plan, live: list[Request]) -> None:
    """Mark the work as large, to be done again. A new controller has to find this out again."""
    assert isinstance(plan, Analyse | PreprocessSegment), "video alone estimates its work"
    for request in live:
        learn_large(state, request, plan.item)
        give_back(state, request, plan)
        state.save(request)


def _apply_shape(state: ControllerState, plan: Analyse, live: list[Request], result: Analysed) -> None:
    for request in live:
        if request.record.items[plan.item].shape is not None:
            continue
        absolve(request, plan)
        if set_shape(state, request, plan.item, result.shape):
            learn_shape(state, request, plan.item, result.shape)


def _apply_preprocessed(state: ControllerState, plan: PreprocessSegment, live: list[Request]) -> None:
    for request in live:
        for _, segment in request.segments_of(plan):
            segment.preprocessed()
            absolve(request, plan)
            state.save(request)


def _apply_encoded(state: ControllerState, plan: Encode | LoadSegments, live: list[Request]) -> list[tuple[Request, Place]]:
    """Record that embedding rows are written; the patch pages are no longer needed. Returns the segments."""
    encoded: list[tuple[Request, Place]] = []
    for request in live:
        done = request.segments_of(plan)
        absolved = absolve(request, plan)
        for place, segment in done:
            assert request.tracker is not None
            if (patch := segment.encoded()) is not None:
                state.pools["patch"].retire(owner(request), patch.pages)
            request.tracker.mark_ready(*place)
            encoded.append((request, place))
        if done:
            release_consumed(state, request)
        if done or absolved:
            state.save(request)
    return encoded


def _apply_prefilled(state: ControllerState, plan: Prefill, live: list[Request]) -> None:
    """Record that tokens are in the KV cache, and free embedding pages read to their end (RS2, US4). The word is written first."""
    rows = {request.key_in_table: request for request in live}
    for chunk in plan.chunks:
        request = rows.get((chunk.row, chunk.row_generation))
        if request is None or request.record.evicting or request.prefilled[chunk.member] >= chunk.end:
            continue
        assert request.prefilled[chunk.member] == chunk.start, "a chunk was prefilled out of order"
        request.prefilled[chunk.member] = chunk.end
        state.emit(SetPrefilled(request.row, chunk.member, chunk.end))
        if chunk.spans and release_consumed(state, request):
            state.save(request)
    for request in live:
        if absolve(request, plan):
            state.save(request)


def release_consumed(state: ControllerState, request: Request) -> bool:
    """Give back embedding pages whose rows are all prefilled, according to ``prefilled``. True if the record changed."""
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
            segment.consumed()
            del request.num_consumed[place]
            changed = True
    return changed
