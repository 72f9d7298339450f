"""Answer clients with 503 while the gateway is broken, so that none waits in the listening sockets' queue for a probe.

Part of the supervisor, which owns these sockets. It reads only up to the end of a request, and never holds a client for long.
"""

import asyncio
import math
import socket
import time
from collections.abc import Sequence
from contextlib import suppress

import msgspec

READ_S = 2.0  # for a request to come; and for its client to take the answer
MAX_CLIENTS = 256
_MAX_HEAD_BYTES = 1 << 16
_MESSAGE = "the gateway is broken and will be tried again"


class StandIn:
    """Serves on copies of ``listeners`` between ``open`` and ``close``."""

    def __init__(self, listeners: Sequence[socket.socket]) -> None:
        self._listeners = listeners
        self._is_open = False
        self._opening: asyncio.Task[None] | None = None
        self._servers: list[asyncio.Server] = []
        self._clients: set[asyncio.Task[None]] = set()
        self._next_probe_s = 0.0

    def open(self, next_probe_s: float) -> None:
        """Answer from now on; clients are told to come again after ``next_probe_s`` (CLOCK_MONOTONIC)."""
        self._next_probe_s = next_probe_s
        self._is_open = True
        if not self._servers and (self._opening is None or self._opening.done()):
            self._opening = asyncio.create_task(self._listen())

    async def _listen(self) -> None:
        for listener in self._listeners:
            self._servers.append(await asyncio.start_server(self._accept, sock=listener.dup(), limit=_MAX_HEAD_BYTES))
        if not self._is_open:  # closed meanwhile
            self.close()

    def close(self) -> None:
        """Stop accepting connections; those accepted are answered."""
        self._is_open = False
        for server in self._servers:
            server.close()
        self._servers = []

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(self._clients) >= MAX_CLIENTS:
            writer.transport.abort()
            return
        client = asyncio.create_task(self._answer(reader, writer))
        self._clients.add(client)
        client.add_done_callback(self._clients.discard)

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            with suppress(OSError, TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
                async with asyncio.timeout(READ_S):
                    await reader.readuntil(b"\r\n\r\n")
            with suppress(OSError, TimeoutError):
                async with asyncio.timeout(READ_S):
                    writer.write(response(self._next_probe_s - time.monotonic()))
                    writer.write_eof()
                    while await reader.read(_MAX_HEAD_BYTES):  # over unread bytes a connection is reset, and its answer lost
                        pass
        finally:
            writer.transport.abort()


def response(wait_s: float) -> bytes:
    """Make an answer in OpenAI's format, like the gateway's (``actors/gateway/apis/openai/answers.py``)."""
    body = msgspec.json.encode({"error": {"message": _MESSAGE, "type": "overloaded_error", "param": None, "code": 503}})
    head = (
        "HTTP/1.1 503 Service Unavailable",
        "Server: mmrt",
        "Content-Type: application/json",
        f"Content-Length: {len(body)}",
        f"Retry-After: {max(1, math.ceil(wait_s) + 1)}",
        "Connection: close",
    )
    return "\r\n".join((*head, "", "")).encode() + body
