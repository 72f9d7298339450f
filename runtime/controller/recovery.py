"""Recovery: a new controller continues where a killed one stopped, after any effect (pure).

The journal holds the live requests, the rows their progress, the plan table the work that actors may be doing. Free lists,
memberships and readiness are rebuilt from these; every outstanding plan is sent again under the new epoch. Since memory is
written in the order of effects, a record can name pages whose plan was never written: those are given back, and the record is
saved before anything else happens.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple, TypeVar

from ...schema.rows import Phase
from ..bus.messages import Generation, RequestSpec
from ..bus.plan_base import Target
from ..bus.plans import decode_plan
from ..pools import PoolName
from ..stage_table import InstanceId
from .caches.cache_eras import restore_era
from .caches.media_sharing import join, learn_shape, look_up
from .machine import Controller
from .plans.kinds.transfer import restore_progress
from .plans.plan_dispatch import adopt_plan
from .rows.expansion import expand
from .rows.intake import prompts_of, set_layout
from .rows.lifecycle import settle
from .rows.windows import restore_windows
from .scheduling.facts import Cost
from .scheduling.guidance import num_pages, wanted_pages
from .scheduling.types import Limits, SegmentStage
from .state.effects import ClearPages, ClearSource
from .state.inflight_plan import InflightPlan
from .state.pages import Owner, PageLedger, User
from .state.records import JournalState
from .state.request import Request
from .state.row_record import RowRecord, decode_record
from .state.state import ControllerState, membership, owner
from .state.state_pages import NO_STATES, StatePages

Holder = TypeVar("Holder", Owner, User)


class RowSnapshot(NamedTuple):
    """A row that is not FREE, as stored in the sequence table. ``state`` None: no record of this generation."""

    row: int
    generation: int
    phase: Phase
    block_tables: tuple[list[int], list[int]]
    prefilled: tuple[int, int]
    committed: int
    end_code: int
    state: bytes | None
    ids: Sequence[int] = ()
    decode: InstanceId | None = None  # the owner
    source_tables: tuple[list[int], list[int]] = ([], [])
    states: tuple[StatePages, StatePages] = NO_STATES
    source_states: tuple[StatePages, StatePages] = NO_STATES
    slots: tuple[int, int] = (0, 0)
    windows: tuple[list[int], list[int]] = ([], [])
    source_windows: tuple[list[int], list[int]] = ([], [])


class PlanSnapshot(NamedTuple):
    slot: int
    plan_id: int
    actor: InstanceId
    payload: bytes


class RunSnapshot(NamedTuple):
    """Everything left by the previous controller. Generations are those of all rows and pages, including free ones; ``page_keys`` are
    the valid ones."""

    journal: JournalState
    rows: Sequence[RowSnapshot]
    row_generations: Sequence[int]
    plans: Sequence[PlanSnapshot]
    page_generations: Mapping[PoolName, Sequence[int]]
    actors: Mapping[InstanceId, int]
    page_keys: Mapping[PoolName, Mapping[int, bytes]] = {}
    secret: bytes = b""
    kept_era: bytes = b""
    known_costs: Mapping[str, Cost] = {}  # of stages: not of the previous controller but of earlier runs


def recover(limits: Limits, epoch: int, snapshot: RunSnapshot) -> Controller:
    """Rebuild the controller. The first ``tick`` sends outstanding plans. An empty snapshot gives a fresh controller."""
    state = ControllerState(limits, epoch, snapshot.page_generations, snapshot.secret, snapshot.known_costs)
    state.actors.update(snapshot.actors)
    state.next_arrival = snapshot.journal.next_arrival
    restore_era(state, snapshot.journal.era, snapshot.kept_era)
    state.row_generations = list(snapshot.row_generations)
    _restore_requests(state, snapshot.journal)
    for row in snapshot.rows:
        _restore_row(state, row)
    state.free_rows = [row for row in range(limits.num_rows - 1, -1, -1) if state.rows[row] is None]
    _restore_plans(state, snapshot.plans)
    targets = [target for inflight in state.plans.values() for target in inflight.plan.targets()]
    for request in state.requests_in_rows():
        _normalise(state, request, targets)
        restore_windows(state, request)
    _restore_ledgers(state, snapshot.page_keys)
    for request in state.requests_in_rows():
        if not request.ending:
            restore_progress(state, request)
            _restore_sharing(state, request)
            state.save(request)
        settle(state, request)
    state.waiting = {key: r for key, r in state.requests.items() if not r.has_row and r.failure is None}
    return Controller(state)


def _restore_requests(state: ControllerState, journal: JournalState) -> None:
    for key, submitted in journal.live.items():
        request = state.make_request(submitted)
        if (failure := journal.failures.get(key)) is not None:
            request.fail(failure)
    for key in journal.ended:
        state.remember_end(key)


def _restore_row(state: ControllerState, row: RowSnapshot) -> None:
    """Attach a row to its request, or to none if that has ended. A row without a record may be in its owner's running set."""
    record = decode_record(row.state) if row.state is not None else RowRecord(0, member_of=row.decode)
    request = state.requests.get(record.key)
    if request is None or row.phase == Phase.ENDING and request.failure is None:
        request, is_over = Request(record.key, -1, -1, RequestSpec(Generation(""), [], [], None)), True
    else:
        is_over = request.failure is not None and (record.filled or row.phase == Phase.ENDING)
    request.restore_row(row.row, row.generation, row.phase, record)
    if is_over:
        request.begin_end()
    request.ownership.give(row.decode)
    states, windows = (row.states, row.source_states, row.slots), (row.windows, row.source_windows)
    request.kv.restore(row.block_tables, row.source_tables, row.prefilled, *states, *windows)
    request.answer.restore(row.committed, row.ids, row.end_code)
    state.rows[row.row] = request


