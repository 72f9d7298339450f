"""Hand open descriptors from process to process, for things without a name in the run directory, such as CUDA memory.

The ``memory`` actor owns the server, on ``<run>/device``; an actor that computes connects and gets all descriptors in one packet.
Both ends ask the kernel for the other's identity (SO_PEERCRED): only processes of the same user are served, and none that is confined.
"""

import json
import os
import socket
import struct
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple, Self

from .confined import is_confined
from .errors import MissingError, ShmError
from .named_socket import bind_in_place

MAX_DESCRIPTORS = 16
_MAX_PACKET_BYTES = 4096
_BACKLOG = 16
_CREDENTIALS = struct.Struct("3i")  # struct ucred: pid, uid, gid


class Descriptor(NamedTuple):
    """An open descriptor of this process, and how many bytes lie behind it."""

    fd: int
    num_bytes: int


class DescriptorServer:
    """Hands ``descriptors`` (by name, at most MAX_DESCRIPTORS) to all who connect. They stay the caller's, and open while it serves."""

    def __init__(self, path: Path, descriptors: Mapping[str, Descriptor]) -> None:
        """Takes the place of an older generation's server at ``path``."""
        assert 0 < len(descriptors) <= MAX_DESCRIPTORS
        self._packet = json.dumps({name: descriptor.num_bytes for name, descriptor in descriptors.items()}).encode()
        assert len(self._packet) <= _MAX_PACKET_BYTES
        self._fds = [descriptor.fd for descriptor in descriptors.values()]
        self._socket = bind_in_place(path, socket.SOCK_SEQPACKET, _BACKLOG)

    @property
    def fd(self) -> int:
        """Readable when a client waits for ``serve``."""
        return self._socket.fileno()

    def serve(self) -> int:
        """Answer all waiting clients; return how many got the descriptors. Other users' and dead clients get nothing."""
        served = 0
        while True:
            try:
                connection, _ = self._socket.accept()
            except BlockingIOError:
                return served
            with connection, suppress(OSError):  # a client that is gone by now needs nothing
                connection.setblocking(False)
                pid, uid = peer(connection)
                if uid == os.getuid() and not is_confined(pid):
                    socket.send_fds(connection, [self._packet], self._fds)
                    served += 1

    def close(self) -> None:
        """Stop serving. The file stays: it may be the next generation's already, and a dead one does no harm."""
        self._socket.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


def fetch_descriptors(path: Path, timeout_s: float) -> dict[str, Descriptor]:
    """Fetch the descriptors that the server at ``path`` hands out, closed on exec; the caller closes them.

    Raises: MissingError if no server listens there; ShmError if the server is another user's, or has not answered after ``timeout_s``.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC) as connection:
        connection.settimeout(timeout_s)
        try:
            connection.connect(str(path))
        except (FileNotFoundError, ConnectionRefusedError, BlockingIOError):  # the last: too many wait there
            raise MissingError(f"nobody hands out descriptors at {path}") from None
        except TimeoutError:
            raise ShmError(f"{path} took no connection within {timeout_s:g} s") from None
        if (uid := peer(connection)[1]) != os.getuid():
            raise ShmError(f"{path} is served by user {uid}, not by {os.getuid()}")
        return _receive(connection, path, timeout_s)


def _receive(connection: socket.socket, path: Path, timeout_s: float) -> dict[str, Descriptor]:
    try:
        packet, fds, _, _ = socket.recv_fds(connection, _MAX_PACKET_BYTES, MAX_DESCRIPTORS, socket.MSG_CMSG_CLOEXEC)
    except TimeoutError:
        raise ShmError(f"{path} has sent nothing within {timeout_s:g} s") from None
    except ConnectionError:
        packet, fds = b"", []
    for fd in fds:
        os.set_inheritable(fd, False)
    sizes: dict[str, int] = json.loads(packet) if packet else {}
    if not fds or len(sizes) != len(fds):
        for fd in fds:
            os.close(fd)
        if not packet:
            raise MissingError(f"the server at {path} went away")
        raise ShmError(f"{path} has sent {len(fds)} descriptors for {len(sizes)} names")
    return {name: Descriptor(fd, num_bytes) for (name, num_bytes), fd in zip(sizes.items(), fds, strict=True)}


def peer(connection: socket.socket) -> tuple[int, int]:
    """Process and user of the other end, as the kernel noted them when it connected or listened."""
    pid, uid, _ = _CREDENTIALS.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return int(pid), int(uid)
