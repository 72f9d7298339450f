"""Plans to prefill chunks of prompts: embedding pages in, KV pages out."""

from itertools import accumulate

import msgspec

from ....bus.messages import Result
from ....bus.plans import Prefill, PrefillChunk
from ....pools import state_pool
from ....stage_table import InstanceId, instance_id
from ...caches.embedding_cache import give_back_read
from ...caches.prefix_cache import name_pages
from ...caches.snapshots import allocate_snapshots, keep_snapshots, take_state
from ...caches.window_pages import check_chunk, has_windows
from ...rows.poison import absolve
from ...rows.windows import advance
from ...scheduling.budgets import update
from ...scheduling.guidance import num_pages
from ...scheduling.types import ChunkChoice, SegmentStage
from ...state.effects import SetPrefilled
from ...state.request import Request
from ...state.state import ControllerState
from ..plan_dispatch import free_relays, place_plan
from .base import Encoded, Kind
from .transfer import leave_source


def issue_prefill(state: ControllerState, choices: tuple[ChunkChoice, ...], now: float) -> None:
    """Place a plan for each device that the chunks' rows are prefilled on."""
    state.steering.last = "prefill"
    for pool in dict.fromkeys(state.requests[choice.key].prefill_pool for choice in choices):
        chosen = [choice for choice in choices if state.requests[choice.key].prefill_pool == pool]
        requests = {choice.key: state.requests[choice.key] for choice in chosen}
        chunks = [_chunk(state, requests[choice.key], choice) for choice in chosen]
        if state.limits.prefill_ranks > 1:
            places = accumulate([chunk.end - chunk.start for chunk in chunks], initial=0)
            chunks = [msgspec.structs.replace(chunk, stream_at=at) for chunk, at in zip(chunks, places, strict=False)]
            plan = Prefill(chunks, relay=free_relays(state)[0])
            place_plan(state, plan, requests.values(), now, actor=instance_id(Prefill.STAGE, 0))
        else:
            place_plan(state, Prefill(chunks), requests.values(), now, pool)


def _chunk(state: ControllerState, request: Request, choice: ChunkChoice) -> PrefillChunk:
    page_tokens, cache = state.limits.kv_page_tokens, state.pools[request.prefill_pool].cache
    for page in request.prefill_tables[choice.member][choice.start // page_tokens : num_pages(choice.end, page_tokens)]:
        assert cache.key_of(page) is None, f"a chunk would write page {page}, which has a key"
    if has_windows(state):
        check_chunk(state, request, choice)
    spans = []
    if choice.member == 0 and request.media.tracker is not None:
        for part in request.media.tracker.overlapping(choice.start, choice.end):
            run = request.record.items[part.item].segments[part.segment].embedding
            assert run is not None, "a chunk reaches into a segment without embedding pages"
            spans.append(request.media.tracker.span(part, run, choice.start, choice.end))
    state_from, state_to, log, snapshots = _states(state, request, choice)
    tokens = choice.member, choice.start, choice.end
    return PrefillChunk(*request.key_in_table, *tokens, spans, state_from, state_to, log, snapshots)


def _states(state: ControllerState, request: Request, choice: ChunkChoice) -> tuple[int, int, int, list[tuple[int, int]]]:
    """Return the pages of recurrent states that a chunk reads and writes, of the log, and for snapshots: see ``PrefillChunk``. None
    that it reads is written, so a chunk that is done again finds what it found before."""
    kv, member = request.kv, choice.member
    pages = kv.prefill_states[member]
    if not pages.is_whole:
        return -1, -1, -1, []
    state_from, state_to = pages.at(kv.slots[member]) if choice.start else -1, pages.at(kv.next_slot(member))
    assert state.pools[state_pool(request.prefill_pool)].cache.key_of(state_to) is None, f"a chunk would write state {state_to}"
    log = pages.log if choice.end == request.targets[member] else -1
    return state_from, state_to, log, allocate_snapshots(state, request, choice)


class PrefillKind(Kind[Prefill]):
    """Tokens are in the KV cache; pages that are full get their keys. In a pipeline they are once the last rank has had the plan."""

    def is_part(self, state: ControllerState, plan: Prefill) -> bool:
        return plan.rank < state.limits.prefill_ranks - 1

    def rest(self, state: ControllerState, plan: Prefill, live: list[Request]) -> tuple[Prefill, InstanceId] | None:
        """Return the next rank's plan, of the rows that still want it, and whose media have not lost their pages meanwhile."""
        lost = {chunk.row for chunk in plan.chunks if any(map(state.pools["embedding"].is_retired, chunk.pages_read))}
        wants = [request for request in live if request.row not in lost and not request.record.evicting]
        rows = {request.key_in_table for request in wants if not _is_ahead(request, plan)}
        wanted = plan.only(lambda row, generation: (row, generation) in rows)
        if wanted is None:
            return None
        return msgspec.structs.replace(wanted, rank=plan.rank + 1), instance_id(Prefill.STAGE, plan.rank + 1)

    def learn_cost(self, state: ControllerState, num_units: int, elapsed_s: float) -> None:
        steering = state.steering
        steering.prefill = update(steering.prefill, num_units, elapsed_s, steering.allowance_s)

    def apply(self, state: ControllerState, plan: Prefill, live: list[Request], result: Result) -> Encoded:
        """Record the tokens, and free embedding pages read to their end (RS2, US4). The word is written first."""
        rows = {request.key_in_table: request for request in live}
        for chunk in plan.chunks:
            request = rows.get((chunk.row, chunk.row_generation))
            if request is None or request.record.evicting or not request.kv.advance(chunk.member, chunk.start, chunk.end):
                continue
            take_state(state, request, chunk.member)
            if request.lacks_first_token:
                state.note_counts(request, False)  # it has one now: this turn's tick reads it
            state.emit(SetPrefilled(request.row, chunk.member, chunk.end, request.kv.slots[chunk.member]))
            if chunk.spans and release_consumed(state, request):
                state.save(request)
        for request in live:
            if absolve(request, plan):
                state.save(request)
        return ()

    def cleared(self, state: ControllerState, plan: Prefill, live: list[Request], encoded: Encoded) -> None:
        for request in live:
            name_pages(state, request)
            keep_snapshots(state, request, plan)
            advance(state, request)
            leave_source(state, request)
            if request.is_computed:
                state.ask(request.key, request.gateway_generation)


def _is_ahead(request: Request, plan: Prefill) -> bool:
    """Return whether a later rank has the row's chunks, or the last one has done them: a controller died as it passed them on."""
    if any(other.relay == plan.relay and other.rank > plan.rank for other in request.plans.values()):
        return True
    chunks = [chunk for chunk in plan.chunks if (chunk.row, chunk.row_generation) == request.key_in_table]
    return all(chunk.end <= request.kv.prefilled[chunk.member] for chunk in chunks)


def release_consumed(state: ControllerState, request: Request) -> bool:
    """Give back embedding pages whose rows are all prefilled, according to ``prefilled``. True if the record changed."""
    changed = False
    prefilled, tracker = request.kv.prefilled[0], request.media.tracker
    assert tracker is not None
    for part in tracker.overlapping(0, prefilled):
        segment = request.record.items[part.item].segments[part.segment]
        if segment.stage != SegmentStage.ENCODED or segment.embedding is None:
            continue
        pages = segment.embedding.pages[request.media.consume(part, prefilled)]
        if prefilled >= part.end:
            segment.consumed()
            changed = True
        give_back_read(state, request, pages)
    return changed
