"""The path from Submit to a prepared row: checks, queue, media pages, expansion of the prompt, replies."""

import math
from collections.abc import Sequence

from ....schema.media import ItemShape, MediaSpan, SegmentShape
from ....schema.rows import Phase
from ...bus.messages import Computed, Failed, Granted, Prepared, Queued, Released, RequestSpec, SequenceSpec, ToActor, Unknown
from ...bus.request_keys import gateway_of
from ...bus.wire import encode
from ...errors import RequestError
from ...stage_table import InstanceId
from ..caches.media_sharing import join, known_shapes, look_up
from ..caches.prefix_cache import PagesToCome, set_keys
from ..caches.snapshots import has_states, set_borders
from ..caches.window_pages import has_windows
from ..scheduling.admission import Load, ResourceGate, check_lengths, check_submission, media_pages
from ..scheduling.guidance import Lengths, member_lengths, num_pages
from ..scheduling.types import MAX_PARTS, Limits
from ..state.effects import BeginRow, WriteSpec
from ..state.embedding_tracker import EmbeddingTracker, lay_out
from ..state.records import Rehomed, Submitted
from ..state.request import Request
from ..state.row_record import MEMBER_BYTES, ItemRecord, RowRecord, SegmentRecord, encode_record
from ..state.state import BY_RANK, ControllerState
from .expansion import check_placeholders, expand, expanded_place, spans_of
from .kv_manager import grant_kv, wanted_kv
from .lifecycle import end, fail, failed_message
from .media_budget import check_pixels
from .outages import check_served
from .placement import Placement, choose_pools
from .poison import MAX_STRIKES, STRIKE_BYTES


def submit(state: ControllerState, generation: int, key: int, spec: RequestSpec, now: float) -> None:
    """Accept a new request, or recognise a known one, which a new gateway takes over. It is journaled before any answer; refusals are
    stateless."""
    known = state.requests.get(key)
    if known is not None and known.gateway_generation < generation:
        known.gateway_generation = generation
        known.hear(now)
        state.journal(Rehomed(key, generation))
    if key not in state.requests and key not in state.ended:
        try:
            if spec.generation.deadline_s and now >= spec.generation.deadline_s:
                raise timed_out()
            check_placeholders(spec, state.limits)
            check_submission(spec, state.limits, load(state))
            check_pixels(state, spec)
            check_served(state, spec)
        except RequestError as error:
            state.send(gateway_of(key), failed_message(state.epoch, key, error))
            return
        submitted = Submitted(key, generation, state.next_arrival, spec, now)
        request = state.make_request(submitted)
        request.hear(now)
        state.next_arrival += 1
        state.deadline_s = min(state.deadline_s, spec.generation.deadline_s or math.inf)
        state.journal(submitted)
        state.waiting[key] = request
    state.ask(key, generation)


def load(state: ControllerState) -> Load:
    return Load(
        num_waiting=len(state.waiting),
        num_waiting_tokens=sum([len(request.spec.prompt_ids) for request in state.waiting.values()]),
        num_rows_used=state.limits.num_rows - len(state.free_rows),
        service_s=state.steering.service_s,
    )


def timed_out() -> RequestError:
    return RequestError("the request was not finished in time (server.request_timeout_s)", status=504, type="timeout_error")


def check_deadlines(state: ControllerState, now: float) -> None:
    """Fail requests past their deadlines, in any phase."""
    if now < state.deadline_s:
        return
    state.deadline_s = min(
        (r.spec.generation.deadline_s for r in state.requests.values() if r.spec.generation.deadline_s > now), default=math.inf
    )
    for request in list(state.requests.values()):
        if request.failure is None and 0 < request.spec.generation.deadline_s <= now and not request.is_finished:
            fail(state, request, timed_out())


def probe_silent_requests(state: ControllerState, now: float) -> None:
    """Report a request's state to a gateway that has not asked about it for too long. A gateway that has forgotten it answers Cancel.

    Needed when a Submit was accepted after the gateway had given up the request, and the answer was lost.
    """
    if now - state.heard_s < state.limits.silence_s:
        return
    for request in state.requests.values():
        if now - request.last_heard_s >= state.limits.silence_s:
            request.hear(now)
            state.ask(request.key, request.gateway_generation)
    state.heard_s = min((request.last_heard_s for request in state.requests.values()), default=now)


