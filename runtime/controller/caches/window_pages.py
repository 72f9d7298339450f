"""Pages of layers that attend to a window, in a pool of their own beside the KV pool (pure; rules over ``ControllerState``).

A row has such pages for the last ``window_tokens`` tokens, for those that are computed next, and some ahead. They have the places of
its KV pages, and their keys: a hit of n tokens needs the KV pages of all n, and of these the pages that the window of token n reaches.
Pages that the window has left stay in the cache, and go first, unless other prompts have begun there, or may: at the end of the first
message.
"""

from collections.abc import Sequence

from ...pools import PoolName, window_pool
from ..scheduling.guidance import num_pages
from ..scheduling.types import ChunkChoice
from ..state.request import Request
from ..state.state import ControllerState


def has_windows(state: ControllerState) -> bool:
    return state.limits.num_window_pages > 0


def first_live(state: ControllerState, num_tokens: int) -> int:
    """Return the place of the first page that the window of the token behind so many reaches, or of a later one."""
    return max(0, num_tokens + 1 - state.limits.window_tokens) // state.limits.kv_page_tokens


def cut_to_windows(state: ControllerState, request: Request, pool: PoolName, member: int, pages: list[int]) -> list[int]:
    """Return those of a member's hits at whose end the cache has all pages of the window."""
    cache, keys, page_tokens = state.pools[window_pool(pool)].cache, request.caches.keys[member], state.limits.kv_page_tokens
    count = len(pages)
    names = keys.up_to(count * page_tokens)
    place = count - 1  # of the page that is looked for: those behind it, to the end of the hits, are there
    while count and place >= first_live(state, count * page_tokens):
        if cache.find(names[place]) is None:
            count = place
        place -= 1
    return pages[:count]


def cut_to_copies(state: ControllerState, request: Request, pool: PoolName, member: int, pages: list[int], target: int) -> list[int]:
    """Return those of a member's pages in another pool than the one in which ``target`` tokens are prefilled, that need not be copied:
    up to the first whose page of the window at the end of these tokens is not there."""
    cache, names = state.pools[window_pool(pool)].cache, request.caches.keys[member].up_to(len(pages) * state.limits.kv_page_tokens)
    places = range(first_live(state, target), len(pages))
    return pages[: next((place for place in places if cache.find(names[place]) is None), len(pages))]


def windows_at(state: ControllerState, request: Request, pool: PoolName, member: int, num_hits: int, num_tokens: int) -> list[int]:
    """Return those of the pages of so many hits that the window of the token behind ``num_tokens`` reaches."""
    first = first_live(state, num_tokens)
    names = request.caches.keys[member].up_to(num_hits * state.limits.kv_page_tokens, first) if num_hits > first else []
    found = state.pools[window_pool(pool)].cache.find_leading(names)
    assert len(found) == len(names), "hits without the windows at their end"
    return found


def name_windows(state: ControllerState, request: Request, member: int, first: int, names: Sequence[bytes]) -> None:
    """Give the pages of a row that it still has the keys of its KV pages in the same places: those from ``first`` on."""
    if not has_windows(state):
        return
    windows, pool = request.prefill_windows, window_pool(request.prefill_pool)
    begin = max(first, windows.firsts[member])
    if chosen := names[begin - first :]:
        pages = windows.tables[member][begin : first + len(names)]
        state.name_pages(pool, pages, chosen, begin)
        page_tokens, cache = state.limits.kv_page_tokens, state.pools[pool].cache
        border = request.caches.shared_borders[0] // page_tokens if member == 0 else 0
        for place in range(max(begin, first_live(state, border * page_tokens)), min(border, first + len(names))):
            cache.spare(names[place - first])


def check_windows_unnamed(state: ControllerState, request: Request) -> None:
    """As ``prefix_cache.check_unnamed``."""
    cache = state.pools[window_pool(request.kv_pool)].cache
    for table, length in zip(request.kv.windows.tables, request.kv.lengths, strict=False):
        first = (length + request.answer.committed - 1) // state.limits.kv_page_tokens
        for page in table[first : first + 1]:
            assert cache.key_of(page) is None, f"decode would write page {page} of windows, which has a key"


def check_chunk(state: ControllerState, request: Request, choice: ChunkChoice) -> None:
    """Assert that a chunk has pages, and that those which it writes have no keys."""
    page_tokens, cache = state.limits.kv_page_tokens, state.pools[window_pool(request.prefill_pool)].cache
    pages = request.prefill_windows.tables[choice.member]
    assert num_pages(choice.end, page_tokens) <= len(pages), "a chunk without pages of windows"
    first = request.prefill_windows.firsts[choice.member]
    assert first <= first_live(state, choice.start), "a chunk would read pages that are given back"
    for page in pages[choice.start // page_tokens : num_pages(choice.end, page_tokens)]:
        assert cache.key_of(page) is None, f"a chunk would write page {page} of windows, which has a key"
