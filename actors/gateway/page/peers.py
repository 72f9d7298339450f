"""The user of a connection from this machine: the kernel knows the user of the socket at its other end (sock_diag(7)).

Runs in the gateway's event loop: a question takes some 20 microseconds, however many sockets there are.
"""

import errno
import os
import socket
import struct

from aiohttp import web

_REQUEST, _SOCK_DIAG_BY_FAMILY, _NETLINK_SOCK_DIAG = 1, 20, 4
_ESTABLISHED = 1
_HEADER = struct.Struct("=IHHII")  # length, type, flags, sequence number, port
_QUESTION = struct.Struct("=BBBxI")  # family, protocol, extensions, states
_ANY = struct.pack("=III", 0, 0xFFFFFFFF, 0xFFFFFFFF)  # interface and cookie
_ANSWER = struct.Struct("=BBxxHH")  # family, state; ports are in the order of the network
_USER_AT = 4 + 48 + 12  # behind the socket's identity, its timer and its queues
_UNKNOWN_USER = 65534  # of sockets whose user this process's namespace has no number for


def is_own(http: web.Request) -> bool:
    """Return whether the request comes from a process of this process's own user. False where that cannot be known: the other end is
    on another machine, or in another network namespace. Root is another user: a proxy of root's speaks for others."""
    transport = http.transport
    if transport is None:
        return False
    peer, own = transport.get_extra_info("peername"), transport.get_extra_info("sockname")
    return bool(peer and own) and user_of(peer, own) == os.geteuid() != _UNKNOWN_USER


def user_of(peer: tuple[str, int], own: tuple[str, int]) -> int | None:
    """Return the user of the established TCP socket whose address is ``peer``, connected to ``own``; None if this network namespace has
    none. A socket that is being closed belongs to nobody any more, and so does not count."""
    family = socket.AF_INET6 if ":" in peer[0] else socket.AF_INET
    try:
        answer = _ask(family, peer, own)
    except (OSError, ValueError):  # ValueError: an address with a zone, which is not loopback
        return None
    if answer is None:
        return None
    _, state, port, other_port = _ANSWER.unpack_from(answer)
    if state != _ESTABLISHED or (socket.ntohs(port), socket.ntohs(other_port)) != (peer[1], own[1]):
        return None  # a listening socket answers where no connected one is found
    (user,) = struct.unpack_from("=I", answer, _USER_AT)
    return int(user)


def _ask(family: int, peer: tuple[str, int], own: tuple[str, int]) -> bytes | None:
    """Return the kernel's description of a socket, None if there is no such one. Raises: OSError, ValueError."""
    ends = struct.pack("!HH", peer[1], own[1])
    ends += b"".join(socket.inet_pton(family, address).ljust(16, b"\0") for address in (peer[0], own[0]))
    question = _QUESTION.pack(family, socket.IPPROTO_TCP, 0, 0xFFFFFFFF) + ends + _ANY
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, _NETLINK_SOCK_DIAG) as kernel:
        kernel.setblocking(False)  # it answers before send returns
        kernel.send(_HEADER.pack(_HEADER.size + len(question), _SOCK_DIAG_BY_FAMILY, _REQUEST, 1, 0) + question)
        answer = kernel.recv(4096)
    kind = _HEADER.unpack_from(answer)[1]
    if kind == _SOCK_DIAG_BY_FAMILY:
        return answer[_HEADER.size :]
    (code,) = struct.unpack_from("=i", answer, _HEADER.size)
    if code != -errno.ENOENT:
        raise OSError(-code, os.strerror(-code))
    return None
