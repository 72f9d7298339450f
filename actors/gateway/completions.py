"""``POST /v1/chat/completions`` and ``/v1/completions``: body in, answer or stream of events out. Runs in the gateway's event loop.

However a request ends (last text, error, disconnect, deadline, a client that does not read), the registry learns of it, and a
stream that has begun ends with a finish reason or an error event, then ``[DONE]``: never silently.
"""

import asyncio
import logging
import secrets
import socket
import struct
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from aiohttp import web

from ...runtime.bus.messages import MediaItem, RequestSpec
from ...runtime.config import ServerSection
from ...runtime.errors import RequestError
from .cache_keys import tenant_salt
from .client_request import ClientRequest
from .metrics import Metrics
from .prompt import Prompt, PromptBuilder
from .request_log import PROBLEM, REQUEST_ID
from .requests import RequestRegistry
from .responses import CHAT, DONE, KEEP_ALIVE, TEXT, Answer, ChunkEncoder, Completion, error_event, final_usage, json_response
from .validation import TEXT_TOKENS, ChatRequest, Limits, TextRequest, read_chat, read_detokenize, read_text, read_tokenize

log = logging.getLogger(__name__)

# A body has so long, and longer by what has arrived at this rate, but never longer without a byte: a slow link is served, a trickle
# is not.
BODY_TIMEOUT_S = 60.0
LEAST_BYTES_S = 128 * 1024
SLOW_READER_S = 30.0
OVERLOAD_RETRY_S = 1
DRAIN_RETRY_S = 5
# Bodies and media in memory at once, in bodies of the largest size.
_INTAKE_BODIES = 4
# Larger bodies are validated and tokenized in a thread, so that running streams need not wait.
_THREAD_BYTES = 4 * 1024
# Even larger ones are refused where memory is short, and use a few threads of their own, since each takes memory.
_LARGE_BYTES = 32 * 1024
_NUM_THREADS = 2


T = TypeVar("T")
_Asked = ChatRequest | TextRequest
_Read = Callable[[bytearray, Limits], _Asked]


@dataclass(eq=False)
class _Stream:
    """One connection that is being written to; ``tick`` checks it."""

    transport: asyncio.Transport | None
    event: asyncio.Event
    asked: _Asked
    request: ClientRequest
    written_s: float
    write_began_s: float | None = None


def shutting_down() -> RequestError:
    """The error that clients get when the server ends."""
    return RequestError("the server is shutting down", status=503, type="overloaded_error", retry_after_s=DRAIN_RETRY_S)


def _name_as_asked(error: RequestError, asked: _Asked) -> None:
    """Rename the field at fault from the controller's name to the request's."""
    if error.param in asked.field_names:
        name = asked.field_names[error.param]
        error.message, error.param = error.message.replace(f"{error.param}: ", f"{name}: ", 1), name


def _reset(transport: asyncio.Transport | None) -> None:
    """Drop a connection with a TCP reset: unsent bytes are lost, and the client can tell that from an end."""
    if transport is None or transport.is_closing():
        return
    transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    transport.abort()


