"""Failure, end and preemption of requests, and release of their pages and rows.

All exits work alike: retire what the row owns, have its decode actor confirm that it has dropped the row (``ownership``), wait for the
plans that name the row, then free. ``settle`` is called whenever one of those holders is gone.
"""

from ....schema.rows import Phase
from ...bus.messages import Failed
from ...errors import RequestError
from ..caches.media_sharing import leave
from ..caches.snapshots import keep_last_states
from ..scheduling.types import SegmentStage
from ..state.effects import ClearPages
from ..state.records import Ended, Refused
from ..state.request import Request
from ..state.state import ControllerState, owner


def fail(state: ControllerState, request: Request, error: RequestError) -> None:
    """Fail a request. The gateway is told until it answers Delivered; pages are given back at once. Journal before phase."""
    if request.failure is not None or request.key not in state.requests:
        return
    failure = failed_message(state.epoch, request.key, error)
    request.fail(failure)
    state.journal(Refused(request.key, failure))
    state.totals.failed += 1
    state.waiting.pop(request.key, None)
    if request.record.filled:  # otherwise the gateway may be writing the media pages: they wait for its answer
        leave_row(state, request)
    state.ask(request.key, request.gateway_generation)


def failed_message(epoch: int, key: int, error: RequestError) -> Failed:
    return Failed(epoch, key, error.status, error.message, error.type, error.param, error.retry_after_s, error.code)


def end(state: ControllerState, request: Request) -> None:
    """End a request that the gateway has delivered or cancelled, or whose gateway is gone. Journal before phase."""
    state.journal(Ended(request.key))
    del state.requests[request.key]
    state.waiting.pop(request.key, None)
    state.remember_end(request.key)
    state.totals.finished += request.failure is None
    leave_row(state, request)
    state.ask(request.key, request.gateway_generation)


def leave_row(state: ControllerState, request: Request) -> None:
    """Retire everything that the row owns. Phase ENDING tells the next controller and all other readers."""
    if not request.has_row or request.ending:
        return
    request.begin_end()
    if request.placed_s:
        state.steering.service_s += 0.1 * (state.now - request.placed_s - state.steering.service_s)
    state.set_phase(request, Phase.ENDING)
    state.totals.generated_tokens += request.answer.committed
    for pool in state.pools.values():
        pool.retire(owner(request))
    leave(state, request)
    settle(state, request)


def preempt(state: ControllerState, request: Request) -> None:
    """Take a request's KV pages back; it keeps its row and is prefilled again over its prompt and its generated tokens.

    Its media are decoded again from the media pages, which it keeps. The record is written before the phase.
    """
    assert request.has_kv and not request.ending
    state.totals.preempted += 1
    request.record.begin_eviction()
    request.end_wait()
    reset_media(state, request, consumed_too=True)
    state.save(request)
    if request.phase == Phase.PREPARE:
        keep_last_states(state, request)
    if request.phase == Phase.DECODE:
        state.set_phase(request, Phase.PREPARE)
    state.retire_kv(request)
    settle(state, request)


def reset_media(state: ControllerState, request: Request, consumed_too: bool) -> None:
    """Give up patch and embedding pages: the segments are to be decoded again. Results still to come are for retired pages.

    Unless ``consumed_too``, segments that prefill has read to their end, or will have after its current plan, stay: they are not
    needed again, and that plan frees their pages, no earlier. The caller saves the record in the same turn.
    """
    reached = 0 if consumed_too else _prefilled_soon(request)
    kept: set[int] = set()
    for place, segment in request.record.segments():
        if segment.stage == SegmentStage.ENCODED and not consumed_too:
            if segment.embedding is None:
                continue
            if request.media.part(place).end <= reached:
                kept.update(request.media.unread(place, segment.embedding.pages))
                continue
        segment.reset()
        request.media.lose(place)
    request.media.give_up()
    state.pools["patch"].retire(owner(request))
    embedding = state.pools["embedding"]
    embedding.retire(owner(request), embedding.owned_by(owner(request)) - kept)


def _prefilled_soon(request: Request) -> int:
    """Return the tokens of the first member that are in the KV cache, or will be once its current plans are done."""
    plans = [plan for plan in request.plans.values() if plan.FILLS_KV and plan.COMPUTES]  # pages to be loaded can be missing
    chunks = [chunk for plan in plans for chunk in plan.chunks]
    ends = [chunk.end for chunk in chunks if chunk.member == 0 and (chunk.row, chunk.row_generation) == request.key_in_table]
    return max([request.kv.prefilled[0], *ends])


def settle(state: ControllerState, request: Request) -> None:
    """Free everything without a remaining holder. Idempotent."""
    if not request.has_row:
        return
    record = request.record
    is_leaving = (
        request.ending or record.evicting or request.is_finished or request.phase == Phase.DECODE and request.ownership.decode is None
    )
    if record.member_of is not None and is_leaving:
        if not request.ownership.drop_ticket:
            request.ownership.ask_to_drop(state.number())
        state.drops[request.row] = request
        return
    if (request.ending or record.evicting or request.is_finished) and not request.has_kv_plan:
        if not request.kv.is_empty:
            clear_pages(state, request)
        if record.evicting and not request.ending:
            record.end_eviction()
            state.note_counts(request, False)
            state.save(request)
    if request.ending and not request.plans:
        state.set_phase(request, Phase.FREE)
        state.rows[request.row] = None
        state.free_rows.append(request.row)
        request.leave_row()


def clear_pages(state: ControllerState, request: Request) -> None:
    """Empty the row's block tables: these words are authoritative for KV pages, so they are cleared before the pages are reused."""
    state.emit(ClearPages(request.row))
    state.retire_kv(request)
    request.kv.clear()
    request.caches.clear()
