"""Plans: records in the plan table that tell video, encoder, prefill and decode what to do, and the properties of plans.

A plan knows its stage, the rows that it names, the pages that it reads and writes, and its amount of work. ``row`` and
``row_generation`` name a row of the sequence table; a part for a row of another generation is stale.
"""

import enum
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar, Self

import msgspec

from ...schema.media import ItemShape, SegmentShape
from ..pools import PoolName
from .media_work import estimated_work, is_large
from .messages import MediaItem, PageRun, Record, Wire, checked

_LINEAR = 1024  # tokens or rows up to which attention's quadratic cost is negligible

RowKey = tuple[int, int]
"""(row, row generation)."""
Place = tuple[int, int]
"""(item, segment) of a request's media; (item, -1) is the item's analysis, (-1, -1) the prompt."""
Target = tuple[PoolName, PageRun]
Renumber = Callable[[PoolName, PageRun], PageRun]


class PlanKind(enum.IntEnum):
    """The kinds of plans."""

    ANALYSE = 1
    PREPROCESS = 2
    ENCODE = 3
    PREFILL = 4
    LOAD = 5
    LOAD_SEGMENTS = 6
    TRANSFER = 7


class PlanBase(Wire, frozen=True):
    """Properties common to all plans."""

    STAGE: ClassVar[str]
    KIND: ClassVar[PlanKind]
    READS: ClassVar[PoolName]
    WRITES: ClassVar[PoolName | None] = None

    @property
    def parts(self) -> Sequence[Any]:
        """The plan's parts, each for one row: itself, or records with ``row`` and ``row_generation``, ``source`` and ``target``.
        A row can have several."""
        return [self]

    @property
    def media(self) -> MediaItem | None:
        """The medium of a video plan; None for other plans."""
        return None

    @property
    def place(self) -> Place | None:
        """The piece of the request's work that the plan does; None for an encode plan, whose targets tell it."""
        return None

    @property
    def cost(self) -> float | None:
        """A number roughly proportional to the duration of the step; None where unknown (media have their own time limit)."""
        return None

    @property
    def is_large(self) -> bool:
        """True if other work must not wait for this plan."""
        return self.media is not None and is_large(estimated_work(self.media))

    @property
    def is_streamed(self) -> bool:
        """True if the plan decodes a segment that was not decoded with its item's analysis."""
        return False

    @property
    def rows(self) -> list[RowKey]:
        """The row of each part."""
        return [(part.row, part.row_generation) for part in self.parts]

    def only(self, is_alive: Callable[[int, int], bool]) -> Self | None:
        """Return the plan without the parts for rows that are not alive; None if nothing is left."""
        parts = [part for part in self.parts if is_alive(part.row, part.row_generation)]
        if len(parts) == len(self.parts):
            return self
        return type(self)(parts) if parts else None

    def reads(self) -> dict[PoolName, list[int]]:
        """Return the pages that the plan names and reads, each once."""
        return {self.READS: _distinct(part.source for part in self.parts)}

    def writes(self) -> dict[PoolName, list[int]]:
        """Return the pages that the plan names and writes, each once. Plans that write KV pages name none: they follow their rows'
        block tables."""
        return {} if self.WRITES is None else {self.WRITES: _distinct(run for _, run in self.targets())}

    def targets(self, key: RowKey | None = None) -> list[Target]:
        """Return the page runs that the plan writes, of one row or of all."""
        pool, parts = self.WRITES, self.parts
        return [(pool, part.target) for part in parts if key in (None, (part.row, part.row_generation))] if pool else []


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
    def place(self) -> Place:
        return self.item, -1

    @property
    def units(self) -> int:
        """Amount of work: bytes to analyse; for other plans patch or mel rows, or tokens."""
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


class PrefillChunk(Record, frozen=True):
    """Tokens [start, end) of one member of a row; their KV goes where the row's block table says.

    Token i is ``prompt[row, member][i]`` below the member's prompt length L, and the committed id ``ids[row][i - L]`` from L on: a
    preempted row is prefilled again over its prompt and its generated tokens. Both members take the same ids.
    """

    row: int
    row_generation: int
    member: int  # 0 conditional, 1 companion
    start: int
    end: int
    spans: list[EmbeddingSpan]


class Prefill(PlanBase, frozen=True):
    """prefill: one forward over these chunks. Prefill never samples."""

    STAGE = "prefill"
    KIND = PlanKind.PREFILL

    chunks: list[PrefillChunk]

    @property
    def parts(self) -> Sequence[PrefillChunk]:
        return self.chunks

    @property
    def place(self) -> Place:
        return -1, -1

    @property
    def units(self) -> int:
        return sum(chunk.end - chunk.start for chunk in self.chunks)

    @property
    def cost(self) -> float:
        return sum((chunk.end - chunk.start) * (1 + chunk.end / _LINEAR) for chunk in self.chunks)

    def reads(self) -> dict[PoolName, list[int]]:
        return {"embedding": _distinct(span.source for chunk in self.chunks for span in chunk.spans)}

    def share(self, row: int) -> tuple[int, int]:
        """Return tokens [first, last) of the row's first member."""
        chunks = [chunk for chunk in self.chunks if chunk.row == row and chunk.member == 0]
        return (chunks[0].start, chunks[-1].end) if chunks else (0, 0)

    def renumbered(self, run: Renumber, row: Callable[[int], int]) -> "Prefill":
        """Return the plan with other pages and rows, of generation 1."""
        replace = msgspec.structs.replace

        def renumber(chunk: PrefillChunk) -> PrefillChunk:
            spans = [replace(span, source=run("embedding", span.source)) for span in chunk.spans]
            return replace(chunk, row=row(chunk.row), row_generation=1, spans=spans)

        return Prefill([renumber(chunk) for chunk in self.chunks])


