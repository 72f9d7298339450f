"""Ways from one process to another and back, for ``bench bus``: our bus, our ring with doorbell, plain ZeroMQ, multiprocessing.Queue.

A link begins in the process of the bench and ends in a spawned peer. Ours carry numbers that name pages of a pool, which
the peer reads where they lie; the others carry bytes, which they copy. A peer returns every number, and every message of MESSAGE_BYTES.
"""

import asyncio
import select
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import uvloop
import zmq

from mmrt.runtime.bus.messages import Done, PlanDone, Run
from mmrt.runtime.bus.transport import ActorSocket, ControllerSocket, drain_in_loop
from mmrt.runtime.process.memory_layout import MEDIA_PAGE_BYTES
from mmrt.shm.doorbell import Listener, Ringer
from mmrt.shm.pool import PagePool
from mmrt.shm.ring import Ring
from mmrt.shm.run_directory import RunDirectory

from .peer import SPAWN, Peer

MESSAGE_BYTES = 64
WORKING_SET_BYTES = 64 << 20  # more than fits the caches, as fresh pixels do
MAX_SLOTS = 32
TIMEOUT_S = 30.0
_POOL = "bench"
_NUM_PAGES = WORKING_SET_BYTES // MEDIA_PAGE_BYTES + MAX_SLOTS
_RING_BYTES = 1 << 16
_WINDOW = 8  # payloads under way in a link that copies them


class PeerError(RuntimeError):
    """The peer died or does not answer."""


class BusEnd:
    """The controller's end: Run to an actor, PlanDone back."""

    def __init__(self, run: RunDirectory) -> None:
        self._socket = ControllerSocket(run.path)
        self.fd = self._socket.fd
        self.close = self._socket.close

    def send(self, number: int) -> bool:
        return self._socket.send("peer", 1, Run(epoch=1, slot=0, plan_id=number))

    def receive(self) -> list[int]:
        return [message.plan_id for _, _, message in self._socket.receive() if isinstance(message, PlanDone)]


class BusPeerEnd:
    """The actor's end of the bus."""

    def __init__(self, run: RunDirectory) -> None:
        self._socket = ActorSocket(run.path, "peer", 1)
        self.fd = self._socket.fd
        self.close = self._socket.close

    def send(self, number: int) -> bool:
        return self._socket.send(PlanDone("peer", 1, number, 0.0, Done()))

    def receive(self) -> list[int]:
        return [message.plan_id for message in self._socket.receive() if isinstance(message, Run)]


class RingEnd:
    """A ring with a doorbell each way."""

    def __init__(self, run: RunDirectory) -> None:
        self._start(run, Ring.create(run, "there", _RING_BYTES), Ring.create(run, "back", _RING_BYTES))

    def _start(self, run: RunDirectory, outgoing: Ring, incoming: Ring) -> None:
        self._outgoing, self._incoming = outgoing, incoming
        self._bell, self._ringer = Listener(run, incoming.name), Ringer(run, outgoing.name)
        self.fd = self._bell.fd

    def send(self, number: int) -> bool:
        if not self._outgoing.try_push(number.to_bytes(MESSAGE_BYTES, "little")):
            return False
        self._ringer.ring()
        return True

    def receive(self) -> list[int]:
        self._bell.drain()
        numbers = [int.from_bytes(record, "little") for record in self._incoming.pop_all()]
        self._incoming.ack()
        return numbers

    def close(self) -> None:
        for part in (self._outgoing, self._incoming, self._bell, self._ringer):
            part.close()


class RingPeerEnd(RingEnd):
    def __init__(self, run: RunDirectory) -> None:
        self._start(run, Ring.attach(run, "back"), Ring.attach(run, "there"))


# What carries numbers. ``fd`` is edge-triggered: receive until nothing comes, then wait. ``send`` returns False where nobody is there.
End = BusEnd | BusPeerEnd | RingEnd


