"""Snapshots: recurrent states that the prefix cache has, each at the end of a page of tokens (pure; rules over ``ControllerState``).

A row of a model with recurrent states can go on behind cached KV pages only where the state at their end is known too. A snapshot has
the key of the KV page that ends there, in the cache of the pool of states, so one chain of keys finds both. A row reads the snapshot in
its first chunk alone, and writes pages of its own.

Prefill copies the state in passing, at the borders of a prompt, and one that it loads from a file or from another pool. The last
state of a row that gives up its pages is a snapshot as it is. Each gets its key when nobody writes it any more: after its plan is
cleared, or after decode has dropped the row.
"""

from collections.abc import Iterator, Sequence

import msgspec

from ....schema.rows import SNAPSHOT_SLOT
from ...bus.copy_plans import Load
from ...bus.plans import Plan
from ...pools import PoolName, state_pool
from ..scheduling.types import ChunkChoice
from ..state.request import Request
from ..state.state import ControllerState, owner

NEAR_PAGES = 2  # between the end of the last message and that of the prompt: what opens an answer

Border = tuple[int, bytes]
"""A place in a prompt, and the key of the page that ends there."""


def has_states(state: ControllerState) -> bool:
    return state.limits.num_state_pages > 0


def cut_to_snapshot(state: ControllerState, request: Request, pool: PoolName, member: int, pages: list[int]) -> list[int]:
    """Return those of a member's hits at whose end the cache has the state."""
    cache, keys = state.pools[state_pool(pool)].cache, request.caches.keys
    if 3 * len(keys) > state.limits.num_state_pages:
        return []  # there is no room for two states of each member beside its snapshot
    for count in range(len(pages), 0, -1):
        key = keys[member].at(count - 1)
        if key is not None and cache.find(key) is not None:
            return pages[:count]
    return []


def snapshots_at(state: ControllerState, request: Request, pool: PoolName, num_pages: Sequence[int]) -> list[int]:
    """Return the page with the state at the end of each member's hits; -1 without any. ``num_pages``: of the hits."""
    found, cache = [], state.pools[state_pool(pool)].cache
    for keys, count in zip(request.caches.keys, num_pages, strict=True):
        key = keys.at(count - 1) if count else None
        page = None if key is None else cache.find(key)
        assert page is not None or not count, "hits without the state at their end"
        found.append(-1 if page is None else page)
    return found


def num_waking(state: ControllerState, pool: PoolName, snapshots: Sequence[int]) -> int:
    """Return how many of these are idle, and count as free until a row reads them."""
    cache = state.pools[state_pool(pool)].cache
    return len({page for page in snapshots if page >= 0 and cache.is_idle(page)})


