"""The part of a request that is stored in its row for the next controller (pure).

``RowRecord`` is rewritten whenever it changes; with the row's words (phase, pages, prefilled, count, end), the journaled
spec and the plan table it is complete. It holds nothing that can be derived from those.
"""

import enum
from collections.abc import Collection, Iterator

import msgspec

from ....schema.media import ItemShape, SegmentShape
from ...bus.messages import PageRun
from ...bus.plan_base import Place, Target
from ...pools import PoolName
from ...stage_table import InstanceId
from ..scheduling.types import SegmentStage


class SegmentRecord(msgspec.Struct, array_like=True):
    """Pages are kept as granted; leading embedding pages that prefill has used up are already free (see EmbeddingTracker)."""

    stage: SegmentStage = SegmentStage.PENDING
    patch: PageRun | None = None
    embedding: PageRun | None = None

    @property
    def target(self) -> Target | None:
        """The pages that a plan is writing, if any."""
        if self.stage == SegmentStage.PREPROCESSING and self.patch is not None:
            return "patch", self.patch
        if self.stage == SegmentStage.ENCODING and self.embedding is not None:
            return "embedding", self.embedding
        return None

    @property
    def is_loading(self) -> bool:
        return self.stage == SegmentStage.ENCODING and self.patch is None

    def begin_preprocess(self, patch: PageRun) -> None:
        """Record that a plan writes these patch pages."""
        assert self.stage == SegmentStage.PENDING
        self.stage, self.patch = SegmentStage.PREPROCESSING, patch

    def preprocessed(self) -> None:
        """Record that the patch pages are written."""
        assert self.stage == SegmentStage.PREPROCESSING
        self.stage = SegmentStage.PREPROCESSED

    def begin_encode(self, embedding: PageRun) -> PageRun:
        """Record that a plan writes these embedding pages. Returns the patch pages that it reads."""
        assert self.stage == SegmentStage.PREPROCESSED and self.patch is not None
        self.stage, self.embedding = SegmentStage.ENCODING, embedding
        return self.patch

    def begin_load(self, embedding: PageRun) -> None:
        """Record that a plan loads these embedding pages: it is being encoded without patch pages."""
        assert self.stage == SegmentStage.PENDING
        self.stage, self.embedding = SegmentStage.ENCODING, embedding

    def encoded(self) -> PageRun | None:
        """Record that the embedding pages are written. Returns its patch pages, which are no longer needed."""
        assert self.stage == SegmentStage.ENCODING
        patch, self.stage, self.patch = self.patch, SegmentStage.ENCODED, None
        return patch

    def consumed(self) -> None:
        """Record that prefill has read all of it."""
        assert self.stage == SegmentStage.ENCODED
        self.embedding = None

    def take(self, embedding: PageRun) -> PageRun | None:
        """Record that the embedding pages are in the cache. Returns its patch pages, which are no longer needed."""
        assert self.stage in (SegmentStage.PENDING, SegmentStage.PREPROCESSED)
        patch, self.stage, self.patch, self.embedding = self.patch, SegmentStage.ENCODED, None, embedding
        return patch

    def skip(self) -> None:
        """Record that it is not needed: the KV pages of its tokens were found in the cache."""
        self.stage, self.patch, self.embedding = SegmentStage.ENCODED, None, None

    def give_back(self) -> Target:
        """Undo a plan that did not write its pages: return to the stage before it. Returns the pages."""
        target = self.target
        assert target is not None
        if target[0] == "patch":
            self.stage, self.patch = SegmentStage.PENDING, None
        else:
            self.stage, self.embedding = SegmentStage.PENDING if self.patch is None else SegmentStage.PREPROCESSED, None
        return target

    def reset(self) -> None:
        """Reset after all pages were taken back: it is to be preprocessed again."""
        self.stage, self.patch, self.embedding = SegmentStage.PENDING, None, None


class ItemRecord(msgspec.Struct, array_like=True):
    source: PageRun
    shape: ItemShape | None = None
    segments: list[SegmentRecord] = []


class StrikeKind(enum.IntEnum):
    """The ways in which a plan fails: an exception in a batch of several, or a crash of its actor."""

    ERROR = 0
    CRASHED = 1


class Strike(msgspec.Struct, frozen=True, array_like=True):
    """A plan with this work of the request failed (``poison``). ``actor``: index into ``stage_table.WORKERS``."""

    plan_id: int
    actor: int
    item: int
    segment: int
    kind: StrikeKind

    @property
    def place(self) -> Place:
        return self.item, self.segment


class RowRecord(msgspec.Struct, array_like=True):
    """A row's record. ``member_of``: the decode actor that may have the row in its running set. ``evicting``: its KV pages are being
    taken back. ``num_cached_tokens``: of the prompt, found in the cache by its first grant of KV pages. ``era``: of the caches that it
    uses. ``kv_pool``: of its KV pages, once it has been granted any. ``source_pool``: where its prompt is prefilled, if that is
    another, until all pages have been copied."""

    key: int
    filled: bool = False
    prepared: bool = False
    member_of: InstanceId | None = None
    evicting: bool = False
    max_new_tokens: int = 0
    items: list[ItemRecord] = []
    strikes: list[Strike] = []
    num_cached_tokens: int | None = None  # no grant yet
    era: bytes = b""
    kv_pool: PoolName = "kv"
    source_pool: PoolName | None = None

    def fill(self) -> None:
        """The gateway has filled its media pages."""
        assert not self.filled
        self.filled = True

    def prepare(self, max_new_tokens: int) -> None:
        """Its prompt is expanded, and leaves room for so many new tokens."""
        assert self.filled and not self.prepared
        self.prepared, self.max_new_tokens = True, max_new_tokens

    def place(self, kv_pool: PoolName, source_pool: PoolName | None) -> None:
        """It is to have KV pages of these pools."""
        assert self.prepared and not self.evicting
        self.kv_pool, self.source_pool = kv_pool, source_pool

    def leave_source(self) -> None:
        """All pages of its source have been copied."""
        assert self.source_pool is not None
        self.source_pool = None

    def begin_eviction(self) -> None:
        """Its KV pages are being taken back."""
        assert not self.evicting
        self.evicting = True

    def end_eviction(self) -> None:
        """Nobody holds its KV pages any more."""
        assert self.evicting and self.member_of is None
        self.evicting = False

    def join(self, decode: InstanceId) -> None:
        """From now on this decode may have it in its running set."""
        assert self.member_of is None and not self.evicting
        self.member_of = decode

    def leave(self) -> None:
        """No decode has it in its running set."""
        self.member_of = None

    def forgive(self, places: Collection[Place], actor: int | None = None) -> None:
        """This work, of one actor or of all, is done, or not needed: that it failed before no longer counts."""
        self.strikes = [one for one in self.strikes if one.place not in places or actor not in (None, one.actor)]

    def segment(self, place: Place) -> SegmentRecord:
        item, number = place
        return self.items[item].segments[number]

    def shape_of(self, item: int, segment: int) -> SegmentShape:
        """Return the shape of a segment of an analysed item."""
        shape = self.items[item].shape
        assert shape is not None
        return shape.segments[segment]

    def segments(self) -> Iterator[tuple[Place, SegmentRecord]]:
        """Yield all segments of all items, in prompt order."""
        for index, item in enumerate(self.items):
            for number, segment in enumerate(item.segments):
                yield (index, number), segment


MEMBER_BYTES = 16  # more of a record whose row has KV pages and has gone to decode

encode_record = msgspec.msgpack.Encoder().encode
decode_record = msgspec.msgpack.Decoder(RowRecord).decode