def cancel_older_gateways(state: ControllerState, gateway: InstanceId) -> None:
    """End the requests of older generations of this gateway that the present one has not taken over: their clients are gone."""
    current = state.actors.get(gateway, 0)
    for request in [r for r in state.requests.values() if r.gateway_generation < current and gateway_of(r.key) == gateway]:
        end(state, request)


def admit(state: ControllerState, gate: ResourceGate, to_come: PagesToCome, request: Request, now: float) -> None:
    """Give a waiting request a row and pages, if the gate has all that it needs and no earlier request waits for any of it. One that
    waits for pages ``to_come`` takes nothing and keeps nothing from others."""
    if request.admission_need is None:
        request.admission_need = _admission_need(state, request.spec)
        if not request.spec.items:
            request.record.era = state.era
            _set_keys(state, request, prompts_of(request.spec, request.spec.prompt_ids), [])
    media, kv = request.admission_need
    if request.spec.items:
        if gate.take(row=1, media=media):
            _place(state, request, None, now)
        return
    placement = choose_pools(state, request, text_lengths(request.spec), kv, gate)
    if to_come.have_next_of(request, placement.most_hits):
        return
    if gate.take(row=1, **placement.needs):
        _place(state, request, placement, now)
        to_come.add(request)


def _admission_need(state: ControllerState, spec: RequestSpec) -> tuple[int, Lengths]:
    """Return the media pages needed, and the KV pages per member. With media, those are known only after analysis."""
    media = sum(media_pages(spec, state.limits))
    if spec.items:
        return media, ()
    lengths = text_lengths(spec)
    return media, wanted_kv(state, lengths, 0, check_lengths(spec, lengths, state.limits), 0.0)


def text_lengths(spec: RequestSpec) -> tuple[int, ...]:
    return member_lengths(len(spec.prompt_ids), len(spec.companion_ids or ()))


def prompts_of(spec: RequestSpec, prompt: list[int]) -> tuple[list[int], ...]:
    """Return the ids of both members, or of the only one. ``prompt``: the expanded prompt."""
    return (prompt, *([spec.companion_ids] if spec.companion_ids else []))


def _place(state: ControllerState, request: Request, placement: Placement | None, now: float) -> None:
    """Give the request a row and its media pages; a text request, which has a ``placement``, is prepared at once. Writing the phase
    word makes it effective."""
    del state.waiting[request.key]
    row = state.free_rows.pop()
    state.row_generations[row] += 1
    request.take_row(row, state.row_generations[row], now)
    state.rows[row] = request
    state.emit(BeginRow(request.row, request.row_generation))
    items = []
    for count in media_pages(request.spec, state.limits):
        run = state.allocate("media", request, count)
        assert run is not None, "the granter gave media pages that are not free"
        items.append(ItemRecord(run))
    request.begin_record(RowRecord(request.key, filled=not items, items=items, era=state.era))
    state.save(request)
    state.set_phase(request, Phase.PREPARE)
    join(state, request)
    state.totals.admitted += 1
    if items:
        state.ask(request.key, request.gateway_generation)
        return
    prepare(state, request)
    if request.record.prepared:
        granted = placement is not None and grant_kv(state, request, placement)
        assert granted, "the granter gave KV pages that are not free"


def prepare_analysed(state: ControllerState) -> None:
    """Prepare the rows whose items have all been analysed."""
    if all([request.record.prepared for request in state.preparing()]):
        return
    for request in state.touched():
        if request.failure is not None or request.record.prepared or not request.record.filled:
            continue
        # up to the first by which it fails: then it may have left its row
        are_recorded = all(set_shape(state, request, item, shape) for item, shape in known_shapes(state, request))
        if are_recorded and all(item.shape is not None for item in request.record.items):
            prepare(state, request)


