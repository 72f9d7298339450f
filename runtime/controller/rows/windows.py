"""A row's pages of layers with a window: what it has at its grant, and as the window moves on (pure; rules over ``ControllerState``).

The pages that the window has left are given back while the row runs, and others are taken for what comes next: before each plan to
prefill, and ahead of decode. Nobody reads a page that is given back: prefill has no plan for the row then, and decode, which goes on
from the committed ids whoever it is, reads from the window on.
"""

from collections.abc import Sequence

from ....schema.rows import Phase
from ...bus.copy_plans import LoadChunk
from ...pools import PoolName, window_pool
from ..caches.prefix_cache import Hits
from ..caches.window_pages import first_live, has_windows, windows_at
from ..scheduling.guidance import Lengths, num_pages, prefill_targets
from ..state.effects import AppendSourceWindowPages, AppendWindowPages
from ..state.parts import Windows
from ..state.request import Request
from ..state.state import ControllerState, membership, owner

_LEAST_CHUNK = 2  # pages


def window_needs(
    state: ControllerState,
    request: Request,
    pool: PoolName,
    targets: Lengths,
    wanted: Lengths,
    hits: Hits,
    *,
    are_copied: bool = False,
) -> dict[PoolName, int]:
    """Return the free pages that a grant takes. ``targets``: tokens to be prefilled per member; ``wanted``: KV pages; ``hits``: of
    these, those that the cache has. ``are_copied``: of the windows at the end of prompts that are prefilled in another pool."""
    if not has_windows(state):
        return {}
    cache, count, shared = state.pools[window_pool(pool)].cache, 0, set[int]()
    for member, most in enumerate(wanted):
        num_hits = len(hits[member]) if hits else 0
        done = targets[member] if are_copied else num_hits * state.limits.kv_page_tokens
        first_new = max(num_hits, first_live(state, done))
        count += max(0, _goal(state, request, member, done, targets[member], most) - first_new)
        if num_hits:
            shared.update(windows_at(state, request, pool, member, num_hits, done))
    return {window_pool(pool): count + sum(cache.is_idle(page) for page in shared)}


def give_windows(state: ControllerState, request: Request, wanted: Lengths, hits: Hits, home: Hits) -> None:
    """Grant a row what ``window_needs`` counts: those of the window at the end of its hits are the cache's. ``home``: hits where it is
    decoded, if it is prefilled elsewhere."""
    if not has_windows(state):
        return
    is_pooled = request.spec.generation.pooling is not None
    targets = request.kv.lengths if is_pooled else prefill_targets(request.kv.lengths, request.answer.committed)
    if request.record.source_pool is None:
        _give(state, request, request.kv_pool, targets, wanted, hits)
    else:
        at_source = tuple([num_pages(target, state.limits.kv_page_tokens) for target in targets])
        _give(state, request, request.prefill_pool, targets, at_source, hits)
        _give(state, request, request.kv_pool, targets, wanted, home, are_copied=True)


def _give(
    state: ControllerState,
    request: Request,
    kv: PoolName,
    targets: Lengths,
    wanted: Lengths,
    hits: Hits,
    *,
    are_copied: bool = False,
) -> None:
    pool, page_tokens, windows = window_pool(kv), state.limits.kv_page_tokens, _windows(request, kv)
    cache, counts = state.pools[pool].cache, [len(pages) for pages in hits] or [0] * len(wanted)
    done = list(targets) if are_copied else [count * page_tokens for count in counts]
    found = [windows_at(state, request, kv, member, count, done[member]) if count else [] for member, count in enumerate(counts)]
    for pages in found:  # before any are allocated, which may evict idle ones
        state.pools[pool].share(owner(request), pages)
        for page in pages:
            if (key := cache.key_of(page)) is not None:
                cache.spare(key)
    for member, most in enumerate(wanted):
        first = first_live(state, done[member])
        windows.leave(member, first)
        _append(state, request, kv, member, [0] * first + found[member])
        goal = _goal(state, request, member, done[member], targets[member], most)
        _take(state, request, kv, member, goal - first - len(found[member]))


