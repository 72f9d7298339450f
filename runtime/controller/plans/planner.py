"""Planning for video, encoder and prefill: the view that policies see, and the plans that follow, which ``kinds`` makes.

A row has at most one prefill plan in flight, in each stage of a pipeline: messages can be reordered, and a chunk must not overtake the
one before it.
``plan_results`` applies the plans' results.
"""

from collections.abc import Iterator, Sequence
from functools import cache
from itertools import islice, takewhile

import msgspec

from ...bus.media_work import estimated_work
from ...pools import PoolName
from ...stage_table import WORKERS, InstanceId, stage_of
from ..caches.embedding_cache import num_held_pages, num_saved_pages
from ..caches.media_sharing import hide_shared, take_shared
from ..caches.window_pages import has_windows
from ..rows.intake import embedding_pages, patch_pages
from ..rows.lifecycle import reset_media
from ..rows.poison import is_suspect
from ..rows.windows import has_gap, num_short, room
from ..scheduling.budgets import allowance_s, lone_units, retarget
from ..scheduling.types import MemberView, RequestView, SegmentChoice, SegmentStage, SegmentView, StepLimits, View
from ..state.inflight_plan import LONG_AGO_S
from ..state.request import Request
from ..state.state import BY_RANK, STUCK_S, ControllerState, owner
from .kinds.analyse import issue_analysis
from .kinds.encode import issue_encode
from .kinds.load import issue_loads
from .kinds.load_segments import issue_segment_loads
from .kinds.prefill import issue_prefill
from .kinds.preprocess import issue_segment
from .plan_dispatch import credit, video_rooms
from .policy_calls import choose

MAX_ROUNDS = 8
WINDOW = 32  # segments of one request that a policy sees: enough to keep video and encoder busy


# ------------------------------------------------------------------------------------------------------------ planning


def issue(state: ControllerState, now: float) -> None:
    """Plan and send until the policy has nothing more for the credit that is left."""
    steering = state.steering
    _aim(state)
    for inflight in state.plans.values():
        if inflight.begun_s == LONG_AGO_S:  # from another controller or for another actor generation: the current one has just begun
            inflight.begun_s = now
    issue_loads(state, now)
    if not _plannable(state):
        state.starved_s = None
        return
    prefill, encode = steering.prefill, steering.encode
    for _ in range(MAX_ROUNDS):
        view = make_view(state)
        tokens = _prefill_tokens(state, view)
        limits = StepLimits(tokens, encode.units, prefill.max_units, encode.max_units, state.limits.with_decode)
        step = choose(state, view, limits)
        if not step:
            break
        for choice in step.analyse:
            issue_analysis(state, state.requests[choice.key], choice.item, now)
        for segment in step.preprocess:
            issue_segment(state, segment, now)
        if step.encode:
            _issue_encode(state, step.encode, now)
        if step.prefill:
            issue_prefill(state, step.prefill, now)
        if not any(credit(state, stage) for stage in WORKERS):
            break  # another round could plan nothing
    _notice_shortage(state, view, now)


def _aim(state: ControllerState) -> None:
    """Adjust budgets at once: the first row that decodes must not meet plans made for an idle run."""
    steering = state.steering
    allowance = allowance_s(steering.share, state.num_decoding, state.tbt_target_s)
    if allowance != steering.allowance_s:
        steering.allowance_s = allowance
        steering.prefill, steering.encode = retarget(steering.prefill, allowance), retarget(steering.encode, allowance)


def _prefill_tokens(state: ControllerState, view: View) -> int:
    """Return the budget tau: larger for a request alone, where prefill has breaks in which it does what comes meanwhile."""
    is_alone = len(view.requests) == 1 and not view.prefill_in_flight and not view.num_decoding
    budget = state.steering.prefill
    return lone_units(budget, state.tbt_target_s) if is_alone and state.limits.has_breaks else budget.units


def _plannable(state: ControllerState) -> list[Request]:
    """Return the rows that a policy plans for."""
    return [request for request in state.preparing() if request.record.filled and request.failure is None]


