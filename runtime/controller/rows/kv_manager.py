"""KV pages and decode: grants, growth ahead of the tokens, preemption, admission to decode (pure; rules over ``ControllerState``).

The controller is not on the token path: it reads decode's words on a timer (``progress``) and keeps every member at least two pages and
two seconds of tokens ahead, and six seconds while half of the pool is free: a new row too, so that it goes on while a controller
starts.
When pages run short, the last rows in order give theirs back (``admission.choose_victims``).
"""

from collections import Counter

from ....schema.rows import Phase
from ...pools import PoolName, kind_of_pool, log_pool, state_pool, window_pool
from ..caches.prefix_cache import Hits, append_hits, append_home_hits, append_to_prefill, load_plan, note_hits, share_hits
from ..caches.snapshots import has_states, learn_border, num_known_pages, snapshots_at
from ..caches.window_pages import has_windows
from ..scheduling.admission import Holder, ResourceGate, choose_victims, pages_ahead, spare_pages_ahead
from ..scheduling.guidance import Lengths, num_pages, wanted_pages
from ..state.effects import AppendPages, SetSourceStatePages, SetStatePages
from ..state.request import Request
from ..state.state import BY_RANK, ControllerState, membership, owner
from ..state.state_pages import StatePages
from .lifecycle import preempt
from .ownership import hand_over, is_orphan
from .placement import Placement, able_pools, choose_pools
from .windows import advance, give_windows, has_gap, num_short

START_RATE = 100.0  # tokens/s assumed for a row while neither this run nor an earlier one has measured any


def wanted_kv(state: ControllerState, lengths: Lengths, committed: int, max_new_tokens: int, rate: float) -> Lengths:
    limits = state.limits
    return wanted_pages(lengths, committed, max_new_tokens, limits.kv_page_tokens, pages_ahead(rate, limits))


def place_row(state: ControllerState, request: Request, gate: ResourceGate) -> Placement:
    """Choose the pools of a row without KV pages. A grant takes the free pages for all members, all or none (CF3, CF4)."""
    return choose_pools(state, request, request.kv.lengths, _wanted(state, request), gate)


def _wanted(state: ControllerState, request: Request) -> Lengths:
    return wanted_kv(state, request.kv.lengths, request.answer.committed, request.record.max_new_tokens, request.answer.rate)


def needs_kv(request: Request) -> bool:
    """Return whether the row is prepared, is not being preempted, and has a known count of generated tokens."""
    return (
        request.has_row
        and not request.ending
        and request.phase == Phase.PREPARE
        and request.record.prepared
        and not request.record.evicting
        and not request.is_finished
        and request.answer.counts_known
        and not request.kv.tables[0]
    )


def grant_kv(state: ControllerState, request: Request, placement: Placement) -> bool:
    """Grant a row the pages for its prompts and a start, for all members or for none. Leading pages that the cache has are shared.

    Of every member at least the last page is its own: a grant cut short by a crash is one that lacks pages. The pools are recorded
    before the pages.
    """
    if any(count > state.pools[pool].num_free for pool, count in placement.needs.items()):
        return False
    wanted, record = _wanted(state, request), request.record
    if (record.kv_pool, record.source_pool) != placement[:2]:
        record.place(*placement[:2])
        state.save(request)
    hits, home = placement.hits, placement.at_home
    num_known, snapshots = num_known_pages(state, request), _share_snapshots(state, request, hits)
    share_hits(state, request, hits, request.prefill_pool)
    share_hits(state, request, home, request.kv_pool)
    give_windows(state, request, wanted, hits, home)  # first: a new controller looks for the KV pages
    for member, count in enumerate(wanted):
        shared = hits[member] if hits else []
        append_hits(state, request, member, shared)
        if record.source_pool is None:
            count -= len(shared)
        else:
            _append_source(state, request, member, num_pages(request.targets[member], state.limits.kv_page_tokens) - len(shared))
            at_home = home[member] if home else []
            append_home_hits(state, request, member, at_home)
            count -= len(at_home)
        _append(state, request, member, count)
        if has_states(state):
            _give_states(state, request, member, snapshots[member] if snapshots else -1)
    request.end_wait()
    if request.caches.keys:
        learn_border(state, request, num_known)
        request.caches.begin(may_load=load_plan(state, request) is not None)
        note_hits(state, request)
    return True


def _append(state: ControllerState, request: Request, member: int, count: int) -> None:
    run = state.allocate(request.kv_pool, request, count)
    assert run is not None, "the granter gave KV pages that are not free"
    if request.record.member_of is not None:
        state.pools[request.kv_pool].use(membership(request), run.pages)
    state.emit(AppendPages(request.row, member, run.pages))
    request.kv.append(member, run.pages)


