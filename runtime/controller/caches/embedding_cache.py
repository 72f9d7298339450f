"""Embedding pages by content: segments that were encoded before are taken from the cache (pure; rules over ``ControllerState``).

Embedding pages get keys when their encode plan is done, and the cache keeps them after the last row that needed them. A segment all of
whose pages are in the cache is *taken*: it is ENCODED, and its row shares the pages until prefill has read them. One all of whose pages
are in a file is *loaded* instead of encoded: to policies it looks as if it were decoded, and had no rows to encode.
"""

import struct
from collections.abc import Iterable
from hashlib import blake2b

from ....schema.media import ItemShape
from ....schema.page_key import KEY_BYTES
from ...bus.messages import PageRun
from ...bus.plan_base import Place
from ..scheduling.guidance import num_pages
from ..scheduling.legality import may_take
from ..scheduling.page_keys import content_digest, root_key
from ..scheduling.types import SegmentStage
from ..state.known_media import MediaKey
from ..state.request import Request
from ..state.row_record import SegmentRecord
from ..state.state import ControllerState, owner

_PLACE = struct.Struct("<II")


def page_keys(state: ControllerState, request: Request, place: Place) -> list[bytes]:
    """Return the keys of a segment's pages. Empty if it is not shared."""
    item, segment = place
    keys = request.media.page_keys.get(item)
    if keys is None:
        shape, key = request.record.items[item].shape, request.media_key(item)
        assert shape is not None
        keys = [[] for _ in shape.segments] if key is None else keys_of(state, key, shape)
        request.media.set_page_keys(item, keys)
    return keys[segment]


def keys_of(state: ControllerState, medium: MediaKey, shape: ItemShape) -> list[list[bytes]]:
    """Return the keys of a medium's pages, by segment: digests of run, tenant, content, shape and place. The shape says where the
    medium is cut: a segment of an equal medium that is cut otherwise is another one."""
    era, salt, content = medium
    stem = blake2b(content_digest(content, shape), digest_size=KEY_BYTES, key=root_key(state.secret, era, salt))
    return [
        [_key(stem, number, page) for page in range(num_pages(segment.num_tokens, state.limits.embedding_page_tokens))]
        for number, segment in enumerate(shape.segments)
    ]


def _key(stem: blake2b, segment: int, page: int) -> bytes:
    digest = stem.copy()
    digest.update(_PLACE.pack(segment, page))
    return digest.digest()


def cached_pages(state: ControllerState, request: Request, place: Place) -> list[int]:
    """Return the segment's pages if all are in the cache, else none."""
    keys = page_keys(state, request, place)
    pages = state.pools["embedding"].cache.find_leading(keys)
    return pages if len(pages) == len(keys) else []


def num_saved_pages(state: ControllerState, request: Request, place: Place) -> int:
    """Return the number of the segment's pages if files have all, else 0."""
    return len(saved_slots(state, request, place))


def saved_slots(state: ControllerState, request: Request, place: Place) -> list[int]:
    """Return where files have the segment's pages, if they have all, else none."""
    keys = page_keys(state, request, place)
    slots = state.saved["embedding"].find_leading(keys)
    return slots if len(slots) == len(keys) else []


def keep_encoded(state: ControllerState, encoded: Iterable[tuple[Request, Place]], *, are_hits: bool = False) -> None:
    """Give keys to the pages of segments whose plan is done and cleared: no process writes them any more. ``are_hits``: they were
    loaded."""
    for request, place in encoded:
        keys = page_keys(state, request, place)
        state.totals.media_queries += bool(keys)
        state.totals.media_hits += are_hits
        segment = request.record.segment(place)
        if keys and not request.ending and segment.embedding is not None and not request.media.num_consumed.get(place):
            state.name_pages("embedding", segment.embedding.pages, keys)


def num_held_pages(state: ControllerState, request: Request) -> int:
    """Return the embedding pages that count as a request's share of the pool. Those that it cannot give back before its next segment is
    ready, since chunks end on a grid, do not count: it would wait for itself."""
    num_owned, tracker = state.pools["embedding"].num_owned(owner(request)), request.media.tracker
    if state.limits.grid == 1 or not num_owned or tracker is None or tracker.is_ready:
        return num_owned
    if request.kv.prefilled[0] < tracker.ready_prefix(request.targets[0]):
        return num_owned
    part = next(tracker.unready())
    return max(0, num_owned - tracker.num_kept_pages(part.item, part.segment))


def take_cached(state: ControllerState, request: Request, reserved: int) -> None:
    """Take segments from the cache, in prompt order, as long as the row may have their pages and ``reserved`` ones stay free.

    A row that has a medium twice takes it again, with the pages that it still has, once all before it are ready: it would keep them
    while it waits for others.
    """
    ledger, is_next = state.pools["embedding"], True
    for place, segment in request.open_segments():
        if segment.stage == SegmentStage.ENCODING:
            is_next = False
            continue
        pages = cached_pages(state, request, place) if segment.stage != SegmentStage.PREPROCESSING else []
        need = len(set(pages) - ledger.owned_by(owner(request)))
        if not pages or not is_next and need < len(pages):
            return
        left = ledger.num_free - reserved - sum(map(ledger.cache.is_idle, pages))
        held = num_held_pages(state, request)
        if need and (left < 0 or not may_take(ledger.num_pages, left + need, held, need, request.can_prefill)):
            return
        _take(state, request, place, segment, pages)


def give_back_read(state: ControllerState, request: Request, pages: Iterable[int]) -> None:
    """Give back embedding pages of a segment that has no need of them any more, except those that the row has for another, too."""
    if request.media.has_one_twice:
        segments = request.record.segments()
        others = [(place, segment.embedding.pages) for place, segment in segments if segment.embedding is not None]
        needed = {page for place, held in others for page in request.media.unread(place, held)}
        pages = [page for page in pages if page not in needed]
    state.pools["embedding"].retire(owner(request), pages)


def _take(state: ControllerState, request: Request, place: Place, segment: SegmentRecord, pages: list[int]) -> None:
    ledger = state.pools["embedding"]
    ledger.share(owner(request), pages)
    patch = segment.take(PageRun(pages, [ledger.generations[page] for page in pages]))
    if patch is not None:
        state.pools["patch"].retire(owner(request), patch.pages)
    request.media.mark_ready(place)
    part = request.media.part(place)
    if request.kv.prefilled[0] > part.start:  # it had lost the segment in the middle
        give_back_read(state, request, pages[request.media.consume(part, request.kv.prefilled[0])])
    request.record.forgive([place])
    request.end_wait()
    state.totals.media_queries += 1
    state.totals.media_hits += 1
    state.save(request)