class LoadChunk(Record, frozen=True):
    """Tokens [start, end) of one member of a row: whole pages, which have these keys, in these slots of the file. They go where the
    row's block table says."""

    row: int
    row_generation: int
    member: int
    start: int
    end: int
    keys: list[bytes]
    slots: list[int]


class Load(PlanBase, frozen=True):
    """prefill: read KV pages of one row from the file of ``cache.dir`` instead of computing them, up to the first that it lacks. The
    result is ``Loaded``."""

    STAGE = "prefill"
    KIND = PlanKind.LOAD

    chunks: list[LoadChunk]

    @property
    def parts(self) -> Sequence[LoadChunk]:
        return self.chunks

    @property
    def place(self) -> Place:
        return -1, -1

    @property
    def units(self) -> int:
        return sum(chunk.end - chunk.start for chunk in self.chunks)

    def reads(self) -> dict[PoolName, list[int]]:
        return {}

    def share(self, row: int) -> tuple[int, int]:
        """Return tokens [first, last) of the row's first member, of those asked for."""
        return next(((chunk.start, chunk.end) for chunk in self.chunks if chunk.row == row and chunk.member == 0), (0, 0))

    def renumbered(self, run: Renumber, row: Callable[[int], int]) -> "Load":
        """Return the plan with other rows, of generation 1."""
        del run
        return Load([msgspec.structs.replace(chunk, row=row(chunk.row), row_generation=1) for chunk in self.chunks])


class LoadPart(Record, frozen=True):
    """A segment of ``num_tokens``, whose embedding pages have these keys, in these slots of the file."""

    row: int
    row_generation: int
    target: PageRun
    num_tokens: int
    keys: list[bytes]
    slots: list[int]


class LoadSegments(PlanBase, frozen=True):
    """encoder: read the embedding pages of segments of one row from the file of ``cache.dir`` instead of encoding them. The result is
    ``Loaded``."""

    STAGE = "encoder"
    KIND = PlanKind.LOAD_SEGMENTS
    WRITES = "embedding"

    parts: list[LoadPart]

    @property
    def units(self) -> int:
        return sum(part.num_tokens for part in self.parts)

    def reads(self) -> dict[PoolName, list[int]]:
        return {}

    def share(self, row: int) -> tuple[int, int]:
        """Return the number of the row's parts."""
        return 0, sum(part.row == row for part in self.parts)

    def renumbered(self, run: Renumber, row: Callable[[int], int]) -> "LoadSegments":
        """Return the plan with other pages; it does not read its rows."""
        del row
        return LoadSegments([msgspec.structs.replace(part, target=run("embedding", part.target)) for part in self.parts])


class TransferChunk(Record, frozen=True):
    """The pages of tokens [start, end) of one member of a row: from those of its source table to those in the same places of its block
    table. ``start`` is the first token of a page."""

    row: int
    row_generation: int
    member: int
    start: int
    end: int


class Transfer(PlanBase, frozen=True):
    """decode: copy KV pages of one row from the pool ``source``, of the device that prefilled them, to that of its own device (TI6,
    KT1). The result is ``Transferred``."""

    STAGE = "decode"
    KIND = PlanKind.TRANSFER

    source: PoolName
    chunks: list[TransferChunk]

    @property
    def parts(self) -> Sequence[TransferChunk]:
        return self.chunks

    @property
    def place(self) -> Place:
        return -1, -1

    @property
    def units(self) -> int:
        return sum(chunk.end - chunk.start for chunk in self.chunks)

    def only(self, is_alive: Callable[[int, int], bool]) -> "Transfer | None":
        """Return the plan if its row is alive."""
        return self if all(is_alive(*row) for row in self.rows) else None

    def reads(self) -> dict[PoolName, list[int]]:
        return {}

    def share(self, row: int) -> tuple[int, int]:
        """Return tokens [first, last) of the row's first member."""
        return next(((chunk.start, chunk.end) for chunk in self.chunks if chunk.row == row and chunk.member == 0), (0, 0))

    def renumbered(self, run: Renumber, row: Callable[[int], int]) -> "Transfer":
        """Return the plan with other rows, of generation 1."""
        del run
        chunks = [msgspec.structs.replace(chunk, row=row(chunk.row), row_generation=1) for chunk in self.chunks]
        return Transfer(self.source, chunks)


Plan = Analyse | PreprocessSegment | Encode | Prefill | Load | LoadSegments | Transfer

decode_plan = checked(msgspec.msgpack.Decoder(Plan).decode)


def _distinct(runs: Iterable[PageRun]) -> list[int]:
    return list(dict.fromkeys(page for run in runs for page in run.pages))
