"""Keep clients' connections beyond the death of the gateway: accept them, hold a copy of each, and give the other to the gateway.

Part of the supervisor, whose event loop it runs in; without one, of the gateway, beyond whose death systemd has the copies. It reads
and writes no byte of a connection. While no gateway has asked for the connections it accepts none: they wait in the listening sockets'
queue.
"""

import asyncio
import errno
import logging
import socket
import struct
from collections import deque
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


class ConnectionKeeper:
    """All connections of a run. ``listeners`` stay the caller's."""

    def __init__(self, listeners: Sequence[socket.socket], sizes: RecordSizes, store: DescriptorStore | None = None) -> None:
        """``store``: has connections of a process before, and gets copies of all. Raises: OSError, if there can be no records."""
        self._listeners = listeners
        self._store = store
        self._records = ConnectionRecords.create(sizes) if store is None else store.records(sizes)
        self._held = {} if store is None else store.connections(self._records)
        self._free = deque(number for number in range(sizes.number) if number not in self._held)
        self._channels: set[socket.socket] = set()
        self._gateway: socket.socket | None = None  # the channel of the one that serves
        self._to_send: deque[Packet] = deque()
        self._is_accepting = False
        self._say_at_s = 0.0
        self._loop = asyncio.get_running_loop()

    @property
    def num_held(self) -> int:
        """The number of connections."""
        return len(self._held)

    def channel(self) -> socket.socket:
        """Return a new gateway's end of its channel, for it to inherit; the caller closes it once the process has started."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        self._channels.add(ours)
        self._loop.add_reader(ours, self._receive, ours)
        return theirs

    def close(self) -> None:
        """Close every connection: no gateway will come."""
        for channel in list(self._channels):
            self._forget(channel)
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

    def _forget(self, channel: socket.socket) -> None:
        self._channels.discard(channel)
        self._loop.remove_reader(channel)
        self._loop.remove_writer(channel)
        channel.close()
        if self._gateway is channel:
            self._gateway = None
            self._to_send.clear()
            self._stop_accepting()

    def _serve(self, channel: socket.socket) -> None:
        """Give all connections to this gateway. It holds the role, so any other is gone, and its last words are all there."""
        for other in self._channels - {channel}:
            self._receive(other)
        if self._gateway is not None:
            self._loop.remove_writer(self._gateway)
        self._gateway = channel
        sizes = self._records.sizes
        self._to_send = deque(
            [
                Packet(Kind.RECORDS, (sizes.number, sizes.in_bytes, sizes.out_bytes), self._records.descriptor),
                *(self._packet(number) for number in self._held),
                Packet(Kind.ALL),
            ]
        )
        self._send()

    def _packet(self, number: int) -> Packet:
        return Packet(Kind.HELD, (number, 0, 0), self._held[number].fileno())

    def _send(self) -> None:
        """Send what there is to send, once there is room for it; then accept more."""
        channel = self._gateway
        while self._to_send and channel is not None:
            packet = self._to_send[0]
            try:
                if packet.kind != Kind.HELD or packet.numbers[0] in self._held:
                    send(channel, packet)
            except OSError as error:
                self._stop_accepting()
                if error.errno == errno.EAGAIN:
                    self._loop.add_writer(channel, self._send)
                    return
                if error.errno in (errno.ETOOMANYREFS, errno.ENOBUFS, errno.ENOMEM):
                    self._loop.call_later(RETRY_S, self._send)
                break  # the gateway is gone: its channel will say so
            self._to_send.popleft()
        if channel is None:
            return
        self._loop.remove_writer(channel)
        if not self._to_send and self._free:
            self._begin_accepting()

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
            if not self._is_accepting:
                return
            try:
                connection, _ = listener.accept()
            except (BlockingIOError, ConnectionError):
                return
            except OSError as error:
                if error.errno in _SHORT:
                    self._say_that_some_wait(error.strerror)
                    self._stop_accepting()
                    self._loop.call_later(NO_FILES_S, self._send)
                return
            connection.setblocking(False)
            number = self._free.popleft()
            self._held[number] = connection
            if self._store is not None:
                self._store.put(number, connection)
            if not self._free:
                self._stop_accepting()  # until one is released
            self._to_send.append(self._packet(number))
            self._send()

    def _say_that_some_wait(self, why: str | None) -> None:
        if self._loop.time() >= self._say_at_s:
            self._say_at_s = self._loop.time() + SAY_S
            log.warning("connections wait: %s (said once a minute)", why)

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
        self._free.append(number)
        self._send()
