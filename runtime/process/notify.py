"""sd_notify(3), both ends: actors report their state to the process that started them (``mmrt up`` or systemd).

Actors use ``Notifier``; the supervisor owns a ``NotifyListener`` on ``<run>/notify``. Beside systemd's own assignments (READY,
STATUS, WATCHDOG, STOPPING, EXTEND_TIMEOUT_USEC) three are ours, which systemd ignores: X_MMRT_ACTOR, X_MMRT_GENERATION and
X_MMRT_ACTIVE (the generation holds its role lock and does the work). The kernel vouches for the sender's pid.
"""

import os
import socket
import struct
import time
from pathlib import Path

import msgspec

from ...shm.confined import is_of_this_user

SEND_TIMEOUT_S = 5.0
STATUS_INTERVAL_S = 0.05
MAX_DATAGRAM_BYTES = 8192
_CREDENTIALS = struct.Struct("3i")  # struct ucred: pid, uid, gid


class Notifier:
    """The sending end. Without an address (no supervisor) every method does nothing.

    ``ready``, ``active`` and ``stopping`` wait up to ``SEND_TIMEOUT_S`` for room in the receiver's queue; ``status`` and
    ``watchdog`` never wait, since a newer one follows. A missing receiver is no error: the lifeline reports that.
    """

    def __init__(self, address: str | None, actor: str, generation: int = 0) -> None:
        self.actor = actor
        self.generation = generation
        self._address = ""
        self._state: tuple[str, ...] = ()  # repeated with every beat, in case it was lost
        self._status_at_s = 0.0
        self._socket: socket.socket | None = None
        self._is_connected = False
        if address:
            self._address = "\0" + address[1:] if address.startswith("@") else address
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)

    def connect(self) -> None:
        """Find the receiver once and for all, for a process that soon may look for nobody. Without one there is nobody to tell."""
        if self._socket is not None:
            try:
                self._socket.connect(self._address)
                self._is_connected = True
            except OSError:
                self.close()

    def ready(self, status: str = "ready") -> None:
        """Report a warm standby: everything that can be done without the role lock is done."""
        self._state = ("READY=1",)
        self._send(SEND_TIMEOUT_S, *self._state, f"STATUS={_line(status)}")

    def active(self, status: str = "active") -> None:
        """Report that this generation holds its role lock and serves (for the gateway: it listens)."""
        self._state = ("READY=1", "X_MMRT_ACTIVE=1")
        self._send(SEND_TIMEOUT_S, *self._state, f"STATUS={_line(status)}")

    def status(self, text: str) -> None:
        """Report activity and progress in one line for users. A line too soon after the last is dropped."""
        now_s = time.monotonic()
        if now_s >= self._status_at_s:
            self._status_at_s = now_s + STATUS_INTERVAL_S
            self._send(0, f"STATUS={_line(text)}")

    def watchdog(self) -> None:
        """Report that the main loop runs. Call it there at least every third of ``watchdog_s`` while no step deadline is declared."""
        self._send(0, "WATCHDOG=1", *self._state)

    def extend(self, seconds: float) -> None:
        """Announce that starting or stopping takes at least ``seconds`` more from now; also holds the watchdog off for that long."""
        usec = max(1, int(seconds * 1e6))
        self._send(SEND_TIMEOUT_S, f"EXTEND_TIMEOUT_USEC={usec}", "WATCHDOG=1")

    def stopping(self, status: str = "stopping") -> None:
        """Report that the actor has begun to end, on its own or on request."""
        self._send(SEND_TIMEOUT_S, "STOPPING=1", f"STATUS={_line(status)}")

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _send(self, timeout_s: float, *assignments: str) -> None:
        if self._socket is None:
            return
        lines = (*assignments, f"X_MMRT_ACTOR={self.actor}", f"X_MMRT_GENERATION={self.generation}")
        self._socket.settimeout(timeout_s)
        datagram = "\n".join(lines).encode()
        try:
            if self._is_connected:
                self._socket.send(datagram)
            else:
                self._socket.sendto(datagram, self._address)
        except OSError:
            return


def _line(text: str) -> str:
    return " ".join(text.split())[:1000]


class Notification(msgspec.Struct, frozen=True):
    """One datagram as received; ``pid`` comes from the kernel. None and False mean that the assignment was absent."""

    pid: int
    actor: str = ""
    generation: int = 0
    ready: bool = False
    active: bool = False
    stopping: bool = False
    watchdog: bool = False
    status: str | None = None
    extend_s: float | None = None


def parse(pid: int, datagram: bytes) -> Notification:
    """Parse the known assignments; anything else, and malformed numbers, are ignored, as systemd does."""
    fields: dict[str, str] = {}
    for line in datagram.decode(errors="replace").split("\n"):
        key, equals, value = line.partition("=")
        if equals:
            fields[key] = value
    extend_usec = _number(fields.get("EXTEND_TIMEOUT_USEC"))
    return Notification(
        pid=pid,
        actor=fields.get("X_MMRT_ACTOR", ""),
        generation=_number(fields.get("X_MMRT_GENERATION")) or 0,
        ready=fields.get("READY") == "1",
        active=fields.get("X_MMRT_ACTIVE") == "1",
        stopping=fields.get("STOPPING") == "1",
        watchdog=fields.get("WATCHDOG") == "1",
        status=fields.get("STATUS"),
        extend_s=None if extend_usec is None else extend_usec / 1e6,
    )


def _number(text: str | None) -> int | None:
    return int(text) if text and text.isascii() and text.isdigit() and len(text) < 19 else None


class NotifyListener:
    """The receiving end: a datagram socket at ``path``, mode 0600; ``drain`` when ``fd`` is readable."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
        path.unlink(missing_ok=True)
        os.fchmod(self._socket.fileno(), 0o600)  # the file that bind makes takes the socket's mode
        self._socket.bind(str(path))
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)

    @property
    def fd(self) -> int:
        return self._socket.fileno()

    def drain(self) -> list[Notification]:
        """Return all notifications that have arrived. Datagrams of other users are dropped."""
        found: list[Notification] = []
        while True:
            try:
                data, ancillary, _, _ = self._socket.recvmsg(MAX_DATAGRAM_BYTES, socket.CMSG_SPACE(_CREDENTIALS.size))
            except BlockingIOError:
                return found
            for level, kind, payload in ancillary:
                if level == socket.SOL_SOCKET and kind == socket.SCM_CREDENTIALS:
                    pid, uid, _ = _CREDENTIALS.unpack(payload[: _CREDENTIALS.size])
                    if is_of_this_user(uid, pid):
                        found.append(parse(pid, data))

    def close(self) -> None:
        self._socket.close()
        self.path.unlink(missing_ok=True)
