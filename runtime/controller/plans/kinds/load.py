"""Plans to load a row's KV pages instead of computing them: from the file of ``cache.dir``, or from the pool of another device."""

from ....bus.copy_plans import Load, LoadChunk
from ....bus.messages import Loaded, Result
from ...caches.prefix_cache import load_plan, name_pages, note_hits
from ...caches.snapshots import has_states, keep_snapshots, load_for_all, take_state
from ...caches.window_pages import has_windows
from ...rows.windows import leave_before, reach_windows
from ...state.effects import SetPrefilled
from ...state.request import Request
from ...state.state import BY_RANK, ControllerState
from ..plan_dispatch import credit, place_plan
from .base import Encoded, Kind


def issue_loads(state: ControllerState, now: float) -> None:
    """Have saved pages loaded before the policy has them computed. Rows that lack no pages go on at once, however busy prefill is.

    Of rows with more pages than one plan loads one at a time goes on, so that a slow disk leaves prefill its turns.
    """
    rows = [
        request for request in state.preparing() if request.caches.may_load and request.can_prefill and request.prefill_plan is None
    ]
    if not rows:
        return
    loading = [request for inflight in state.plans.values() if isinstance(inflight.plan, Load) for request in inflight.requests]
    goes_on = any(request.caches.num_loads > 1 and not request.ending for request in loading)
    for request in sorted(rows, key=BY_RANK):
        plan = load_plan(state, request)
        if plan is not None and (request.caches.num_loads and goes_on or not credit(state, "prefill", request.prefill_pool)):
            continue
        if plan is None or not reach_windows(state, request, plan.chunks):
            request.caches.end_loading()
            state.touch(request)
            note_hits(state, request)
        else:
            goes_on = goes_on or request.caches.num_loads > 0
            request.caches.load()
            place_plan(state, load_for_all(state, request, plan), [request], now, request.prefill_pool)


class LoadKind(Kind[Load]):
    """Tokens are in the KV cache as hits; media that they cover are not needed. What was not loaded is computed."""

    def answered(self, state: ControllerState, plan: Load, live: list[Request], result: Result) -> None:
        for request in live:
            request.caches.end_loading()

    def apply(self, state: ControllerState, plan: Load, live: list[Request], result: Result) -> Encoded:
        assert isinstance(result, Loaded)
        for request in live:
            apply_loaded(state, request, plan, result)
        return ()

    def cleared(self, state: ControllerState, plan: Load, live: list[Request], encoded: Encoded) -> None:
        for request in live:
            name_pages(state, request)
            keep_snapshots(state, request, plan)
            if request.has_kv and not request.ending:
                note_hits(state, request)
            if request.is_computed:
                state.ask(request.key, request.gateway_generation)


def apply_loaded(state: ControllerState, request: Request, plan: Load, result: Loaded) -> None:
    """Record the pages that have been loaded."""
    request.caches.end_loading(may_load=any(result.more))
    state.totals.transferred_bytes += result.num_bytes
    states = result.states or [False] * len(plan.chunks)
    for chunk, end, may_ask_again, has_state in zip(plan.chunks, result.ends, result.more, states, strict=True):
        member, page_tokens = chunk.member, state.limits.kv_page_tokens
        if not may_ask_again and not plan.source:
            state.saved["kv"].note_lacking(chunk.keys[(end - chunk.start) // page_tokens])
        if request.record.evicting:
            continue
        if (has_states(state) or has_windows(state)) and not has_state:
            request.caches.load_before_state(member, end // page_tokens - request.caches.num_named[member])
            if end == chunk.end and not plan.source:
                _note_lacking(state, chunk)
        elif request.kv.advance(member, request.kv.prefilled[member] if has_state else chunk.start, end):
            request.caches.loaded(member, end)
            take_state(state, request, member)
            state.emit(SetPrefilled(request.row, member, end, request.kv.slots[member]))
            leave_before(state, request, member)


def _note_lacking(state: ControllerState, chunk: LoadChunk) -> None:
    """What was to be at the chunk's end was not, or not all of it: which page is not known."""
    if chunk.state is not None:
        state.saved["state"].note_lacking(chunk.state.key)
    for key in chunk.windows.keys if chunk.windows is not None else ():
        state.saved["window"].note_lacking(key)
