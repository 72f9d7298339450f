"""Streams of chat completions that go on without their clients: those that name a conversation, by ``X-Conversation-Id``. Runs in the
gateway's event loop.

Their bytes are kept as they are made, with how far each choice is shown by them, so another gateway goes on with them where this one
ended. Each event has the number of the byte behind it as its id.
"""

import asyncio
import contextlib
import logging
import re
import time
from collections.abc import Awaitable, Callable, Sequence
from itertools import count

import msgspec
from aiohttp import web

from ....runtime.bus.messages import RequestSpec
from ....runtime.config.sections import ServerSection
from ....runtime.errors import RequestError
from ....shm.spool import whole
from ..answers.answer_format import COMMENT, WrittenAnswer
from ..answers.answer_record import AnswerRecord
from ..answers.choices import Choice, error_of, usage_of
from ..answers.link import Keeping
from ..answers.requests import RequestRegistry
from ..at_work import Work, in_steps
from ..keeping.first_gateway import CONVERSATION
from ..keeping.kept_answers import KeptAnswer
from ..keeping.patience import Patience
from ..keeping.state import Place
from ..keys.api_keys import CLIENT, Client, salt_of
from ..keys.authentication import hand_on
from ..reading.content import Conversation
from ..reading.fields import refuse, show
from ..reading.prompt import Prompt
from ..reading.tool_fields import ToolUse
from ..reading.validation import ChatRequest, Generation, read_chat
from ..watching.metrics import Metrics
from ..watching.request_log import REQUEST_ID
from .background import MAX_STRIKES, BackgroundAnswers, expect_unseen, refuse_for_memory
from .completions import Completions
from .news import News
from .openai.answers import CHAT, json_response
from .reading_along import LeftError, send_along
from .streams import Stream, name_as_asked

log = logging.getLogger(__name__)

MAX_ID_CHARS = 128
STREAMS = "stream:"  # what their ids begin with among kept answers
_ID = re.compile(rf"[A-Za-z0-9._:-]{{1,{MAX_ID_CHARS}}}")
_MAX_NUMBER_CHARS = 12
_END = b"\n\n"


class ChatJob(msgspec.Struct, array_like=True, frozen=True):
    """A stream under way: whatever another gateway needs to go on with it. ``client``: the name of the API key, "" without."""

    id: str
    created: int
    generation: Generation
    spec: RequestSpec
    media: tuple[bytes, ...]
    tool_names: list[str] | None
    is_thinking: bool | None
    client: str

    @property
    def asked(self) -> ChatRequest:
        """The request, as far as its answer depends on it."""
        tools = None if self.tool_names is None else ToolUse((), frozenset(self.tool_names))
        return ChatRequest(self.generation, Conversation((), ()), tools=tools)


class ChatState(msgspec.Struct, array_like=True, frozen=True):
    """The progress of a resumable stream. ``id``: the answer's. ``keys``: those of its choices at the controller. ``strikes``: crashes
    of gateways while it was worked on."""

    id: str
    keys: list[int]
    places: list[Place] = []
    num_events: int = 0
    strikes: int = 0


_encode = msgspec.msgpack.Encoder().encode
_decode_job = msgspec.msgpack.Decoder(ChatJob).decode
_decode_state = msgspec.msgpack.Decoder(ChatState).decode


def numbered(event: bytes, at: int) -> bytes:
    """Return an event that begins at this byte of its stream with its id, the number of the byte behind it."""
    for num_digits in count(len(str(at))):
        end = at + len(b"id: \n") + num_digits + len(event)
        if len(str(end)) == num_digits:
            return b"id: %d\n%b" % (end, event)
    raise AssertionError


