"""The supervisor's control socket: ``<run>/control``, a unix stream of JSON lines, mode 0600; one request, one reply.

Defines its messages, and the command line's ends ``call`` and ``borrow_role``; the supervisor's end is ``control_server``, the
gateway's is ``ask_supervisor``.
"""

import os
import socket
from pathlib import Path

import msgspec

from ..errors import RunError
from .run_report import FrontReport, RunReport

SOCKET_NAME = "control"
MAX_LINE_BYTES = 1 << 20
MAX_DESCRIPTORS = 16  # that come with one reply


class StatusRequest(msgspec.Struct, frozen=True, tag="status"):
    """Answered with a StatusReply, by a front of several models with a FrontReply."""


class RestartRequest(msgspec.Struct, frozen=True, tag="restart"):
    """Hot restart of one actor; answered with a RestartReply when it is done or has failed."""

    actor: str


class KillRequest(msgspec.Struct, frozen=True, tag="kill"):
    """SIGKILL for the process of one actor, as from outside; answered with a KillReply when it is sent."""

    actor: str


class ScaleRequest(msgspec.Struct, frozen=True, tag="scale"):
    """Another number of actors of a stage; answered with a LayoutReply when they serve, or the leaving ones have ended."""

    stage: str
    count: int


class LayoutRequest(msgspec.Struct, frozen=True, tag="layout"):
    """Another layout, of the same processes, more of them or fewer; answered as a ScaleRequest."""

    layout: str


class DebugRequest(msgspec.Struct, frozen=True, tag="debug"):
    """The asking process wants to be this actor; answered with a DebugReply. The connection then stays open for as long as it is."""

    actor: str


class DownRequest(msgspec.Struct, frozen=True, tag="down"):
    """End the run; requests get ``drain_s`` seconds to finish (None: as configured). Answered when nothing is left."""

    drain_s: float | None = None


class KeyRequest(msgspec.Struct, frozen=True, tag="key"):
    """Answered with a KeyReply, by a front of several models as well."""


Request = StatusRequest | RestartRequest | KillRequest | ScaleRequest | LayoutRequest | DebugRequest | DownRequest | KeyRequest


class StatusReply(msgspec.Struct, frozen=True, tag="status"):
    report: RunReport


class FrontReply(msgspec.Struct, frozen=True, tag="front"):
    report: FrontReport


class RestartReply(msgspec.Struct, frozen=True, tag="restart"):
    """``message`` is for users; after a failure ``log`` holds the last lines of the generation that did not come up."""

    ok: bool
    message: str
    generation: int = 0
    seconds: float = 0.0
    log: list[str] = []


class KillReply(msgspec.Struct, frozen=True, tag="kill"):
    pid: int


class LayoutReply(msgspec.Struct, frozen=True, tag="layout"):
    """The layout now, and how it came about, for users."""

    layout: str
    messages: list[str]


class DebugReply(msgspec.Struct, frozen=True, tag="debug"):
    """Be ``actor`` in ``environment``, with the descriptors of sockets that clients connect to.

    The role is free once the old generation has ended, which it is told to when the asking process reports READY.
    """

    environment: dict[str, str]


class DownReply(msgspec.Struct, frozen=True, tag="down"):
    """Every process has ended and the run directory is gone."""


class KeyReply(msgspec.Struct, frozen=True, tag="key"):
    """``server.api_key``, for the user's own commands."""

    key: str


class ErrorReply(msgspec.Struct, frozen=True, tag="error"):
    message: str


Reply = StatusReply | FrontReply | RestartReply | KillReply | LayoutReply | DebugReply | DownReply | KeyReply | ErrorReply

encode = msgspec.json.encode
decode_request = msgspec.json.Decoder(Request).decode
_decode_reply = msgspec.json.Decoder(Reply).decode


def call(run: Path, request: Request, timeout_s: float | None = 10.0) -> Reply:
    """Ask the supervisor of the run in ``run``. Raises RunError when there is none, it does not answer, or it refuses."""
    with _connect(run, timeout_s) as connection:
        try:
            connection.sendall(encode(request) + b"\n")
            with connection.makefile("rb") as stream:
                line = stream.readline()
        except TimeoutError:
            raise RunError(f"the supervisor of {run} did not answer within {timeout_s} s") from None
        except OSError:
            line = b""
    return read_reply(line, run)


def borrow_role(run: Path, actor: str, timeout_s: float = 10.0) -> tuple[DebugReply, list[int], socket.socket]:
    """Ask to be ``actor``. Returns the descriptors that belong to it, and the connection, whose end means that the run is over.

    Raises: RunError when there is no supervisor, it does not answer, or it refuses.
    """
    connection = _connect(run, timeout_s)
    line = b""
    fds: list[int] = []
    try:
        connection.sendall(encode(DebugRequest(actor)) + b"\n")
        while not line.endswith(b"\n"):
            data, received, _, _ = socket.recv_fds(connection, MAX_LINE_BYTES, MAX_DESCRIPTORS)
            fds += received
            if not data:
                break
            line += data
    except OSError as error:
        connection.close()
        raise RunError(f"the supervisor of {run} did not answer: {error.strerror or error}") from None
    connection.settimeout(None)
    reply = read_reply(line, run)
    assert isinstance(reply, DebugReply)
    return reply, fds, connection


def _connect(run: Path, timeout_s: float | None) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.settimeout(timeout_s)
    try:
        connection.connect(os.fspath(run / SOCKET_NAME))
    except OSError:
        connection.close()
        raise no_supervisor(run) from None
    return connection


def no_supervisor(run: Path) -> RunError:
    """Return the error that nobody listens on the socket."""
    return RunError(f"no supervisor answers in {run}: is a run up? (mmrt up)")


def read_reply(line: bytes, run: Path) -> Reply:
    """Decode a reply. Raises: RunError if it is an error, not whole, or of another version."""
    if not line.endswith(b"\n"):
        raise RunError(f"the supervisor of {run} ended before it answered")
    try:
        reply: Reply = _decode_reply(line)
    except msgspec.MsgspecError as error:
        raise RunError(f"the supervisor of {run} runs another version of mmrt: {error}") from None
    if isinstance(reply, ErrorReply):
        raise RunError(reply.message)
    return reply
