"""From Submit to a prepared row: checks, queue, media pages, expansion of the prompt, answers (pure; rules over ``Core``)."""

from collections.abc import Sequence

from ...schema.rows import Phase
from ..bus.messages import (
    Definition,
    Failed,
    Granted,
    ItemShape,
    MediaSpan,
    Prepared,
    Queued,
    Released,
    SegmentShape,
    SequenceDefinition,
    ToActor,
    Unknown,
    encode,
)
from ..errors import RequestError
from .effects import BeginRow, WriteDefinition
from .embedding_tracker import EmbeddingTracker, lay_out
from .guidance import member_lengths, num_pages
from .kv_manager import grant_kv, wanted_kv
from .lifecycle import end, fail, failed_message
from .outages import check_served
from .poison import MAX_DEATHS, STRIKE_BYTES
from .records import Submitted
from .request import ItemRecord, Request, RowRecord, SegmentRecord, encode_record
from .scheduling.admission import Granter, Load, check_lengths, check_submission, media_pages
from .scheduling.types import Limits
from .scheduling.unified import MAX_PARTS
from .state import Core


def submit(core: Core, generation: int, key: int, definition: Definition, now: float) -> None:
    """A new request, or one that is known. Journaled before anything is answered; refusals are stateless."""
    if key not in core.requests and key not in core.ended:
        try:
            if definition.deadline_s and now >= definition.deadline_s:
                raise timed_out()
            check_placeholders(definition, core.limits)
            check_submission(definition, core.limits, load(core))
            check_served(core, definition)
        except RequestError as error:
            core.send("gateway", failed_message(core.epoch, key, error))
            return
        request = Request(key, core.next_arrival, generation, definition, heard_s=now)
        core.next_arrival += 1
        core.journal(Submitted(key, generation, request.arrival, definition))
        core.requests[key] = core.waiting[key] = request
    core.ask(key, generation)


def load(core: Core) -> Load:
    return Load(
        num_waiting=len(core.waiting),
        num_waiting_tokens=sum(len(request.definition.prompt_ids) for request in core.waiting.values()),
        num_rows_used=core.limits.num_rows - len(core.free_rows),
        service_s=core.steering.service_s,
    )


def timed_out() -> RequestError:
    return RequestError("the request was not finished in time (server.request_timeout_s)", status=504, type="timeout_error")


def check_deadlines(core: Core, now: float) -> None:
    """Fail what is late, in whatever phase it is."""
    for request in list(core.requests.values()):
        if request.failure is None and 0 < request.definition.deadline_s <= now and not request.is_finished:
            fail(core, request, timed_out())


def break_silence(core: Core, now: float) -> None:
    """Tell the gateway where a request stands that it should have asked about: if it has forgotten it, it answers Cancel.

    Needed where a Submit was accepted after the gateway had given the request up, and the answer was lost.
    """
    for request in core.requests.values():
        if now - request.heard_s >= core.limits.silence_s:
            request.heard_s = now
            core.ask(request.key, request.gateway_generation)


def cancel_older_gateways(core: Core) -> None:
    """A new gateway generation is there: nobody waits for what older ones submitted."""
    current = core.actors.get("gateway", 0)
    for request in [request for request in core.requests.values() if request.gateway_generation < current]:
        end(core, request)


def admit(core: Core, granter: Granter, request: Request, now: float) -> None:
    """Give a waiting request a row and pages, if the granter has all that it needs and nobody older waits for any of it."""
    definition = request.definition
    media = sum(media_pages(definition, core.limits))
    kv = 0
    if not definition.items:  # else the need is known after analysis
        lengths = text_lengths(definition)
        kv = sum(wanted_kv(core, lengths, 0, check_lengths(definition, lengths, core.limits), 0.0))
    if granter.take(row=1, media=media, kv=kv):
        _place(core, request, now)


def text_lengths(definition: Definition) -> tuple[int, ...]:
    return member_lengths(len(definition.prompt_ids), len(definition.companion_ids or ()))