class ResumableStream:
    """One under way; it is the record of its requests, and takes the bytes of its ``Stream``. ``data``: all of them so far."""

    def __init__(
        self, kept: KeptAnswer, job: ChatJob, state: ChatState, data: bytes, append: Callable[[bytes, bytes], bool], work: Work
    ) -> None:
        """``append``: keeps more bytes, and a state."""
        self.kept = kept
        self.work = work
        self.job = job
        self.state = state
        self.data = bytearray(data)
        self.shown = state.places
        self.num_events = state.num_events
        self.has_ended = self.is_left = False
        self.error: RequestError | None = None  # before its first byte
        self.client: Client | None = None
        self.choices: list[Choice] = []
        self.has_begun = asyncio.Event()  # its client may have the headers
        self.task: asyncio.Task[None] | None = None
        self.on_known: Callable[[int], None] = lambda _: None  # by key
        self._append = append
        self._pending = bytearray()
        self._rest = b""  # the beginning of an event that is written in parts
        self._news = News()

    def request(self, number: int) -> tuple[int, Keeping | None]:
        """Return key and keeping of its ``number``th request."""
        place = self.shown[number] if self.shown else Place()
        key = self.state.keys[number]
        return key, Keeping(lambda: self.on_known(key), place)

    async def write(self, data: bytes) -> None:
        """Take the next part of events, or a sign of life, which each reader gets by itself."""
        if data == COMMENT:
            return
        *events, self._rest = (self._rest + data).split(_END)
        for event in events:
            self._pending += numbered(event + _END, len(self.data) + len(self._pending))

    async def commit(self, places: Sequence[Place], num_events: int, on_more: Callable[[], None]) -> None:
        """Keep what was written, with the places that it shows, then let clients have it. Raises: RequestError without memory."""
        state = msgspec.structs.replace(self.state, places=list(places), num_events=num_events)
        if not self._append(bytes(self._pending), _encode(state)):
            self._pending.clear()  # nobody has it
            raise refuse_for_memory()
        self.state = state
        self.show()

    def show(self) -> None:
        """Let clients have what is pending."""
        self.data += self._pending
        self._pending.clear()
        self._news.tell()

    async def more(self, timeout_s: float) -> bool:
        """Wait for more. Returns whether it has come in this time."""
        return await self._news.wait(timeout_s)


class _Reader:
    """The bytes of one for one client."""

    def __init__(self, stream: ResumableStream | bytes, position: int) -> None:
        self._stream = stream
        self.position = position

    def take(self) -> tuple[bytes, bool]:
        if isinstance(self._stream, ResumableStream) and self._stream.is_left:
            raise LeftError
        is_last = not isinstance(self._stream, ResumableStream) or self._stream.has_ended
        data = self._stream.data if isinstance(self._stream, ResumableStream) else self._stream
        taken, self.position = bytes(data[self.position :]), len(data)
        return taken, is_last

    async def more(self, timeout_s: float) -> bool:
        assert isinstance(self._stream, ResumableStream)
        return await self._stream.more(timeout_s)


