"""The controller's counts, readable by ``mmrt status`` and /metrics even after its death: one snapshot, written by the controller."""

from typing import Self

import msgspec
import numpy as np

from ..schema.policy_report import NO_POLICY_YET, PolicyReport
from .run_directory import RunDirectory
from .segment import Layout, Segment
from .versioned import VersionedBlob

_KIND = "stats"
_MAX_SNAPSHOT_BYTES = 32768


class PoolUse(msgspec.Struct, frozen=True):
    """Pages of one pool. ``used``: granted or held. ``cached``: with contents that the cache knows. ``evictable``: of these, those that
    nobody else holds; they are not used."""

    pages: int = 0
    used: int = 0
    cached: int = 0
    evictable: int = 0


class StatsSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """The controller's counts. Totals grow over the whole run, also across controllers: a new one reads them first."""

    epoch: int = 0
    waiting: int = 0  # requests journaled, not admitted
    preparing: int = 0  # rows in phase PREPARE
    running: int = 0  # rows in phase DECODE
    plans: int = 0  # issued, not acknowledged
    rows_left: int = 0  # patch rows to be encoded, of requests without a first token
    tokens_left: int = 0  # likewise, tokens to be prefilled
    admitted_total: int = 0
    finished_total: int = 0
    failed_total: int = 0
    preempted_total: int = 0
    instances_version: int = 0  # ``ActorTable.version`` that the controller acts on
    drained: list[str] = []  # leaving actors that hold nothing any more
    handed_over_total: int = 0  # rows from one decode actor to another
    transferred_bytes_total: int = 0  # of KV pages, from the pool of one device to that of another
    evicted_total: int = 0
    quarantined_total: int = 0
    prompt_tokens_total: int = 0
    looked_up_tokens_total: int = 0  # those of the prompts that were looked up in the prefix cache
    cached_tokens_total: int = 0  # those of them that were found there
    generated_tokens_total: int = 0
    media_queries_total: int = 0  # segments of media looked up in the embedding cache
    media_hits_total: int = 0
    overruled_total: int = 0  # times that the scheduling policy failed, and another acted in its place
    illegal_choices_total: int = 0  # of the scheduling policy, dropped
    encode_budget: int = 0
    prefill_budget: int = 0
    tbt_s: float = 0.0  # time between tokens as measured last; 0: not measured
    tbt_objective_s: float = 0.0  # for the rows that decode now
    tbt_p99_s: float | None = None  # of the last seconds; None: nothing decoded
    late_share: float | None = None  # likewise: times between tokens over the objective
    gaps: list[int] = []  # times between tokens, by bucket (``schema.gap_buckets``), since the run began
    gaps_s: float = 0.0  # their sum
    pools: dict[str, PoolUse] = {}  # by name: media, patch, embedding, and the KV pools of all devices
    broken: dict[str, str] = {}  # actors that the run does without for now, and why
    policy: PolicyReport = NO_POLICY_YET


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(StatsSnapshot).decode


class ControllerStats:
    """The controller's snapshot: replaced whole, never torn, and readable after its death."""

    def __init__(self, segment: Segment) -> None:
        """Use ``create`` or ``attach``."""
        word, slots, num_bytes = _layout()
        segment.expect_bytes(num_bytes)
        self._segment = segment
        self._blob = VersionedBlob(segment, word // 8, slots, _MAX_SNAPSHOT_BYTES)

    @classmethod
    def create(cls, run: RunDirectory) -> Self:
        """Make it. Raises: SpaceError, FileExistsError."""
        return cls(Segment.create(run.segment_path("stats"), _layout()[2], kind=_KIND))

    @classmethod
    def attach(cls, run: RunDirectory, writable: bool = True) -> Self:
        """Map it. Raises: MissingError, SegmentError."""
        return cls(Segment.attach(run.segment_path("stats"), kind=_KIND, writable=writable))

    def close(self) -> None:
        """Unmap."""
        self._segment.close()

    def publish(self, snapshot: StatsSnapshot) -> None:
        """Replace the snapshot. Controller only."""
        self._blob.write(1, _encode(snapshot))

    def read(self) -> StatsSnapshot:
        """The last snapshot; all zero before the first."""
        blob = self._blob.read(1)
        return StatsSnapshot() if blob is None else _decode(blob)


def _layout() -> tuple[int, int, int]:
    """(offset of the word, offset of the slots, bytes of the segment)."""
    layout = Layout()
    word = layout.add(1, np.uint64).offset
    slots = layout.add((2, VersionedBlob.slot_bytes(_MAX_SNAPSHOT_BYTES)), np.uint8).offset
    return word, slots, layout.num_bytes