class PageLink:
    """One of ours, with a pool of pages. A ping finds both processes in asyncio loops, as gateway and controller are."""

    def __init__(
        self, name: str, end: Callable[[RunDirectory], End], peer_end: Callable[[RunDirectory], End], run: RunDirectory
    ) -> None:
        """Raises: PeerError, ShmError."""
        self.name = name
        self.pool = PagePool.create(run, _POOL, _NUM_PAGES, MEDIA_PAGE_BYTES)
        self._end = end(run)
        self._peer = Peer(_serve, str(run.path), peer_end)
        self._runner = asyncio.Runner(loop_factory=uvloop.new_event_loop)
        deadline_s = time.monotonic() + TIMEOUT_S
        while not self._end.send(0):  # the peer is not there yet
            if self._peer.exitcode is not None or time.monotonic() > deadline_s:
                raise PeerError(f"{name}: the peer does not come")
            time.sleep(0.01)
        self._receive()

    def ping(self, num_pings: int, gap_s: float) -> list[float]:
        """Half of each round trip, in seconds, each ``gap_s`` after the one before. Raises: TimeoutError."""
        return self._runner.run(self._ping(num_pings, gap_s))

    async def _ping(self, num_pings: int, gap_s: float) -> list[float]:
        loop = asyncio.get_running_loop()
        times_s: list[float] = []

        def arrived(_: int) -> None:
            times_s.append((time.perf_counter() - sent_s) / 2)
            answered.set()

        answered = asyncio.Event()
        reader = drain_in_loop(loop, self._end, arrived)
        try:
            async with asyncio.timeout(TIMEOUT_S + num_pings * gap_s):
                for _ in range(num_pings):
                    await asyncio.sleep(gap_s)
                    answered.clear()
                    sent_s = time.perf_counter()
                    self._end.send(0)
                    reader.poke()
                    await answered.wait()
        finally:
            reader.close()
        return times_s

    def move(self, payloads: Sequence[memoryview], count: int) -> None:
        """Write them in turn into pages of their own, ``count`` in all, and let the peer read each. Raises: PeerError."""
        pages_each = -(-len(payloads[0]) // MEDIA_PAGE_BYTES)
        num_out = 0
        for number in range(count):
            while num_out == len(payloads):
                num_out -= self._receive()
            first = number % len(payloads) * pages_each
            self.pool.write_bytes(range(first, first + pages_each), payloads[number % len(payloads)])
            self._end.send(first << 32 | pages_each)
            num_out += 1
        while num_out:
            num_out -= self._receive()

    def _receive(self) -> int:
        """The number of returned numbers: at least one."""
        while not (numbers := self._end.receive()):
            ready = select.select([self._end.fd, self._peer.sentinel], [], [], TIMEOUT_S)[0]
            if not ready or self._peer.exitcode is not None:
                raise PeerError(f"{self.name}: the peer died or did not answer within {TIMEOUT_S:g} s")
        return len(numbers)

    def close(self) -> None:
        self._peer.stop()
        self._runner.close()
        self._end.close()
        self.pool.close()


def _serve(run_path: str, make_end: Callable[[RunDirectory], End]) -> None:
    """Read a byte of each page that is named, and send the number back."""
    run = RunDirectory.attach(Path(run_path))
    pool, end = PagePool.attach(run, _POOL), make_end(run)

    async def serve() -> None:
        def receive(number: int) -> None:
            first, num_pages = number >> 32, number & 0xFFFF_FFFF
            pool.data[first : first + num_pages, 0].sum()
            end.send(number)
            reader.poke()

        reader = drain_in_loop(asyncio.get_running_loop(), end, receive)
        await asyncio.Event().wait()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve())


class CopyLink:
    """Blocking at both ends. A message of MESSAGE_BYTES comes back; the peer drops longer ones, which are copies."""

    name: str
    _peer: Peer

    def send(self, payload: memoryview) -> None: ...

    def receive(self) -> None: ...

    def ping(self, num_pings: int, gap_s: float) -> list[float]:
        """As ``PageLink.ping``. Raises: PeerError."""
        times_s = []
        for _ in range(num_pings):
            time.sleep(gap_s)
            sent_s = time.perf_counter()
            self.send(memoryview(bytes(MESSAGE_BYTES)))
            self.receive()
            times_s.append((time.perf_counter() - sent_s) / 2)
        return times_s

    def move(self, payloads: Sequence[memoryview], count: int) -> None:
        """Send them in turn; ends when the peer has taken the last. Raises: PeerError."""
        for number in range(count):
            self.send(payloads[number % len(payloads)])
        self.send(memoryview(bytes(MESSAGE_BYTES)))
        self.receive()

    def close(self) -> None:
        self._peer.stop()


class ZmqLink(CopyLink):
    """A pair of plain sockets over ipc."""

    name = "ZeroMQ"

    def __init__(self, run: RunDirectory) -> None:
        endpoint = f"ipc://{run.path}/plain"
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.PAIR)
        self._socket.sndhwm = _WINDOW
        self._socket.bind(endpoint)
        self._peer = Peer(_serve_zmq, endpoint)
        self.ping(1, 0.0)

    def send(self, payload: memoryview) -> None:
        self._socket.send(payload)

    def receive(self) -> None:
        if not self._socket.poll(round(TIMEOUT_S * 1000)):
            raise PeerError(f"{self.name}: the peer did not answer within {TIMEOUT_S:g} s")
        self._socket.recv()

    def close(self) -> None:
        super().close()
        self._socket.close(0)
        self._context.term()


def _serve_zmq(endpoint: str) -> None:
    socket = zmq.Context().socket(zmq.PAIR)
    socket.rcvhwm = _WINDOW
    socket.connect(endpoint)
    while True:
        if len(message := socket.recv()) == MESSAGE_BYTES:
            socket.send(message)


class QueueLink(CopyLink):
    """Two queues of multiprocessing."""

    name = "multiprocessing.Queue"

    def __init__(self, run: RunDirectory) -> None:
        self._there: Any = SPAWN.Queue(_WINDOW)
        self._back: Any = SPAWN.Queue()
        self._peer = Peer(_serve_queue, self._there, self._back)
        self.ping(1, 0.0)

    def send(self, payload: memoryview) -> None:
        self._there.put(payload.tobytes())

    def receive(self) -> None:
        self._back.get(timeout=TIMEOUT_S)

    def close(self) -> None:
        super().close()
        for queue in (self._there, self._back):
            queue.cancel_join_thread()
            queue.close()


def _serve_queue(there: Any, back: Any) -> None:
    while True:
        if len(message := there.get()) == MESSAGE_BYTES:
            back.put(message)


Link = PageLink | ZmqLink | QueueLink


bus_link = partial(PageLink, "mmrt bus", BusEnd, BusPeerEnd)
ring_link = partial(PageLink, "mmrt ring", RingEnd, RingPeerEnd)
LINKS: tuple[Callable[[RunDirectory], Link], ...] = (bus_link, ring_link, ZmqLink, QueueLink)