def set_borders(state: ControllerState, request: Request, places: Sequence[int]) -> None:
    """Choose the ends of pages at which prefill leaves snapshots. ``places``: the ends of the first message, of the last one and of the
    last medium, as the gateway has found them. The end of a prompt's last page is one where no message ends near: an equal prompt
    begins there, and has a token left."""
    page_tokens = state.limits.kv_page_tokens
    ends = [max(0, keys.num_prompt_tokens - 2) // page_tokens * page_tokens for keys in request.caches.keys]
    first, last, media = (min(ends[0], place // page_tokens * page_tokens) for place in places)
    if not last or ends[0] - last > NEAR_PAGES * page_tokens:
        last = ends[0]
    chosen: list[int] = []
    for border in sorted({first, media} - {0}):
        if border - max(chosen, default=0) >= state.limits.snapshot_tokens:
            chosen.append(border)
    request.caches.set_borders([sorted({*chosen, last} - {0}), [end for end in ends[1:] if end]], first)


def num_known_pages(state: ControllerState, request: Request) -> int:
    """Return how many leading KV pages of the first member the cache has, whether or not it has states."""
    if not has_states(state) or not request.caches.keys:
        return 0
    return len(state.pools[request.prefill_pool].cache.find_leading(request.caches.keys[0].leading(request.targets[0])))


def learn_border(state: ControllerState, request: Request, num_pages: int) -> None:
    """Note that the cache has so many leading KV pages of a prompt, and no state near their end: other prompts part from it there."""
    border = num_pages * state.limits.kv_page_tokens
    if border - request.kv.prefilled[0] >= state.limits.learnt_tokens and border <= request.targets[0]:
        request.caches.learn_border(border)


def announced(state: ControllerState, request: Request) -> Iterator[Border]:
    """Yield the borders at which a row is still to leave snapshots."""
    for keys, borders, prefilled in zip(request.caches.keys, request.caches.borders, request.kv.prefilled, strict=False):
        for border in borders:
            if prefilled < border and (key := keys.at(_page(state, border))) is not None:
                yield border, key


def allocate_snapshots(state: ControllerState, request: Request, choice: ChunkChoice) -> list[tuple[int, int]]:
    """Return the borders that a chunk passes, each with a page for the state there: those that the cache lacks, while there is room."""
    if not request.caches.keys:
        return []
    pool, found = state_pool(request.prefill_pool), []
    for border in request.caches.borders[choice.member]:
        if choice.start < border <= choice.end:
            key = request.caches.keys[choice.member].at(_page(state, border))
            if key is not None and state.pools[pool].cache.find(key) is None and (run := state.allocate(pool, request, 1)) is not None:
                found.append((border, run.pages[0]))
    return found


def load_for_all(state: ControllerState, request: Request, plan: Load) -> Load:
    """Return the plan with pages for the cache to keep the states that it loads: those that the cache lacks, while there is room."""
    pool, chunks = state_pool(request.prefill_pool), []
    for chunk in plan.chunks:
        loaded = chunk.state
        if loaded is not None and state.pools[pool].cache.find(loaded.key) is None:
            run = state.allocate(pool, request, 1)
            loaded = msgspec.structs.replace(loaded, snapshot=-1 if run is None else run.pages[0])
        chunks.append(msgspec.structs.replace(chunk, state=loaded))
    return Load(chunks, plan.source)


def take_state(state: ControllerState, request: Request, member: int) -> None:
    """A plan has written the state of a member's tokens: nobody reads the one before it for the row any more."""
    snapshot = request.kv.swap_states(member)
    if snapshot >= 0 and snapshot not in request.kv.bases(request.kv.prefill_states):
        state.pools[state_pool(request.prefill_pool)].retire(owner(request), [snapshot])


def keep_snapshots(state: ControllerState, request: Request, plan: Plan) -> None:
    """After a plan has left the table: name the snapshots that it has made, if it was done, and give up their pages."""
    made = plan.snapshots(request.key_in_table)
    if not made or request.ending or request.record.evicting:
        return
    for member, border, page in made:
        if request.kv.prefilled[member] >= border:
            _name(state, request, member, border, page)
    state.pools[state_pool(request.prefill_pool)].retire(owner(request), [page for _, _, page in made])


def keep_last_states(state: ControllerState, request: Request) -> None:
    """Name the last states of a row that gives up its pages, which is recorded. If it has been in decode, its count is the final one,
    and its membership is about to end."""
    if not request.caches.keys or not has_states(state):
        return
    page_tokens, plan = state.limits.kv_page_tokens, request.prefill_plan
    written = plan.states_written() if plan is not None else []
    for member, length in enumerate(request.kv.lengths):
        pages, slot, prefilled = request.kv.prefill_states[member], request.kv.slots[member], request.kv.prefilled[member]
        if not pages.is_whole or slot == SNAPSHOT_SLOT:
            continue
        end = prefilled
        if request.record.member_of is not None:
            end = max(end, length + request.answer.committed - 1)
            slot = (slot + end // page_tokens - prefilled // page_tokens) % 2
        if (border := end - end % page_tokens) and (page := pages.at(slot)) not in written:
            _name(state, request, member, border, page)


def _name(state: ControllerState, request: Request, member: int, border: int, page: int) -> None:
    """Give a page the key of the KV page that ends at the border, which has it too. Of earlier ones in the same chain all but the last
    go before others, unless prompts part there."""
    number, pool, keys = _page(state, border), request.prefill_pool, request.caches.keys[member]
    cache, key = state.pools[state_pool(pool)].cache, keys.at(number)
    if key is None or state.pools[pool].cache.find(key) is None:
        return
    state.name_pages(state_pool(pool), [page], [key], number)
    for place in request.caches.shared_borders if member == 0 else ():  # whoever has left a state there
        if 0 < place <= border and (shared := keys.at(_page(state, place))) is not None:
            cache.spare(shared)
    older = [earlier for earlier in keys.up_to(border - 1) if cache.find(earlier) is not None]
    cache.demote([earlier for earlier in older[:-1] if not cache.is_spared(earlier)])


def _page(state: ControllerState, border: int) -> int:
    return border // state.limits.kv_page_tokens - 1
