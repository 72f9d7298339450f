"""Batches that policies build: a prefill plan, an encode plan, and the turns of both beside decode (pure).

The blocks keep what every plan must keep: budgets, credit, pages, suspects alone, both members of a guidance pair together. A policy
chooses the order of the requests, the budgets, and how much of one request goes into a batch.

An earlier request that is short of pages keeps later ones from taking them, so that the first always makes progress.
"""

from collections.abc import Collection, Iterable, Iterator
from typing import Self

from .legality import may_take
from .types import MAX_PARTS, ChunkChoice, MemberView, RequestView, SegmentChoice, SegmentStage, View

Encode = tuple[SegmentChoice, ...]
Prefill = tuple[ChunkChoice, ...]


class PrefillBatch:
    """A prefill plan while requests are added to it, of at most ``max_tokens`` (US9: n_p <= tau always)."""

    def __init__(self, view: View, max_tokens: int) -> None:
        self.num_tokens = 0
        self.is_closed = view.prefill_credit <= 0 or max_tokens <= 0
        self._grid = view.grid
        self._max_tokens = max(max_tokens, view.grid)  # less would be nothing
        self._chunks: list[ChunkChoice] = []

    @property
    def chunks(self) -> Prefill:
        return tuple(self._chunks)

    def fill(self, requests: Iterable[RequestView], max_tokens: int | None = None) -> Self:
        """Add requests in this order, at most ``max_tokens`` of each, until the batch is full."""
        if not self.is_closed:
            for request in requests:
                self.add(request, max_tokens)
                if self.is_closed:
                    break
        return self

    def add(self, request: RequestView, max_tokens: int | None = None) -> int:
        """Add the ready tokens of a request (RS4), within the budget and at most ``max_tokens``. Returns how many were added.

        A pair's members are added together (CF3): each gets a part, the longer one over several batches.
        """
        if self.is_closed or not can_prefill(request):
            return 0
        ready = [(index, member) for index, member in enumerate(request.members) if member.ready > member.next]
        if not ready:
            return 0
        room = self._max_tokens - self.num_tokens
        if self._chunks and (request.alone or len(ready) > room):
            self.is_closed = True  # otherwise a later request would start now, and precede it from then on
            return 0
        room = room if max_tokens is None else min(room, -(-max_tokens // self._grid) * self._grid)
        if room < min(len(ready), self._max_tokens):
            return 0
        added = self._take(request, ready, room)
        self.num_tokens += added
        self.is_closed = not added or self.num_tokens >= self._max_tokens or request.alone
        return added

    def _take(self, request: RequestView, ready: list[tuple[int, MemberView]], room: int) -> int:
        added = 0
        for place, (index, member) in enumerate(ready):
            others = len(ready) - place - 1  # each of them gets a token at least, if there is one
            size = get_next_chunk_size(member.ready, member.next, max(room - others, min(room, 1)), added)
            if member.next + size < member.target:
                size -= (member.next + size) % self._grid
            if member.pictures and size:
                size = self._with_whole_pictures(member, size, room - others - added, added)
            if size:
                self._chunks.append(ChunkChoice(request.key, index, member.next, member.next + size))
                added += size
        return added

    def _with_whole_pictures(self, member: MemberView, size: int, room: int, added: int) -> int:
        """Return the tokens of a chunk that ends in no picture. One that is larger than the budget is prefilled alone."""
        whole = member.chunk_end(member.next + size) - member.next
        return whole if whole <= room or not (self._chunks or added) else 0


class EncodeBatch:
    """An encode plan while requests are added to it, of at most ``max_rows``: n_e <= alpha. A larger segment runs alone, since no image
    is split (US7)."""

    def __init__(self, view: View, max_rows: int) -> None:
        self.num_rows = 0
        self.is_closed = view.encoder_credit <= 0
        self._max_rows = max_rows
        self._num_pages, self._num_free = view.num_embedding_pages, view.num_free_embedding_pages
        self._segments: list[SegmentChoice] = []

    @property
    def segments(self) -> Encode:
        return tuple(self._segments)

    def fill(self, requests: Iterable[RequestView], max_rows: int | None = None) -> Self:
        """Add requests in this order, at most ``max_rows`` of each, until the batch is full."""
        if not self.is_closed:
            for request in requests:
                if request.segments:
                    self.add(request, max_rows)
                    if self.is_closed:
                        break
        return self

    def add(self, request: RequestView, max_rows: int | None = None) -> int:
        """Add the decoded segments of a request, in order, while embedding pages last; at most ``max_rows`` of it, but one segment.
        Returns how many rows were added."""
        if self.is_closed or request.alone and self._segments:
            return 0
        held, added = request.embedding_held, 0
        for segment in request.segments:
            if segment.stage < SegmentStage.PREPROCESSED:
                break  # in order: a later segment must not hold the pages that an earlier one needs
            if segment.stage != SegmentStage.PREPROCESSED:
                continue
            rows, need = segment.num_rows, segment.embedding_pages
            if self._segments and (self.num_rows + rows > self._max_rows or len(self._segments) >= MAX_PARTS):
                self.is_closed = True
                break
            if added and max_rows is not None and added + rows > max_rows:
                break
            if not may_take(self._num_pages, self._num_free, held, need, request.has_kv):
                break
            if need > self._num_free:
                self.is_closed = True
                break
            self._num_free -= need
            held += need
            added += rows
            self.num_rows += rows
            self._segments.append(SegmentChoice(request.key, segment.item, segment.segment))
            if request.alone:
                self.is_closed = True  # a single piece of work, so that its result is attributable
                break
        return added


def get_next_chunk_size(ready: int, next_token: int, budget: int, num_planned: int) -> int:
    """Return the tokens of a member to put into this batch: the ready ones, within the remaining budget."""
    return max(0, min(ready - next_token, budget - num_planned))


def can_prefill(request: RequestView) -> bool:
    """Return whether a prefill plan may name the request: it has KV pages, and no other plan writes them."""
    return request.has_kv and not request.prefill_in_flight


def is_ready(request: RequestView) -> bool:
    """Return whether it has tokens that are ready and not yet prefilled."""
    for member in request.members:
        if member.ready > member.next:
            return True
    return False


def has_work(view: View) -> bool:
    """Return whether some plan of encode or prefill is possible, within the credit."""
    decoded = SegmentStage.PREPROCESSED
    for request in view.requests:
        if view.prefill_credit > 0 and can_prefill(request) and is_ready(request):
            return True
        if view.encoder_credit > 0 and any([segment.stage == decoded for segment in request.segments]):
            return True
    return False


def partial_first(requests: Iterable[RequestView], early: Collection[int] = ()) -> Iterator[RequestView]:
    """Yield the requests that can be prefilled now, begun ones (RS5, US8 (a)) and those with a key in ``early`` first. A batch that is
    closed does not ask, and nothing is sorted."""
    ready = [request for request in requests if can_prefill(request) and is_ready(request)]
    yield from sorted(ready, key=lambda request: not request.is_partial and request.key not in early)


def free_turns(view: View) -> int:
    """Return how many more plans may be in flight where encoder and prefill take turns."""
    return max(0, view.num_turns - view.encode_in_flight - view.prefill_in_flight)


def in_turn(view: View, encode: Encode, prefill: Prefill) -> tuple[Encode, Prefill]:
    """Keep what has its turn: with one free, the stage that did not have the last."""
    num_free = free_turns(view)
    if num_free == 0:
        return (), ()
    if num_free == 1 and encode and prefill:
        return (encode, ()) if view.last == "prefill" else ((), prefill)
    return encode, prefill
