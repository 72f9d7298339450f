"""Streams of events: the choices of one answer, chunk by chunk, to one connection. Runs in the gateway's event loop.

Choices take turns as their text comes; one that ends does not end the others. A stream ends with its format's end or an
error, never silently. Chunks of many tokens are made in a thread, so that other streams need not wait.
"""

import asyncio
import logging
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, Protocol

from ....runtime.errors import RequestError
from ..answers.answer_format import Chunks
from ..answers.answer_record import Progress
from ..answers.choices import NOTHING, Choice, Ending, News, Usage, error_of, usage_of
from ..at_work import in_thread
from ..keeping.endings import reset
from ..keeping.state import Place
from ..reading.validation import ChatRequest, TextRequest
from ..watching.metrics import Metrics

log = logging.getLogger(__name__)

SLOW_READER_S = 30.0
WRITE_BYTES = 256 * 1024  # at once: a client must read so many in ``SLOW_READER_S``
LOOP_TOKENS = 256  # whose chunks are made in the loop, at most


def name_as_asked(error: RequestError, field_names: Mapping[str, str]) -> None:
    """Rename the field at fault from the controller's name to the request's."""
    if error.param is not None and error.param in field_names:
        name = field_names[error.param]
        error.message, error.param = error.message.replace(f"{error.param}: ", f"{name}: ", 1), name


@dataclass(slots=True, eq=False)
class _Part:
    """A choice, whether its role has been sent, the time and the number of tokens of its last text, and how far it has been taken."""

    choice: Choice
    has_begun: bool = False
    text_s: float | None = None
    num_tokens: int = 0
    place: Place = Place()


class _PartNews(NamedTuple):
    """News of a choice, whether they are its first, and how it ends with them."""

    choice: Choice
    news: News
    is_first: bool
    ending: Ending | None


class Sink(Protocol):
    """The receiver of a stream's bytes: an HTTP response, or a record that keeps them."""

    async def write(self, data: bytes) -> None: ...


