"""The base of plans, and the names of their parts. ``plans`` has the plans themselves."""

import enum
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar, Self

from ..pools import PoolName
from .media_work import estimated_work, is_large
from .messages import MediaItem, PageRun, Result
from .wire import Record, Wire

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


class TokenChunk(Record, frozen=True):
    """Tokens [start, end) of one member of a row."""

    row: int
    row_generation: int
    member: int  # 0 conditional, 1 companion
    start: int
    end: int


class PlanBase(Wire, frozen=True):
    """Properties common to all plans."""

    STAGE: ClassVar[str]
    KIND: ClassVar[PlanKind]
    READS: ClassVar[PoolName]
    WRITES: ClassVar[PoolName | None] = None
    USES_KV: ClassVar[bool] = False  # it reads or writes KV pages of its rows, where their tables say
    FILLS_KV: ClassVar[bool] = False  # it writes those in which their prompts are prefilled
    COMPUTES: ClassVar[bool] = True  # its actor computes something, which tells its cost

    @property
    def parts(self) -> Sequence[Any]:
        """The plan's parts, each for one row: itself, or records with ``row`` and ``row_generation``, ``source`` and ``target``.
        A row can have several."""
        return [self]

    @property
    def chunks(self) -> Sequence[TokenChunk]:
        """The tokens whose KV pages the plan reads or writes."""
        return ()

    @property
    def media(self) -> MediaItem | None:
        """The medium of a video plan; None for other plans."""
        return None

    @property
    def analysed_item(self) -> int | None:
        """The item of its row whose shape the plan finds; None for other plans."""
        return None

    @property
    def place(self) -> Place | None:
        """The piece of the request's work that the plan does; None for an encode plan, whose targets tell it."""
        return None

    @property
    def units(self) -> int:
        """Amount of work: bytes to analyse, patch or mel rows, or tokens."""
        raise NotImplementedError

    def units_done(self, result: Result) -> int:
        """Return how much of it was done, with this result; of pages that are copied, their bytes."""
        del result
        return self.units

    @property
    def cost(self) -> float | None:
        """A number roughly proportional to the duration of the step; None where unknown (media have their own time limit)."""
        return None

    @property
    def rank(self) -> int:
        """The stage of prefill's pipeline that does it; 0 without one."""
        return 0

    @property
    def relay(self) -> int:
        """The number that no other plan in a pipeline has, but the next rank's of the same chunks; -1 without one."""
        return -1

    @property
    def can_replay(self) -> bool:
        """True if it can be done again from a capture."""
        return self.COMPUTES

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
        return {self.READS: distinct_pages(part.source for part in self.parts)}

    def writes(self) -> dict[PoolName, list[int]]:
        """Return the pages that the plan names and writes, each once. Plans that write KV pages name none: they follow their rows'
        block tables."""
        return {} if self.WRITES is None else {self.WRITES: distinct_pages(run for _, run in self.targets())}

    def snapshots(self, key: RowKey) -> list[tuple[int, int, int]]:
        """Return the pages that get recurrent states of a row beside its own: (member, tokens, page)."""
        del key
        return []

    def states_written(self) -> list[int]:
        """Return the rows' own pages of recurrent states that the plan writes."""
        return []

    def targets(self, key: RowKey | None = None) -> list[Target]:
        """Return the page runs that the plan writes, of one row or of all."""
        pool, parts = self.WRITES, self.parts
        return [(pool, part.target) for part in parts if key in (None, (part.row, part.row_generation))] if pool else []


class ChunkPlan(PlanBase, frozen=True):
    """A plan whose parts are chunks: it reads or writes KV pages."""

    USES_KV = True

    @property
    def parts(self) -> Sequence[TokenChunk]:
        return self.chunks

    @property
    def place(self) -> Place:
        return -1, -1

    @property
    def units(self) -> int:
        """The number of tokens."""
        return sum(chunk.end - chunk.start for chunk in self.chunks)

    def share(self, row: int) -> tuple[int, int]:
        """Return tokens [first, last) of the row's first member."""
        chunks = [chunk for chunk in self.chunks if chunk.row == row and chunk.member == 0]
        return (chunks[0].start, chunks[-1].end) if chunks else (0, 0)


def distinct_pages(runs: Iterable[PageRun]) -> list[int]:
    return list(dict.fromkeys(page for run in runs for page in run.pages))
