"""The supervisor's end of the control socket (see ``control``): only processes of the same user are accepted (SO_PEERCRED)."""

import asyncio
import contextlib
import os
import socket
import struct
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

import msgspec

from ..errors import RunError
from .control import MAX_LINE_BYTES, ErrorReply, Reply, Request, decode_request, encode

_CREDENTIALS = struct.Struct("3i")  # struct ucred: pid, uid, gid


class WithDescriptors(msgspec.Struct, frozen=True):
    """A reply sent together with open files. ``on_sent`` is called when the other side has them, or is gone."""

    reply: Reply
    fds: Sequence[int]
    on_sent: Callable[[], None]


Handler = Callable[[Request, int], Awaitable[Reply | WithDescriptors]]


class ControlServer:
    """Answers each request with what ``handler(request, pid of the asking process)`` returns; a RunError becomes an ErrorReply."""

    def __init__(self, path: Path, handler: Handler) -> None:
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
        """Serve one connection. It is always closed in the end: the client may wait for an answer without a timeout."""
        pid, uid = _peer(writer)
        try:
            with contextlib.suppress(ConnectionError):
                while uid == os.getuid() and (line := await _read_line(reader)):
                    try:
                        reply = await self._handler(decode_request(line), pid)
                    except (msgspec.MsgspecError, RunError, OSError) as error:
                        reply = ErrorReply(str(error))
                    if isinstance(reply, WithDescriptors):
                        try:
                            _send_descriptors(writer, encode(reply.reply) + b"\n", reply.fds)
                        finally:
                            reply.on_sent()
                    else:
                        writer.write(encode(reply) + b"\n")
                    await writer.drain()
        finally:
            writer.close()

    async def close(self, grace_s: float = 1.0) -> None:
        """Stop listening; let pending replies go out."""
        if self._server is None:
            return
        self._server.close()
        if self._connections:
            await asyncio.wait(self._connections, timeout=grace_s)
        for task in self._connections:
            task.cancel()


async def _read_line(reader: asyncio.StreamReader) -> bytes:
    """Read a request; empty if the other end has closed or exceeds the line limit."""
    try:
        return await reader.readline()
    except ValueError:
        return b""


def _peer(writer: asyncio.StreamWriter) -> tuple[int, int]:
    """Return (pid, uid) of the other end, as the kernel noted them when it connected."""
    pid, uid, _ = _CREDENTIALS.unpack(
        writer.get_extra_info("socket").getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    )
    return pid, uid


def _send_descriptors(writer: asyncio.StreamWriter, data: bytes, fds: Sequence[int]) -> None:
    """Asyncio cannot send descriptors: they go out with the first byte, past the transport, whose buffer is empty here."""
    with writer.get_extra_info("socket").dup() as connection:
        socket.send_fds(connection, [data[:1]], fds)
    writer.write(data[1:])
