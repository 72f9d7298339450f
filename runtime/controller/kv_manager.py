"""KV pages and decode: grants, growth ahead of the tokens, preemption, admission to decode, progress (pure; rules over
``Core``).

The controller is not on the token path: it looks at decode's words on a timer and keeps every member at least two pages and two
seconds of tokens ahead. When pages run short the youngest rows give theirs back (``admission.choose_victims``).
"""

from collections.abc import Sequence
from typing import NamedTuple

from ...schema.rows import Phase
from ..bus.messages import Admit
from .effects import AppendPages
from .guidance import Lengths, wanted_pages
from .lifecycle import preempt, settle
from .request import Request
from .scheduling.admission import Holder, choose_victims, pages_ahead
from .scheduling.budgets import steer_share
from .state import DISTURBING, Core, membership

WINDOW_S = 0.25
_FORGET = 0.2  # weight of the newest window in what an undisturbed step takes


class Progress(NamedTuple):
    """decode's words of a row, read from the sequence table."""

    row: int
    row_generation: int
    committed: int
    end_code: int


def observe(core: Core, progress: Sequence[Progress], now: float) -> None:
    """Take note of committed ids and ends; measure rates and the time between tokens."""
    core.steering.looked_s = now
    if any(outstanding.actor in DISTURBING for outstanding in core.plans.values()):
        core.steering.disturbed_s = now
    num_tokens, span_s = 0, 0.0
    quiet_tokens, quiet_s = 0, 0.0
    for seen in progress:
        request = core.rows[seen.row]
        if request is None or request.row_generation != seen.row_generation or request.ending:
            continue
        if not request.record.member:
            request.looked = True
        request.committed = max(request.committed, seen.committed)
        if request.phase == Phase.DECODE and request.window is not None:
            began_s, began = request.window
            if now - began_s >= WINDOW_S:
                request.rate = (request.committed - began) / (now - began_s)
                num_tokens += request.committed - began
                span_s += now - began_s
                if began_s > core.steering.disturbed_s:
                    quiet_tokens += request.committed - began
                    quiet_s += now - began_s
                request.window = (now, request.committed)
        else:
            request.window = (now, request.committed)
        if seen.end_code and not request.end_code:
            request.end_code = seen.end_code
            settle(core, request)
    if num_tokens and now - core.steering.steered_s >= WINDOW_S:  # once per window, however rows' windows are staggered
        core.steering.steered_s = now
        if quiet_tokens:
            _learn_undisturbed(core, quiet_s / quiet_tokens)
        _steer(core, span_s / num_tokens)


def show_ended(core: Core) -> None:
    """What ended while it was being preempted is shown in phase DECODE, where readers look for ends."""
    for request in core.rows:
        if request is None or request.ending or request.record.evicting:
            continue
        if request.phase == Phase.PREPARE and request.is_finished:
            core.set_phase(request, Phase.DECODE)


def _learn_undisturbed(core: Core, tbt_s: float) -> None:
    known_s = core.steering.undisturbed_s
    core.steering.undisturbed_s = tbt_s if known_s is None else known_s + _FORGET * (tbt_s - known_s)


def _steer(core: Core, tbt_s: float) -> None:
    core.steering.tbt_s = tbt_s
    core.steering.share = steer_share(core.steering.share, tbt_s, core.tbt_target_s)


def watched(core: Core) -> list[tuple[int, int]]:
    """(row, generation) of the rows whose words matter now."""
    return [
        (request.row, request.row_generation)
        for request in core.rows
        if request is not None and not request.ending and (request.phase == Phase.DECODE or not request.looked)
    ]


def wanted_kv(core: Core, lengths: Lengths, committed: int, max_new_tokens: int, rate: float) -> Lengths:
    limits = core.limits
    return wanted_pages(lengths, committed, max_new_tokens, limits.kv_page_tokens, pages_ahead(rate, limits))


def kv_need(core: Core, request: Request) -> int:
    """Pages that a row without any must get, all members together, all or none (CF3, CF4)."""
    return sum(wanted_kv(core, request.lengths, request.committed, request.record.max_new_tokens, request.rate))


