"""The controller's view of one request: what it is, where it is, and its parts (pure)."""

from collections.abc import Iterator
from dataclasses import dataclass, field

import msgspec

from ....schema.rows import Phase
from ...bus.media_work import corrected
from ...bus.messages import Failed, RequestSpec
from ...bus.plan_base import Place, RowKey
from ...bus.plans import Plan
from ...pools import PoolName, log_pool, state_pool, window_pool
from ..scheduling.facts import Objective, RequestKind
from ..scheduling.guidance import Lengths, is_prefilled, prefill_targets
from ..scheduling.types import Rank, SegmentStage
from .derived import Derived, Left
from .known_media import MediaKey
from .parts import Answer, Caches, Kv, Media, Ownership, Tables, Windows
from .row_record import RowRecord, SegmentRecord
from .state_pages import NO_STATES

_NEXT = {
    Phase.FREE: (Phase.PREPARE,),
    Phase.PREPARE: (Phase.DECODE, Phase.ENDING),
    Phase.DECODE: (Phase.PREPARE, Phase.ENDING),
    Phase.ENDING: (Phase.FREE,),
}


@dataclass(slots=True, eq=False)
class Request:
    """A live request, or a row that is being cleared after its request (``ending``)."""

    key: int
    arrival: int
    gateway_generation: int
    spec: RequestSpec
    arrived_s: float = 0.0
    kind: RequestKind = "text"
    objective: Objective = Objective()
    rank: Rank = ()  # for this tick
    admission_need: tuple[int, Lengths] | None = None  # media pages, and KV pages per member, once computed
    failure: Failed | None = None
    last_heard_s: float = 0.0  # when the gateway last sent a message about it
    ending: bool = False

    row: int = -1
    row_generation: int = 0
    phase: Phase = Phase.FREE
    record: RowRecord = field(default_factory=lambda: RowRecord(0))
    placed_s: float = 0.0
    video_s: float = 0.0  # when video last got a plan of it, or first could have
    video: str = ""  # the process of video that has its media: that of the last such plan

    kv: Kv = field(default_factory=Kv)
    caches: Caches = field(default_factory=Caches)
    media: Media = field(default_factory=Media)
    answer: Answer = field(default_factory=Answer)
    ownership: Ownership = field(default_factory=Ownership)

    plans: dict[int, Plan] = field(default_factory=dict)  # unacknowledged plans that name the row, by id
    blocked_s: float = -1.0  # start of its wait for pages; -1: it does not wait
    derived: Derived = field(default_factory=Derived)

    @property
    def key_in_table(self) -> RowKey:
        """The name of its row in plans."""
        return self.row, self.row_generation

    @property
    def has_row(self) -> bool:
        return self.row >= 0

    def hear(self, now: float) -> None:
        """The gateway has sent a message about it, or is asked to."""
        self.last_heard_s = now

    def fail(self, failure: Failed) -> None:
        """It fails; the gateway is told until it answers."""
        assert self.failure is None
        self.failure = failure

    def take_row(self, row: int, generation: int, now: float) -> None:
        """It leaves the queue for a row, which gets this generation."""
        assert not self.has_row and not self.ending and self.failure is None
        self.row, self.row_generation = row, generation
        self.placed_s = self.video_s = now

    def begin_record(self, record: RowRecord) -> None:
        """Its row has this record from now on."""
        assert self.has_row and record.key == self.key and self.phase == Phase.FREE
        self.record = record

    def restore_row(self, row: int, generation: int, phase: Phase, record: RowRecord) -> None:
        """Its row was found in memory."""
        assert not self.has_row and record.key == self.key
        self.row, self.row_generation, self.phase, self.record = row, generation, phase, record

    def enter(self, phase: Phase) -> Phase:
        """Go on to another phase. Returns the one before."""
        before, self.phase = self.phase, phase
        assert phase in _NEXT[before], f"a row goes from {before.name} to {phase.name}"
        return before

    def begin_end(self) -> None:
        """It gives up its row."""
        assert self.has_row and not self.ending
        self.ending = True

    def leave_row(self) -> None:
        """Its row is free: nobody holds anything of it."""
        assert self.ending and not self.plans and self.phase == Phase.FREE
        self.row = -1

    def begin_era(self) -> None:
        """The caches have begun another era: what it found in them while it waited is outdated."""
        self.admission_need = None
        self.caches.forget_keys()

    def note_video(self, now: float) -> None:
        """video gets a plan of it."""
        self.video_s = now

    def wait_for_pages(self, now: float, patience_s: float) -> bool:
        """Wait for pages, since now or since before. Returns whether that takes too long; then a new wait begins."""
        if self.blocked_s < 0:
            self.blocked_s = now
        elif now - self.blocked_s >= patience_s:
            self.blocked_s = now
            return True
        return False

    def end_wait(self) -> None:
        """It has got pages, or has given up all that it had."""
        self.blocked_s = -1.0

    @property
    def priority(self) -> int:
        return self.spec.priority

    @property
    def is_partial(self) -> bool:
        """True if work on its prompt or beyond has begun."""
        prefilled, cached = self.kv.prefilled, self.caches.num_cached
        return self.phase == Phase.DECODE or prefilled[0] > cached[0] or prefilled[1] > cached[1]

    @property
    def tokens_left(self) -> int:
        """Tokens of all members to be prefilled until its first token; before its preparation a medium counts as one."""
        return (self.derived.left or self._set_left()).tokens

    @property
    def rows_left(self) -> int:
        """Patch rows to be encoded until then, of media that have been analysed."""
        return (self.derived.left or self._set_left()).rows

    @property
    def video_rows_left(self) -> int:
        """Those of these rows that are of segments of videos still to be decoded."""
        return (self.derived.left or self._set_left()).video_rows

    @property
    def video_left(self) -> int:
        """Plans that video will have of it until then: to find the shape of a medium, and to decode each segment."""
        return (self.derived.left or self._set_left()).video_plans

    def _set_left(self) -> Left:
        if not self.record.prepared:
            known = sum(item.shape is not None for item in self.record.items)
            plans = 2 * len(self.spec.items) - known
            left = Left(len(self.spec.prompt_ids) + len(self.spec.companion_ids or ()), video_plans=plans)
        elif self.phase == Phase.DECODE or self.answer.committed:  # also while it is prefilled again, after a preemption
            left = Left()
        else:
            shapes = [(segment.stage, self.record.shape_of(*place)) for place, segment in self.open_segments()]
            undecoded = [shape.num_rows for stage, shape in shapes if shape.kind == "video" and stage < SegmentStage.PREPROCESSED]
            tokens = sum(self.targets) - sum(self.kv.prefilled)
            plans = sum(stage < SegmentStage.PREPROCESSED for stage, _ in shapes)
            left = Left(tokens, sum([shape.num_rows for _, shape in shapes]), sum(undecoded), plans)
        self.derived.left = left
        return left

    @property
    def has_kv(self) -> bool:
        """True if it has KV pages up to its next token and is not being preempted."""
        return bool(self.kv.tables[0]) and not self.record.evicting

    @property
    def can_prefill(self) -> bool:
        """True if its KV pages can be written."""
        return self.has_kv and self.answer.counts_known

    @property
    def kv_pool(self) -> PoolName:
        """The pool of its block tables, which decode reads and writes."""
        return self.record.kv_pool

    @property
    def prefill_pool(self) -> PoolName:
        """The pool in which its prompt is prefilled."""
        return self.record.source_pool or self.record.kv_pool

    @property
    def prefill_tables(self) -> Tables:
        """The pages in which its prompt is prefilled, per member."""
        return self.kv.tables if self.record.source_pool is None else self.kv.source_tables

    @property
    def prefill_windows(self) -> Windows:
        """Of layers with a window, likewise."""
        return self.kv.windows if self.record.source_pool is None else self.kv.source_windows

    def granted_pages(self) -> Iterator[tuple[PoolName, list[int]]]:
        """Yield its KV pages, of both pools, those of windows, and those of recurrent states, also of snapshots that a plan in flight
        makes."""
        for table in self.kv.tables:
            yield self.record.kv_pool, table
        if self.record.source_pool is not None:
            for table in self.kv.source_tables:
                yield self.record.source_pool, table
        for pool, states in ((self.record.kv_pool, self.kv.states), (self.record.source_pool, self.kv.source_states)):
            if pool is not None and states != NO_STATES:
                yield state_pool(pool), self.kv.bases(states)
                yield log_pool(pool), [member.log for member in states if member.log >= 0]
        for pool, windows in ((self.record.kv_pool, self.kv.windows), (self.record.source_pool, self.kv.source_windows)):
            for member in range(len(windows.tables)):
                if pool is not None and (pages := windows.own(member)):
                    yield window_pool(pool), pages
        for plan in self.plans.values():
            if snapshots := plan.snapshots(self.key_in_table):
                yield state_pool(self.prefill_pool), [page for _, _, page in snapshots]

    def pages_in(self, pool: PoolName) -> set[int]:
        """Return those of a pool."""
        return {page for name, pages in self.granted_pages() if name == pool for page in pages}

    @property
    def prefill_plan(self) -> Plan | None:
        """The plan in flight that fills its KV pages, if any. Its parts are chunks."""
        for plan in self.plans.values():
            if plan.FILLS_KV:
                return plan
        return None

    @property
    def transfer_plan(self) -> Plan | None:
        """The plan in flight that copies its KV pages, if any."""
        for plan in self.plans.values():
            if plan.USES_KV and not plan.FILLS_KV:
                return plan
        return None

    @property
    def has_kv_plan(self) -> bool:
        """True if a plan in flight reads or writes its KV pages."""
        return any([plan.USES_KV for plan in self.plans.values()])

    @property
    def analysing(self) -> set[int]:
        """The items that plans in flight analyse."""
        return {item for plan in self.plans.values() if (item := plan.analysed_item) is not None}

    def media_key(self, item: int) -> MediaKey | None:
        """Return the key of a shared medium; None if it is not shared."""
        return self.media.keys[item] if self.media.keys else None

    def open_segments(self) -> Iterator[tuple[Place, SegmentRecord]]:
        """Yield the segments of a prepared row that are not encoded yet, in prompt order."""
        for part in self.media.tracker.unready() if self.media.tracker is not None else ():
            yield (part.item, part.segment), self.record.items[part.item].segments[part.segment]

    def mark_large(self, item: int) -> None:
        """Mark the medium as large work."""
        items = list(self.spec.items)
        items[item] = corrected(items[item])
        self.spec = msgspec.structs.replace(self.spec, items=items)

    def segments_of(self, plan: Plan) -> list[tuple[Place, SegmentRecord]]:
        """Return the segments whose pages this plan is writing, except those taken back meanwhile."""
        targets = plan.targets(self.key_in_table)
        return [(place, segment) for place, segment in self.record.segments() if segment.target in targets] if targets else []

    def awaits(self, plan: Plan) -> bool:
        """Return whether this plan in flight does work that the request needs, and no other plan does."""
        if (item := plan.analysed_item) is not None:
            return self.record.items[item].shape is None
        return plan.USES_KV or bool(self.segments_of(plan))

    @property
    def targets(self) -> Lengths:
        if self.spec.generation.pooling is not None or self.begins_in_prefill:
            return self.kv.lengths
        return prefill_targets(self.kv.lengths, self.answer.committed)

    @property
    def begins_in_prefill(self) -> bool:
        """True if prefill is to compute the prompt's last token, and draw the one behind it. Where all before it is there already, say
        from a cache, decode computes it with the tokens of other rows."""
        return self.answer.begins_in_prefill and not self.answer.committed and self.kv.prefilled[0] != self.kv.lengths[0] - 1

    @property
    def lacks_first_token(self) -> bool:
        """True if all of its prompt is prefilled, by a prefill of an earlier version, which drew nothing."""
        answer = self.answer
        return answer.begins_in_prefill and not answer.committed and self.kv.prefilled[0] == self.kv.lengths[0]

    @property
    def is_prefilled(self) -> bool:
        return is_prefilled(self.kv.prefilled, self.targets)

    @property
    def is_computed(self) -> bool:
        """True if it has no answer, and what it asks for lies in its row."""
        return self.spec.is_prefill_only and self.record.prepared and self.is_ready

    @property
    def is_ready(self) -> bool:
        """True if its prompts are prefilled, and no plan writes its KV pages."""
        return self.can_prefill and self.is_prefilled and self.prefill_plan is None

    @property
    def is_finished(self) -> bool:
        """True if decode has set the end word: KV is no longer needed."""
        return self.answer.end_code != 0
