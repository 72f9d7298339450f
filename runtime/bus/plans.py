"""Plans: records in the plan table that tell video, encoder, prefill and decode what to do, and the properties of plans.

A plan knows its stage, the rows that it names, the pages that it reads and writes, and its amount of work. ``row`` and
``row_generation`` name a row of the sequence table; a part for a row of another generation is stale.
"""

from collections.abc import Callable

import msgspec

from ...schema.media import ItemShape, SegmentShape
from ..pools import PoolName
from .copy_plans import Load, LoadSegments, Transfer
from .messages import MediaItem, PageRun
from .plan_base import ChunkPlan, Place, PlanBase, PlanKind, Renumber, RowKey, TokenChunk, distinct_pages
from .wire import Record, checked

_LINEAR = 1024  # tokens or rows up to which attention's quadratic cost is negligible


class Analyse(PlanBase, frozen=True):
    """video: find an item's shape. The result is ``Analysed``."""

    STAGE = "video"
    KIND = PlanKind.ANALYSE
    READS = "media"

    row: int
    row_generation: int
    item: int
    media: MediaItem
    source: PageRun

    @property
    def analysed_item(self) -> int:
        return self.item

    @property
    def place(self) -> Place:
        return self.item, -1

    @property
    def units(self) -> int:
        return self.media.num_bytes

    def share(self, row: int) -> tuple[int, int]:
        """Return the item of the row's part."""
        del row
        return self.item, 0

    def renumbered(self, run: Renumber, row: Callable[[int], int]) -> "Analyse":
        """Return the plan with other pages and rows, of generation 1. It does not read its row, which becomes row 0."""
        del row
        return msgspec.structs.replace(self, row=0, row_generation=1, source=run("media", self.source))


class PreprocessSegment(PlanBase, frozen=True):
    """video: decode one segment of an item into patch pages, row after row, never across a page boundary."""

    STAGE = "video"
    KIND = PlanKind.PREPROCESS
    READS = "media"
    WRITES = "patch"

    row: int
    row_generation: int
    item: int
    segment: int
    media: MediaItem
    shape: ItemShape
    source: PageRun
    target: PageRun

    @property
    def place(self) -> Place:
        return self.item, self.segment

    @property
    def units(self) -> int:
        return self.shape.segments[self.segment].num_rows

    @property
    def is_streamed(self) -> bool:
        return self.shape.segments[self.segment].kind == "video"

    def share(self, row: int) -> tuple[int, int]:
        """Return item and segment of the row's part."""
        del row
        return self.item, self.segment

    def renumbered(self, run: Renumber, row: Callable[[int], int]) -> "PreprocessSegment":
        """Like ``Analyse.renumbered``."""
        del row
        source, target = run("media", self.source), run("patch", self.target)
        return msgspec.structs.replace(self, row=0, row_generation=1, source=source, target=target)


class EncodePart(Record, frozen=True):
    """One segment for the tower: patch pages in, embedding pages out (US2)."""

    row: int
    row_generation: int
    shape: SegmentShape
    source: PageRun
    target: PageRun


class Encode(PlanBase, frozen=True):
    """encoder: run the towers over these parts; images are never split (US7)."""

    STAGE = "encoder"
    KIND = PlanKind.ENCODE
    READS = "patch"
    WRITES = "embedding"

    parts: list[EncodePart]

    @property
    def units(self) -> int:
        return sum(part.shape.num_rows for part in self.parts)

    @property
    def cost(self) -> float:
        return sum(part.shape.num_rows * (1 + part.shape.num_rows / _LINEAR) for part in self.parts)

    def share(self, row: int) -> tuple[int, int]:
        """Return the number of the row's parts."""
        return 0, sum(part.row == row for part in self.parts)

    def renumbered(self, run: Renumber, row: Callable[[int], int]) -> "Encode":
        """Return the plan with other pages; it does not read its rows."""
        del row
        replace = msgspec.structs.replace
        return Encode([replace(p, source=run("patch", p.source), target=run("embedding", p.target)) for p in self.parts])


class EmbeddingSpan(Record, frozen=True):
    """``num_tokens`` prompt tokens from ``start`` on take rows [first_row, …) of a segment's embedding pages (US3)."""

    start: int
    num_tokens: int
    first_row: int
    source: PageRun


class PrefillChunk(TokenChunk, frozen=True):
    """Tokens to be prefilled; their KV goes where the row's block table says.

    Token i is ``prompt[row, member][i]`` below the member's prompt length L, and the committed id ``ids[row][i - L]`` from L on: a
    preempted row is prefilled again over its prompt and its generated tokens. Both members take the same ids.

    Of a model with recurrent states: ``state_from`` is the page with the state at the chunk's start, -1 at that of the prompt;
    ``state_to`` gets the one at the last border; ``log`` gets what is behind that, where the prompt ends. ``snapshots``: borders in the
    chunk, each with a page for the state there. In a pipeline ``stream_at`` is the place of its first token in the plan's stream.
    """

    spans: list[EmbeddingSpan]
    state_from: int = -1
    state_to: int = -1
    log: int = -1
    snapshots: list[tuple[int, int]] = []
    stream_at: int = 0

    @property
    def pages_read(self) -> list[int]:
        """The embedding pages that it reads, each once."""
        return distinct_pages(span.source for span in self.spans)


class Prefill(ChunkPlan, frozen=True):
    """prefill: one forward over these chunks. One that ends a plain row's prompt draws the first token (``decode.first_tokens``).

    In a pipeline (RS1) it is the part of the forward in the layers of the stage ``rank``; the next rank's plan goes on from the stream
    of ``relay``, which no other plan in flight has (``actors.host.pipeline``).
    """

    STAGE = "prefill"
    KIND = PlanKind.PREFILL
    FILLS_KV = True

    chunks: list[PrefillChunk]
    rank: int = 0
    relay: int = -1

    @property
    def can_replay(self) -> bool:
        return self.relay < 0

    def only(self, is_alive: Callable[[int, int], bool]) -> "Prefill | None":
        found = super().only(is_alive)
        return found if found is None or found is self else msgspec.structs.replace(self, chunks=found.chunks)

    @property
    def cost(self) -> float:
        return sum((chunk.end - chunk.start) * (1 + chunk.end / _LINEAR) for chunk in self.chunks)

    def reads(self) -> dict[PoolName, list[int]]:
        return {"embedding": distinct_pages(span.source for chunk in self.chunks for span in chunk.spans)}

    def snapshots(self, key: RowKey) -> list[tuple[int, int, int]]:
        chunks = [chunk for chunk in self.chunks if (chunk.row, chunk.row_generation) == key]
        return [(chunk.member, border, page) for chunk in chunks for border, page in chunk.snapshots]

    def states_written(self) -> list[int]:
        return [chunk.state_to for chunk in self.chunks]

    def renumbered(self, run: Renumber, row: Callable[[int], int]) -> "Prefill":
        """Return the plan with other pages and rows, of generation 1."""
        replace = msgspec.structs.replace

        def renumber(chunk: PrefillChunk) -> PrefillChunk:
            spans = [replace(span, source=run("embedding", span.source)) for span in chunk.spans]
            return replace(chunk, row=row(chunk.row), row_generation=1, spans=spans)

        return msgspec.structs.replace(self, chunks=[renumber(chunk) for chunk in self.chunks])


Plan = Analyse | PreprocessSegment | Encode | Prefill | Load | LoadSegments | Transfer

decode_plan = checked(msgspec.msgpack.Decoder(Plan).decode)