def needs_kv(request: Request) -> bool:
    """Prepared, nobody is taking pages back, and what was generated so far is known."""
    return (
        request.has_row
        and not request.ending
        and request.phase == Phase.PREPARE
        and request.record.prepared
        and not request.record.evicting
        and not request.is_finished
        and request.looked
        and not request.block_tables[0]
    )


def grant_kv(core: Core, request: Request) -> bool:
    """Give a row the pages for its prompts and a start, for all members or for none."""
    wanted = wanted_kv(core, request.lengths, request.committed, request.record.max_new_tokens, request.rate)
    if sum(wanted) > core.pools["kv"].num_free:
        return False
    for member, count in enumerate(wanted):
        _append(core, request, member, count)
    request.blocked_s = -1.0
    return True


def _append(core: Core, request: Request, member: int, count: int) -> bool:
    run = core.allocate("kv", request, count)
    if run is None:
        return False
    if request.record.member:
        core.pools["kv"].use(membership(request), run.pages)
    core.emit(AppendPages(request.row, member, run.pages))
    request.block_tables[member].extend(run.pages)
    return True


def reserve(core: Core) -> int:
    """Pages kept for the growth of running members when somebody new asks."""
    return sum(len(request.lengths) for request in _decoding(core))


def _decoding(core: Core) -> list[Request]:
    return [r for r in core.rows if r is not None and r.phase == Phase.DECODE and not r.ending and not r.is_finished]


def grow(core: Core) -> None:
    """Keep running rows ahead of their tokens, the oldest first; who cannot even compute the next one may preempt younger rows."""
    page_tokens = core.limits.kv_page_tokens
    for request in sorted(_decoding(core), key=lambda request: request.arrival):
        if request.phase != Phase.DECODE:
            continue  # preempted a moment ago
        max_new_tokens = request.record.max_new_tokens
        least = wanted_pages(request.lengths, request.committed, max_new_tokens, page_tokens, ahead_pages=0)
        wanted = wanted_kv(core, request.lengths, request.committed, max_new_tokens, request.rate)
        for goal in (least, wanted):  # what the next token needs goes first, for both members
            for member, count in enumerate(goal):
                missing = min(count - len(request.block_tables[member]), core.pools["kv"].num_free)
                if missing > 0:
                    _append(core, request, member, missing)
        short = sum(max(0, count - len(request.block_tables[member])) for member, count in enumerate(least))
        if short:
            _take_from_younger(core, request, short)


def _take_from_younger(core: Core, request: Request, num_pages: int) -> bool:
    """Preempt until ``num_pages`` are on their way, counting what others are giving back already. False if they cannot be had."""
    coming = sum(
        sum(map(len, other.block_tables))
        for other in core.rows
        if other is not None and (other.record.evicting or other.ending or other.is_finished)
    )
    missing = num_pages - core.pools["kv"].num_free - coming
    if missing <= 0:
        return True
    holders = [
        Holder(other.key, other.arrival, 2 if other.record.items else 0, sum(map(len, other.block_tables)))
        for other in core.rows
        if other is not None and other.has_kv and not other.ending and not other.is_finished
    ]
    victims = choose_victims(holders, request.arrival, missing)
    for key in victims:
        preempt(core, core.requests[key])
    return bool(victims)


def make_room(core: Core, request: Request, now: float) -> None:
    """The oldest row has waited for KV pages long enough: younger ones give theirs back."""
    if request.blocked_s < 0:
        request.blocked_s = now
    elif now - request.blocked_s >= core.limits.patience_s:
        request.blocked_s = now
        need = kv_need(core, request)
        # younger rows may hold the need but not the reserve, which falls as they go
        if not _take_from_younger(core, request, need + reserve(core)):
            _take_from_younger(core, request, need)


def admit_to_decode(core: Core) -> None:
    """Rows whose members are all prefilled go to decode, once no plan names them. Membership is recorded before the phase."""
    for request in core.rows:
        if request is None or request.ending or request.phase != Phase.PREPARE or not request.has_kv:
            continue
        if request.plans or not request.looked or not request.is_prefilled:
            continue
        request.record.member = True
        request.window = None  # time out of decode is no time between tokens
        core.save(request)
        for table in request.block_tables:
            core.pools["kv"].use(membership(request), table)
        core.set_phase(request, Phase.DECODE)
        core.send("decode", Admit(core.epoch, request.row, request.row_generation))