def advance(state: ControllerState, request: Request, wanted: Lengths | None = None) -> None:
    """Give back the pages that the row's windows have left, and take others for what comes next, as far as there are any: where it is
    prefilled, or decoded. ``wanted``: up to so many places per member; None: as many as it has KV pages. No plan may be filling
    these."""
    if not has_windows(state) or not request.has_kv or request.ending or request.is_finished:
        return
    members, pool = range(len(request.kv.lengths)), request.prefill_pool
    for member in members:
        _leave(state, request, member)
    for member in members:
        done, most = num_computed(request, member), len(request.prefill_tables[member])
        most = most if wanted is None else min(most, wanted[member])
        goal = _goal(state, request, member, done, request.targets[member], most)
        missing = min(goal - len(request.prefill_windows.tables[member]), state.pools[window_pool(pool)].num_free)
        if missing > 0:
            _take(state, request, pool, member, missing)


def reach_windows(state: ControllerState, request: Request, chunks: Sequence[LoadChunk]) -> bool:
    """Give a row, before its tokens are loaded, the pages of windows that it lacks at their end. False if there are not so many; or if
    places are among them that an earlier load has left out."""
    page_tokens, pool = state.limits.kv_page_tokens, request.prefill_pool
    windows, missing = request.prefill_windows, dict[int, tuple[int, int]]()
    for chunk in chunks if has_windows(state) else ():
        if chunk.windows is not None:
            first, end = first_live(state, chunk.end), chunk.end // page_tokens
            gap, length = windows.gaps[chunk.member], len(windows.tables[chunk.member])
            if max(first, gap.start) < min(end, gap.stop):
                return False
            if length < first:
                end = max(end, first + 1)
            missing[chunk.member] = max(0, first - length), max(0, end - max(first, length))
    if missing and sum(count for _, count in missing.values()) > state.pools[window_pool(pool)].num_free:
        return False
    for member, (num_left_out, count) in missing.items():
        if count:
            length, run = len(windows.tables[member]), state.allocate(window_pool(pool), request, count)
            assert run is not None
            _append(state, request, pool, member, [run.pages[0]] * num_left_out + run.pages)
            if num_left_out:
                windows.gaps[member] = range(windows.gaps[member].start or length, length + num_left_out)
    return True


def leave_before(state: ControllerState, request: Request, member: int) -> None:
    """A member's next tokens are loaded, with the pages at their end: it leaves those before."""
    if has_windows(state):
        _leave(state, request, member)