def _share_snapshots(state: ControllerState, request: Request, hits: Hits) -> list[int]:
    """Make the row an owner of the states at the end of its hits, until it has states of its own. Returns their pages."""
    if not has_states(state):
        return []
    pool = request.prefill_pool
    snapshots = snapshots_at(state, request, pool, list(map(len, hits)))
    if pages := [page for page in snapshots if page >= 0]:
        state.pools[state_pool(pool)].share(owner(request), pages)
    return snapshots


def _give_states(state: ControllerState, request: Request, member: int, snapshot: int) -> None:
    """Give a member its states in the row's own pool, and where its prompt is prefilled, if that is another."""
    if request.record.source_pool is None:
        pages = _allocate_states(state, request, request.kv_pool, snapshot)
        state.emit(SetStatePages(request.row, member, list(pages.bases), pages.log, snapshot))
        request.kv.take_states(member, pages)
    else:
        pages = _allocate_states(state, request, request.kv_pool, -1)
        state.emit(SetStatePages(request.row, member, list(pages.bases), pages.log))
        request.kv.take_states(member, pages)
        pages = _allocate_states(state, request, request.prefill_pool, snapshot)
        state.emit(SetSourceStatePages(request.row, member, list(pages.bases), pages.log, snapshot))
        request.kv.take_source_states(member, pages)


def _allocate_states(state: ControllerState, request: Request, pool: PoolName, snapshot: int) -> StatePages:
    bases = state.allocate(state_pool(pool), request, 2)
    log = state.allocate(log_pool(pool), request, 0 if request.spec.is_prefill_only else 1)
    assert bases is not None and log is not None, "the granter gave pages of states that are not free"
    return StatePages((bases.pages[0], bases.pages[1]), log.pages[0] if log.pages else -1, snapshot)


def _append_source(state: ControllerState, request: Request, member: int, count: int) -> None:
    run = state.allocate(request.prefill_pool, request, count)
    assert run is not None, "the granter gave KV pages that are not free"
    if count:
        append_to_prefill(state, request, member, run.pages)


def num_grantable(state: ControllerState, pool: PoolName) -> int:
    """Return the pages that a new row may take: of KV some are kept for the growth of running members."""
    return max(0, state.pools[pool].num_free - _reserve(state, pool))


def _reserve(state: ControllerState, pool: PoolName) -> int:
    if kind_of_pool(pool) not in ("kv", "window"):
        return 0
    if len(state.kv_pools) == 1:
        return state.num_decode_tokens
    return sum([len(request.kv.lengths) for request in state.decoding() if pool in (request.kv_pool, window_pool(request.kv_pool))])


def grow(state: ControllerState) -> None:
    """Keep running rows ahead of their tokens, in rank order. A row without pages for its next token may preempt later rows."""
    page_tokens = state.limits.kv_page_tokens
    if has_windows(state):
        _grow_windows(state)
    due = [request for request in state.decoding() if request.answer.committed >= request.derived.grow_at]
    for request in sorted(due, key=BY_RANK):
        if request.phase != Phase.DECODE:
            continue  # preempted a moment ago
        request.derived.grow_at = _next_growth(state, request)
        if request.answer.committed < request.derived.grow_at:
            continue
        max_new_tokens = request.record.max_new_tokens
        least = wanted_pages(request.kv.lengths, request.answer.committed, max_new_tokens, page_tokens, ahead_pages=0)
        wanted = wanted_kv(state, request.kv.lengths, request.answer.committed, max_new_tokens, request.answer.rate)
        for goal in (least, wanted):  # first the need of the next token, for both members
            _fill(state, request, goal)
        _take_spare(state, request)
        if has_windows(state):
            for goal in (least, wanted, *((None,) if _has_spare(state, request) else ())):
                advance(state, request, goal)
        short = sum(max(0, count - len(request.kv.tables[member])) for member, count in enumerate(least))
        if short:
            _take_from_later(state, request, request.kv_pool, short)
        if short := num_short(state, request):
            _take_from_later(state, request, window_pool(request.kv_pool), short)
        request.derived.grow_at = _next_growth(state, request)


def _grow_windows(state: ControllerState) -> None:
    """Let rows in preparation have pages of windows for their next chunks, in rank order. One without any may preempt later rows."""
    for request in sorted([r for r in state.preparing() if r.can_prefill and not r.is_prefilled and not r.has_kv_plan], key=BY_RANK):
        if request.has_kv and has_gap(state, request):
            if not request.caches.may_load:
                preempt(state, request)
        elif request.has_kv:  # not preempted a moment ago
            advance(state, request)
            if short := num_short(state, request):
                _take_from_later(state, request, window_pool(request.prefill_pool), short)


