"""Streams of events: the choices of one answer, chunk by chunk, to one connection. Runs in the gateway's event loop.

Choices take turns as their text comes; one that ends does not end the others. A stream ends with ``[DONE]``, after the usage or an
error.
"""

import asyncio
import logging
import socket
import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass

from aiohttp import web

from ...runtime.errors import RequestError
from .choices import NOTHING, Choice, error_of, usage_of
from .metrics import Metrics
from .responses import DONE, KEEP_ALIVE, ChunkEncoder, Usage, error_event, final_usage
from .validation import ChatRequest, TextRequest

log = logging.getLogger(__name__)

SLOW_READER_S = 30.0


def name_as_asked(error: RequestError, asked: ChatRequest | TextRequest) -> None:
    """Rename the field at fault from the controller's name to the request's."""
    if error.param in asked.field_names:
        name = asked.field_names[error.param]
        error.message, error.param = error.message.replace(f"{error.param}: ", f"{name}: ", 1), name


def reset(transport: asyncio.Transport | None) -> None:
    """Drop a connection with a TCP reset: unsent bytes are lost, and the client can tell that from an end."""
    if transport is None or transport.is_closing():
        return
    transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    transport.abort()


@dataclass(slots=True, eq=False)
class _Part:
    """A choice, whether its role has been sent, and the time and the number of tokens of its last text."""

    choice: Choice
    has_begun: bool = False
    text_s: float | None = None
    num_tokens: int = 0


class Stream:
    """One connection that is being written to; ``tick`` checks it."""

    def __init__(
        self,
        transport: asyncio.Transport | None,
        event: asyncio.Event,
        asked: ChatRequest | TextRequest,
        choices: Sequence[Choice],
        chunks: ChunkEncoder,
        metrics: Metrics,
        keep_alive_s: float,
    ) -> None:
        """``event`` is set when there is news of a choice."""
        self.transport = transport
        self._event = event
        self._asked = asked
        self._choices = choices
        self._parts = [_Part(choice) for choice in choices]
        self._open = list(self._parts)  # those that have not ended
        self._chunks = chunks
        self._metrics = metrics
        self._keep_alive_s = keep_alive_s
        self._written_s = time.monotonic()
        self._write_began_s: float | None = None

    def tick(self, now_s: float) -> None:
        """Every 0.1 s or so: drop the connection if its client does not read, and wake the stream if it owes a sign of life."""
        began_s = self._write_began_s
        if self._is_too_slow or (began_s is not None and now_s - began_s > SLOW_READER_S):
            log.info("%s: its client reads too slowly", self._choices[0].request.spec.request_id)
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

    async def write(self, response: web.StreamResponse) -> None:
        """Write all events from the roles, which go with the first text or the end, to ``[DONE]``. All text of a choice since the last
        write shares a chunk. Raises: ConnectionResetError."""
        while True:
            self._event.clear()
            if self._is_too_slow:
                reset(self.transport)
                return
            now_s = time.monotonic()
            error = error_of(self._choices)
            frames = b"".join([self._frames_of(part, now_s) for part in list(self._open)])
            is_over = error is not None or not self._open
            if error is not None:
                name_as_asked(error, self._asked)
                frames += error_event(error) + DONE
            elif is_over:
                usage = final_usage(*usage_of(self._choices))
                frames += self._chunks.usage(usage) + DONE
            elif not frames and now_s - self._written_s >= self._keep_alive_s:
                frames = KEEP_ALIVE
            if not frames:
                await self._event.wait()
                continue
            self._write_began_s = now_s
            await response.write(frames)
            for part in self._parts:
                part.choice.request.sent(part.num_tokens, now_s)
            if is_over:
                return  # the end of the response waits for a client to read what stands in buffers: its time runs on
            self._write_began_s = None
            self._written_s = now_s

    @property
    def _is_too_slow(self) -> bool:
        return any([choice.request.is_too_slow for choice in self._choices])

    def _frames_of(self, part: _Part, now_s: float) -> bytes:
        """The chunks of what has come of a choice."""
        choice, finish = part.choice, part.choice.finish
        piece = choice.take() if choice.has_news else NOTHING
        if not piece.text and finish is None:
            return b""
        usage = Usage(*usage_of(self._choices)[:2])
        frames = b"" if part.has_begun else self._chunks.role(choice.index, usage)
        part.has_begun = True
        if piece.text:
            frames += self._chunks.text(choice.index, piece, usage)
            piece = NOTHING
            self._measure(part, now_s)
        if finish is not None:
            frames += self._chunks.finish(choice.index, finish, piece, usage)
            self._open.remove(part)
        return frames

    def _measure(self, part: _Part, now_s: float) -> None:
        request = part.choice.request
        if part.text_s is None:
            self._metrics.on_first_text(request)
        else:
            self._metrics.on_text(now_s - part.text_s, request.num_tokens - part.num_tokens)
        part.text_s, part.num_tokens = now_s, request.num_tokens
