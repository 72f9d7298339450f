"""Rows with equal media of one tenant: each piece of work is done once (pure; rules over ``ControllerState``).

Of rows that need the same analysis or segment at the same time one works on it, and the others wait. A row waits only for rows ahead
of it, or for a plan in flight, so rows never wait for each other; when a row fails, the next one goes on. Rows with KV pages are ahead
of those without, then ranks decide. A row that waits for a segment works on no later one: that would hold pages that the
earlier one needs.

Analyses are remembered (``known_media``), encoded segments are taken from the cache (``embedding_cache``), and decoded patches go to
the first row that needs them.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import msgspec

from ....schema.media import ItemShape
from ...bus.plan_base import Place
from ..scheduling.guidance import num_pages
from ..scheduling.legality import may_take
from ..scheduling.types import RequestView, SegmentStage, SegmentView
from ..state.known_media import MediaKey, media_key
from ..state.request import Request
from ..state.state import ControllerState, owner
from .embedding_cache import cached_pages, take_cached

_IN_FLIGHT = (SegmentStage.PREPROCESSING, SegmentStage.ENCODING)
_ANALYSIS = -1
_Piece = tuple[MediaKey, int]
"""A medium and its segment, or ``_ANALYSIS``."""
_Decoded = dict[_Piece, tuple[Request, Place]]


# ---------------------------------------------------------------------------------------------------------------- rows


def join(state: ControllerState, request: Request) -> None:
    """Make a row and those with equal media known to each other."""
    if not state.limits.embedding_cache:
        return
    request.media.join([media_key(request.spec, request.record.era, item) for item in range(len(request.spec.items))])
    for item, key in enumerate(request.media.keys):
        if key is None:
            continue
        sharers = state.sharers.setdefault(key, [])
        sharers.append(request)
        if len(sharers) > 1:
            request.media.share()
        if len(sharers) == 2:
            sharers[0].media.share()
        if state.known_media.find(key).is_large:
            request.mark_large(item)


def leave(state: ControllerState, request: Request) -> None:
    """Forget a row that ends."""
    for key in request.media.keys:
        if key is not None:
            state.sharers[key].remove(request)
            if not state.sharers[key]:
                del state.sharers[key]
    request.media.leave()


def learn_shape(state: ControllerState, request: Request, item: int, shape: ItemShape) -> None:
    """Remember an analysis, and look at the rows that wait for it."""
    if (key := request.media_key(item)) is not None:
        state.known_media.learn_shape(key, shape)
        for sharer in state.sharers[key]:
            state.touch(sharer)


def learn_large(state: ControllerState, request: Request, item: int) -> None:
    """Remember that a medium is more work than estimated, and mark it in all rows that have it."""
    request.mark_large(item)
    if (key := request.media_key(item)) is not None:
        state.known_media.learn_large(key)
        for sharer in state.sharers[key]:
            for other, other_key in enumerate(sharer.media.keys):
                if other_key == key:
                    sharer.mark_large(other)
            state.touch(sharer)


def forget_medium(state: ControllerState, request: Request, item: int) -> None:
    """Forget the analysis of a medium that could not be decoded. Video refuses a segment if it now analyses the medium otherwise."""
    if (key := request.media_key(item)) is not None:
        state.known_media.forget_shape(key)


def known_shapes(state: ControllerState, request: Request) -> Iterator[tuple[int, ItemShape]]:
    """Yield the items that are not analysed in this row but whose shapes are known."""
    for item, key in enumerate(request.media.keys):
        if key is not None and request.record.items[item].shape is None:
            shape = state.known_media.find(key).shape
            if shape is not None:
                yield item, shape


def look_up(state: ControllerState, request: Request) -> None:
    """Note whether some segment of a prepared row is in the cache."""
    if request.media.keys and not request.media.is_shared:
        if any(cached_pages(state, request, place) for place, _ in request.open_segments()):
            request.media.share()


# -------------------------------------------------------------------------------------------------------------- taking


def take_shared(state: ControllerState, rows: Sequence[Request], views: Sequence[RequestView]) -> None:
    """Give rows what others have made: segments in the cache, and decoded patches of rows behind. ``rows``: in rank order.

    The first row with KV pages keeps room for its next segment, as it does where pages are allocated: it always makes progress.
    """
    if not any([request.media.is_shared for request in rows]):
        return
    decoded = _decoded(rows, views)
    reserved: int | None = None
    for index in _kv_first(views):
        request, view = rows[index], views[index]
        if request.media.is_shared and view.segments:
            take_cached(state, request, reserved or 0)
            _take_decoded(state, request, decoded)
        elif request.record.prepared and not request.record.evicting and not request.caches.may_load:
            request.media.end_sharing()
        if reserved is None and view.has_kv:
            reserved = _next_need(state, request)


def _kv_first(views: Sequence[RequestView]) -> list[int]:
    """Return the rows' indices in the order in which they are ahead."""
    with_kv = [index for index, view in enumerate(views) if view.has_kv]
    return with_kv + [index for index, view in enumerate(views) if not view.has_kv]


def _decoded(rows: Sequence[Request], views: Sequence[RequestView]) -> _Decoded:
    """Return the rows with decoded patches, by piece: of several the last in rank order."""
    decoded: _Decoded = {}
    for request, view in zip(rows, views, strict=True):
        for segment in view.segments if view.patch_held and request.media.is_shared else ():
            if segment.stage == SegmentStage.PREPROCESSED and (piece := _piece(request, segment.item, segment.segment)) is not None:
                decoded[piece] = request, (segment.item, segment.segment)
    return decoded