def make_view(state: ControllerState) -> View:
    """Build the view: rows in preparation, in rank order, and free resources. Before that, give the rows what others have made."""
    rows = sorted(_plannable(state), key=BY_RANK)
    views = [request.derived.view or _keep_view(state, request) for request in rows]
    if any([request.media.is_shared for request in rows]):
        take_shared(state, rows, views)
        views = hide_shared(state, rows, [request.derived.view or _keep_view(state, request) for request in rows])
    if len(state.kv_pools) > 1:
        views = _hide_busy(state, rows, views)
    now, plans, videos = state.now, state.plans.values(), video_rooms(state)
    in_flight = [plan.plan.STAGE for plan in plans if now - plan.begun_s < STUCK_S and not state.is_lost(plan.actor)]
    return View(
        requests=tuple(views),
        facts=state.facts,
        video_credit=credit(state, "video"),
        encoder_credit=credit(state, "encoder"),
        prefill_credit=credit(state, "prefill"),
        encode_in_flight=in_flight.count("encoder"),
        prefill_in_flight=in_flight.count("prefill"),
        num_decoding=state.num_decoding,
        num_decode_tokens=state.num_decode_tokens,
        num_encoders=_num_encoders(state.staying),
        num_patch_pages=state.limits.num_patch_pages,
        num_free_patch_pages=state.pools["patch"].num_free,
        num_embedding_pages=state.limits.num_embedding_pages,
        num_free_embedding_pages=state.pools["embedding"].num_free,
        last=state.steering.last,
        num_turns=_num_turns(state.staying),
        large_in_flight=all([room.large_in_flight for room in videos]) if videos else any([plan.is_large for plan in plans]),
        videos=videos,
        last_streamed=state.steering.last_streamed,
        grid=state.limits.grid,
    )


def _hide_busy(state: ControllerState, rows: Sequence[Request], views: Sequence[RequestView]) -> list[RequestView]:
    """Return the views, without prefill for rows whose device has no prefill with room for a plan."""
    busy = {pool for pool in state.kv_pools if not credit(state, "prefill", pool)}
    pairs = zip(rows, views, strict=True)
    return [msgspec.structs.replace(view, prefill_in_flight=True) if row.prefill_pool in busy else view for row, view in pairs]


@cache
def _num_turns(actors: Sequence[InstanceId]) -> int:
    """Return how many plans of encoder and prefill the larger of both stages can do at once."""
    stages = [stage_of(actor) for actor in actors]
    return max(stages.count("encoder"), stages.count("prefill"))


@cache
def _num_encoders(actors: Sequence[InstanceId]) -> int:
    return sum(stage_of(actor) == "encoder" for actor in actors)


def _keep_view(state: ControllerState, request: Request) -> RequestView:
    request.derived.view = view_request(state, request)
    return request.derived.view


def view_request(state: ControllerState, request: Request) -> RequestView:
    """Build the policies' view of a row. Call ``ControllerState.touch`` whenever it changes."""
    record, items, plans = request.record, request.spec.items, request.plans
    is_prepared = record.prepared
    patch_held = embedding_held = 0
    unanalysed: tuple[int, ...] = ()
    segments: tuple[SegmentView, ...] = ()
    if not is_prepared:
        analysing = request.analysing
        unanalysed = tuple([i for i, item in enumerate(record.items) if item.shape is None and i not in analysing])
    elif items:
        patch_held = state.pools["patch"].num_owned(owner(request))
        embedding_held = num_held_pages(state, request)
        if not record.evicting and not (request.caches.may_load and request.has_kv):  # loads of KV pages may make media unnecessary
            segments = tuple(islice(_open_segments(state, request), WINDOW))
    return RequestView(
        request.key,
        request.arrival,
        has_kv=is_prepared and request.can_prefill,
        prefill_in_flight=is_prepared
        and (request.caches.may_load or next_tokens(state, request) is None or _lacks_windows(state, request)),
        members=_members(state, request) if is_prepared else (),
        unanalysed=unanalysed,
        segments=segments,
        patch_held=patch_held,
        embedding_held=embedding_held,
        alone=is_prepared and is_suspect(request),
        work=tuple(map(estimated_work, items)) if items else (),
        video_in_flight=sum([plan.STAGE == "video" for plan in plans.values()]) if plans else 0,
        video_since_s=request.video_s,
        video=request.video,
        arrived_s=request.arrived_s,
        kind=request.kind,
        objective=request.objective,
        priority=request.priority,
    )


def _open_segments(state: ControllerState, request: Request) -> Iterator[SegmentView]:
    """Yield the segments not yet encoded, in prompt order. One that can be loaded looks as if it were decoded, and had no rows. Until
    it is loaded no later one is decoded: that would hold patch pages that it needs if the file lacks it after all."""
    waits = False
    for (item, number), segment in request.open_segments():
        shape = request.record.shape_of(item, number)
        waits = waits or segment.is_loading
        if segment.stage == SegmentStage.PENDING:
            if num_saved_pages(state, request, (item, number)):
                waits = True
                yield SegmentView(item, number, SegmentStage.PREPROCESSED, 0, 0, embedding_pages(shape, state.limits))
                continue
            if waits:
                return
        pages = patch_pages(shape, state.limits), embedding_pages(shape, state.limits)
        yield SegmentView(item, number, segment.stage, shape.num_rows, *pages, shape.kind == "video")


