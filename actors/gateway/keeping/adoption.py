"""The gateway's side of the keeper's channel: it asks for all connections once it serves, and goes on with each. Runs in its loop.

Until the requests that a gateway before had under way are all submitted again, the adoption lasts: then the controller may end the
others. Those that it may have died of come last, one at a time.
"""

import asyncio
import contextlib
import logging
import socket
from collections.abc import Callable
from functools import partial

from aiohttp import web

from ....runtime.process.kept_connections import Kind, Packet, receive, send
from ....shm.connection_records import ConnectionRecords, RecordSizes
from ....shm.tcp_count import reset
from .connection import KeptConnection
from .kept_bodies import KeptBodies
from .patience import Patience
from .turns import Turns

log = logging.getLogger(__name__)

SUSPECT_S = 1.0  # for one that a gateway may have died of, before the next
_RETRY_S = 0.01
_PACKETS = 16  # taken in one turn of the loop


class Adoption:
    """All connections that the keeper gives to this gateway."""

    def __init__(
        self,
        channel: socket.socket,
        make_handler: Callable[[], web.RequestHandler],
        turns: Turns,
        on_adopted: Callable[[], None],
        has_crashed: bool,
        patience: Patience,
        bodies: KeptBodies,
    ) -> None:
        """``has_crashed``: the gateway before did, of its work. ``on_adopted`` is called once."""
        self._has_crashed = has_crashed
        self._channel = channel
        self._make_handler = make_handler
        self._turns = turns
        self._on_adopted: Callable[[], None] | None = on_adopted
        self._loop = asyncio.get_running_loop()
        self._records: ConnectionRecords | None = None
        self._unclaimed: set[int] = set()
        self._are_all_here = False
        self._num_taken, self._began_s = 0, 0.0
        self._patience = patience
        self._bodies = bodies
        self._opening: set[asyncio.Task[None]] = set()
        self._suspects: dict[int, Callable[[], None]] = {}  # that wait, and how they begin
        self._to_send: list[Packet] = []

    def begin(self) -> None:
        """Ask for the connections."""
        self._began_s = self._loop.time()
        self._channel.setblocking(False)
        self._loop.add_reader(self._channel, self._receive)
        self._patience.after(self._give_up)
        self._say(Packet(Kind.ADOPT))

    def close(self) -> None:
        """Take no more connections."""
        self._on_adopted = None
        self._loop.remove_reader(self._channel)
        self._channel.close()

    def _receive(self) -> None:
        for _ in range(_PACKETS):
            try:
                packet = receive(self._channel)
            except BlockingIOError:
                return
            if packet is None:  # the supervisor is gone, which the lifeline tells
                self._loop.remove_reader(self._channel)
                return
            if packet.kind == Kind.RECORDS:
                self._records = ConnectionRecords(packet.descriptor, RecordSizes(*packet.numbers))
            elif packet.kind == Kind.HELD and packet.descriptor < 0:
                log.warning("a connection is dropped: too many files are open")
                self._say(Packet(Kind.RELEASE, packet.numbers))
            elif packet.kind == Kind.HELD:
                self._open(packet.numbers[0], socket.socket(fileno=packet.descriptor))
            elif packet.kind == Kind.ALL:
                self._are_all_here = True
                self._check()

    def _open(self, number: int, connection: socket.socket) -> None:
        """Go on with a connection, or begin it. One whose record is of no use is dropped."""
        assert self._records is not None
        connection.setblocking(False)
        try:
            kept = KeptConnection(
                self._records.record(number),
                connection,
                self._make_handler(),
                self._turns,
                lambda: self._claimed(number),
                partial(self._left, number),
                has_crashed=self._has_crashed and not self._are_all_here,
                bodies=self._bodies,
            )
        except (ValueError, OSError) as error:
            log.warning("a connection is dropped: %s", error)
            self._drop(number, connection)
            return
        self._num_taken += 1
        if kept.is_awaited:
            self._unclaimed.add(number)
        begin = partial(self._begin, number, connection, kept)
        if kept.is_suspect:
            self._suspects[number] = begin
            self._check()  # one that another gateway has left comes alone, maybe long after all others
        else:
            begin()

    def _begin(self, number: int, connection: socket.socket, kept: KeptConnection) -> None:
        task = self._loop.create_task(self._attach(number, connection, kept))
        self._opening.add(task)
        task.add_done_callback(self._opening.discard)

    async def _attach(self, number: int, connection: socket.socket, kept: KeptConnection) -> None:
        try:
            await self._loop.connect_accepted_socket(lambda: kept, connection)
        except OSError as error:
            log.warning("a connection is dropped: %s", error)
            self._drop(number, connection)
            self._claimed(number)

    def _drop(self, number: int, connection: socket.socket) -> None:
        with contextlib.suppress(OSError):
            reset(connection)
        connection.close()
        self._say(Packet(Kind.RELEASE, (number, 0, 0)))

    def _left(self, number: int, moves_to: int | None) -> None:
        self._say(Packet(Kind.RELEASE, (number, 0, 0)) if moves_to is None else Packet(Kind.MOVE, (number, moves_to, 0)))

    def _claimed(self, number: int) -> None:
        self._unclaimed.discard(number)
        self._check()

    def _give_up(self) -> None:
        """Give up what is not submitted again by now."""
        if self._on_adopted is None:
            return
        log.warning("%d requests were not taken over in time", len(self._unclaimed))
        self._unclaimed.clear()
        self._are_all_here = True
        while self._suspects:
            self._try_suspect()
        self._check()

    def _try_suspect(self) -> int:
        number = next(iter(self._suspects))
        self._suspects.pop(number)()
        return number

    def _check(self) -> None:
        if not self._are_all_here or self._unclaimed - self._suspects.keys():
            return
        if self._suspects:
            self._loop.call_later(SUSPECT_S, self._claimed, self._try_suspect())
        elif self._on_adopted is not None:
            done, self._on_adopted = self._on_adopted, None
            log.info("%d connections taken over in %.3f s", self._num_taken, self._loop.time() - self._began_s)
            done()

    def _say(self, packet: Packet) -> None:
        self._to_send.append(packet)
        if len(self._to_send) == 1:
            self._send()

    def _send(self) -> None:
        while self._to_send:
            try:
                send(self._channel, self._to_send[0])
            except BlockingIOError:
                self._loop.call_later(_RETRY_S, self._send)
                return
            except OSError:  # the supervisor is gone
                self._to_send.clear()
                return
            del self._to_send[0]