def has_gap(state: ControllerState, request: Request) -> bool:
    """Return whether the row's next chunk would come to places without pages of their own: what was to be loaded was not."""
    windows, page_tokens = request.prefill_windows, state.limits.kv_page_tokens
    return any(request.kv.prefilled[member] // page_tokens < gap.stop for member, gap in enumerate(windows.gaps) if gap)


def num_computed(request: Request, member: int) -> int:
    """Return the tokens of a member that are in its KV pages."""
    prefilled = request.kv.prefilled[member]
    if not request.kv.lengths or request.phase != Phase.DECODE and request.record.member_of is None:
        return prefilled
    return max(prefilled, request.kv.lengths[member] + request.answer.committed - 1)


def num_short(state: ControllerState, request: Request) -> int:
    """Return how many pages the row's members lack, of those that they need for their next tokens."""
    if not has_windows(state) or not request.has_kv:
        return 0
    page_tokens, short = state.limits.kv_page_tokens, 0
    for member, table in enumerate(request.prefill_tables[: len(request.kv.lengths)]):
        done = num_computed(request, member)
        if request.phase == Phase.DECODE or done < request.targets[member]:
            least = max([done + 1, *(last for first, last in _pictures(state, request, member, done) if first <= done)])
            short += max(0, min(num_pages(least, page_tokens), len(table)) - len(request.prefill_windows.tables[member]))
    return short


def room(state: ControllerState, request: Request, member: int) -> int:
    """Return the tokens of a member that can be prefilled so far: those that it has pages for, up to no picture's midst."""
    done = request.kv.prefilled[member]
    end = len(request.prefill_windows.tables[member]) * state.limits.kv_page_tokens
    for first, last in _pictures(state, request, member, done):
        if first < end < last:
            return max(first, done)
    return end


def restore_windows(state: ControllerState, request: Request) -> None:
    """In a new controller: which pages are the row's. Plans in flight are done again from where they begin."""
    if request.record.source_pool is not None:
        for member, target in enumerate(request.targets):
            request.kv.windows.leave(member, min(len(request.kv.windows.tables[member]), first_live(state, target)))
    for member, pages in enumerate(request.prefill_windows.tables):
        if pages:
            done = num_computed(request, member)
            plans = [plan for plan in request.plans.values() if plan.FILLS_KV]
            chunks = [chunk for plan in plans for chunk in plan.chunks if plan.COMPUTES or done < chunk.end]
            starts = [c.start for c in chunks if (c.row, c.row_generation, c.member) == (*request.key_in_table, member)]
            request.prefill_windows.leave(member, min(len(pages), first_live(state, min([done, *starts]))))
            own = range(request.prefill_windows.firsts[member], len(pages) - 1)
            alike = [place for place in own if pages[place] == pages[place + 1]]
            if alike:
                request.prefill_windows.gaps[member] = range(alike[0], alike[-1] + 1)


def _goal(state: ControllerState, request: Request, member: int, num_done: int, target: int, most: int) -> int:
    """Return the place behind the last page that a member is to have, of ``most``: up to the end of the longest chunk that comes next,
    or, once nothing is to be prefilled, as many as leave the other member of a pair as many, and the next token's at least."""
    if num_done >= target:
        least = num_pages(num_done + 1, state.limits.kv_page_tokens)
        return min(most, max(least, first_live(state, num_done) + state.limits.num_window_pages // 2))
    end = num_done + _chunk(state, member)
    for first, last in _pictures(state, request, member, num_done):
        if first < end < last:
            end = last
    return min(most, num_pages(end, state.limits.kv_page_tokens))


def _chunk(state: ControllerState, member: int) -> int:
    """Return the tokens of a member's longest chunk. The pool may have no room for those of two members."""
    limits, page_tokens = state.limits, state.limits.kv_page_tokens
    of_both = 2 * (num_pages(limits.window_tokens, page_tokens) + num_pages(limits.window_chunk, page_tokens) + 4)
    return limits.window_chunk if member == 0 or of_both <= limits.num_window_pages else _LEAST_CHUNK * page_tokens


def _pictures(state: ControllerState, request: Request, member: int, start: int) -> Sequence[tuple[int, int]]:
    """Return the tokens of pictures that a chunk of a member must hold, behind ``start``."""
    tracker = request.media.tracker
    is_asked_for = member == 0 and state.limits.sees_pictures and tracker is not None
    return tracker.pictures(start, request.targets[0]) if is_asked_for and tracker is not None else ()


def _leave(state: ControllerState, request: Request, member: int) -> None:
    windows = request.prefill_windows
    pages = windows.leave(member, first_live(state, num_computed(request, member)))
    others = {page for other in range(len(windows.tables)) for page in windows.own(other)}
    if left := [page for page in dict.fromkeys(pages) if page not in others]:
        ledger = state.pools[window_pool(request.prefill_pool)]
        keys = [key for page in left if (key := ledger.cache.key_of(page)) is not None]
        ledger.leave(owner(request), [membership(request)], left)
        ledger.cache.demote([key for key in keys if not ledger.cache.is_spared(key)])


def _windows(request: Request, kv: PoolName) -> Windows:
    """Return the row's pages of windows beside a KV pool of its own."""
    return request.kv.windows if kv == request.kv_pool else request.kv.source_windows


def _take(state: ControllerState, request: Request, kv: PoolName, member: int, count: int) -> None:
    pool = window_pool(kv)
    run = state.allocate(pool, request, max(0, count))
    assert run is not None, "the granter gave pages of windows that are not free"
    if request.record.member_of is not None:
        state.pools[pool].use(membership(request), run.pages)
    _append(state, request, kv, member, run.pages)


def _append(state: ControllerState, request: Request, kv: PoolName, member: int, pages: Sequence[int]) -> None:
    if pages:
        effect = AppendWindowPages if kv == request.kv_pool else AppendSourceWindowPages
        state.emit(effect(request.row, member, list(pages)))
        _windows(request, kv).append(member, pages)
