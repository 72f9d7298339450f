"""The supervisor's end of the control socket (see ``control``)."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec

from .control import MAX_LINE_BYTES, ErrorReply, Reply, Request, decode_request, encode
from .errors import RunError


class ControlServer:
    """Answers each request with what ``handler`` returns; a RunError becomes an ErrorReply."""

    def __init__(self, path: Path, handler: Callable[[Request], Awaitable[Reply]]) -> None:
        self._path = path
        self._handler = handler
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        self._server = await asyncio.start_unix_server(self._connected, self._path, limit=MAX_LINE_BYTES)
        self._path.chmod(0o600)

    def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(self._serve(reader, writer))
        self._connections.add(task)
        task.add_done_callback(self._connections.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.LimitOverrunError):
            while line := await reader.readline():
                try:
                    reply = await self._handler(decode_request(line))
                except (msgspec.MsgspecError, RunError) as error:
                    reply = ErrorReply(str(error))
                writer.write(encode(reply) + b"\n")
                await writer.drain()
        writer.close()

    async def close(self, grace_s: float = 1.0) -> None:
        """Listen no more; let replies that are under way go out."""
        if self._server is None:
            return
        self._server.close()
        self._path.unlink(missing_ok=True)
        if self._connections:
            await asyncio.wait(self._connections, timeout=grace_s)
        for task in self._connections:
            task.cancel()
