"""What the keeper of connections, in the supervisor, and a gateway say to each other, over a pair of sockets that only they have.

A gateway that serves asks for all its connections: ``ADOPT``. It gets ``RECORDS``, each connection as ``HELD``, then ``ALL``, and from
then on each new one as ``HELD``. It says ``RELEASE`` when it has closed one, and ``MOVE`` when it has left one to another gateway. A
packet whose process is gone is lost with it: its successor gets the connection again.
"""

import enum
import os
import resource
import socket
import struct
from typing import NamedTuple

from ...shm.connection_records import RecordSizes
from ...shm.tcp_count import why_inexact
from ..errors import ConfigError
from .listening import EXTRA_CONNECTIONS, connection_limit

_OWN_FILES = 256  # of the supervisor, besides connections
_LEAST_CONNECTIONS = 64
_PACKET = struct.Struct("=4Q")


class Kind(enum.IntEnum):
    """The kind of a packet."""

    ADOPT = 1
    RELEASE = 2
    RECORDS = 3
    HELD = 4
    ALL = 5
    MOVE = 6


class Packet(NamedTuple):
    """A packet, with the numbers of its kind: of a connection (and of the gateway that it moves to), or the sizes of records.
    ``descriptor``: of ``RECORDS`` and ``HELD``."""

    kind: Kind
    numbers: tuple[int, int, int] = (0, 0, 0)
    descriptor: int = -1


def send(channel: socket.socket, packet: Packet) -> None:
    """Send without blocking. Raises: OSError; BlockingIOError if there is no room now."""
    socket.send_fds(channel, [_PACKET.pack(packet.kind, *packet.numbers)], [packet.descriptor] if packet.descriptor >= 0 else [])


def receive(channel: socket.socket) -> Packet | None:
    """Return the next packet, whose descriptor is the caller's, None if the other side is gone. Raises: BlockingIOError."""
    try:
        data, descriptors, _, _ = socket.recv_fds(channel, _PACKET.size, 1, socket.MSG_CMSG_CLOEXEC)
    except ConnectionError:
        return None
    if not data:
        return None
    kind, first, second, third = _PACKET.unpack(data)
    for descriptor in descriptors:
        os.set_inheritable(descriptor, False)
    return Packet(Kind(kind), (first, second, third), descriptors[0] if descriptors else -1)


def record_sizes(max_connections: int, max_body_bytes: int, files_each: int = 1, num_gateways: int = 1) -> RecordSizes:
    """Return the sizes of the records of a run. Their number is 0 where so few files may be open that connections cannot be kept.
    ``files_each``: that one needs in its gateway. Raises: ConfigError, as ``connection_limit``."""
    count = connection_limit(max_connections, files_each) + EXTRA_CONNECTIONS * num_gateways
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if files != resource.RLIM_INFINITY:
        count = min(count, files - _OWN_FILES)
    return RecordSizes.of(count if count >= _LEAST_CONNECTIONS else 0, max_body_bytes)


def why_unkept(sizes: RecordSizes) -> str:
    """Return why connections end with their gateway, "" if they do not."""
    return why_inexact() or ("" if sizes.number else "few files may be open (ulimit -n)")


def check_shared(num_gateways: int, max_connections: int) -> None:
    """Raise ConfigError where a run cannot have so many gateways, since its connections cannot be kept."""
    if num_gateways > 1 and (fault := why_unkept(record_sizes(max_connections, 0, num_gateways=num_gateways))):
        raise ConfigError(f"actors.layout has {num_gateways} gateways, and connections cannot be kept here: {fault}")


def served_connections(num_records: int, num_gateways: int, gateway: int) -> int:
    """Return how many connections the gateway of this number serves at a time, besides those that are extra: at least one. The first
    may serve all of the run, for all may move to it."""
    share = -(-num_records // num_gateways) - EXTRA_CONNECTIONS
    return max(1, share, 0 if gateway else num_records - EXTRA_CONNECTIONS * num_gateways)
