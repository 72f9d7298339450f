"""Many streams at next to no cost: raw sockets whose bytes are only kept with their times, and understood when all is over.

Called by ``runtime``, where a real client would need more processor than the runtime that is measured. Its limits: one request per
connection, plain HTTP, and a server that writes whole events per HTTP chunk.
"""

import asyncio
import time
from collections.abc import Sequence
from typing import cast
from urllib.parse import urlsplit

from mmrt.bench.serve.client import EventParser, StreamReader
from mmrt.bench.serve.errors import BenchError
from mmrt.bench.serve.record import Record


class RawStream(asyncio.Protocol):
    """One connection with one request. ``finished`` when ``[DONE]`` has come or the connection has ended."""

    def __init__(self, request: bytes) -> None:
        self.finished: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.sent_s = 0.0
        self.end_s = 0.0
        self.pieces: list[tuple[float, bytes]] = []
        self._request = request
        self._tail = b""
        self._transport: asyncio.BaseTransport | None = None

    @property
    def has_begun(self) -> bool:
        """Something beyond the first event, which may be no more than a role, has arrived."""
        return len(self.pieces) > 2

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport
        self.sent_s = time.monotonic()
        cast(asyncio.Transport, transport).write(self._request)

    def data_received(self, data: bytes) -> None:
        self.pieces.append((time.monotonic(), data))
        self._tail = self._tail[-16:] + data
        if b"[DONE]" in self._tail:
            self._end()

    def connection_lost(self, exc: Exception | None) -> None:
        self._end()

    def abort(self) -> None:
        """Leave before the end, as a client that goes away does."""
        self._end()

    def _end(self) -> None:
        if not self.finished.done():
            self.end_s = time.monotonic()
            self.finished.set_result(None)
        if self._transport is not None:
            self._transport.close()

    def record(self, index: int) -> Record:
        """The record parsed from the bytes."""
        record = Record(index=index, group="stream", scheduled_s=self.sent_s, sent_s=self.sent_s, end_s=self.end_s)
        status = self.pieces[0][1].partition(b"\r\n")[0] if self.pieces else b""
        if b" 200 " not in status:
            record.error = f"answered {b''.join(data for _, data in self.pieces)[:500].decode(errors='replace')!r}"
            return record
        parser, reader = EventParser(), StreamReader(record)
        try:
            for time_s, data in self.pieces:
                for event in parser.feed(data):
                    reader.take(event, time_s)
        except (BenchError, ValueError) as error:
            record.error = str(error)
            return record
        record.error = reader.verdict()
        return record


async def open_streams(url: str, bodies: Sequence[bytes]) -> list[RawStream]:
    """Connect and send them all; returns without waiting for answers. Raises: BenchError when the server is not there."""
    return [await _open_stream(url, body) for body in bodies]


async def _open_stream(url: str, body: bytes) -> RawStream:
    parts = urlsplit(url)
    head = (
        f"POST {parts.path.rstrip('/')}/v1/chat/completions HTTP/1.1\r\nHost: {parts.netloc}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    )
    loop = asyncio.get_running_loop()
    try:
        _, stream = await loop.create_connection(lambda: RawStream(head.encode() + body), parts.hostname or "", parts.port or 80)
    except OSError as error:
        raise BenchError(f"no server answers at {url}: {error}") from None
    return stream
