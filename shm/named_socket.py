"""Unix sockets with a path: a new one takes the place of the old one's in one step."""

import os
import socket
from pathlib import Path


def bind_in_place(path: Path, kind: socket.SocketKind, backlog: int | None = None) -> socket.socket:
    """Bind a socket of this kind at ``path``, non-blocking and for this user alone; with ``backlog`` it listens.

    A client that connects finds the old socket or this one, ready.
    """
    fresh = path.with_name(f".{path.name}.{os.getpid()}")
    bound = socket.socket(socket.AF_UNIX, kind | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
    try:
        fresh.unlink(missing_ok=True)
        os.fchmod(bound.fileno(), 0o600)  # the file that bind makes takes the socket's mode
        bound.bind(str(fresh))
        if backlog is not None:
            bound.listen(backlog)
        os.replace(fresh, path)
    except BaseException:
        bound.close()
        raise
    return bound