class Completions:
    """The handlers, and the state that all their requests share."""

    def __init__(
        self,
        *,
        limits: Limits,
        prompts: PromptBuilder,
        registry: RequestRegistry,
        metrics: Metrics,
        server: ServerSection,
        fingerprint: str,
    ) -> None:
        self._limits = limits
        self._prompts = prompts
        self._registry = registry
        self._metrics = metrics
        self._server = server
        self._fingerprint = fingerprint
        self._max_body_bytes = server.max_body_mib << 20
        self._num_reading_bytes = 0
        self._threads = ThreadPoolExecutor(1, thread_name_prefix="intake")
        self._threads_of_large = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="intake-large")
        self._streams: set[_Stream] = set()
        self.num_open = 0
        self.num_reading = 0  # of them, those whose body has not come whole
        self.is_draining = False
        self.is_closed = False  # running requests have been failed, and none begins

    async def chat(self, http: web.Request) -> web.StreamResponse:
        """Answer a conversation.

        Raises:
            RequestError: as long as no headers are out.
        """
        return await self._handle(http, read_chat, CHAT)

    async def text(self, http: web.Request) -> web.StreamResponse:
        """Continue a text. Raises: as ``chat``."""
        return await self._handle(http, read_text, TEXT)

    async def tokenize(self, http: web.Request) -> web.Response:
        """Answer with the token ids of a prompt. A medium is one token, its placeholder. Raises: as ``chat``."""
        self._check_open()
        _, prompt = await self._intake(http, partial(self._parse, read_tokenize))
        return json_response({"count": len(prompt.ids), "max_model_len": self._limits.max_context, "tokens": prompt.ids})

    async def detokenize(self, http: web.Request) -> web.Response:
        """Answer with the text of token ids, control tokens included. Raises: as ``chat``."""
        self._check_open()
        return json_response(
            {"prompt": await self._intake(http, lambda body: self._prompts.text_of(read_detokenize(body, self._limits)))}
        )

    def _check_open(self) -> None:
        if self.is_draining:
            raise shutting_down()

    async def _handle(self, http: web.Request, read: _Read, answer: Answer) -> web.StreamResponse:
        self._check_open()
        self.num_open += 1
        try:
            try:
                asked, prompt = await self._intake(http, partial(self._parse, read))
            except RequestError as error:
                self._metrics.on_rejected(error.status)
                raise
            return await self._answer(http, asked, prompt, answer)
        finally:
            self.num_open -= 1

    def tick(self, now_s: float) -> None:
        """Every 0.1 s or so: wake streams that owe their client a sign of life, and drop clients that do not read."""
        for stream in list(self._streams):
            began_s = stream.write_began_s
            if stream.request.is_too_slow or (began_s is not None and now_s - began_s > SLOW_READER_S):
                log.info("%s: its client reads too slowly", stream.request.spec.request_id)
                _reset(stream.transport)
            elif now_s - stream.written_s >= self._server.keep_alive_s:
                stream.event.set()

    def abandon(self) -> None:
        """Drop the streams that are still open: their clients did not even read the error."""
        for stream in list(self._streams):
            _reset(stream.transport)

    # --------------------------------------------------------------------------------------------------------- intake

    async def _intake(self, http: web.Request, parse: Callable[[bytearray], T]) -> T:
        """Receive a body and parse it, in a thread where it is long. Raises: RequestError."""
        self._check_headers(http)
        body = bytearray()
        self.num_reading += 1
        try:
            await self._read_body(http, body)
            if len(body) <= _THREAD_BYTES:
                return parse(body)
            parsing = (self._threads if len(body) <= _LARGE_BYTES else self._threads_of_large).submit(parse, body)
        finally:
            self.num_reading -= 1
            self._num_reading_bytes -= len(body)
        # The body takes memory until its thread is done, even if no handler waits for it any more.
        loop, num_bytes = asyncio.get_running_loop(), len(body)
        self._num_reading_bytes += num_bytes
        parsing.add_done_callback(lambda _: loop.call_soon_threadsafe(self._forget, num_bytes))
        return await asyncio.shield(asyncio.wrap_future(parsing))  # cancelled, it would stay in the queue with its body all the same

    def _forget(self, num_bytes: int) -> None:
        self._num_reading_bytes -= num_bytes

    def _check_headers(self, http: web.Request) -> None:
        content_type = http.headers.get("Content-Type")
        if content_type is not None and http.content_type != "application/json":
            raise RequestError(f"Content-Type is {http.content_type!r}, expected application/json", status=415)
        packing = http.headers.get("Content-Encoding", "identity")
        if packing.lower() != "identity":
            raise RequestError(f"Content-Encoding is {packing[:100]!r}, compressed request bodies are not supported", status=415)
        length = http.content_length
        if length is not None and length > self._max_body_bytes:
            raise self._too_large(length)

    def _too_large(self, length: int) -> RequestError:
        return RequestError(f"the body has {length} bytes, the limit is {self._max_body_bytes} (server.max_body_mib)", status=413)

    async def _read_body(self, http: web.Request, body: bytearray) -> None:
        """Fill ``body``. Memory counts as it arrives: an announced length alone keeps no other request out, and a small body is
        never kept out: media of others may wait for minutes."""
        limit = _INTAKE_BODIES * self._max_body_bytes
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        due_s = began_s + BODY_TIMEOUT_S
        try:
            async with asyncio.timeout_at(due_s) as timeout:
                async for chunk in http.content.iter_any():
                    body += chunk
                    self._num_reading_bytes += len(chunk)
                    timeout.reschedule(min(due_s + len(body) / LEAST_BYTES_S, loop.time() + BODY_TIMEOUT_S))
                    if len(body) > self._max_body_bytes:
                        raise self._too_large(len(body))
                    if len(body) > _LARGE_BYTES and self._num_reading_bytes + self._registry.num_media_bytes > limit:
                        raise RequestError(
                            "too many large requests are being received",
                            status=503,
                            type="overloaded_error",
                            retry_after_s=OVERLOAD_RETRY_S,
                        )
        except RequestError:
            raise
        except TimeoutError:
            message = f"the body did not arrive in time: {len(body)} bytes in {loop.time() - began_s:.0f} s"
            raise RequestError(message, status=408) from None
        except (web.RequestPayloadError, ValueError) as error:
            raise RequestError(f"the body cannot be read: {str(error)[:200]}") from None

    def _parse(self, read: _Read, body: bytearray) -> tuple[_Asked, Prompt]:
        asked = read(body, self._limits)
        return asked, self._prompts.build(asked)

    # --------------------------------------------------------------------------------------------------------- answer

    async def _answer(self, http: web.Request, asked: _Asked, prompt: Prompt, answer: Answer) -> web.StreamResponse:
        if self.is_closed:
            raise shutting_down()
        now_s, generation = time.monotonic(), asked.generation
        id = http[REQUEST_ID] = f"{answer.id_prefix}{secrets.token_hex(12)}"
        media = asked.conversation.media if isinstance(asked, ChatRequest) else ()
        spec = RequestSpec(
            request_id=id,
            prompt_ids=prompt.ids,
            items=[MediaItem(m.kind, len(m.data), m.mime, m.options, m.path, m.num_pixels, m.work, m.content) for m in media],
            sampling=prompt.sampling,
            max_new_tokens=self._max_new_tokens(asked, prompt),
            stop=generation.stop,
            ignore_eos=generation.ignore_eos,
            deadline_s=now_s + self._server.request_timeout_s,
            companion_ids=prompt.companion_ids,
            return_token_ids=generation.return_token_ids,
            stop_token_ids=generation.stop_token_ids,
            include_stop=generation.include_stop,
            priority=generation.priority,
            salt=tenant_salt(generation.cache_salt, self._server.api_key),
        )
        completion = Completion(answer, id, int(time.time()), self._limits.model_name, self._fingerprint)
        event = asyncio.Event()
        request = self._registry.submit(spec, [medium.data for medium in media], event.set, now_s)
        try:
            if generation.stream:
                chunks = ChunkEncoder(completion, generation.include_usage, generation.continuous_usage, generation.return_token_ids)
                return await self._stream(http, asked, request, completion, chunks, event)
            return await self._whole(request, completion, event)
        except RequestError as error:
            _name_as_asked(error, asked)
            raise
        finally:
            now_s = time.monotonic()
            request.cancel(now_s)
            self._metrics.on_over(request, now_s)

    def _max_new_tokens(self, asked: _Asked, prompt: Prompt) -> int | None:
        """The limit on new tokens; None for as many as fit."""
        if asked.generation.max_new_tokens is not None or isinstance(asked, ChatRequest):
            return asked.generation.max_new_tokens
        wanted = max(TEXT_TOKENS, asked.generation.sampling.min_tokens)
        return min(wanted, self._limits.max_context - max(len(prompt.ids), len(prompt.companion_ids or ())))

    async def _whole(self, request: ClientRequest, completion: Completion, event: asyncio.Event) -> web.Response:
        parts: list[str] = []
        ids: list[int] = []
        while not request.is_over:
            event.clear()
            await event.wait()
            parts.append(request.take())
            ids += request.take_ids()
        if request.error is not None:
            raise request.error
        assert request.finish is not None
        self._metrics.on_first_text(request)
        body = completion.whole(
            "".join(parts),
            request.finish,
            final_usage(request.prompt_tokens(), request.num_cached_tokens, request.num_tokens),
            ids if request.spec.return_token_ids else None,
        )
        return web.Response(body=body, content_type="application/json", headers={"X-Request-Id": completion.id})

    async def _stream(
        self,
        http: web.Request,
        asked: _Asked,
        request: ClientRequest,
        completion: Completion,
        chunks: ChunkEncoder,
        event: asyncio.Event,
    ) -> web.StreamResponse:
        """Stream the answer. Headers are sent once the request is known to fit, or after ``keep_alive_s`` of waiting."""
        stream = _Stream(http.transport, event, asked, request, time.monotonic())
        self._streams.add(stream)
        try:
            while not (request.has_started or request.is_over):
                event.clear()
                await event.wait()
                if time.monotonic() - stream.written_s >= self._server.keep_alive_s:
                    break
            if request.error is not None:
                raise request.error
            headers = {"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
            response = web.StreamResponse(headers={**headers, "X-Request-Id": completion.id})
            await response.prepare(http)
            try:
                await self._write_events(response, stream, chunks)
                if request.error is not None:
                    http[PROBLEM] = request.error.message
                await response.write_eof()
            except ConnectionResetError:
                http[PROBLEM] = "its client has gone"
            except Exception:  # a bug here must not look like an end, nor like a second response
                log.exception("%s: its stream failed", completion.id)
                _reset(http.transport)
            return response
        finally:
            self._streams.discard(stream)

    async def _write_events(self, response: web.StreamResponse, stream: _Stream, chunks: ChunkEncoder) -> None:
        """Write all events from the role, which goes with the first text or the end, to ``[DONE]``. All text since the last write
        shares a chunk."""
        request = stream.request
        frames = b""
        has_role = False
        num_tokens = 0
        text_s: float | None = None
        while True:
            stream.event.clear()
            if request.is_too_slow:
                _reset(stream.transport)
                return
            text, is_over = request.take(), request.is_over
            now_s = time.monotonic()
            if (text or request.finish is not None) and not has_role:
                frames, has_role = chunks.role(request.prompt_tokens()), True
            if text:
                frames += chunks.text(text, request.take_ids(), request.prompt_tokens(), request.num_tokens)
                if text_s is None:
                    self._metrics.on_first_text(request)
                else:
                    self._metrics.on_text(now_s - text_s, request.num_tokens - num_tokens)
                text_s, num_tokens = now_s, request.num_tokens
            if request.error is not None:
                _name_as_asked(request.error, stream.asked)
                frames += error_event(request.error) + DONE
            elif request.finish is not None:
                prompt_tokens = request.prompt_tokens()
                frames += chunks.finish(request.finish, request.take_ids(), prompt_tokens, request.num_tokens)
                frames += chunks.usage(final_usage(prompt_tokens, request.num_cached_tokens, request.num_tokens)) + DONE
            elif not frames and now_s - stream.written_s >= self._server.keep_alive_s:
                frames = KEEP_ALIVE
            if frames:
                stream.write_began_s = now_s
                await response.write(frames)
                request.sent(num_tokens, now_s)
                if is_over:
                    return  # the end of the response waits for a client to read what stands in buffers: its time runs on
                stream.write_began_s = None
                stream.written_s = now_s
                frames = b""
            else:
                await stream.event.wait()
