"""Plans that fill pages without computing: from the file of ``cache.dir``, or from another KV pool."""

from collections.abc import Callable
from itertools import chain

import msgspec

from ..pools import PoolName, state_pool, window_pool
from .messages import Loaded, PageRun, Result, Transferred
from .plan_base import ChunkPlan, PlanBase, PlanKind, Renumber, RowKey, TokenChunk
from .wire import Record


class LoadedState(Record, frozen=True):
    """A recurrent state to be loaded: of this key, in this slot of the file of states, or on this page of another pool. It goes to the
    page ``target``, and to ``snapshot``, if that is not -1, for the cache."""

    key: bytes
    slot: int
    target: int
    snapshot: int = -1


class LoadedWindows(Record, frozen=True):
    """Pages of layers with a window to be loaded: of these keys, in these slots of the file of such pages, or on these pages of another
    pool. They go to the last places before the end of a chunk."""

    keys: list[bytes]
    slots: list[int]


class LoadChunk(TokenChunk, frozen=True):
    """Tokens to be loaded: whole pages, which have these keys, in these slots of the file, or on these pages of
    another pool. They go where the row's block table says. ``state``, ``windows``: those at their end, after which they count."""

    keys: list[bytes]
    slots: list[int]
    state: LoadedState | None = None
    windows: LoadedWindows | None = None


class Load(ChunkPlan, frozen=True):
    """prefill: read KV pages of one row instead of computing them: from the pool ``source`` of another device, or if that is "" from
    the file of ``cache.dir``, up to the first that it lacks. The result is ``Loaded``."""

    STAGE = "prefill"
    KIND = PlanKind.LOAD
    FILLS_KV = True
    COMPUTES = False

    chunks: list[LoadChunk]
    source: PoolName = ""

    def only(self, is_alive: Callable[[int, int], bool]) -> "Load | None":
        """Return the plan if its row is alive."""
        return self if all(is_alive(*row) for row in self.rows) else None

    def reads(self) -> dict[PoolName, list[int]]:
        """Return the pages of the other pool: they stay until the plan is done."""
        if not self.source:
            return {}
        states = [chunk.state.slot for chunk in self.chunks if chunk.state is not None]
        windows = [slot for chunk in self.chunks if chunk.windows is not None for slot in chunk.windows.slots]
        kv = chain(*(chunk.slots for chunk in self.chunks))
        pages = {self.source: kv, state_pool(self.source): states, window_pool(self.source): windows}
        return {pool: found for pool, slots in pages.items() if (found := list(dict.fromkeys(slots)))}

    def snapshots(self, key: RowKey) -> list[tuple[int, int, int]]:
        """See ``PlanBase.snapshots``."""
        return [
            (chunk.member, chunk.end, chunk.state.snapshot)
            for chunk in self.chunks
            if (chunk.row, chunk.row_generation) == key and chunk.state is not None and chunk.state.snapshot >= 0
        ]

    def states_written(self) -> list[int]:
        return [chunk.state.target for chunk in self.chunks if chunk.state is not None]

    def units_done(self, result: Result) -> int:
        if not isinstance(result, Loaded):
            return self.units
        return sum(end - chunk.start for chunk, end in zip(self.chunks, result.ends, strict=True))

    def renumbered(self, run: Renumber, row: Callable[[int], int]) -> "Load":
        """Return the plan with other rows, of generation 1."""
        del run
        return Load([msgspec.structs.replace(chunk, row=row(chunk.row), row_generation=1) for chunk in self.chunks], self.source)


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
    COMPUTES = False
    WRITES = "embedding"

    parts: list[LoadPart]

    @property
    def units(self) -> int:
        return sum(part.num_tokens for part in self.parts)

    def units_done(self, result: Result) -> int:
        return sum(result.ends) if isinstance(result, Loaded) else self.units

    def reads(self) -> dict[PoolName, list[int]]:
        return {}

    def share(self, row: int) -> tuple[int, int]:
        """Return the number of the row's parts."""
        return 0, sum(part.row == row for part in self.parts)

    def renumbered(self, run: Renumber, row: Callable[[int], int]) -> "LoadSegments":
        """Return the plan with other pages; it does not read its rows."""
        del row
        return LoadSegments([msgspec.structs.replace(part, target=run("embedding", part.target)) for part in self.parts])


class TransferChunk(TokenChunk, frozen=True):
    """The pages of these tokens: from those of its source table to those in the same places of its block
    table. ``start`` is the first token of a page.

    The last one of a member whose model has recurrent states names the pages of its state and its log: (from, to). Of a plan that
    copies behind a prefill, the pages of the tokens before ``filled`` are filled already: whole ones, or all. From the place
    ``windows`` in the tables on pages of layers with a window go with them; -1: none."""

    state: tuple[int, int] | None = None
    log: tuple[int, int] | None = None
    filled: int = 0
    windows: int = -1


class Transfer(ChunkPlan, frozen=True):
    """decode: copy KV pages of one row from the pool ``source``, of the device that prefilled them, to that of its own device (TI6).
    ``behind``: the plan of a prefill, and its slot in the table, that fills the chunks' last pages, which are copied layer by layer
    while it does (KT1). The result is ``Transferred``, or ``Skipped`` if that plan has left the table and nobody has done it."""

    STAGE = "decode"
    KIND = PlanKind.TRANSFER
    COMPUTES = False

    source: PoolName
    chunks: list[TransferChunk]
    behind: tuple[int, int] | None = None

    def only(self, is_alive: Callable[[int, int], bool]) -> "Transfer | None":
        """Return the plan if its row is alive."""
        return self if all(is_alive(*row) for row in self.rows) else None

    def reads(self) -> dict[PoolName, list[int]]:
        return {}

    def units_done(self, result: Result) -> int:
        return result.num_bytes if isinstance(result, Transferred) else 0

    def renumbered(self, run: Renumber, row: Callable[[int], int]) -> "Transfer":
        """Return the plan with other rows, of generation 1."""
        del run
        chunks = [msgspec.structs.replace(chunk, row=row(chunk.row), row_generation=1) for chunk in self.chunks]
        return Transfer(self.source, chunks)
