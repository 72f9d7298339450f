"""How a request fails, ends, loses its pages and leaves its row.

All ways out are one: retire what the row owns, get decode's word that it has let go (Drop until Dropped), wait for the plans
that name the row, then free. ``settle`` is called whenever one of those holders is gone.
"""

from ...schema.rows import Phase
from ..bus.messages import Drop, Failed
from ..errors import RequestError
from .effects import ClearPages
from .records import Ended, Refused
from .request import Request
from .scheduling.types import SegmentStage
from .state import LONG_AGO_S, ControllerState, membership, owner


def fail(state: ControllerState, request: Request, error: RequestError) -> None:
    """The request cannot go on. The gateway is told until it says Delivered; pages go back at once. Journal before phase."""
    if request.failure is not None or request.key not in state.requests:
        return
    request.failure = failed_message(state.epoch, request.key, error)
    state.journal(Refused(request.key, request.failure))
    state.totals.failed += 1
    state.waiting.pop(request.key, None)
    if request.record.filled:  # else the gateway may be writing into the media pages: they wait for its answer
        leave_row(state, request)
    state.ask(request.key, request.gateway_generation)


def failed_message(epoch: int, key: int, error: RequestError) -> Failed:
    return Failed(epoch, key, error.status, error.message, error.type, error.param, error.retry_after_s)


def end(state: ControllerState, request: Request) -> None:
    """The gateway has seen the last of it, or is gone, or nobody wants it any more. Journal before phase."""
    state.journal(Ended(request.key))
    del state.requests[request.key]
    state.waiting.pop(request.key, None)
    state.remember_end(request.key)
    state.totals.finished += request.failure is None
    leave_row(state, request)
    state.ask(request.key, request.gateway_generation)


def leave_row(state: ControllerState, request: Request) -> None:
    """Retire everything that the row owns. Phase ENDING says so to the next controller and to everybody who looks."""
    if not request.has_row or request.ending:
        return
    request.ending = True
    if request.placed_s:
        state.steering.service_s += 0.1 * (state.now - request.placed_s - state.steering.service_s)
    state.set_phase(request, Phase.ENDING)
    state.totals.generated_tokens += request.committed
    for pool in state.pools.values():
        pool.retire(owner(request))
    settle(state, request)


def preempt(state: ControllerState, request: Request) -> None:
    """Take a row's KV pages back; it stays in its row and is prefilled again over its prompt and what it generated.

    Its media are decoded again from the media pages, which it keeps. The record says so before the phase does.
    """
    assert request.has_kv and not request.ending
    state.totals.preempted += 1
    request.record.evicting = True
    request.blocked_s = -1.0
    reset_media(state, request, consumed_too=True)
    state.save(request)
    if request.phase == Phase.DECODE:
        state.set_phase(request, Phase.PREPARE)
    state.pools["kv"].retire(owner(request))
    settle(state, request)


def reset_media(state: ControllerState, request: Request, consumed_too: bool) -> None:
    """Give up patch and embedding pages: the segments are to be decoded again. Results still to come are for retired pages.

    Unless ``consumed_too``, what prefill has read to its end, or will have with the plan in work, stays: it is not needed again, and
    its pages come free with that plan and not before. The caller saves the record, in the same turn.
    """
    reached = 0 if consumed_too else _prefilled_soon(request)
    kept: set[int] = set()
    for place, segment in request.record.segments():
        if segment.stage == SegmentStage.ENCODED and not consumed_too:
            if segment.embedding is None:
                continue
            assert request.tracker is not None
            if request.tracker.part(*place).end <= reached:
                kept.update(segment.embedding.pages[request.num_consumed.get(place, 0) :])
                continue
        segment.reset()
        request.num_consumed.pop(place, None)
        if request.tracker is not None:
            request.tracker.mark_unready(*place)
    state.pools["patch"].retire(owner(request))
    embedding = state.pools["embedding"]
    embedding.retire(owner(request), embedding.owned_by(owner(request)) - kept)


def _prefilled_soon(request: Request) -> int:
    """Tokens of the first member that are in the KV cache, or will be once the plan that is in work is done."""
    plan = request.prefill_plan
    chunks = plan.chunks if plan is not None else ()
    ends = [chunk.end for chunk in chunks if chunk.member == 0 and (chunk.row, chunk.row_generation) == request.key_in_table]
    return max([request.prefilled[0], *ends])


def settle(state: ControllerState, request: Request) -> None:
    """Free what nobody holds any more. Idempotent."""
    if not request.has_row:
        return
    record = request.record
    if record.member and (request.ending or record.evicting or request.is_finished):
        request.drop_ticket = request.drop_ticket or state.number()
        return
    if (request.ending or record.evicting or request.is_finished) and request.prefill_plan is None:
        if any(request.block_tables) or any(request.prefilled):
            clear_pages(state, request)
        if record.evicting and not request.ending:
            record.evicting = False
            state.note_counts(request, False)
            state.save(request)
    if request.ending and not request.plans:
        state.set_phase(request, Phase.FREE)
        state.rows[request.row] = None
        state.free_rows.append(request.row)
        request.row = -1


def clear_pages(state: ControllerState, request: Request) -> None:
    """Empty the row's block tables: the words are the truth about KV pages, so they go before the pages can be given away."""
    state.emit(ClearPages(request.row))
    state.pools["kv"].retire(owner(request))
    request.block_tables = ([], [])
    request.prefilled = [0, 0]


def send_drops(state: ControllerState, now: float) -> None:
    """Ask decode to let go, again and again."""
    for request in state.requests_in_rows():
        if request.drop_ticket and now - request.drop_sent_s >= state.limits.resend_s:
            if state.send("decode", Drop(state.epoch, request.row, request.row_generation, request.drop_ticket)):
                request.drop_sent_s = now


def on_dropped(state: ControllerState, row: int, row_generation: int, ticket: int) -> None:
    """decode's active generation has let go of the row: the membership ends."""
    request = state.rows[row] if 0 <= row < len(state.rows) else None
    if request is None or request.row_generation != row_generation or not ticket or request.drop_ticket != ticket:
        return
    request.drop_ticket, request.drop_sent_s = 0, LONG_AGO_S
    request.record.member = False
    state.save(request)
    state.pools["kv"].drop(membership(request))
    settle(state, request)