def _fill(state: ControllerState, request: Request, goal: Lengths, left_free: int = 0) -> None:
    """Give the members the pages that they lack, as far as the pool has more free ones than ``left_free``."""
    for member, count in enumerate(goal):
        missing = min(count - len(request.kv.tables[member]), state.pools[request.kv_pool].num_free - left_free)
        if missing > 0:
            _append(state, request, member, missing)


def _take_spare(state: ControllerState, request: Request) -> None:
    """Let the row reach further ahead, as long as half of its pool stays free for others."""
    ahead = spare_pages_ahead(_rate(state, request), state.limits)
    goal = wanted_pages(request.kv.lengths, request.answer.committed, request.record.max_new_tokens, state.limits.kv_page_tokens, ahead)
    _fill(state, request, goal, _half(state))


def _has_spare(state: ControllerState, request: Request) -> bool:
    """Return whether half of the row's pool is free, and of that of windows, if there is one."""
    is_free = state.pools[request.kv_pool].num_free > _half(state)
    return is_free and (
        not has_windows(state) or 2 * state.pools[window_pool(request.kv_pool)].num_free > state.limits.num_window_pages
    )


def _half(state: ControllerState) -> int:
    return state.limits.num_kv_pages // 2


def _rate(state: ControllerState, request: Request) -> float:
    """Return the row's tokens/s: measured, or as rows of the run have them, best while nothing is prefilled, or of an earlier run."""
    tbt_s = state.steering.undisturbed_s or state.steering.tbt_s or state.costs.of("decode").base_s
    return request.answer.rate or (1 / tbt_s if tbt_s else START_RATE)


def _next_growth(state: ControllerState, request: Request) -> int:
    """Return the number of committed ids at which the row wants more pages than it has."""
    page_tokens, ahead = state.limits.kv_page_tokens, pages_ahead(request.answer.rate, state.limits)
    if _has_spare(state, request):
        ahead = max(ahead, spare_pages_ahead(_rate(state, request), state.limits))
    found = state.limits.max_context
    for member, length in enumerate(request.kv.lengths):
        reach = request.kv.reach(member)
        if reach < num_pages(length + request.record.max_new_tokens - 1, page_tokens):
            found = min(found, (reach - ahead) * page_tokens - length + 1)
    return found


def _take_from_later(state: ControllerState, request: Request, pool: PoolName, num_pages: int) -> bool:
    """Preempt until ``num_pages`` of a pool are coming, counting pages already being given back. False if that is impossible."""
    ledger = state.pools[pool]
    leaving = [r for r in state.requests_in_rows() if r.record.evicting or r.ending or r.is_finished]
    given_back = Counter(p for r in leaving if not r.record.evicting and not r.ending for p in r.pages_in(pool))
    coming = {p for r in leaving for p in r.pages_in(pool) if ledger.num_rows(p) <= given_back[p]}
    missing = num_pages - ledger.num_free - len(coming)
    if missing <= 0:
        return True
    holders = [
        Holder(other.key, other.rank, 2 if other.record.items else 0, pages)
        for other in state.live()
        if other.has_kv and not other.is_finished and (pages := other.pages_in(pool))
    ]
    victims = choose_victims(holders, request.rank, missing, ledger.num_rows)
    for key in victims:
        preempt(state, state.requests[key])
    return bool(victims)


def make_room(state: ControllerState, request: Request, placement: Placement, now: float) -> None:
    """Preempt later rows once the first row has waited long enough for KV pages."""
    if request.wait_for_pages(now, state.limits.patience_s):
        for pool, need in placement.needs.items():
            # later rows may hold the need but not the reserve, which falls as they go
            if not _take_from_later(state, request, pool, need + _reserve(state, pool)):
                _take_from_later(state, request, pool, need)


def admit_to_decode(state: ControllerState) -> None:
    """Hand over fully prefilled rows once no plan writes their KV pages, and rows that have left a decode actor for another one. Those
    whose pool has lost its decodes are prefilled again in another."""
    prepare = Phase.PREPARE
    for request in state.touched():
        if _is_prepared(request) if request.phase == prepare else is_orphan(request):
            if request.lacks_first_token:
                request.answer.begin_in_prefill(False)
                preempt(state, request)
            elif request.kv_pool in able_pools(state, "decode"):
                _take_spare(state, request)
                hand_over(state, request)
            else:
                preempt(state, request)


def _is_prepared(request: Request) -> bool:
    if not request.is_ready or request.spec.is_prefill_only:
        return False
    return request.record.source_pool is None and request.transfer_plan is None
