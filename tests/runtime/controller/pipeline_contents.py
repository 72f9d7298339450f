"""What the stages of prefill's pipeline have written in the simulated run of ``recovery_world``: their layers of KV
pages, and streams."""

from collections.abc import Sequence

from mmrt.runtime.bus.plans import Prefill, PrefillChunk
from mmrt.shm.sequence_table import SequenceTable

PAGE_TOKENS = 4
LAYERS, STREAM = "layers", "stream"  # the pools of what they write
Write = tuple[str, int, int, object, object]
Pages = list[dict[int, int]]


class PipelineContents:
    """``kv``: values of which all layers are written, by page and slot, in the pool ``pool``. The last rank writes there; others into
    ``layers``."""

    def __init__(self, num_ranks: int, pool: str, kv: Pages) -> None:
        self.last = num_ranks - 1
        self.pool = pool
        self._kv = kv
        self.num_ahead = 0  # chunks begun while the one before them was at a later stage
        self._layers: list[Pages] = [[{} for _ in kv] for _ in range(num_ranks)]
        self._streams: dict[tuple[int, int, int], int] = {}

    def is_stale(self, plan: Prefill, table: SequenceTable) -> bool:
        """Return whether the last rank leaves the plan: the chunk before one of its chunks was not done, or it was itself."""
        return plan.rank == self.last and any(table.num_prefilled(c.row)[c.member] != c.start for c in plan.chunks)

    def chunk(
        self, plan: Prefill, chunk: PrefillChunk, generations: Sequence[int], pages: Sequence[int], values: Sequence[int]
    ) -> list:
        """Check what a rank reads of a chunk. Returns what it writes beside, or in place of, its values in KV pages."""
        assert 0 <= plan.relay < 2 * (self.last + 1) and 0 <= plan.rank <= self.last
        for position in range(chunk.start):
            found = self._of(plan.rank, pages[position // PAGE_TOKENS], position % PAGE_TOKENS)
            assert found == values[position], f"rank {plan.rank} finds {found} in its layers where {values[position]} should be"
        self.num_ahead += bool(chunk.start) and self._kv[pages[(chunk.start - 1) // PAGE_TOKENS]].get((chunk.start - 1) % 4) is None
        writes: list[Write] = []
        for position in range(chunk.start, chunk.end):
            relay, at = plan.relay, chunk.stream_at + position - chunk.start
            before = self._streams.get((plan.rank - 1, relay, at))
            assert not plan.rank or before == values[position], "the stream is of another chunk or plan"
            if plan.rank < self.last:
                page = pages[position // PAGE_TOKENS]
                value = plan.rank, position % PAGE_TOKENS, values[position]
                writes.append((LAYERS, page, int(generations[page]), value, None))
                writes.append((STREAM, relay, at, plan.rank, values[position]))
        return writes

    def write(self, pool: str, page: int, generation: int, slot: object, value: object) -> None:
        """Do one of these writes."""
        if pool == STREAM:
            self._streams[slot, page, generation] = value
            return
        rank, place, held = slot
        self._layers[rank][page][place] = held
        if self._kv[page].get(place) != held:
            self._kv[page].pop(place, None)

    def check_whole(self, page: int, slot: int, value: int) -> None:
        """The last rank may write a value only where all before it have."""
        for rank in range(self.last):
            assert self._of(rank, page, slot) == value, f"rank {self.last} writes a token that rank {rank} lacks"

    def _of(self, rank: int, page: int, slot: int) -> int | None:
        whole = self._kv[page].get(slot)
        return self._layers[rank][page].get(slot) if whole is None and rank < self.last else whole
