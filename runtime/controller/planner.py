"""Work for video, encoder and prefill: the view that policies see, and the plans that follow.

A row has at most one prefill plan in flight: messages can be reordered, and a chunk must not overtake the one before it.
``plan_results`` says what becomes of plans.
"""

from collections.abc import Iterator
from itertools import islice
from typing import TypedDict

from ..bus.messages import Analyse, Encode, EncodePart, Plan, Prefill, PrefillChunk, PreprocessSegment
from .effects import PoolName
from .intake import embedding_pages, patch_pages
from .lifecycle import reset_media
from .poison import is_suspect
from .request import Request
from .scheduling import unified
from .scheduling.budgets import allowance_s, retarget
from .scheduling.media_work import estimated_work, is_large
from .scheduling.types import (
    ChunkChoice,
    MemberView,
    RequestView,
    SegmentChoice,
    SegmentStage,
    SegmentView,
    StepLimits,
    View,
)
from .state import BY_ARRIVAL, LONG_AGO_S, ControllerState, owner

MAX_ROUNDS = 8
STUCK_S = 5.0  # a plan this old is with an actor that is away or hangs: it takes no processor from others
WINDOW = 32  # segments of one request that a policy sees: enough to keep video and encoder busy


class _VideoShare(TypedDict):
    work: tuple[int, ...]
    video_in_flight: int
    video_since_s: float


# ------------------------------------------------------------------------------------------------------------ planning


def issue(state: ControllerState, now: float) -> None:
    """Plan and send until the policy has nothing more for the credit that is left."""
    steering = state.steering
    _aim(state)
    for inflight in state.plans.values():
        if inflight.begun_s == LONG_AGO_S:  # of another controller, or for another actor: whoever has it now has just begun
            inflight.begun_s = now
    limits = StepLimits(steering.prefill.units, steering.encode.units, state.limits.exclusive)
    for _ in range(MAX_ROUNDS):
        view = make_view(state)
        step = unified.plan(view, limits, now) if view.requests else None
        if not step:
            break
        for choice in step.analyse:
            _issue_analysis(state, state.requests[choice.key], choice.item, now)
        for segment in step.decode:
            _issue_segment(state, segment, now)
        if step.encode:
            _issue_encode(state, step.encode, now)
        if step.prefill:
            _issue_prefill(state, step.prefill, now)
    _notice_shortage(state, view, now)


def _aim(state: ControllerState) -> None:
    """Budgets follow at once: the first row that decodes must not meet plans that were made for an idle run."""
    steering = state.steering
    allowance = allowance_s(steering.share, state.num_decoding, state.tbt_target_s)
    if allowance != steering.allowance_s:
        steering.allowance_s = allowance
        steering.prefill, steering.encode = retarget(steering.prefill, allowance), retarget(steering.encode, allowance)


def make_view(state: ControllerState) -> View:
    """Rows in preparation, in order of arrival, and what is free."""
    rows = [request for request in state.preparing() if request.record.filled and request.failure is None]
    rows.sort(key=BY_ARRIVAL)
    in_flight = [inflight.actor for inflight in state.plans.values() if state.now - inflight.begun_s < STUCK_S]
    return View(
        requests=tuple([request.view or _keep_view(state, request) for request in rows]),
        now=state.now,
        video_credit=state.credit("video"),
        encoder_credit=state.credit("encoder"),
        prefill_credit=state.credit("prefill"),
        encode_in_flight=in_flight.count("encoder"),
        prefill_in_flight=in_flight.count("prefill"),
        num_decoding=state.num_decoding,
        num_patch_pages=state.limits.num_patch_pages,
        num_free_patch_pages=state.pools["patch"].num_free,
        num_embedding_pages=state.limits.num_embedding_pages,
        num_free_embedding_pages=state.pools["embedding"].num_free,
        last=state.steering.last,
        large_in_flight=any(_is_large(inflight.plan) for inflight in state.plans.values()),
        last_streamed=state.steering.last_streamed,
    )


def _is_large(plan: Plan) -> bool:
    return isinstance(plan, Analyse | PreprocessSegment) and is_large(estimated_work(plan.media))