class ResumableStreams:
    """All of one gateway, and the handlers of their routes."""

    def __init__(
        self,
        completions: Completions,
        background: BackgroundAnswers,
        registry: RequestRegistry,
        metrics: Metrics,
        server: ServerSection,
        format: Callable[[str, int], WrittenAnswer],
    ) -> None:
        """``format``: of an answer of this id, created at this time."""
        self._completions = completions
        self._background = background
        self._kept = background.kept
        self._registry = registry
        self._metrics = metrics
        self._keep_alive_s = server.keep_alive_s
        self._timeout_s = server.request_timeout_s
        self._format = format
        self._running: dict[tuple[bytes, str], ResumableStream] = {}
        self._suspected = asyncio.Lock()  # held while one that gateways have died of is made again

    async def chat(self, http: web.Request) -> web.StreamResponse:
        """Answer a conversation, as ``Completions.chat``; a stream that names it goes on without its client."""
        if (name := http.headers.get(CONVERSATION)) is None:
            return await self._completions.chat(http)
        if not _ID.fullmatch(name):
            raise refuse(CONVERSATION, f"is {show(name)}, allowed are 1 to {MAX_ID_CHARS} letters, digits, and . _ : -")

        def detach(asked: ChatRequest, prompt: Prompt) -> Awaitable[web.StreamResponse] | None:
            return self._create(http, name, asked, prompt) if asked.generation.stream else None

        return await self._completions.answer(http, read_chat, CHAT, detach)

    async def read(self, http: web.Request) -> web.StreamResponse:
        """Stream one from a byte on."""
        tenant, name = salt_of(http, None), http.match_info["id"]
        stream = self._running.get((tenant, name)) or self._ended(tenant, name)
        if stream is None:
            raise self._unknown(name)
        start = _start_of(http)
        num_bytes = len(stream.data if isinstance(stream, ResumableStream) else stream)
        if start > num_bytes:
            raise refuse("from", f"is {start}, the stream has {num_bytes} bytes so far")
        record = AnswerRecord(http, CHAT.id_prefix, self._timeout_s)
        record.open(0, lambda: 0)
        reader = _Reader(stream, record.num_events if record.shown else start)
        return await send_along(http, record, record.id, reader, self._keep_alive_s)

    async def delete(self, http: web.Request) -> web.Response:
        """End one, if it is under way, and forget it."""
        tenant, name = salt_of(http, None), http.match_info["id"]
        if (stream := self._running.get((tenant, name))) is not None:
            self._cancel(stream)
            assert stream.task is not None
            await asyncio.wait([stream.task], timeout=10)
        if not self._kept.remove(tenant, STREAMS + name):
            raise self._unknown(name)
        return json_response({"id": name, "object": "stream", "deleted": True})

    def _unknown(self, name: str) -> RequestError:
        message = f"id: stream {show(name)} is unknown: none was begun with it as {CONVERSATION}, or it is forgotten"
        return RequestError(message, status=404, type="not_found_error", param="id")

    def _ended(self, tenant: bytes, name: str, id: str | None = None) -> bytes | None:
        """Return the bytes of one that has ended, and is that answer; None if there is none."""
        found = self._kept.get(tenant, STREAMS + name)
        if found is None or found.is_open or (id is not None and _decode_state(found.state).id != id):
            return None
        return self._kept.body(found)

    # ---------------------------------------------------------------------------------------------------------- to run

    async def _create(self, http: web.Request, name: str, asked: ChatRequest, prompt: Prompt) -> web.StreamResponse:
        tenant, client = salt_of(http, None), http.get(CLIENT)
        record = AnswerRecord(http, CHAT.id_prefix, self._timeout_s)
        http[REQUEST_ID] = record.id
        record.open(1, self._registry.new_key)
        _, keeping = record.request(0)
        stream: ResumableStream | bytes | None = self._running.get((tenant, name))
        try:
            if isinstance(stream, ResumableStream) and stream.job.id != record.id:
                message = f"{CONVERSATION}: the stream {show(name)} is under way: read it at /v1/stream/{name}, or DELETE it"
                raise RequestError(message, status=409, type="conflict_error", param=CONVERSATION)
            if stream is None:
                stream = self._ended(tenant, name, record.id)
            if stream is None:
                expect_unseen(record)
                job = self._job_of(http, record, asked, prompt, "" if client is None else client.key.name)
                stream = self._open(tenant, name, job)
                stream.client = client
                self._start(name, stream)
        finally:
            if keeping is not None:
                keeping.on_known()
        hand_on(http)
        if isinstance(stream, ResumableStream):
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(stream.has_begun.wait(), self._keep_alive_s)
            if stream.error is not None:
                raise stream.error
            stream.has_begun.set()
        return await send_along(http, record, record.id, _Reader(stream, record.num_events), self._keep_alive_s)

    def _job_of(self, http: web.Request, record: AnswerRecord, asked: ChatRequest, prompt: Prompt, client: str) -> ChatJob:
        media = asked.conversation.media
        self._background.check(salt_of(http, None), sum(len(medium.data) for medium in media))
        return ChatJob(
            record.id,
            record.created,
            msgspec.structs.replace(asked.generation, grammar=None),
            self._completions.base_spec(http, asked, prompt, record.deadline_s),
            tuple(whole(medium.data) for medium in media),
            None if asked.tools is None else sorted(asked.tools.names),
            prompt.is_thinking,
            client,
        )

    def _open(self, tenant: bytes, name: str, job: ChatJob) -> ResumableStream:
        state = ChatState(job.id, [self._registry.new_key() for _ in range(job.generation.output.best_of)])
        if (kept := self._kept.open(tenant, STREAMS + name, _encode(job), _encode(state))) is None:
            raise refuse_for_memory()
        return self._stream_of(kept, job, state, b"")

    def _stream_of(self, kept: KeptAnswer, job: ChatJob, state: ChatState, data: bytes) -> ResumableStream:
        work = Work(self._kept.marks(kept))
        return ResumableStream(kept, job, state, data, lambda more, changed: self._kept.append(kept, more, changed), work)

    def _start(self, name: str, stream: ResumableStream) -> None:
        self._running[stream.kept.tenant, name] = stream
        if stream.client is not None:
            stream.client.quota.begin(time.monotonic(), is_known=True)
        job, event, asked = stream.job, asyncio.Event(), stream.job.asked
        self._metrics.on_media(job.spec.items)
        prompt = Prompt(job.spec.prompt_ids, job.spec.companion_ids, job.spec.generation.sampling, is_thinking=job.is_thinking)
        stream.choices = self._completions.submit(asked, prompt, job.spec, job.media, 0, event, stream)
        chunks, threads = self._format(job.id, job.created).chunks(job.generation), self._completions.threads_of_answers
        writer = Stream(None, event, asked, stream.choices, chunks, self._metrics, self._keep_alive_s, threads, stream)
        stream.task = asyncio.get_running_loop().create_task(in_steps(stream.work, self._run(name, stream, writer)))

    async def _run(self, name: str, stream: ResumableStream, writer: Stream) -> None:
        try:
            if stream.shown:
                stream.has_begun.set()
                async with self._suspected if stream.state.strikes else contextlib.nullcontext():
                    await writer.restore()  # in a thread, if it is long: of several there none could be told from the others
            else:
                await writer.until_started()
                stream.has_begun.set()
            await writer.write(stream)
        except RequestError as error:
            name_as_asked(error, stream.job.asked.field_names)
            await self._fail(stream, writer, error)
        except Exception:  # a bug here must cost this stream only
            log.exception("%s failed", stream.kept.id)
            await self._fail(stream, writer, RequestError("internal error", status=500, type="internal_error"))
        self._end(name, stream)

    async def _fail(self, stream: ResumableStream, writer: Stream, error: RequestError) -> None:
        """End one by an error: a status, unless clients have their headers."""
        if stream.has_begun.is_set():
            await stream.write(writer.error(error))
        else:
            stream.error = error
        self._cancel(stream)

    def _end(self, name: str, stream: ResumableStream) -> None:
        """Keep the end, then let the controller forget the requests."""
        now_s, kept = time.monotonic(), stream.kept
        stream.has_ended = True
        stream.work.retire()  # its record goes
        stream.show()
        if stream.error is not None or (
            self._kept.has(kept) and not self._kept.put(kept.tenant, kept.id, bytes(stream.data), _encode(stream.state))
        ):
            self._kept.remove(kept.tenant, kept.id)
        self._running.pop((kept.tenant, name), None)
        stream.has_begun.set()
        self._cancel(stream)
        for choice in stream.choices:
            choice.request.release(now_s)
        usage = usage_of(stream.choices)
        self._metrics.on_over([choice.request for choice in stream.choices], usage.prompt_tokens, now_s)
        if stream.client is not None:
            stream.client.quota.end()
            if usage.completion_tokens or error_of(stream.choices) is None:
                stream.client.quota.spend(usage.prompt_tokens, usage.completion_tokens, now_s)

    def _cancel(self, stream: ResumableStream) -> None:
        for choice in stream.choices:
            choice.request.cancel(time.monotonic())

    # -------------------------------------------------------------------------------------------------------- to go on

    def resume(self, has_crashed: bool, on_resumed: Callable[[], None], patience: Patience) -> None:
        """Go on with the streams of a gateway before: see ``BackgroundAnswers.resume``."""
        found = [one for one in self._kept.open_ones() if one.id.startswith(STREAMS)]
        streams = [stream for kept in found if (stream := self._restored(kept, has_crashed)) is not None]
        left = {key for stream in streams for key in stream.state.keys}

        def known(key: int) -> None:
            left.discard(key)
            if not left:
                on_resumed()

        for stream in streams:
            stream.on_known = known
            stream.client = self._background.client(stream.job.client)
            self._start(stream.kept.id.removeprefix(STREAMS), stream)
        if not streams:
            on_resumed()
            return
        log.info("%d streams go on without their clients", len(streams))
        patience.after(on_resumed)

    def _restored(self, kept: KeptAnswer, has_crashed: bool) -> ResumableStream | None:
        body, data = self._kept.body(kept), self._kept.log(kept, 0, kept.num_log_bytes)
        assert body is not None and data is not None
        try:
            state = _decode_state(kept.state)
            if Work(self._kept.marks(kept)).take() and has_crashed:
                state = msgspec.structs.replace(state, strikes=state.strikes + 1)
                if state.strikes >= MAX_STRIKES or not self._kept.append(kept, b"", _encode(state)):
                    raise ValueError(f"gateways have died {state.strikes} times over it")
            return self._stream_of(kept, _decode_job(body), state, data)
        except (ValueError, msgspec.DecodeError) as error:
            log.warning("%s is dropped: %s", kept.id, error)
            self._kept.remove(kept.tenant, kept.id)
            return None

    def leave(self) -> None:
        """Leave all that is under way as it is, to a successor."""
        for stream in self._running.values():
            assert stream.task is not None
            stream.task.cancel()
            for key in stream.state.keys:
                self._registry.forget(key)
            stream.is_left = True
            stream.has_begun.set()
            stream.show()
        self._running.clear()


def _start_of(http: web.Request) -> int:
    """Return the byte from which on a client wants a stream: behind the last event that it has, or as the URL says. Raises:
    RequestError."""
    last = http.headers.get("Last-Event-ID")
    name, given = ("from", http.query.get("from", "0")) if last is None else ("Last-Event-ID", last)
    if not (given.isascii() and given.isdigit() and len(given) <= _MAX_NUMBER_CHARS):
        raise refuse(name, f"is {show(given)}, expected the number of a byte, from 0 on")
    return int(given)