def _next_need(state: ControllerState, request: Request) -> int | None:
    """Return the embedding pages of the first segment that no plan has encoded or is encoding; None if there is none."""
    for place, segment in request.open_segments():
        if segment.stage < SegmentStage.ENCODING:
            return num_pages(request.record.shape_of(*place).num_tokens, state.limits.embedding_page_tokens)
    return None


def _take_decoded(state: ControllerState, request: Request, decoded: _Decoded) -> None:
    """Take over the patch pages of segments, in prompt order, from rows behind, which then wait for this one."""
    if not decoded:
        return
    ledger = state.pools["patch"]
    for place, segment in request.open_segments():
        if segment.is_loading:
            return  # it may need patch pages if that fails
        if segment.stage != SegmentStage.PENDING:
            continue
        piece = _piece(request, *place)
        if piece not in decoded:
            return
        other, other_place = decoded[piece]
        theirs = other.record.segment(other_place)
        patch = theirs.patch
        if theirs.stage != SegmentStage.PREPROCESSED or patch is None or not _is_ahead(request, other):
            return
        if request.record.items[place[0]].shape != other.record.items[other_place[0]].shape:
            return  # cut otherwise
        held, need = ledger.num_owned(owner(request)), len(patch.pages)
        if not may_take(ledger.num_pages, ledger.num_free + need, held, need, request.can_prefill):
            return
        ledger.share(owner(request), patch.pages)
        ledger.retire(owner(other), patch.pages)
        theirs.reset()
        state.save(other)  # first: if the controller dies between the two, the pages are free
        segment.begin_preprocess(patch)
        segment.preprocessed()
        state.save(request)


def _is_ahead(request: Request, other: Request) -> bool:
    return (not request.can_prefill, request.rank) < (not other.can_prefill, other.rank)


def _piece(request: Request, item: int, segment: int) -> _Piece | None:
    key = request.media_key(item)
    return None if key is None else (key, segment)


# ------------------------------------------------------------------------------------------------------------- waiting


@dataclass(slots=True)
class _Work:
    """The furthest stage of each piece, of rows with a plan for it in flight, and of rows ahead."""

    in_flight: dict[_Piece, int] = field(default_factory=dict)
    ahead: dict[_Piece, int] = field(default_factory=dict)

    def is_awaited(self, piece: _Piece, stage: int) -> bool:
        """Return whether a row that has got to this stage of a piece, and has no plan for it, waits for another row."""
        return self.in_flight.get(piece, -1) > stage or self.ahead.get(piece, -1) >= stage


def _note(stages: dict[_Piece, int], piece: _Piece | None, stage: int) -> None:
    if piece is not None:
        stages[piece] = max(stage, stages.get(piece, -1))


def hide_shared(state: ControllerState, rows: Sequence[Request], views: list[RequestView]) -> list[RequestView]:
    """Return the rows' views without the work that they wait for others to do."""
    if not any([request.media.is_shared for request in rows]):
        return views
    work = _Work()
    for request, view in zip(rows, views, strict=True):
        if request.media.is_shared and request.plans:
            _note_in_flight(work, request, view)
    for index in _kv_first(views):
        if rows[index].media.is_shared:
            views[index] = _own_view(state, work, rows[index], views[index])
    return views


def _note_in_flight(work: _Work, request: Request, view: RequestView) -> None:
    for item in request.analysing:
        _note(work.in_flight, _piece(request, item, _ANALYSIS), SegmentStage.PREPROCESSING)
    for segment in view.segments:
        if segment.stage in _IN_FLIGHT:
            _note(work.in_flight, _piece(request, segment.item, segment.segment), segment.stage)


def _own_view(state: ControllerState, work: _Work, request: Request, view: RequestView) -> RequestView:
    """Return the view without work that the row waits for. It is kept: a row that waits looks the same in most rounds."""
    own = tuple(_own_analyses(work, request, view.unanalysed)), tuple(_own_segments(state, work, request, view.segments))
    if own == (view.unanalysed, view.segments):
        return view
    kept = request.derived.own_view
    if kept is None or (kept.unanalysed, kept.segments) != own:
        kept = request.derived.own_view = msgspec.structs.replace(view, unanalysed=own[0], segments=own[1])
    return kept


def _own_analyses(work: _Work, request: Request, items: Iterable[int]) -> Iterator[int]:
    for item in items:
        piece = _piece(request, item, _ANALYSIS)
        if piece is None or not work.is_awaited(piece, SegmentStage.PENDING):
            _note(work.ahead, piece, SegmentStage.PENDING)
            yield item


def _own_segments(state: ControllerState, work: _Work, request: Request, segments: Iterable[SegmentView]) -> Iterator[SegmentView]:
    """Yield the row's segments up to the first that it waits for."""
    for segment in segments:
        piece = _piece(request, segment.item, segment.segment)
        if piece is not None and segment.stage not in _IN_FLIGHT:
            if work.is_awaited(piece, segment.stage) or cached_pages(state, request, (segment.item, segment.segment)):
                return
        _note(work.ahead, piece, segment.stage)
        yield segment
