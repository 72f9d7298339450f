"""Track the tokens of a prompt that can be prefilled, and the embedding pages that are used up (pure; controller; RS2, RS4).

Text is ready at once; a medium's tokens are ready segment by segment as the encoder reports them. Prefill takes the contiguous
ready prefix; an embedding page is free as soon as all its rows have been prefilled (US4).
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from ....schema.media import ItemShape
from ...bus.messages import PageRun
from ...bus.plans import EmbeddingSpan


class Part(NamedTuple):
    """Segment ``segment`` of item ``item``, at prompt tokens [start, start + num_tokens)."""

    item: int
    segment: int
    start: int
    num_tokens: int
    is_sound: bool = False

    @property
    def end(self) -> int:
        return self.start + self.num_tokens


def lay_out(starts: Sequence[int], shapes: Sequence[ItemShape]) -> list[Part]:
    """Return the parts of a prompt whose item i begins at token ``starts[i]``, in prompt order."""
    parts: list[Part] = []
    for item, (start, shape) in enumerate(zip(starts, shapes, strict=True)):
        for index, segment in enumerate(shape.segments):
            parts.append(Part(item, index, start + len(segment.lead), segment.num_tokens, segment.kind == "audio"))
            start += segment.num_prompt_tokens
    return parts


class EmbeddingTracker:
    """Readiness of one prompt. A companion has no media, hence no tracker: all of it is ready (CF5)."""

    def __init__(self, parts: Sequence[Part], page_tokens: int, grid: int = 1) -> None:
        """``grid``: see ``Limits``."""
        self.parts = list(parts)
        assert all(a.end <= b.start for a, b in zip(self.parts, self.parts[1:], strict=False)), "parts overlap"
        self._page_tokens, self._grid = page_tokens, grid
        self._index = {(part.item, part.segment): index for index, part in enumerate(self.parts)}
        self._ready = [False] * len(self.parts)
        self._first_unready = 0

    def part(self, item: int, segment: int) -> Part:
        return self.parts[self._index[item, segment]]

    def mark_ready(self, item: int, segment: int) -> None:
        """Record that the segment's embedding rows are written."""
        self._ready[self._index[item, segment]] = True
        while self._first_unready < len(self.parts) and self._ready[self._first_unready]:
            self._first_unready += 1

    def mark_unready(self, item: int, segment: int) -> None:
        """Record that the segment's embedding rows are lost: the request was preempted or its pages were evicted."""
        index = self._index[item, segment]
        self._ready[index] = False
        self._first_unready = min(self._first_unready, index)

    @property
    def is_ready(self) -> bool:
        """True if the embedding rows of all segments are written."""
        return self._first_unready == len(self.parts)

    def unready(self) -> Iterator[Part]:
        """Yield the parts whose embedding rows are not written, in prompt order. Leading ready ones cost nothing."""
        for index in range(self._first_unready, len(self.parts)):
            if not self._ready[index]:
                yield self.parts[index]

    def ready_prefix(self, target: int) -> int:
        """Return the number of leading tokens that can be prefilled in order, to the target or the grid; at most ``target`` (RS4)."""
        if self.is_ready:
            return target
        start = self.parts[self._first_unready].start
        return target if target <= start else self._border(start)

    def num_kept_pages(self, item: int, segment: int) -> int:
        """Return the number of embedding pages of earlier parts that are needed until this segment is ready: those of tokens behind the
        last place before it where a chunk may end."""
        index, kept = self._index[item, segment], 0
        border = self._border(self.parts[index].start)
        while index and self.parts[index - 1].end > border:
            index -= 1
            part = self.parts[index]
            kept += self.num_consumed_pages(part, part.end) - self.num_consumed_pages(part, border)
        return kept

    def _border(self, token: int) -> int:
        return token - token % self._grid

    def overlapping(self, start: int, end: int) -> list[Part]:
        """Return the parts that have tokens in [start, end)."""
        return [part for part in self.parts if part.start < end and start < part.end]

    def pictures(self, start: int, end: int) -> tuple[tuple[int, int], ...]:
        """Return the tokens of pictures and frames that have some behind ``start``, and end at ``end`` or before."""
        found = [part for part in self.overlapping(start, end) if part.end <= end and not part.is_sound]
        return tuple([(part.start, part.end) for part in found])

    def num_consumed_pages(self, part: Part, prefilled: int) -> int:
        """Return the number of leading embedding pages of ``part`` not needed once tokens [0, prefilled) are in the KV cache."""
        if prefilled >= part.end:
            return -(-part.num_tokens // self._page_tokens)
        return max(0, prefilled - part.start) // self._page_tokens

    def span(self, part: Part, run: PageRun, start: int, end: int) -> EmbeddingSpan:
        """Return the span of ``part`` that a chunk [start, end) reads. ``run``: the part's pages; only those read are named."""
        first, last = max(start, part.start), min(end, part.end)
        skipped = (first - part.start) // self._page_tokens
        used = -(-(last - part.start) // self._page_tokens)
        return EmbeddingSpan(
            start=first,
            num_tokens=last - first,
            first_row=first - part.start - skipped * self._page_tokens,
            source=PageRun(run.pages[skipped:used], run.generations[skipped:used]),
        )