def _place(core: Core, request: Request, now: float) -> None:
    """Give the request a row and its media pages; a text request is prepared at once. The phase word makes it count."""
    del core.waiting[request.key]
    request.row = core.free_rows.pop()
    core.row_generations[request.row] += 1
    request.row_generation = core.row_generations[request.row]
    core.rows[request.row] = request
    request.placed_s = request.video_s = now
    core.emit(BeginRow(request.row, request.row_generation))
    items = []
    for count in media_pages(request.definition, core.limits):
        run = core.allocate("media", request, count)
        assert run is not None, "the granter gave media pages that are not free"
        items.append(ItemRecord(run))
    request.record = RowRecord(request.key, filled=not items, items=items)
    core.save(request)
    core.set_phase(request, Phase.PREPARE)
    core.totals.admitted += 1
    if items:
        core.ask(request.key, request.gateway_generation)
        return
    prepare(core, request)
    if request.record.prepared:
        granted = grant_kv(core, request)
        assert granted, "the granter gave KV pages that are not free"


def prepare_analysed(core: Core) -> None:
    """Prepare the rows whose items have all been analysed."""
    for request in core.rows:
        if request is None or request.ending or request.failure is not None or request.record.prepared:
            continue
        if request.record.filled and all(item.shape is not None for item in request.record.items):
            prepare(core, request)


def prepare(core: Core, request: Request) -> None:
    """All items are analysed: expand the prompt, check it against the context, and write what other actors read."""
    shapes = [item.shape for item in request.record.items if item.shape is not None]
    definition, limits = request.definition, core.limits
    assert len(shapes) == len(definition.items)
    try:
        prompt, starts = expand(definition, shapes, limits)
        lengths = member_lengths(len(prompt), len(definition.companion_ids or ()))
        max_new_tokens = check_lengths(definition, lengths, limits)
        check_segments(shapes, limits)
        spans = [MediaSpan(start, shape) for start, shape in zip(starts, shapes, strict=True)]
        encoded = encode(
            SequenceDefinition(
                key=request.key,
                request_id=definition.request_id,
                sampling=definition.sampling,
                num_prompt_tokens=lengths[0],
                num_companion_tokens=lengths[1] if len(lengths) > 1 else 0,
                max_new_tokens=max_new_tokens,
                spans=spans,
                stop=definition.stop,
                ignore_eos=definition.ignore_eos,
                gateway_generation=request.gateway_generation,
                return_token_ids=definition.return_token_ids,
                deadline_s=definition.deadline_s,
            )
        )
        _fits("the request's description", len(encoded), limits.max_definition_bytes)
        record = request.record
        for item, shape in zip(record.items, shapes, strict=True):
            item.segments = [SegmentRecord() for _ in shape.segments]
        segments = [segment for shape in shapes for segment in shape.segments]
        num_patch = min(limits.num_patch_pages, sum(patch_pages(segment, limits) for segment in segments))
        num_embedding = min(limits.num_embedding_pages, sum(embedding_pages(segment, limits) for segment in segments))
        page_bytes = 14 * (num_patch + num_embedding) + 12 * len(segments)
        page_bytes += MAX_DEATHS * STRIKE_BYTES * (len(shapes) + min(len(segments), MAX_PARTS))
        check_record(core, request, page_bytes)
    except RequestError as error:
        fail(core, request, error)
        return
    record.prepared, record.max_new_tokens = True, max_new_tokens
    core.emit(WriteDefinition(request.row, encoded, (prompt, *([definition.companion_ids] if definition.companion_ids else []))))
    core.save(request)
    set_layout(request, lengths, starts, shapes, limits)
    core.totals.prompt_tokens += lengths[0]
    core.ask(request.key, request.gateway_generation)


def set_layout(request: Request, lengths: tuple[int, ...], starts: list[int], shapes: list[ItemShape], limits: Limits) -> None:
    """What is derived from the expansion; also after a recovery."""
    request.lengths = lengths
    if shapes:
        request.tracker = EmbeddingTracker(lay_out(starts, shapes), limits.embedding_page_tokens)


def check_placeholders(definition: Definition, limits: Limits) -> None:
    """One placeholder per medium, of its kind, in order, and text behind the last one. Raises RequestError."""
    kinds = {token: kind for kind, token in limits.placeholder_ids.items()}
    found = [kinds[token] for token in definition.prompt_ids if token in kinds]
    wanted = [item.kind for item in definition.items]
    if found != wanted:
        message = f"the prompt has placeholders for {found or 'no media'}, the request has {wanted or 'none'}"
        raise RequestError(message, param="messages")
    if wanted and definition.prompt_ids[-1] in kinds:
        raise RequestError("the prompt ends in media, text must follow it", param="messages")