def _restore_plans(state: ControllerState, plans: Sequence[PlanSnapshot]) -> None:
    used = {plan.slot for plan in plans}
    state.free_slots = [slot for slot in range(state.limits.num_plan_slots - 1, -1, -1) if slot not in used]
    by_row = {request.key_in_table: request for request in state.requests_in_rows()}
    for slot, plan_id, actor, payload in plans:
        plan = decode_plan(payload)
        requests = [by_row[key] for key in dict.fromkeys(plan.rows) if key in by_row]
        adopt_plan(state, InflightPlan(plan_id, slot, actor, plan, requests))


def _normalise(state: ControllerState, request: Request, targets: list[Target]) -> None:
    """Repair whatever the previous controller left half done."""
    record = request.record
    if request.ending:
        if request.phase != Phase.ENDING:
            state.set_phase(request, Phase.ENDING)
        return
    if request.phase == Phase.PREPARE and not record.evicting:
        record.leave()  # the phase word was not yet written: decode has never seen the row
    if record.evicting and request.phase == Phase.DECODE:
        state.set_phase(request, Phase.PREPARE)
    if not record.prepared:
        return
    spec = request.spec
    shapes = [item.shape for item in record.items if item.shape is not None]
    prompt, starts = expand(spec, shapes, state.limits)
    set_layout(state, request, prompts_of(spec, prompt), starts, shapes)
    if request.phase == Phase.PREPARE and not record.evicting:
        if record.source_pool is None and request.kv.has_source:
            state.emit(ClearSource(request.row))  # all pages have been copied
            request.kv.leave_source()
        if not _has_pages(state, request):
            state.emit(ClearPages(request.row))  # all or none: the grant was interrupted
            request.kv.clear()
    if request.caches.keys and request.kv.tables[0] and record.num_cached_tokens is None:
        record.num_cached_tokens = 0  # its first grant was not recorded to the end: a later one must not count as the first
    _normalise_segments(request, targets)


def _has_pages(state: ControllerState, request: Request) -> bool:
    """Return whether the row has all pages of a grant, in all pools."""
    page_tokens = state.limits.kv_page_tokens
    least = wanted_pages(request.kv.lengths, request.answer.committed, request.record.max_new_tokens, page_tokens, ahead_pages=0)
    source = () if request.record.source_pool is None else [num_pages(target, page_tokens) for target in request.targets]
    needs = [*zip(request.kv.tables, least, strict=False), *zip(request.kv.source_tables, source, strict=False)]
    states = [*request.kv.states[: len(least)], *(() if request.record.source_pool is None else request.kv.source_states[: len(least)])]
    has_states = not state.limits.num_state_pages or all(pages.is_whole for pages in states)
    return has_states and all(len(table) >= count for table, count in needs)


def _normalise_segments(request: Request, targets: list[Target]) -> None:
    """Repair the segments. ``targets``: page runs that some plan is writing."""
    for place, segment in request.record.segments():
        part, prefilled = request.media.part(place), request.kv.prefilled[0]
        if not request.record.evicting and prefilled >= part.end:
            segment.skip()
            request.media.mark_ready(place)
        elif segment.target is not None:
            if segment.target not in targets:
                segment.give_back()
        elif segment.stage == SegmentStage.ENCODED:
            request.media.mark_ready(place)
            if segment.embedding is not None:
                request.media.consume(part, prefilled)


def _restore_sharing(state: ControllerState, request: Request) -> None:
    """Let the row share its media again. Only analyses of media in rows are known to a new controller."""
    join(state, request)
    look_up(state, request)
    for item, record in enumerate(request.record.items):
        if record.shape is not None:
            learn_shape(state, request, item, record.shape)


def _restore_ledgers(state: ControllerState, keys: Mapping[PoolName, Mapping[int, bytes]]) -> None:
    """Rebuild ownership and use: rows own the pages in their records and block tables; plans and memberships use those they name;
    the cache owns pages with keys."""
    owned: dict[PoolName, dict[Owner, list[int]]] = {name: {} for name in state.pools}
    used: dict[PoolName, dict[User, list[int]]] = {name: {} for name in state.pools}
    for request in state.requests_in_rows():
        if request.record.member_of is not None:
            _add_pages(used, membership(request), request)
        if request.ending:
            continue
        items = request.record.items
        segments = list(request.record.segments())
        owned["media"][owner(request)] = [page for item in items for page in item.source.pages]
        owned["patch"][owner(request)] = [page for _, segment in segments if segment.patch for page in segment.patch.pages]
        owned["embedding"][owner(request)] = [
            page for place, segment in segments if segment.embedding for page in request.media.unread(place, segment.embedding.pages)
        ]
        if not request.record.evicting:
            _add_pages(owned, owner(request), request)
    for inflight in state.plans.values():
        for name, pages in inflight.pages():
            used[name].setdefault(User("plan", inflight.plan_id), []).extend(pages)
    for name in state.pools:
        generations = state.pools[name].generations
        state.pools[name] = PageLedger.restore(len(generations), generations, owned[name], used[name], keys.get(name))
    state.tie_snapshots()


def _add_pages(held: dict[PoolName, dict[Holder, list[int]]], holder: Holder, request: Request) -> None:
    for pool, pages in request.granted_pages():
        held[pool].setdefault(holder, []).extend(pages)
