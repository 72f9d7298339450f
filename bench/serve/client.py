"""A plain client of OpenAI-compatible servers that records the time of each token. Called by ``drivers`` and ``stall``.

A stream counts as a success only with a finish reason and ``[DONE]``: a clean end without them is a silent truncation.
"""

import asyncio
import io
import time
from typing import Any

import aiohttp
import msgspec

from .errors import BenchError
from .record import Chunk, Record

MAX_EVENT_BYTES = 16 << 20
_EOF_GRACE_S = 1.0
_MAX_ERROR_CHARS = 300
_BAD_FINISHES = frozenset({"error", "abort"})


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None


class _Choice(msgspec.Struct):
    delta: _Delta | None = None
    finish_reason: str | None = None

    @property
    def has_text(self) -> bool:
        delta = self.delta
        return delta is not None and bool(delta.content or delta.reasoning_content or delta.reasoning)


class _PromptDetails(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: _PromptDetails | None = None


class _Event(msgspec.Struct):
    id: str = ""
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: msgspec.Raw | None = None


class _Model(msgspec.Struct):
    id: str


class _Models(msgspec.Struct):
    data: list[_Model]


_decode_event = msgspec.json.Decoder(_Event).decode
_decode_models = msgspec.json.Decoder(_Models).decode


class EventParser:
    """Server-sent events from bytes that may be cut anywhere: LF and CRLF, comments, data over several lines."""

    def __init__(self) -> None:
        self._rest = b""
        self._lines: list[bytes] = []

    def feed(self, data: bytes) -> list[bytes]:
        """The data of every event that these bytes complete. Raises: ValueError for an endless line."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > MAX_EVENT_BYTES:
            raise ValueError(f"an event of more than {MAX_EVENT_BYTES} bytes")
        events = []
        for line in lines:
            line = line.removesuffix(b"\r")
            if line.startswith(b"data:"):
                self._lines.append(line[5:].removeprefix(b" "))
            elif not line and self._lines:
                events.append(b"\n".join(self._lines))
                self._lines.clear()
        return events


class StreamReader:
    """Turns the events of one stream into chunks of its record.

    With continuous usage each event says how many tokens there are by now; without, an event with text counts as one token, and
    only the total of the final usage is exact.
    """

    def __init__(self, record: Record) -> None:
        self.is_done = False
        self.texts: list[str] = []
        self._record = record
        self._continuous = False
        self._seen = 0

    def take(self, event: bytes, time_s: float) -> None:
        """Take one event. Raises: BenchError for an error frame or one that does not decode."""
        if event == b"[DONE]":
            self._finish(time_s)
            return
        try:
            decoded = _decode_event(event)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise BenchError(f"bad event {event[:80]!r}: {error}") from None
        if decoded.error is not None:
            raise BenchError(f"error frame: {_excerpt(bytes(decoded.error))}")
        record, usage = self._record, decoded.usage
        record.request_id = record.request_id or decoded.id
        finish = next((choice.finish_reason for choice in decoded.choices if choice.finish_reason), None)
        if usage is not None:
            record.num_prompt_tokens, record.num_completion_tokens = usage.prompt_tokens, usage.completion_tokens
            if usage.prompt_tokens_details is not None:
                record.num_cached_tokens = usage.prompt_tokens_details.cached_tokens
            self._continuous |= bool(decoded.choices) and finish is None
        self.texts += [choice.delta.content for choice in decoded.choices if choice.delta is not None and choice.delta.content]
        if self._continuous:
            num_tokens = usage.completion_tokens - self._seen if usage is not None else 0
        else:
            num_tokens = int(any(choice.has_text for choice in decoded.choices))
        if num_tokens > 0:
            record.chunks.append(Chunk(time_s, num_tokens))
            self._seen += num_tokens
        record.finish_reason = finish or record.finish_reason

    def _finish(self, time_s: float) -> None:
        record = self._record
        self.is_done = True
        if not record.chunks and record.num_completion_tokens:
            record.chunks.append(Chunk(time_s, record.num_completion_tokens))  # tokens without any text

    def verdict(self) -> str | None:
        """The fault of a stream that has ended, or None."""
        if not self.is_done:
            return "the stream ended without [DONE]"
        reason = self._record.finish_reason
        if reason is None:
            return "the stream ended without a finish reason"
        return f"finish reason {reason!r}" if reason in _BAD_FINISHES else None


def open_session(timeout_s: float, api_key: str = "", *, keeps_connections: bool = True) -> aiohttp.ClientSession:
    """A session without a limit on connections, which serve several requests if it keeps them. ``timeout_s`` bounds each request as a
    whole. The caller closes it."""
    headers = {"Content-Type": "application/json"}
    if api_key:
        headers["Authorization"] = f"Bearer {api_key}"
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, force_close=not keeps_connections),
        timeout=aiohttp.ClientTimeout(total=timeout_s, sock_connect=min(10.0, timeout_s)),
        headers=headers,
    )


async def find_model(session: aiohttp.ClientSession, url: str) -> str:
    """The first model that the server at ``url`` offers. Raises: BenchError."""
    try:
        async with session.get(f"{url}/v1/models") as response:
            body = await response.read()
            if response.status != 200:
                raise BenchError(f"{url}/v1/models answered {response.status}: {_excerpt(body)}")
        models = _decode_models(body).data
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        raise BenchError(f"no server answers at {url}: {_describe(error)}") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BenchError(f"{url}/v1/models is not a list of models: {error}") from None
    if not models:
        raise BenchError(f"{url} offers no model")
    return models[0].id


async def post_json(session: aiohttp.ClientSession, url: str, body: bytes) -> Any:
    """Send a body. Returns the reply, in JSON. Raises: BenchError."""
    try:
        async with session.post(url, data=io.BytesIO(body)) as response:
            reply = await response.read()
            if response.status != 200:
                raise BenchError(f"{url} answered {response.status}: {_excerpt(reply)}")
        return msgspec.json.decode(reply)
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        raise BenchError(f"{url} does not answer: {_describe(error)}") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BenchError(f"the answer of {url} is no JSON: {error}") from None


async def stream_chat(session: aiohttp.ClientSession, url: str, body: bytes, record: Record) -> str:
    """Send one streaming chat completion and fill its record. Returns the text. Never raises for faults of the server.

    Cancelling it cuts the request: the connection is closed.
    """
    reader = StreamReader(record)
    record.sent_s = time.monotonic()
    try:
        # As a file: of bytes aiohttp warns from a MiB on.
        async with session.post(f"{url}/v1/chat/completions", data=io.BytesIO(body)) as response:
            if response.status != 200:
                record.error = f"HTTP {response.status}: {_excerpt(await response.read())}"
                return ""
            await _read_events(response, reader)
            record.end_s = time.monotonic()
            record.error = reader.verdict()
            if reader.is_done:
                await _drain(response)
    except asyncio.CancelledError:
        record.cut = True
        raise
    except BenchError as error:
        record.error = str(error)
    except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
        record.error = _describe(error)
    finally:
        record.end_s = record.end_s or time.monotonic()
    return "".join(reader.texts)


async def _read_events(response: aiohttp.ClientResponse, reader: StreamReader) -> None:
    parser = EventParser()
    async for data in response.content.iter_any():
        now_s = time.monotonic()
        for event in parser.feed(data):
            reader.take(event, now_s)
        if reader.is_done:
            return


async def _drain(response: aiohttp.ClientResponse) -> None:
    """Read to the end of the response, so that the connection can serve again; errors are ignored: the stream was complete."""
    try:
        async with asyncio.timeout(_EOF_GRACE_S):
            await response.content.read()
    except (aiohttp.ClientError, TimeoutError, OSError):
        pass


def _describe(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def _excerpt(body: bytes) -> str:
    text = body.decode(errors="replace").strip()
    return text if len(text) <= _MAX_ERROR_CHARS else text[:_MAX_ERROR_CHARS] + "…"