def expand(definition: Definition, shapes: Sequence[ItemShape], limits: Limits) -> tuple[list[int], list[int]]:
    """Prompt ids with each placeholder repeated, by its segments' kinds, and where each item starts.

    Raises: RequestError for an item without tokens.
    """
    placeholders = set(limits.placeholder_ids.values()) if shapes else set()
    prompt: list[int] = []
    starts: list[int] = []
    for token in definition.prompt_ids:
        if token not in placeholders:
            prompt.append(token)
            continue
        shape = shapes[len(starts)]
        if shape.num_tokens < 1 or shape.num_tokens != sum(segment.num_tokens for segment in shape.segments):
            raise RequestError(f"{shape.kind} {len(starts) + 1} has no tokens", param="messages")
        starts.append(len(prompt))
        for segment in shape.segments:
            prompt += [limits.placeholder_ids[segment.kind]] * segment.num_tokens
    return prompt, starts


def patch_pages(segment: SegmentShape, limits: Limits) -> int:
    """Rows lie one after another and never cross a page border."""
    return num_pages(segment.num_rows, limits.patch_page_bytes // segment.row_bytes)


def embedding_pages(segment: SegmentShape, limits: Limits) -> int:
    return num_pages(segment.num_tokens, limits.embedding_page_tokens)


def check_segments(shapes: Sequence[ItemShape], limits: Limits) -> None:
    """What cannot be split must fit its pools. Raises RequestError."""
    for shape in shapes:
        for segment in shape.segments:
            if not 0 < segment.row_bytes <= limits.patch_page_bytes:
                raise RequestError(f"a row of {segment.row_bytes} bytes, the limit is {limits.patch_page_bytes}", param="messages")
            if patch_pages(segment, limits) > limits.num_patch_pages:
                num_bytes = segment.num_rows * segment.row_bytes
                room = limits.num_patch_pages * limits.patch_page_bytes
                raise RequestError(f"{segment.kind} of {num_bytes} decoded bytes at once, there is room for {room}", param="messages")
            if embedding_pages(segment, limits) > limits.num_embedding_pages:
                room = limits.num_embedding_pages * limits.embedding_page_tokens
                message = f"{segment.kind} of {segment.num_tokens} tokens at once, there is room for {room}"
                raise RequestError(message, param="messages")


def check_record(core: Core, request: Request, more_bytes: int = 0) -> None:
    """What is known of the media must fit the row, with ``more_bytes`` that are still to come. Raises RequestError."""
    num_bytes = len(encode_record(request.record)) + more_bytes
    _fits("the record of the request's media", num_bytes, core.limits.max_state_bytes)


def _fits(what: str, num_bytes: int, limit: int) -> None:
    if num_bytes > limit:
        raise RequestError(f"{what} takes {num_bytes} bytes, the limit is {limit}", param="messages")


def flush_answers(core: Core) -> None:
    """Tell the gateway, once per turn, where the requests stand that it asked about or that moved."""
    asked, core.asked = core.asked, {}
    position = {key: index for index, key in enumerate(core.waiting)} if asked else {}
    for key, generation in asked.items():
        if core.actors.get("gateway") == generation:
            core.send("gateway", _answer(core, key, position))


def _answer(core: Core, key: int, position: dict[int, int]) -> ToActor:
    request = core.requests.get(key)
    if request is None:
        return Released(core.epoch, key) if key in core.ended else Unknown(core.epoch, key)
    if (failure := request.failure) is not None:
        return Failed(core.epoch, key, *failed_fields(failure))
    if not request.has_row:
        return Queued(core.epoch, key, position[key])
    if request.record.prepared:
        return Prepared(core.epoch, key, request.lengths[0])
    return Granted(core.epoch, key, [item.source for item in request.record.items])


def failed_fields(failure: Failed) -> tuple[int, str, str, str | None, int | None]:
    return failure.status, failure.message, failure.error_type, failure.param, failure.retry_after_s
