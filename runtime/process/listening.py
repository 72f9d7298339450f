"""The sockets that clients connect to. They belong to a process that outlives the gateway: the supervisor, or systemd.

``mmrt up`` opens them once, and each generation of the gateway inherits them. Connections that arrive while no gateway accepts,
because one hands over to the next or has been killed, wait in the kernel's queue: they are never refused while the run is up. A
gateway without inherited sockets (systemd without a socket unit) opens its own.
"""

import errno
import fcntl
import logging
import os
import resource
import socket
from collections.abc import Sequence

from ..errors import ConfigError, RunError

log = logging.getLogger(__name__)

BACKLOG = 1024  # connections that may wait; the system's own limit is net.core.somaxconn
MIN_OPEN_FILES = 128  # of one process: the gateway has about 30 of its own
MAX_CONNECTIONS = 16_384  # by default, whatever number of files may be open
EXTRA_CONNECTIONS = 32  # beyond the limit, for probes and refusals
_OWN_FILES = 64  # of the gateway, besides connections
_HIGH_FD = 64  # above every descriptor that children are given, so that none overwrites another on the way


def open_listeners(host: str, port: int) -> list[socket.socket]:
    """Listen on every address of ``host`` that this machine has, with one port for all of them (0: any free one). Not inherited by
    other programs.

    Raises: RunError if the name is unknown or an address is in use, or this process may open too few files.
    """
    _check_open_files()
    opened: list[socket.socket] = []
    absent: OSError | None = None
    try:
        infos = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        for family, kind, protocol, _, address in dict.fromkeys(infos):
            try:
                opened.append(_listen(family, kind, protocol, (address[0], port, *address[2:])))
            except OSError as error:
                if error.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
                    raise
                absent = error  # names may have addresses that the machine lacks: ::1 where there is no IPv6
                log.warning("not serving on %s, an address of %s: %s", address[0], host, error.strerror)
            else:
                port = port or int(opened[0].getsockname()[1])
        if absent is not None and not opened:
            raise absent
    except (OSError, UnicodeError) as error:  # UnicodeError: "a..b" cannot be a name
        for listener in opened:
            listener.close()
        reason = getattr(error, "strerror", None) or error
        hint = "; another port: --port" if getattr(error, "errno", 0) in (errno.EADDRINUSE, errno.EACCES) else ""
        raise RunError(f"cannot serve on {host}:{port} (server.host, server.port): {reason}{hint}") from None
    return opened


def _check_open_files() -> None:
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit != resource.RLIM_INFINITY and limit < MIN_OPEN_FILES:
        raise RunError(f"a process may open {limit} files here (ulimit -n), a run needs at least {MIN_OPEN_FILES}")


def connection_limit(configured: int, files_each: int = 1) -> int:
    """Return the number of connections that the gateway may have open, by ``server.max_connections`` (0: as many as this process's
    limit on open files allows, up to 16,384). Each needs ``files_each`` open files.

    Raises: ConfigError if the limit on open files does not allow as many as are configured.
    """
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    room = MAX_CONNECTIONS if files == resource.RLIM_INFINITY else max(1, (files - _OWN_FILES - EXTRA_CONNECTIONS) // files_each)
    if files != resource.RLIM_INFINITY and configured > room:
        raise ConfigError(
            f"server.max_connections = {configured}: a process may open {files} files here (ulimit -n), which allows {room} connections"
        )
    return configured or min(room, MAX_CONNECTIONS)


def _listen(family: int, kind: int, protocol: int, address: tuple[object, ...]) -> socket.socket:
    with socket.socket(family, kind, protocol) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)  # or it would take the IPv4 port too
        listener.bind(address)
        listener.listen(BACKLOG)
        listener.setblocking(False)
        return socket.socket(fileno=fcntl.fcntl(listener, fcntl.F_DUPFD_CLOEXEC, _HIGH_FD))


def inherited_listeners(fds: Sequence[int]) -> list[socket.socket]:
    """Return the sockets that this process inherited. Raises: RunError if a descriptor is no listening TCP socket."""
    listeners = []
    for fd in fds:
        try:
            listener = socket.socket(fileno=fd)
            is_listening = bool(listener.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))
        except OSError as error:
            raise RunError(f"descriptor {fd} should be a listening socket: {error.strerror}") from None
        if not is_listening or listener.family not in (socket.AF_INET, socket.AF_INET6):
            listener.detach()
            raise RunError(f"descriptor {fd} should be a listening TCP socket, and is another one")
        os.set_inheritable(fd, False)
        listener.setblocking(False)
        listeners.append(listener)
    return listeners