def next_tokens(state: ControllerState, request: Request) -> Sequence[int] | None:
    """Return the tokens of each member before the next chunk: those that are prefilled, and in a pipeline those of chunks that have
    left its first stage. None while there cannot be a next chunk."""
    if state.limits.prefill_ranks == 1:
        return request.kv.prefilled if request.prefill_plan is None else None
    plans, found = [plan for plan in request.plans.values() if plan.FILLS_KV], list(request.kv.prefilled)
    if not plans:
        return found
    if is_suspect(request) or any(not plan.rank for plan in plans):
        return None
    for chunk in sorted([chunk for plan in plans for chunk in plan.chunks], key=lambda chunk: chunk.start):
        if (chunk.row, chunk.row_generation) == request.key_in_table and chunk.end > found[chunk.member]:
            if chunk.start != found[chunk.member]:
                return None  # the chunk before it was not done, so it counts for nothing
            found[chunk.member] = chunk.end
    return found


def _members(state: ControllerState, request: Request) -> tuple[MemberView, ...]:
    targets, tracker, next = request.targets, request.media.tracker, next_tokens(state, request) or request.kv.prefilled
    first = tracker.ready_prefix(targets[0]) if tracker is not None else targets[0]
    pictures = tracker.pictures(next[0], first) if state.limits.sees_pictures and tracker is not None else ()
    if len(targets) == 1 and not has_windows(state):
        return (MemberView(next[0], first, targets[0], request.caches.num_cached[0], pictures),)
    members, cached = range(len(targets)), request.caches.num_cached
    ready, seen = (first, *targets[1:]), (pictures, *((),) * (len(targets) - 1))
    ends = [room(state, request, m) if has_windows(state) and request.has_kv else 0 for m in members]
    return tuple([MemberView(next[m], ready[m], targets[m], cached[m], seen[m], ends[m]) for m in members])


def _lacks_windows(state: ControllerState, request: Request) -> bool:
    """Return whether some member waits for pages of layers with a window."""
    is_going_on = has_windows(state) and request.has_kv and not request.is_prefilled
    return is_going_on and (num_short(state, request) > 0 or has_gap(state, request))


def _notice_shortage(state: ControllerState, view: View, now: float) -> None:
    """Evict pages of later rows if the first row with KV pages has waited too long for patch or embedding pages."""
    for seen in view.requests:
        if not seen.segments or not seen.has_kv:
            continue
        request = state.requests[seen.key]
        if any([not state.is_lost(state.plans[plan_id].actor) for plan_id in request.plans]):
            continue
        segment = seen.segments[0]
        pool: PoolName = "patch" if segment.stage == SegmentStage.PENDING else "embedding"
        actor, need = ("video", segment.patch_pages) if pool == "patch" else ("encoder", segment.embedding_pages)
        if not credit(state, actor) or state.pools[pool].num_free >= need:
            return
        if request.wait_for_pages(now, state.limits.patience_s):
            _evict_later(state, request, pool, need)
        return


def _evict_later(state: ControllerState, request: Request, pool: PoolName, need: int) -> None:
    """Take patch and embedding pages from the last rows that have any of ``pool``; they decode their media again later. If earlier
    rows hold the missing pages, later ones keep theirs."""
    ledger = state.pools[pool]
    later = [r for r in state.live() if r.rank > request.rank]
    holders = sorted((r for r in later if ledger.num_owned(owner(r))), key=BY_RANK, reverse=True)
    coming = ledger.num_free + ledger.num_retired
    if coming + sum(ledger.num_owned(owner(r)) for r in holders) < need:
        return
    for victim in holders:
        if coming >= need:
            return
        coming += ledger.num_owned(owner(victim))  # the pages that it keeps are named by a prefill plan and freed with it
        state.totals.evicted += 1
        reset_media(state, victim, consumed_too=False)
        state.save(victim)


# ------------------------------------------------------------------------------------------------------------- issuing


def _issue_encode(state: ControllerState, choices: tuple[SegmentChoice, ...], now: float) -> None:
    """Have segments encoded, or loaded: the first choice and those behind it for which the same plan can be made."""
    state.steering.last = "encode"
    if _can_load(state, choices[0]):
        key = choices[0].key
        issue_segment_loads(state, list(takewhile(lambda choice: choice.key == key and _can_load(state, choice), choices)), now)
    else:
        issue_encode(state, list(takewhile(lambda choice: not _can_load(state, choice), choices)), now)


def _can_load(state: ControllerState, choice: SegmentChoice) -> bool:
    """Return whether a policy has chosen a segment that looks as if it were decoded."""
    return state.requests[choice.key].record.segment(choice[1:]).stage == SegmentStage.PENDING
