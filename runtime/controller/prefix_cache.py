"""Hits of the prefix cache: pages that a row need not compute, and names for those that it has computed (pure; rules over
``ControllerState``).

A row is given the leading pages of its members that the cache knows, at the grant of its KV pages. Only pages wholly before the last
token are given: decode feeds that token, and a page with a key is never written. A page gets its key when no plan writes it any
more and all its tokens are in it: after the plan that filled it is cleared, or when decode has gone beyond it.
"""

from collections.abc import Sequence
from functools import partial

from ...schema.media import MediaSpan
from ...schema.rows import Phase
from .effects import AppendPages, SetPrefilled
from .page_keys import Medium, PageKeys, content_digest, root_key
from .request import Request
from .state import ControllerState, owner

Hits = list[list[int]]
"""Pages per member."""


def set_keys(state: ControllerState, request: Request, prompts: Sequence[Sequence[int]], spans: Sequence[MediaSpan] = ()) -> None:
    """Prepare the names of the row's pages. ``prompts``: expanded ids per member; ``spans``: of the first one's media."""
    if not state.limits.prefix_cache or request.keys:
        return
    root = root_key(state.secret, request.spec.salt)
    media = [
        Medium(s.start, s.start + s.shape.num_tokens, content_digest(item.content, s.shape))
        for s, item in zip(spans, request.spec.items, strict=True)
    ]
    positions = partial(state.limits.positions, len(prompts[0]), spans) if media else None
    page_tokens = state.limits.kv_page_tokens
    request.keys = (PageKeys(root, prompts[0], page_tokens, media, positions), *[PageKeys(root, p, page_tokens) for p in prompts[1:]])
    for keys in request.keys:
        keys.extend(request.ids)


def learn_ids(request: Request, ids: Sequence[int]) -> None:
    """Note ids that the row has generated, behind those known."""
    request.ids.extend(ids)
    for keys in request.keys:
        keys.extend(ids)


def find_hits(state: ControllerState, request: Request) -> Hits:
    """Return the pages that a row without KV pages would be given from the cache."""
    cache = state.pools["kv"].cache
    return [cache.find_leading(keys.leading(keys.num_tokens - 1)) for keys in request.keys]


def num_saved(state: ControllerState, hits: Hits) -> int:
    """Return by how much these hits lower the number of free pages that a grant takes. Idle ones are free before the grant."""
    cache = state.pools["kv"].cache
    return sum(map(len, hits)) - len({page for pages in hits for page in pages if cache.is_idle(page)})


def share_hits(state: ControllerState, request: Request, hits: Hits) -> None:
    """Make the row an owner of these pages before any are allocated for it, which may evict idle ones."""
    for pages in hits:
        state.pools["kv"].share(owner(request), pages)


def append_hits(state: ControllerState, request: Request, member: int, pages: list[int]) -> None:
    """Begin a member's block table with pages from the cache: their tokens are prefilled."""
    if not pages:
        return
    num_tokens = len(pages) * state.limits.kv_page_tokens
    state.emit(AppendPages(request.row, member, pages))
    state.emit(SetPrefilled(request.row, member, num_tokens))
    request.block_tables[member].extend(pages)
    request.prefilled[member] = request.num_cached[member] = num_tokens
    request.num_named[member] = len(pages)


def note_hits(state: ControllerState, request: Request) -> None:
    """After a grant: media that the hits cover are not needed, and the gateway learns how many tokens of the prompt they saved."""
    skipped = skip_media(state, request)
    is_first = request.record.num_cached_tokens is None
    if is_first:
        num_cached = min(request.prefilled[0], request.lengths[0])  # more if the row has generated tokens
        request.record.num_cached_tokens = num_cached
        state.totals.looked_up_tokens += request.lengths[0]
        state.totals.cached_tokens += num_cached
        if num_cached:
            state.ask(request.key, request.gateway_generation)
    if skipped or is_first:
        state.save(request)


def skip_media(state: ControllerState, request: Request) -> bool:
    """Mark segments as encoded and consumed whose tokens are all prefilled: no plan need work on them. Returns whether any were."""
    if request.tracker is None:
        return False
    skipped = []
    for part in request.tracker.overlapping(0, request.prefilled[0]):
        segment = request.record.items[part.item].segments[part.segment]
        if part.end <= request.prefilled[0] and (segment.stage != segment.stage.ENCODED or segment.embedding is not None):
            place = part.item, part.segment
            state.pools["patch"].retire(owner(request), segment.patch.pages if segment.patch is not None else ())
            if segment.embedding is not None:
                state.pools["embedding"].retire(owner(request), segment.embedding.pages[request.num_consumed.pop(place, 0) :])
            segment.skip()
            request.tracker.mark_ready(*place)
            skipped.append(place)
    request.record.strikes = [strike for strike in request.record.strikes if strike.place not in skipped]
    return bool(skipped)


def name_pages(state: ControllerState, request: Request) -> None:
    """Give keys to the pages that the row has filled. No plan may be writing them."""
    if not request.keys or request.ending or request.record.evicting:
        return
    for member, keys in enumerate(request.keys):
        num_written = request.prefilled[member]
        if request.phase == Phase.DECODE:
            num_written = max(num_written, request.lengths[member] + request.committed - 1)
        first = request.num_named[member]
        if names := keys.up_to(num_written, first):
            request.num_named[member] += len(names)
            state.name_pages("kv", zip(request.block_tables[member][first:], names, strict=False), first)


def check_unnamed(state: ControllerState, request: Request) -> None:
    """Assert that decode will write no page that has a key: its first token is the last one known."""
    for table, length in zip(request.block_tables, request.lengths, strict=False):
        page = table[(length + request.committed - 1) // state.limits.kv_page_tokens]
        assert state.pools["kv"].cache.key_of(page) is None, f"decode would write page {page}, which has a key"
