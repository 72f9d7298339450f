"""Plans to copy KV pages from the pool in which a row was prefilled to its own: migration (TI6-TI8, KT1).

A decode actor of the row's own device copies them (pull), since it may write there: by a plan of its own kind, whole pages, and the
last one at the end of the prompt, with the recurrent state if the model has any. A row has one such plan at a time.

Pages that a prefill plan is filling are copied layer by layer behind it: the plan to copy names that of prefill, and its decode follows
the word of that one (``shm.layer_progress``). So a row can be copied before it is prefilled; it leaves its source after both. One plan
of a decode at a time waits for prefill: those that wait take no room from those that do not. In a pipeline the plan of the last rank is
followed: the layers of the ranks before it are stored when it begins, and copied first.

Leading pages that the cache of the row's own pool has are shared at the grant, and not copied. Of layers with a window the pages at
the end of the prompt alone are copied: prefill keeps them until the row leaves its source.

Nothing of the progress is stored. A new decode actor does its predecessor's plan again; a new controller begins with the first page
that is not shared again. The source's pages stay until all have been copied; after that its cache has those with keys.
"""

from itertools import takewhile

from ....bus.copy_plans import Transfer, TransferChunk
from ....bus.messages import Result, Transferred
from ....bus.plans import Plan, Prefill
from ...caches.prefix_cache import name_pages
from ...caches.window_pages import first_live, has_windows
from ...state.effects import ClearSource
from ...state.request import Request
from ...state.state import BY_RANK, ControllerState, owner
from ..plan_dispatch import credit, place_plan
from .base import Encoded, Kind

PAGES_AT_ONCE = 256  # of a member, in a plan


def issue_transfers(state: ControllerState, now: float) -> None:
    """Have pages copied that have been filled, in rank order."""
    if len(state.kv_pools) == 1:
        return
    rows = [r for r in state.preparing() if r.record.source_pool is not None and r.can_prefill and r.transfer_plan is None]
    for request in sorted(rows, key=BY_RANK):
        room = credit(state, "decode", request.kv_pool)
        if room and (transfer := _transfer(state, request, may_wait=room > 1)) is not None:
            place_plan(state, transfer, [request], now, request.kv_pool)


def _transfer(state: ControllerState, request: Request, may_wait: bool) -> Transfer | None:
    """Return the plan to copy the pages that are filled and, if it ``may_wait``, those that are being filled; None without any."""
    page_tokens, chunks, is_behind = state.limits.kv_page_tokens, list[TransferChunk](), False
    plan = _filling(state, request)
    in_work = {} if plan is None else {c.member: c for c in plan.chunks if (c.row, c.row_generation) == request.key_in_table}
    for member, target in enumerate(request.targets):
        start, chunk = request.kv.copied[member], in_work.get(member)
        filled = end = _whole(min(request.kv.prefilled[member], target if chunk is None else chunk.start), target, page_tokens)
        if may_wait and chunk is not None and isinstance(plan, Prefill):
            end = max(filled, _whole(chunk.end, _followed(request, member, page_tokens), page_tokens))
        end = min(end, start + PAGES_AT_ONCE * page_tokens)
        if start < end:
            states = _states(request, member, end)
            filled = min(end, max(start, filled))
            windows = first_live(state, target) if has_windows(state) else -1
            chunks.append(TransferChunk(*request.key_in_table, member, start, end, *states, filled, windows))
            is_behind |= filled < end
    assert request.record.source_pool is not None
    behind = next((number, state.plans[number].slot) for number, one in request.plans.items() if one is plan) if is_behind else None
    return Transfer(request.record.source_pool, chunks, behind) if chunks else None


def _filling(state: ControllerState, request: Request) -> Plan | None:
    """Return the plan in flight that fills the row's next pages to the end, if any: in a pipeline the first one at the last rank. If
    the chunk before it was not done it is skipped, and so is a copy behind it."""
    last = state.limits.prefill_ranks - 1
    plans = [plan for _, plan in sorted(request.plans.items()) if plan.FILLS_KV]
    return next((plan for plan in plans if plan.relay < 0 or plan.rank == last), None)


def _whole(num_tokens: int, target: int, page_tokens: int) -> int:
    """Return the tokens that are in whole pages; all of a prompt up to ``target`` count."""
    return target if num_tokens >= target else num_tokens - num_tokens % page_tokens


def _followed(request: Request, member: int, page_tokens: int) -> int:
    """Return the tokens of a member up to which prefill is followed: a recurrent state goes with the last page, once it is there."""
    target = request.targets[member]
    return target if not request.kv.states[member].is_whole else (target - 1) // page_tokens * page_tokens


def _states(request: Request, member: int, end: int) -> tuple[tuple[int, int] | None, tuple[int, int] | None]:
    """Return the pages of a member's state and log, here and there, once all its tokens are in them. They keep their slot."""
    ours, theirs, slot = request.kv.states[member], request.kv.source_states[member], request.kv.slots[member]
    if not ours.is_whole or end < request.targets[member]:
        return None, None
    return (theirs.at(slot), ours.at(slot)), (theirs.log, ours.log)


class TransferKind(Kind[Transfer]):
    """Pages are copied. After the last the row leaves its source."""

    def apply(self, state: ControllerState, plan: Transfer, live: list[Request], result: Result) -> Encoded:
        assert isinstance(result, Transferred)
        for request in live:
            _apply_transferred(state, request, plan, result)
        return ()

    def cleared(self, state: ControllerState, plan: Transfer, live: list[Request], encoded: Encoded) -> None:
        for request in live:
            leave_source(state, request)


def _apply_transferred(state: ControllerState, request: Request, plan: Transfer, result: Transferred) -> None:
    """Record the pages that have been copied. A plan of a previous controller can be one for pages behind those known to be."""
    state.totals.transferred_bytes += result.num_bytes
    for chunk in plan.chunks:
        if not request.record.evicting:
            request.kv.copy(chunk.member, chunk.start, chunk.end)


def restore_progress(state: ControllerState, request: Request) -> None:
    """In a new controller: leading pages of a row's own table that have keys are those that it shares. Its other pages get theirs when
    all have been copied."""
    if request.record.source_pool is None:
        return
    cache, page_tokens = state.pools[request.kv_pool].cache, state.limits.kv_page_tokens
    for member, table in enumerate(request.kv.tables):
        num_shared = sum(1 for _ in takewhile(lambda page: cache.key_of(page) is not None, table))
        request.kv.copy(member, 0, page_tokens * num_shared)


def leave_source(state: ControllerState, request: Request) -> None:
    """Give the source's pages back once all are copied and no plan writes them. The record is written before the table."""
    source, record = request.record.source_pool, request.record
    is_over = request.ending or record.evicting or request.is_finished
    if source is None or is_over or not request.is_ready or not request.kv.is_copied(request.targets):
        return
    record.leave_source()
    state.save(request)
    state.emit(ClearSource(request.row))
    for pool in state.pools_beside(source):
        state.pools[pool].retire(owner(request))
    request.kv.leave_source()
    request.caches.forget_names()
    name_pages(state, request)