def set_shape(state: ControllerState, request: Request, item: int, shape: ItemShape) -> bool:
    """Record an analysis. Returns False for a request that fails by it: it contradicts itself, or its record outgrows the row."""
    medium = request.spec.items[item]
    if fault := state.limits.fault_of(medium.kind, shape):
        message = f"{medium.path}: the analysis of the {medium.kind} contradicts itself: {fault}"
        fail(state, request, RequestError(message, status=500, type="internal_error"))
        return False
    request.record.items[item].shape = shape
    try:
        check_record(state, request)
    except RequestError as error:
        request.record.items[item].shape = None
        fail(state, request, error)
        return False
    state.save(request)
    return True


def prepare(state: ControllerState, request: Request) -> None:
    """Once all items are analysed, expand the prompt, check it against the context, and write the data that other actors read."""
    shapes = [item.shape for item in request.record.items if item.shape is not None]
    spec, limits = request.spec, state.limits
    assert len(shapes) == len(spec.items)
    try:
        prompt, starts = expand(spec, shapes, limits)
        prompts = prompts_of(spec, prompt)
        lengths = tuple(map(len, prompts))
        max_new_tokens = check_lengths(spec, lengths, limits)
        check_segments(starts, shapes, limits)
        spans = spans_of(prompt, starts, shapes, limits)
        encoded = encode(
            SequenceSpec(
                key=request.key,
                generation=spec.generation,
                num_prompt_tokens=lengths[0],
                num_companion_tokens=lengths[1] if len(lengths) > 1 else 0,
                max_new_tokens=max_new_tokens,
                spans=spans,
                gateway_generation=request.gateway_generation,
            )
        )
        _fits("the request's description", len(encoded), limits.max_spec_bytes)
        record = request.record
        for item, shape in zip(record.items, shapes, strict=True):
            item.segments = [SegmentRecord() for _ in shape.segments]
        segments = [segment for shape in shapes for segment in shape.segments]
        num_patch = min(limits.num_patch_pages, sum(patch_pages(segment, limits) for segment in segments))
        num_embedding = min(limits.num_embedding_pages, sum(embedding_pages(segment, limits) for segment in segments))
        page_bytes = MEMBER_BYTES + 14 * (num_patch + num_embedding) + 12 * len(segments)
        page_bytes += MAX_STRIKES * STRIKE_BYTES * (len(shapes) + min(len(segments), MAX_PARTS))
        check_record(state, request, page_bytes)
    except RequestError as error:
        fail(state, request, error)
        return
    record.prepare(max_new_tokens)
    state.emit(WriteSpec(request.row, encoded, prompts))
    state.save(request)
    set_layout(state, request, prompts, starts, shapes)
    look_up(state, request)
    state.totals.prompt_tokens += lengths[0]
    state.ask(request.key, request.gateway_generation)


def set_layout(
    state: ControllerState, request: Request, prompts: tuple[list[int], ...], starts: list[int], shapes: list[ItemShape]
) -> None:
    """Set the fields derived from the expansion; also after a recovery."""
    request.kv.prepare(tuple(map(len, prompts)))
    sampling = request.spec.generation.sampling
    is_plain = len(prompts) == 1 and not sampling.grammar and request.spec.generation.pooling is None
    request.answer.begin_in_prefill(state.limits.first_tokens and is_plain and not request.spec.is_prefill_only)
    if shapes:
        request.media.lay_out(_tracker(starts, shapes, state.limits))
    _set_keys(state, request, prompts, spans_of(prompts[0], starts, shapes, state.limits))


def _set_keys(state: ControllerState, request: Request, prompts: tuple[list[int], ...], spans: list[MediaSpan]) -> None:
    if request.caches.keys:
        return
    set_keys(state, request, prompts, spans)
    if request.caches.keys and has_states(state):
        spec = request.spec
        set_borders(state, request, [expanded_place(spec, place, spans, state.limits) for place in spec.borders])
    elif request.caches.keys and has_windows(state):
        request.caches.set_borders([[], []], expanded_place(request.spec, request.spec.borders[0], spans, state.limits))