def _keep_view(state: ControllerState, request: Request) -> RequestView:
    request.view = view_request(state, request)
    return request.view


def view_request(state: ControllerState, request: Request) -> RequestView:
    """What policies see of a row. ``ControllerState.touch`` must be called whenever it changes."""
    items = request.record.items
    if not request.record.prepared:
        unanalysed = tuple(i for i, item in enumerate(items) if item.shape is None and i not in request.analysing)
        return RequestView(request.key, request.arrival, unanalysed=unanalysed, **_video_share(state, request))
    segments = () if request.record.evicting else tuple(islice(_open_segments(state, request), WINDOW))
    return RequestView(
        request.key,
        request.arrival,
        has_kv=request.has_kv and request.counts_known,
        prefill_in_flight=bool(request.prefill_plan),
        members=_members(request),
        segments=segments,
        patch_held=state.pools["patch"].num_owned(owner(request)),
        embedding_held=state.pools["embedding"].num_owned(owner(request)),
        alone=is_suspect(request),
        **_video_share(state, request),
    )


def _video_share(state: ControllerState, request: Request) -> _VideoShare:
    return {
        "work": tuple(map(estimated_work, request.spec.items)),
        "video_in_flight": sum(state.plans[plan_id].actor == "video" for plan_id in request.plans),
        "video_since_s": request.video_s,
    }


def _open_segments(state: ControllerState, request: Request) -> Iterator[SegmentView]:
    """Segments that are not encoded yet, in prompt order."""
    for index, item in enumerate(request.record.items):
        for number, segment in enumerate(item.segments):
            if segment.stage < SegmentStage.ENCODED:
                assert item.shape is not None
                shape = item.shape.segments[number]
                pages = patch_pages(shape, state.limits), embedding_pages(shape, state.limits)
                yield SegmentView(index, number, segment.stage, shape.num_rows, *pages, shape.kind == "video")


def _members(request: Request) -> tuple[MemberView, ...]:
    targets = request.targets
    first = request.tracker.ready_prefix(targets[0]) if request.tracker is not None else targets[0]
    ready = (first, *targets[1:])
    return tuple(MemberView(request.prefilled[m], ready[m], targets[m]) for m in range(len(targets)))


def _notice_shortage(state: ControllerState, view: View, now: float) -> None:
    """If the oldest row with KV pages cannot get patch or embedding pages for a while, younger rows lose theirs."""
    for seen in view.requests:
        request = state.requests[seen.key]
        if not seen.segments or request.plans or not seen.has_kv:
            continue
        segment = seen.segments[0]
        pool: PoolName = "patch" if segment.stage == SegmentStage.PENDING else "embedding"
        actor, need = ("video", segment.patch_pages) if pool == "patch" else ("encoder", segment.embedding_pages)
        if not state.credit(actor) or state.pools[pool].num_free >= need:
            return
        if request.blocked_s < 0:
            request.blocked_s = now
        elif now - request.blocked_s >= state.limits.patience_s:
            request.blocked_s = now
            _evict_younger(state, request, pool, need)
        return


def _evict_younger(state: ControllerState, request: Request, pool: PoolName, need: int) -> None:
    """Take patch and embedding pages from the youngest rows that have any of ``pool``; they decode their media again later. If older
    rows have what is missing, younger ones keep theirs."""
    ledger = state.pools[pool]
    younger = [r for r in state.rows if r is not None and not r.ending and r.arrival > request.arrival]
    holders = sorted((r for r in younger if ledger.num_owned(owner(r))), key=lambda r: -r.arrival)
    coming = ledger.num_free + ledger.num_retired
    if coming + sum(ledger.num_owned(owner(r)) for r in holders) < need:
        return
    for victim in holders:
        if coming >= need:
            return
        coming += ledger.num_owned(owner(victim))  # what it keeps is named by a prefill plan, and comes free with it
        state.totals.evicted += 1
        reset_media(state, victim, consumed_too=False)
        state.save(victim)


# ------------------------------------------------------------------------------------------------------------- issuing


def _issue_analysis(state: ControllerState, request: Request, item: int, now: float) -> None:
    source = request.record.items[item].source
    plan = Analyse(request.row, request.row_generation, item, request.spec.items[item], source)
    request.analysing.add(item)
    _place_video_plan(state, request, plan, [("media", source.pages)], now)