class Stream:
    """One connection that is being written to; ``tick`` checks it."""

    def __init__(
        self,
        transport: asyncio.Transport | None,
        event: asyncio.Event,
        asked: ChatRequest | TextRequest,
        choices: Sequence[Choice],
        chunks: Chunks,
        metrics: Metrics,
        keep_alive_s: float,
        threads: Executor,
        record: Progress,
    ) -> None:
        """``event`` is set when there is news of a choice. ``threads`` make long chunks."""
        self._record = record
        self.transport = transport
        self._event = event
        self._asked = asked
        self._choices = choices
        self._parts = [_Part(choice) for choice in choices]
        self._open = list(self._parts)  # those that have not ended
        self._chunks = chunks
        self._metrics = metrics
        self._keep_alive_s = keep_alive_s
        self._threads = threads
        self._written_s = time.monotonic()
        self._write_began_s: float | None = None

    def tick(self, now_s: float) -> None:
        """Every 0.1 s or so: drop the connection if its client does not read, and wake the stream if it owes a sign of life."""
        began_s = self._write_began_s
        if self._is_too_slow or (began_s is not None and now_s - began_s > SLOW_READER_S):
            log.info("%s: its client reads too slowly", self._choices[0].request.spec.generation.request_id)
            reset(self.transport)
        elif now_s - self._written_s >= self._keep_alive_s:
            self._event.set()

    async def until_started(self) -> None:
        """Wait until a choice is known to fit, or for ``keep_alive_s``. Raises: RequestError, that of a choice."""
        requests = [choice.request for choice in self._choices]
        while error_of(self._choices) is None and not any(request.has_started or request.is_over for request in requests):
            self._event.clear()
            await self._event.wait()
            if time.monotonic() - self._written_s >= self._keep_alive_s:
                break
        if (error := error_of(self._choices)) is not None:
            raise error

    async def restore(self) -> None:
        """Make again what a gateway before has shown the client, in one piece, and drop it."""
        again = list(zip(self._parts, self._record.shown, strict=True))
        while error_of(self._choices) is None and not all(part.choice.can_take_again(place) for part, place in again):
            self._event.clear()
            await self._event.wait()
        if error_of(self._choices) is None:
            await self._frames([self._take_again(part, place) for part, place in again])
        self._chunks.num_events = self._record.num_events

    def _take_again(self, part: _Part, place: Place) -> _PartNews | None:
        if place.has_ended:
            return self._take(part, time.monotonic())
        news = part.choice.take_again(place)
        part.place, part.has_begun = place, place.has_begun
        part.text_s, part.num_tokens = time.monotonic(), part.choice.request.num_tokens
        return _PartNews(part.choice, news, True, None) if place.has_begun else None

    async def write(self, response: Sink) -> None:
        """Write all events from the roles, which go with the first text or the end, to the last. All text of a choice since the last
        write shares a chunk. Raises: ConnectionResetError."""
        while True:
            self._event.clear()
            if self._is_too_slow:
                reset(self.transport)
                return
            now_s = time.monotonic()
            error = error_of(self._choices)
            frames = await self._frames([self._take(part, now_s) for part in list(self._open)])
            is_over = error is not None or not self._open
            if error is not None:
                name_as_asked(error, self._asked.field_names)
                frames += self._chunks.error(error)
            elif is_over:
                frames += self._chunks.end(usage_of(self._choices))
            elif not frames and now_s - self._written_s >= self._keep_alive_s:
                frames = self._chunks.keep_alive
            if not frames:
                await self._event.wait()
                continue
            await self._write(response, frames)
            if not is_over:  # the last of it is committed with the end of the response
                await self._record.commit([part.place for part in self._parts], self._chunks.num_events, self.renew)
            for part in self._parts:
                part.choice.request.sent(part.num_tokens, now_s)
            if is_over:
                return  # the end of the response waits for a client to read what stands in buffers: its time runs on
            self._write_began_s = None
            self._written_s = now_s

    async def _write(self, response: Sink, frames: bytes) -> None:
        """Write in parts, each of which has its own time. Raises: ConnectionResetError."""
        for start in range(0, len(frames), WRITE_BYTES):
            self._write_began_s = time.monotonic()
            await response.write(frames[start : start + WRITE_BYTES])

    def error(self, error: RequestError) -> bytes:
        """Return the end of a stream that cannot go on."""
        return self._chunks.error(error)

    def renew(self) -> None:
        """Give the client its time anew: it has read."""
        self._write_began_s = time.monotonic()

    @property
    def _is_too_slow(self) -> bool:
        return any([choice.request.is_too_slow for choice in self._choices])

    def _take(self, part: _Part, now_s: float) -> _PartNews | None:
        """Take what has come of a choice, None if nothing has."""
        choice = part.choice
        if not choice.has_news:
            return None
        news, ending = choice.take(), choice.ending
        if not news.is_shown and ending is None:
            part.place = choice.taken(part.has_begun, has_ended=False)
            return None
        is_first, part.has_begun = not part.has_begun, True
        part.place = choice.taken(has_begun=True, has_ended=ending is not None)
        if news.is_shown:
            self._measure(part, now_s)
        if ending is not None:
            self._open.remove(part)
        return _PartNews(choice, news, is_first, ending)

    async def _frames(self, found: Sequence[_PartNews | None]) -> bytes:
        """Return the chunks of what has come. Long ones are made in a thread, from what the loop does not change."""
        news = [one for one in found if one is not None]
        if not news:
            return b""
        usage = usage_of(self._choices)
        encode = partial(self._encode, news, usage)
        if sum([one.choice.cost(one.news) for one in news]) <= LOOP_TOKENS:
            return encode()
        return await asyncio.get_running_loop().run_in_executor(self._threads, in_thread(encode))

    def _encode(self, found: Sequence[_PartNews], usage: Usage) -> bytes:
        frames = []
        for choice, news, is_first, ending in found:
            piece = choice.piece(news)
            if is_first:
                frames.append(self._chunks.role(choice.index, usage))
            if piece.text or piece.calls or piece.thoughts or ending is None:
                frames.append(self._chunks.text(choice.index, piece, usage))
                piece = NOTHING
            if ending is not None:
                frames.append(self._chunks.finish(choice.index, ending, piece, usage))
        return b"".join(frames)

    def _measure(self, part: _Part, now_s: float) -> None:
        request = part.choice.request
        if part.text_s is None:
            self._metrics.on_first_text(request)
        else:
            self._metrics.on_text(now_s - part.text_s, request.num_tokens - part.num_tokens)
        part.text_s, part.num_tokens = now_s, request.num_tokens
