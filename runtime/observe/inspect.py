"""Inspect live requests from outside: rows, plans, journal and flight recorders, read-only.

Runs in the process of ``mmrt inspect``, and needs no live actor: all data is in shared memory. Each value is from the moment of
its reading; a row that is reassigned meanwhile is read again.
"""

import time
from collections.abc import Callable, Mapping, Sequence

from ...schema.rows import Phase
from ...shm.controller_stats import ControllerStats, StatsSnapshot
from ...shm.flight_recorder import read_recorders
from ...shm.plan_table import PlanTable
from ...shm.run_directory import RunDirectory
from ...shm.sequence_table import SequenceTable
from ...shm.status import ActorReading, ActorTable
from ..bus.request_keys import gateway_of
from ..controller.scheduling.facts import kind_of
from ..controller.scheduling.types import SegmentStage
from ..controller.state.embedding_tracker import EmbeddingTracker, lay_out
from ..controller.state.records import JournalState, Submitted
from ..controller.state.row_record import SegmentRecord
from ..stage_table import SUPERVISOR
from .breakdown import request_breakdown, step_begins
from .flight import PLAN_NAMES, merge
from .inspect_report import (
    ItemReport,
    MemberReport,
    PlanReport,
    RequestReport,
    RunView,
    SegmentReport,
    TimingReport,
    WorkReport,
)
from .inspect_rows import LivePlan, Row, live_plans, read_row
from .trace_requests import PlanSpan, RequestSpan, plan_spans, plans_of, request_spans

_STAGE_NAMES = {
    SegmentStage.PENDING: "pending",
    SegmentStage.PREPROCESSING: "decoding",
    SegmentStage.PREPROCESSED: "decoded",
    SegmentStage.ENCODING: "encoding",
    SegmentStage.ENCODED: "ready",
}


class Inspector:
    """Reads a run. Maps everything read-only; ``close`` when done."""

    def __init__(self, run: RunDirectory, read_journal: Callable[[], JournalState]) -> None:
        """``read_journal`` returns the current state of the journal. Raises: MissingError while ``memory`` has not made the tables."""
        self._run = run
        self._read_journal = read_journal
        self._table = SequenceTable.attach(run, writable=False)
        self._plans = PlanTable.attach(run, writable=False)
        self._actors = ActorTable.attach(run, writable=False)
        self._stats = ControllerStats.attach(run)

    def close(self) -> None:
        for mapped in (self._table, self._plans, self._actors, self._stats):
            mapped.close()

    def look(self) -> RunView:
        """Return the current view of the run."""
        now_ns = time.monotonic_ns()
        records = merge(read_recorders(self._run, (*self._actors.actors, SUPERVISOR)))
        spans, done, begins_ns = request_spans(records), plan_spans(records), step_begins(records)
        journal = self._read_journal()
        plans = live_plans(self._plans, self._actors.actors)
        rows = [row for index in range(self._table.num_rows) if (row := read_row(self._table, index)) is not None]
        by_key = {row.record.key: row for row in rows if row.record is not None}
        keys = [*journal.live, *(key for key in by_key if key not in journal.live)]
        readings = {actor: self._actors.read(actor) for actor in self._actors.actors}
        requests = [
            _Builder(key, journal, by_key.get(key), spans.get(key), done, begins_ns, now_ns).report(plans, readings) for key in keys
        ]
        requests += [
            _Builder(key, journal, None, span, done, begins_ns, now_ns).report((), readings)
            for key, span in spans.items()
            if key not in journal.live and key not in by_key and _is_on_its_way(span, readings.get(gateway_of(key)))
        ]
        return _run_view(self._stats.read(), requests)

    def ended(self) -> list[RequestReport]:
        """Return ended requests that are still in the flight recorders, the newest last."""
        records = merge(read_recorders(self._run, (*self._actors.actors, SUPERVISOR)))
        done, begins_ns, nothing = plan_spans(records), step_begins(records), JournalState()
        over = sorted((span for span in request_spans(records).values() if span.end_ns), key=lambda span: span.end_ns)
        return [_Builder(span.key, nothing, None, span, done, begins_ns, span.end_ns).report((), {}) for span in over]


