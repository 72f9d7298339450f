"""Doorbells: wake a process that waits in poll. A datagram says only *look*; shared memory holds the news.

The waiter's generation that holds the role lock binds ``<run>/<name>.bell``; ringers need not know which one that is, or if there
is any.
"""

import socket
from contextlib import suppress
from typing import Self

from .named_socket import bind_in_place
from .run_directory import RunDirectory


class Listener:
    """The waiting end: poll ``fd`` for reading, ``drain``, then look. Takes the bell over from an older generation."""

    def __init__(self, run: RunDirectory, name: str) -> None:
        self._socket = bind_in_place(run.path / f"{name}.bell", socket.SOCK_DGRAM)

    @property
    def fd(self) -> int:
        """Readable when a ring has come since the last ``drain``."""
        return self._socket.fileno()

    def drain(self) -> bool:
        """Take all rings; True if there was one. Look for work after this, not before."""
        rung = False
        while True:
            try:
                self._socket.recv(1)
            except BlockingIOError:
                return rung
            rung = True

    def close(self) -> None:
        """Stop listening. The file stays: it may be the next generation's already, and a dead one does no harm."""
        self._socket.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


class Ringer:
    """The waking end; finds the listener anew at every ring."""

    def __init__(self, run: RunDirectory, name: str) -> None:
        self._path = str(run.path / f"{name}.bell")
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)

    def ring(self) -> None:
        """Wake the listener, if there is one. Never blocks; a full queue means that it is being woken already."""
        with suppress(BlockingIOError, ConnectionRefusedError, FileNotFoundError):
            self._socket.sendto(b"!", self._path)

    def close(self) -> None:
        self._socket.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()
