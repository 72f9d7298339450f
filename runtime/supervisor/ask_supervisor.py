"""The gateway's end of the control socket (see ``control``): two requests, asked from its event loop."""

import asyncio
from pathlib import Path

from .control import (
    MAX_LINE_BYTES,
    SOCKET_NAME,
    KillReply,
    KillRequest,
    RestartReply,
    RestartRequest,
    encode,
    no_supervisor,
    read_reply,
)


async def ask(run: Path, request: RestartRequest | KillRequest) -> RestartReply | KillReply:
    """Ask as ``control.call`` does, without a time limit. Raises RunError."""
    try:
        reader, writer = await asyncio.open_unix_connection(run / SOCKET_NAME, limit=MAX_LINE_BYTES)
    except OSError:
        raise no_supervisor(run) from None
    try:
        writer.write(encode(request) + b"\n")
        line = await reader.readline()
    except (OSError, ValueError):
        line = b""
    finally:
        writer.close()
    reply = read_reply(line, run)
    assert isinstance(reply, RestartReply | KillReply)
    return reply
