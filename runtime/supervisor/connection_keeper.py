"""Keep clients' connections beyond the death of a gateway: accept them, hold a copy of each, and give the other to a gateway.

Part of the supervisor, whose event loop it runs in; without one, of the gateway, beyond whose death systemd has the copies. It reads
and writes no byte of a connection. While no gateway has asked for the connections it accepts none: they wait in the listening sockets'
queue. Of several, the one that has the fewest gets a new one, and its successors keep it.
"""

import asyncio
import errno
import logging
import socket
import struct
from collections import Counter, deque
from collections.abc import Sequence

from ...shm.connection_records import ConnectionRecords, RecordSizes
from ...shm.tcp_count import reset
from ..process.descriptor_store import DescriptorStore
from ..process.kept_connections import Kind, Packet, receive, send

log = logging.getLogger(__name__)

ACCEPTS = 32  # in one turn of the loop
RETRY_S = 0.005
NO_FILES_S = 0.2
SAY_S = 60.0  # between lines that say so
_LINGER = struct.Struct("ii")
_SHORT = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class _Served:
    """A gateway that serves: its channel, and what there is to send to it."""

    def __init__(self, channel: socket.socket, to_send: deque[Packet]) -> None:
        self.channel = channel
        self.to_send = to_send


class ConnectionKeeper:
    """All connections of a run. ``listeners`` stay the caller's."""

    def __init__(self, listeners: Sequence[socket.socket], sizes: RecordSizes, store: DescriptorStore | None = None) -> None:
        """``store``: has connections of a process before, and gets copies of all. Raises: OSError, if there can be no records."""
        self._listeners = listeners
        self._store = store
        self._records = ConnectionRecords.create(sizes) if store is None else store.records(sizes)
        self._held = {} if store is None else store.connections(self._records)
        self._free = deque(number for number in range(sizes.number) if number not in self._held)
        self._home = dict.fromkeys(self._held, 0)  # the number of the gateway of each connection
        self._num_of = Counter(self._home.values())  # connections, by that
        self._channels: dict[socket.socket, int] = {}  # and the number of its gateway
        self._serving: dict[int, _Served] = {}  # by number
        self._is_accepting = False
        self._say_at_s = 0.0
        self._loop = asyncio.get_running_loop()

    @property
    def num_held(self) -> int:
        """The number of connections."""
        return len(self._held)

    def channel(self, gateway: int = 0) -> socket.socket:
        """Return the end of a channel for a new process of the gateway of this number, for it to inherit; the caller closes it once the
        process has started."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        self._channels[ours] = gateway
        self._loop.add_reader(ours, self._receive, ours)
        return theirs

    def close(self) -> None:
        """Close every connection: no gateway will come."""
        for channel in list(self._channels):
            self._forget(channel)
        self._stop_accepting()
        for number in list(self._held):
            self._release(number)
        self._records.close()

    # ------------------------------------------------------------------------------------------------------ gateways

    def _receive(self, channel: socket.socket) -> None:
        """Take what a gateway says, up to its end if it is gone."""
        while channel in self._channels:
            try:
                packet = receive(channel)
            except BlockingIOError:
                return
            if packet is None:
                self._forget(channel)
            elif packet.kind == Kind.ADOPT:
                self._serve(channel)
            elif packet.kind == Kind.RELEASE:
                self._release(packet.numbers[0])
            elif packet.kind == Kind.MOVE:
                self._move(*packet.numbers[:2])

    def _forget(self, channel: socket.socket) -> None:
        number = self._channels.pop(channel)
        self._loop.remove_reader(channel)
        self._loop.remove_writer(channel)
        channel.close()
        if (served := self._serving.get(number)) is not None and served.channel is channel:
            del self._serving[number]
            self._pace()

    def _serve(self, channel: socket.socket) -> None:
        """Give this gateway all its connections. It holds the role, so any before it is gone, and its last words are all there."""
        gateway = self._channels[channel]
        for other in [one for one, its in self._channels.items() if its == gateway and one is not channel]:
            self._receive(other)
        if (before := self._serving.get(gateway)) is not None:
            self._loop.remove_writer(before.channel)
        sizes = self._records.sizes
        to_send = deque(
            [
                Packet(Kind.RECORDS, (sizes.number, sizes.in_bytes, sizes.out_bytes), self._records.descriptor),
                *(self._packet(number) for number in self._held if self._home[number] == gateway),
                Packet(Kind.ALL),
            ]
        )
        self._serving[gateway] = _Served(channel, to_send)
        self._send(gateway)

    def _packet(self, number: int) -> Packet:
        return Packet(Kind.HELD, (number, 0, 0), self._held[number].fileno())

    def _send(self, gateway: int) -> None:
        """Send a gateway what there is to send, once there is room for it; then accept more."""
        if (served := self._serving.get(gateway)) is None:
            return
        while served.to_send:
            packet = served.to_send[0]
            try:
                if packet.kind != Kind.HELD or self._home.get(packet.numbers[0]) == gateway:
                    send(served.channel, packet)
            except OSError as error:
                if error.errno == errno.EAGAIN:
                    self._loop.add_writer(served.channel, self._send, gateway)
                    self._pace()
                    return
                if error.errno in (errno.ETOOMANYREFS, errno.ENOBUFS, errno.ENOMEM):
                    self._loop.call_later(RETRY_S, self._send, gateway)
                break  # the gateway is gone: its channel will say so
            served.to_send.popleft()
        self._loop.remove_writer(served.channel)
        self._pace()

    def _next_gateway(self) -> int | None:
        """Return the gateway that a new connection goes to, None if none takes any now."""
        free = [gateway for gateway, served in self._serving.items() if not served.to_send]
        return min(free, key=lambda gateway: (self._num_of[gateway], gateway)) if free and self._free else None

    def _pace(self) -> None:
        """Accept as long as a gateway takes connections."""
        self._stop_accepting() if self._next_gateway() is None else self._begin_accepting()

    # --------------------------------------------------------------------------------------------------- connections

    def _begin_accepting(self) -> None:
        if not self._is_accepting:
            self._is_accepting = True
            for listener in self._listeners:
                self._loop.add_reader(listener, self._accept, listener)

    def _stop_accepting(self) -> None:
        if self._is_accepting:
            self._is_accepting = False
            for listener in self._listeners:
                self._loop.remove_reader(listener)

    def _accept(self, listener: socket.socket) -> None:
        for _ in range(ACCEPTS):
            if not self._is_accepting or (gateway := self._next_gateway()) is None:
                return
            try:
                connection, _ = listener.accept()
            except (BlockingIOError, ConnectionError):
                return
            except OSError as error:
                if error.errno in _SHORT:
                    self._say_that_some_wait(error.strerror)
                    self._stop_accepting()
                    self._loop.call_later(NO_FILES_S, self._pace)
                return
            connection.setblocking(False)
            number = self._free.popleft()
            self._held[number] = connection
            self._set_home(number, gateway)
            if self._store is not None:
                self._store.put(number, connection)
            self._give(number)

    def _say_that_some_wait(self, why: str | None) -> None:
        if self._loop.time() >= self._say_at_s:
            self._say_at_s = self._loop.time() + SAY_S
            log.warning("connections wait: %s (said once a minute)", why)

    def _set_home(self, number: int, gateway: int | None) -> None:
        """Note the gateway of a connection; None: it is closed."""
        if (before := self._home.pop(number, None)) is not None:
            self._num_of[before] -= 1
        if gateway is not None:
            self._home[number] = gateway
            self._num_of[gateway] += 1

    def _give(self, number: int) -> None:
        """Give a connection to its gateway, once that serves."""
        gateway = self._home[number]
        if (served := self._serving.get(gateway)) is not None:
            served.to_send.append(self._packet(number))
            self._send(gateway)

    def _move(self, number: int, gateway: int) -> None:
        """Give a connection, which its gateway has left as it is, to another one."""
        if number in self._held:
            self._set_home(number, gateway)
            self._give(number)

    def _release(self, number: int) -> None:
        """Close a connection that its gateway has closed, with a reset if it asked for that by SO_LINGER."""
        connection = self._held.pop(number, None)
        if connection is None:
            return
        try:
            is_reset = _LINGER.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _LINGER.size)) == (1, 0)
            reset(connection) if is_reset else connection.shutdown(socket.SHUT_RDWR)
        except OSError:  # the client has closed it
            pass
        connection.close()
        if self._store is not None:
            self._store.remove(number)
        self._records.record(number).clear()
        self._set_home(number, None)
        self._free.append(number)
        self._pace()