def _issue_segment(state: ControllerState, choice: SegmentChoice, now: float) -> None:
    request = state.requests[choice.key]
    item = request.record.items[choice.item]
    segment = item.segments[choice.segment]
    assert item.shape is not None and segment.stage == SegmentStage.PENDING
    target = state.allocate("patch", request, patch_pages(item.shape.segments[choice.segment], state.limits))
    assert target is not None, "the policy chose a segment without patch pages for it"
    segment.stage, segment.patch = SegmentStage.PREPROCESSING, target
    request.blocked_s = -1.0
    state.save(request)
    plan = PreprocessSegment(
        request.row,
        request.row_generation,
        choice.item,
        choice.segment,
        request.spec.items[choice.item],
        item.shape,
        item.source,
        target,
    )
    _place_video_plan(state, request, plan, [("media", item.source.pages), ("patch", target.pages)], now)


def _place_video_plan(
    state: ControllerState, request: Request, plan: Analyse | PreprocessSegment, uses: list[tuple[PoolName, list[int]]], now: float
) -> None:
    request.video_s = now
    if _is_large(plan):
        state.steering.last_streamed = isinstance(plan, PreprocessSegment) and plan.shape.segments[plan.segment].kind == "video"
    state.place_plan("video", plan, [request], uses, now)


def _issue_encode(state: ControllerState, choices: tuple[SegmentChoice, ...], now: float) -> None:
    parts: list[EncodePart] = []
    requests: dict[int, Request] = {}
    for choice in choices:
        request = requests[choice.key] = state.requests[choice.key]
        item = request.record.items[choice.item]
        segment = item.segments[choice.segment]
        assert item.shape is not None and segment.patch is not None and segment.stage == SegmentStage.PREPROCESSED
        shape = item.shape.segments[choice.segment]
        target = state.allocate("embedding", request, embedding_pages(shape, state.limits))
        assert target is not None, "the policy chose a segment without embedding pages for it"
        segment.stage, segment.embedding = SegmentStage.ENCODING, target
        request.blocked_s = -1.0
        parts.append(EncodePart(request.row, request.row_generation, shape, segment.patch, target))
    for request in requests.values():
        state.save(request)
    state.steering.last = "encode"
    state.place_plan("encoder", Encode(parts), requests.values(), encode_uses(parts), now)


def encode_uses(parts: list[EncodePart]) -> list[tuple[PoolName, list[int]]]:
    """Pages that an Encode plan names."""
    patch = [page for part in parts for page in part.source.pages]
    embedding = [page for part in parts for page in part.target.pages]
    return [("patch", patch), ("embedding", embedding)]


def _issue_prefill(state: ControllerState, choices: tuple[ChunkChoice, ...], now: float) -> None:
    chunks = [_chunk(state.requests[choice.key], choice) for choice in choices]
    requests = {choice.key: state.requests[choice.key] for choice in choices}
    state.steering.last = "prefill"
    inflight = state.place_plan("prefill", Prefill(chunks), requests.values(), prefill_uses(chunks, list(requests.values())), now)
    for request in requests.values():
        request.prefill_plan = inflight.plan_id


def _chunk(request: Request, choice: ChunkChoice) -> PrefillChunk:
    spans = []
    if choice.member == 0 and request.tracker is not None:
        for part in request.tracker.overlapping(choice.start, choice.end):
            run = request.record.items[part.item].segments[part.segment].embedding
            assert run is not None, "a chunk reaches into a segment without embedding pages"
            spans.append(request.tracker.span(part, run, choice.start, choice.end))
    return PrefillChunk(request.row, request.row_generation, choice.member, choice.start, choice.end, spans)


def prefill_uses(chunks: list[PrefillChunk], requests: list[Request]) -> list[tuple[PoolName, list[int]]]:
    """Pages that a Prefill plan names: embedding pages it reads and *all* KV pages of its rows, whose block tables it follows."""
    embedding = [page for chunk in chunks for span in chunk.spans for page in span.source.pages]
    kv = [page for request in requests for table in request.block_tables for page in table]
    return [("embedding", embedding), ("kv", kv)]