def patch_pages(segment: SegmentShape, limits: Limits) -> int:
    """Return the number of patch pages. Rows are consecutive and never cross a page boundary."""
    return num_pages(segment.num_rows, limits.patch_page_bytes // segment.row_bytes)


def embedding_pages(segment: SegmentShape, limits: Limits) -> int:
    return num_pages(segment.num_tokens, limits.embedding_page_tokens)


def _tracker(starts: Sequence[int], shapes: Sequence[ItemShape], limits: Limits) -> EmbeddingTracker:
    return EmbeddingTracker(lay_out(starts, shapes), limits.embedding_page_tokens, limits.grid)


def check_segments(starts: Sequence[int], shapes: Sequence[ItemShape], limits: Limits) -> None:
    """Check that whatever cannot be split fits its pools, beside what is kept until it is ready. ``starts``: of the items, in the
    prompt. Raises RequestError."""
    tracker = _tracker(starts, shapes, limits)
    for item, shape in enumerate(shapes):
        for number, segment in enumerate(shape.segments):
            if not 0 < segment.row_bytes <= limits.patch_page_bytes:
                raise RequestError(f"a row of {segment.row_bytes} bytes, the limit is {limits.patch_page_bytes}", param="messages")
            if patch_pages(segment, limits) > limits.num_patch_pages:
                num_bytes = segment.num_rows * segment.row_bytes
                room = limits.num_patch_pages * limits.patch_page_bytes
                raise RequestError(f"{segment.kind} of {num_bytes} decoded bytes at once, there is room for {room}", param="messages")
            num_left = limits.num_embedding_pages - tracker.num_kept_pages(item, number)
            if embedding_pages(segment, limits) > num_left:
                room = num_left * limits.embedding_page_tokens
                message = f"{segment.kind} of {segment.num_tokens} tokens at once, there is room for {room}"
                raise RequestError(message, param="messages")


def check_record(state: ControllerState, request: Request, more_bytes: int = 0) -> None:
    """Check that the record of the media fits the row, with ``more_bytes`` still to come. Raises RequestError."""
    num_bytes = len(encode_record(request.record)) + more_bytes
    _fits("the record of the request's media", num_bytes, state.limits.max_state_bytes)


def _fits(what: str, num_bytes: int, limit: int) -> None:
    if num_bytes > limit:
        raise RequestError(f"{what} takes {num_bytes} bytes, the limit is {limit}", param="messages")


def send_replies(state: ControllerState) -> None:
    """Tell the gateway, once per turn, the state of requests that it asked about or that changed."""
    if not state.pending_replies:
        return
    pending_replies, state.pending_replies = state.pending_replies, {}
    waiting = sorted(state.waiting.values(), key=BY_RANK)
    position = {request.key: index for index, request in enumerate(waiting)}
    for key, generation in pending_replies.items():
        if state.actors.get(gateway := gateway_of(key)) == generation:
            state.send(gateway, _answer(state, key, position))


def _answer(state: ControllerState, key: int, position: dict[int, int]) -> ToActor:
    request = state.requests.get(key)
    if request is None:
        return Released(state.epoch, key) if key in state.ended else Unknown(state.epoch, key)
    if (failure := request.failure) is not None:
        return Failed(state.epoch, key, *failed_fields(failure))
    if not request.has_row:
        return Queued(state.epoch, key, position[key])
    if request.record.prepared:
        known = request.record.num_cached_tokens if request.caches.keys else 0
        share = min([item.options.known_share for item in request.spec.items], default=1.0)
        if request.is_computed:
            return Computed(state.epoch, key, *request.key_in_table, request.kv.lengths[0], known or 0, share)
        return Prepared(state.epoch, key, request.kv.lengths[0], -1 if known is None else known, _num_sound_frames(request), share)
    return Granted(state.epoch, key, [item.source for item in request.record.items])


def _num_sound_frames(request: Request) -> int:
    shapes = [item.shape for item in request.record.items if item.shape is not None]
    return sum(shape.grid[0] for shape in shapes if shape.kind == "audio")


def failed_fields(failure: Failed) -> tuple[int, str, str, str | None, int | None, str | None]:
    return failure.status, failure.message, failure.error_type, failure.param, failure.retry_after_s, failure.code
