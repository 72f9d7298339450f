"""The supervisor's control socket: ``<run>/control``, a unix stream of JSON lines, mode 0600; one request, one reply.

What is said over it, and ``call``, the end of the command line; ``control_server`` is the supervisor's.
"""

import os
import socket
from pathlib import Path

import msgspec

from .errors import RunError
from .report import RunReport

SOCKET_NAME = "control"
MAX_LINE_BYTES = 1 << 20


class StatusRequest(msgspec.Struct, frozen=True, tag="status"):
    """Answered with a StatusReply."""


class RestartRequest(msgspec.Struct, frozen=True, tag="restart"):
    """Hot restart of one actor; answered with a RestartReply when it is done or has failed."""

    actor: str


class DownRequest(msgspec.Struct, frozen=True, tag="down"):
    """End the run; requests get ``drain_s`` seconds to finish (None: as configured). Answered when nothing is left."""

    drain_s: float | None = None


Request = StatusRequest | RestartRequest | DownRequest


class StatusReply(msgspec.Struct, frozen=True, tag="status"):
    report: RunReport


class RestartReply(msgspec.Struct, frozen=True, tag="restart"):
    """``message`` is for people; after a failure ``log`` holds the last lines of the generation that did not come up."""

    ok: bool
    message: str
    generation: int = 0
    seconds: float = 0.0
    log: list[str] = []


class DownReply(msgspec.Struct, frozen=True, tag="down"):
    """Every process has ended and the run directory is gone."""


class ErrorReply(msgspec.Struct, frozen=True, tag="error"):
    message: str


Reply = StatusReply | RestartReply | DownReply | ErrorReply

encode = msgspec.json.encode
decode_request = msgspec.json.Decoder(Request).decode
_decode_reply = msgspec.json.Decoder(Reply).decode


def call(run: Path, request: Request, timeout_s: float | None = 10.0) -> Reply:
    """Ask the supervisor of the run in ``run``. Raises RunError when there is none, it does not answer, or it refuses."""
    path = run / SOCKET_NAME
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(timeout_s)
        try:
            connection.connect(os.fspath(path))
        except OSError:
            raise RunError(f"no supervisor answers in {run}: is a run up? (mmrt up)") from None
        try:
            connection.sendall(encode(request) + b"\n")
            with connection.makefile("rb") as stream:
                line = stream.readline()
        except TimeoutError:
            raise RunError(f"the supervisor of {run} did not answer within {timeout_s} s") from None
        except OSError:
            line = b""
    if not line:
        raise RunError(f"the supervisor of {run} ended before it answered")
    reply: Reply = _decode_reply(line)
    if isinstance(reply, ErrorReply):
        raise RunError(reply.message)
    return reply