def _is_on_its_way(span: RequestSpan, gateway: ActorReading | None) -> bool:
    """Return whether a live gateway has sent the request and the controller has not recorded it yet."""
    is_submitted = not span.end_ns and span.stages[-1].name == "submitted"
    return is_submitted and gateway is not None and span.gateway_generation == gateway.generation


def _run_view(stats: StatsSnapshot, requests: list[RequestReport]) -> RunView:
    return RunView(
        epoch=stats.epoch,
        waiting=stats.waiting,
        preparing=stats.preparing,
        running=stats.running,
        prefill_budget_tokens=stats.prefill_budget,
        encode_budget_rows=stats.encode_budget,
        tbt_ms=1000 * stats.tbt_s,
        tbt_objective_ms=1000 * stats.tbt_objective_s,
        tbt_p99_ms=None if stats.tbt_p99_s is None else 1000 * stats.tbt_p99_s,
        late_share=stats.late_share,
        pools={name: (use.used, use.pages) for name, use in stats.pools.items()},
        cached_pages={name: use.cached for name, use in stats.pools.items() if use.cached},
        policy=stats.policy.summary,
        requests=requests,
    )


class _Builder:
    """Combines the data of the journal, the row, and the flight recorders on one request."""

    def __init__(
        self,
        key: int,
        journal: JournalState,
        row: Row | None,
        span: RequestSpan | None,
        done: dict[int, PlanSpan],
        begins_ns: Sequence[int],
        now_ns: int,
    ) -> None:
        """``begins_ns``: of decode's steps."""
        self._key = key
        self._submitted: Submitted | None = journal.live.get(key)
        self._failure = journal.failures.get(key)
        self._row = row
        self._span = span or RequestSpan(key)
        self._done = plans_of(key, done)
        self._begins_ns, self._now_ns = begins_ns, now_ns
        self._tracker = self._make_tracker()

    def report(self, plans: Sequence[LivePlan], actors: Mapping[str, ActorReading]) -> RequestReport:
        submitted, row, span = self._submitted, self._row, self._span
        spec = row.spec if row is not None else None
        deadline_s = submitted.spec.generation.deadline_s if submitted is not None else 0.0
        request_id = spec.generation.request_id if spec is not None else span.request_id
        return RequestReport(
            key=f"{self._key:x}",
            request_id=submitted.spec.generation.request_id if submitted is not None else request_id,
            stage=self._stage(),
            live=submitted is not None or row is not None or not span.end_ns,
            age_s=max(0, self._now_ns - span.begin_ns) / 1e9 if span.stages else 0.0,
            deadline_s=deadline_s - self._now_ns / 1e9 if deadline_s else None,
            arrival=submitted.arrival if submitted is not None else -1,
            kind=kind_of(item.kind for item in submitted.spec.items) if submitted is not None else "",
            priority=submitted.spec.priority if submitted is not None else 0,
            gateway_generation=submitted.gateway_generation if submitted is not None else 0,
            row=row.row if row is not None else span.row,
            row_generation=row.generation if row is not None else span.row_generation,
            phase=row.phase.name.lower() if row is not None else "",
            end=row.end.name.lower() if row is not None and row.end else "",
            committed_tokens=row.committed if row is not None else 0,
            cached_tokens=row.record.num_cached_tokens or 0 if row is not None and row.record is not None else span.num_cached_tokens,
            sent_tokens=span.num_sent,
            max_new_tokens=spec.max_new_tokens if spec is not None else 0,
            decode=row.decode if row is not None else "",
            in_running_set=row is not None and bool(row.decode) and not row.end,
            failure=f"{self._failure.status}: {self._failure.message}" if self._failure is not None else "",
            members=self._members(),
            items=self._items(),
            plans=[_plan(found, row, actors, self._now_ns) for found in plans if row is not None and row.key in found.plan.rows],
            timings=[_timing(stage.name, stage.begin_ns, stage.end_ns, self._now_ns) for stage in span.stages],
            work=self._work(),
            marks=[(what, (time_ns - span.begin_ns) / 1e9) for what, time_ns in span.marks],
            breakdown=request_breakdown(span, self._done, self._begins_ns, self._now_ns),
        )

    def _stage(self) -> str:
        """Return the request's stage, or what it waits for, in one or two words."""
        row = self._row
        if self._submitted is None and row is None:
            return "over" if self._span.end_ns else "submitted"
        if self._failure is not None:
            return "failed"
        if row is None:
            return "queued"
        if row.phase == Phase.DECODE:
            return "delivering" if row.end else "decoding"
        if row.phase == Phase.ENDING or row.record is None:
            return "ending"
        if not row.record.filled:
            return "fetching"
        if not row.record.prepared:
            return "analysing"
        if row.record.evicting:
            return "preempted"
        return "prefilling" if row.block_tables[0] else "waits for kv"

    def _make_tracker(self) -> EmbeddingTracker | None:
        row = self._row
        if row is None or row.spec is None or row.record is None or not row.spec.spans:
            return None
        spans = row.spec.spans
        tracker = EmbeddingTracker(lay_out([span.start for span in spans], [span.shape for span in spans]), 1)
        for index, item in enumerate(row.record.items):
            for number, segment in enumerate(item.segments):
                if segment.stage == SegmentStage.ENCODED:
                    tracker.mark_ready(index, number)
        return tracker

    def _members(self) -> list[MemberReport]:
        row = self._row
        if row is None or row.spec is None:
            return []
        lengths = row.spec.num_prompt_tokens, row.spec.num_companion_tokens
        return [
            MemberReport(
                prompt_tokens=length,
                ready_tokens=self._tracker.ready_prefix(length) if self._tracker is not None and member == 0 else length,
                prefilled_tokens=row.prefilled[member],
                block_table=row.block_tables[member],
            )
            for member, length in enumerate(lengths)
            if length
        ]

    def _items(self) -> list[ItemReport]:
        if self._submitted is None:
            return []
        records = self._row.record.items if self._row is not None and self._row.record is not None else []
        items = []
        for index, medium in enumerate(self._submitted.spec.items):
            record = records[index] if index < len(records) else None
            shape = record.shape if record is not None else None
            segments = []
            for number, segment in enumerate(record.segments if record is not None else ()):
                assert shape is not None
                segments.append(
                    SegmentReport(
                        state=_state(segment),
                        rows=shape.segments[number].num_rows,
                        tokens=shape.segments[number].num_tokens,
                        start=self._tracker.part(index, number).start if self._tracker is not None else -1,
                        patch_pages=segment.patch.pages if segment.patch is not None else [],
                        embedding_pages=segment.embedding.pages if segment.embedding is not None else [],
                    )
                )
            items.append(
                ItemReport(
                    kind=medium.kind,
                    num_bytes=medium.num_bytes,
                    grid=shape.grid if shape is not None else None,
                    tokens=shape.num_tokens if shape is not None else 0,
                    media_pages=record.source.pages if record is not None else [],
                    segments=segments,
                )
            )
        return items

    def _work(self) -> list[WorkReport]:
        work = []
        for kind, name in PLAN_NAMES.items():
            mine = [plan for plan in self._done if plan.kind == kind and plan.begin_ns]
            if mine:
                seconds = sum(plan.end_ns - plan.begin_ns for plan in mine) / 1e9
                queued = sum(plan.begin_ns - plan.arrived_ns for plan in mine) / 1e9
                work.append(WorkReport(what=name, plans=len(mine), seconds=seconds, queued_seconds=queued))
        return work


def _state(segment: SegmentRecord) -> str:
    if segment.stage == SegmentStage.ENCODED and segment.embedding is None:
        return "prefilled"
    return _STAGE_NAMES[segment.stage]


def _plan(found: LivePlan, row: Row, actors: Mapping[str, ActorReading], now_ns: int) -> PlanReport:
    plan_id, slot, actor, plan = found
    first, last = plan.share(row.row)
    reading = actors.get(actor)
    state = "queued"
    if reading is not None and reading.step_deadline_ns and reading.step_plan == plan_id:
        state = f"running for {max(0, now_ns - reading.step_start_ns) / 1e6:.1f} ms"
    return PlanReport(
        plan_id=plan_id,
        what=PLAN_NAMES[plan.KIND],
        actor=actor,
        slot=slot,
        units=plan.units,
        first=first,
        last=last,
        state=state,
    )


def _timing(stage: str, begin_ns: int, end_ns: int, now_ns: int) -> TimingReport:
    return TimingReport(stage=stage, seconds=max(0, (end_ns or now_ns) - begin_ns) / 1e9, over=bool(end_ns))
