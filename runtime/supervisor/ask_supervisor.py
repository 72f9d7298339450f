"""The end of the control socket (see ``control``) for event loops: the gateway's, and that of a front of several models."""

import asyncio
from pathlib import Path

from .control import (
    MAX_LINE_BYTES,
    SOCKET_NAME,
    Reply,
    Request,
    encode,
    no_supervisor,
    read_reply,
)


async def ask(run: Path, request: Request) -> Reply:
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
    return read_reply(line, run)
