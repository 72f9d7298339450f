"""Throughput from one process to another: pages of a pool with descriptors over bus or ring, beside ZeroMQ, Queue and memcpy.

Each transport moves the same payloads out of the same source, which is larger than the caches, as fresh pixels are. ``transfer``
ends when the peer has taken every message: of a pool it reads a byte of each page where it lies, of the others it gets a copy. The
functions named ``_sink_*`` run in the spawned peer.
"""

import select
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import msgspec
import numpy as np
import zmq
from numpy.typing import NDArray

from ...runtime.bus.messages import Done, Hello, PageRun, PlanDone, Record, Run, encode
from ...runtime.bus.transport import ActorSocket, ControllerSocket
from ...runtime.process.memory_layout import MEDIA_PAGE_BYTES
from ...shm.doorbell import Listener, Ringer
from ...shm.plan_table import PlanTable
from ...shm.pool import PagePool
from ...shm.ring import Ring
from ...shm.run_directory import RunDirectory
from .bus_latency import PeerError, bind_pair, close_queues, pair_endpoint
from .peer import SPAWN, Peer

WORKING_SET_BYTES = 64 << 20
MAX_SLOTS = 32
_RING_BYTES = 1 << 20
_TIMEOUT_S = 30.0
_COUNT = struct.Struct("=Q")

Bytes = NDArray[np.uint8]


def _window(num_bytes: int) -> int:
    """Messages in flight in a transport that copies them."""
    return 8 if num_bytes >= 1 << 16 else 1000


def read_pages(pool: PagePool, pages: Sequence[int]) -> int:
    """A byte of every page, from where it lies."""
    return int(pool.data[list(pages), 0].sum())


class Payloads:
    """Messages of one size, cut out of a source that is larger than the caches (small ones: out of a small source)."""

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self.num_slots = max(2, min(MAX_SLOTS, WORKING_SET_BYTES // num_bytes))
        self._source = np.random.default_rng(0).integers(0, 256, self.num_slots * num_bytes, dtype=np.uint8)

    def __getitem__(self, number: int) -> Bytes:
        start = number % self.num_slots * self.num_bytes
        return self._source[start : start + self.num_bytes]


class Throughput(Protocol):
    """One transport with its peer, for payloads of one size."""

    name: str
    share: float  # of the messages that the others move: less for what is slow

    def transfer(self, payloads: Payloads, num_messages: int) -> None:
        """Move them all to the peer."""
        ...

    def close(self) -> None: ...


class _Slots:
    """A pool with a slot of neighbouring pages for each payload in flight, granted once and for all."""

    def __init__(self, run: RunDirectory, name: str, payloads: Payloads) -> None:
        self.pages_per_slot = -(-payloads.num_bytes // MEDIA_PAGE_BYTES)
        self.pool = PagePool.create(run, name, payloads.num_slots * self.pages_per_slot, MEDIA_PAGE_BYTES)
        self.pool.populate()
        self.granted = [
            PageRun(list(self.pages(slot)), self.pool.generations[list(self.pages(slot))].tolist())
            for slot in range(payloads.num_slots)
        ]

    def pages(self, slot: int) -> range:
        return range(slot * self.pages_per_slot, (slot + 1) * self.pages_per_slot)


class Memcpy:
    """One process, one copy, into the same kind of memory: what the others are measured against."""

    name = "memcpy"
    share = 1.0

    def __init__(self, run: RunDirectory, payloads: Payloads) -> None:
        self._slots = _Slots(run, f"memcpy-{payloads.num_bytes}", payloads)
        self._flat = self._slots.pool.data.reshape(-1)

    def transfer(self, payloads: Payloads, num_messages: int) -> None:
        for number in range(num_messages):
            first = self._slots.pages(number % payloads.num_slots).start * MEDIA_PAGE_BYTES
            np.copyto(self._flat[first : first + payloads.num_bytes], payloads[number])

    def close(self) -> None:
        del self._flat
        self._slots.pool.close()


class BulkDescriptor(Record, frozen=True):
    """What stands in the plan table: which pages, and how many bytes of them."""

    source: PageRun
    num_bytes: int


_decode_descriptor = msgspec.msgpack.Decoder(BulkDescriptor).decode


class _BusPeer:
    """The controller's end of the bus to a peer that plays the actor ``sink``."""

    def __init__(self, run: RunDirectory, target: Callable[..., None]) -> None:
        self._socket = ControllerSocket(run.path)
        self._poll = select.poll()
        self._poll.register(self._socket.fd, select.POLLIN)
        self._peer = Peer(target, str(run.path))
        self.wait_for(lambda: any(isinstance(message, Hello) for _, _, message in self._socket.receive()))

    def send(self, message: Run) -> None:
        """Send, waiting while the peer's queue is full. Raises: PeerError."""
        if not self._socket.send("sink", 1, message):
            self.wait_for(lambda: self._socket.send("sink", 1, message))

    def finished(self) -> list[int]:
        """The plans that the peer has done since the last look."""
        return [message.plan_id for _, _, message in self._socket.receive() if isinstance(message, PlanDone)]

    def wait_for(self, arrived: Callable[[], bool]) -> None:
        """The descriptor is edge-triggered: look, wait, look again. Raises: PeerError."""
        deadline_s = time.monotonic() + _TIMEOUT_S
        while not arrived():
            if self._peer.exitcode is not None or time.monotonic() > deadline_s:
                raise PeerError(f"the peer died or did not answer within {_TIMEOUT_S:g} s")
            self._poll.poll(10)

    def close(self) -> None:
        self._peer.stop()
        self._socket.close()


def _runs(socket: ActorSocket) -> Iterator[Run]:
    """What the controller sends, for ever; says Hello until it does."""
    heard = False
    while True:
        if not heard:
            socket.send(Hello("sink", 1, 0, True))
        socket.poll(1.0 if heard else 0.02)
        for message in socket.receive():
            heard = True
            if isinstance(message, Run):
                yield message


class PoolOverBus:
    """Written into pages; a plan record that names them; Run over the bus; PlanDone frees the slot: how pixels travel."""

    name = "mmrt pool + bus"
    share = 1.0

    def __init__(self, run: RunDirectory, payloads: Payloads) -> None:
        self._slots = _Slots(run, "bus", payloads)
        self._plans = PlanTable.create(run, payloads.num_slots)
        self._plan_id = 0
        self._bus = _BusPeer(run, _sink_pool)

    def transfer(self, payloads: Payloads, num_messages: int) -> None:
        num_sent = num_done = 0
        free = list(range(payloads.num_slots))
        slot_of: dict[int, int] = {}

        def collect() -> bool:
            nonlocal num_done
            done = self._bus.finished()
            free.extend(slot_of.pop(plan_id) for plan_id in done)
            num_done += len(done)
            return bool(done)

        while num_done < num_messages:
            while free and num_sent < num_messages:
                slot = free.pop()
                self._plan_id += 1
                slot_of[self._plan_id] = slot
                self._send(slot, payloads[num_sent])
                num_sent += 1
            self._bus.wait_for(collect)

    def _send(self, slot: int, payload: Bytes) -> None:
        granted = self._slots.granted[slot]
        self._slots.pool.write_bytes(granted.pages, payload.data)
        self._plans.write(slot, self._plan_id, 0, encode(BulkDescriptor(granted, len(payload))))
        self._bus.send(Run(epoch=1, slot=slot, plan_id=self._plan_id))

    def close(self) -> None:
        self._bus.close()
        self._plans.close()
        self._slots.pool.close()


def _sink_pool(run_path: str) -> None:
    run = RunDirectory.attach(Path(run_path))
    pool, plans = PagePool.attach(run, "bus"), PlanTable.attach(run)
    socket = ActorSocket(run.path, "sink", 1)
    for message in _runs(socket):
        plan = plans.read(message.slot, message.plan_id)
        assert plan is not None, f"plan {message.plan_id} is not in slot {message.slot}"
        descriptor = _decode_descriptor(plan)
        pool.check(descriptor.source.pages, descriptor.source.generations)
        read_pages(pool, descriptor.source.pages)
        socket.send(PlanDone("sink", 1, message.plan_id, 0.0, Done()))


class _RingPeer:
    """A ring to a peer and one back, each with its bell; the peer answers with how many records it has taken."""

    def __init__(self, run: RunDirectory, name: str, target: Callable[..., None], *arguments: object) -> None:
        self.ring = Ring.create(run, name, _RING_BYTES)
        self._answers = Ring.create(run, f"{name}-done", _RING_BYTES)
        self._bell = Listener(run, f"{name}-done")
        self._ringer = Ringer(run, name)
        self._peer = Peer(target, str(run.path), name, *arguments)
        self.collect()

    def push(self, record: bytes) -> int:
        """Push and ring; how many answers had to be collected to make room."""
        num_done = 0
        while not self.ring.try_push(record):
            num_done += self.collect()
        self._ringer.ring()
        return num_done

    def collect(self) -> int:
        """Wait until the peer has taken some; how many. Raises: PeerError."""
        while not (answers := self._answers.pop_all()):
            if not select.select([self._bell.fd, self._peer.sentinel], [], [], _TIMEOUT_S)[0] or self._peer.exitcode is not None:
                raise PeerError(f"the peer died or did not answer within {_TIMEOUT_S:g} s")
            self._bell.drain()
        self._answers.ack()
        return sum(_COUNT.unpack(answer)[0] for answer in answers)

    def close(self) -> None:
        self._peer.stop()
        for part in (self.ring, self._answers, self._bell, self._ringer):
            part.close()


def _sink_ring(run_path: str, name: str, pool_name: str = "", pages_per_slot: int = 0) -> None:
    """Takes the records of a ring, and reads the pages that they name if there is a pool."""
    run = RunDirectory.attach(Path(run_path))
    ring, answers = Ring.attach(run, name), Ring.attach(run, f"{name}-done")
    bell, ringer = Listener(run, name), Ringer(run, f"{name}-done")
    pool = PagePool.attach(run, pool_name) if pool_name else None
    records: list[bytes] = []
    while True:
        if pool is not None:
            for record in records:
                first = _COUNT.unpack(record)[0] * pages_per_slot
                read_pages(pool, range(first, first + pages_per_slot))
        ring.ack()
        answers.try_push(_COUNT.pack(len(records)))
        ringer.ring()
        while not (records := ring.pop_all()):
            select.select([bell.fd], [], [])
            bell.drain()


class PoolOverRing:
    """Written into pages; the slot's number in a ring, and a doorbell; the answer frees the slot."""

    name = "mmrt pool + ring"
    share = 1.0

    def __init__(self, run: RunDirectory, payloads: Payloads) -> None:
        self._slots = _Slots(run, "ring", payloads)
        self._peer = _RingPeer(run, "bulk", _sink_ring, "ring", self._slots.pages_per_slot)

    def transfer(self, payloads: Payloads, num_messages: int) -> None:
        num_done = 0
        for number in range(num_messages):
            while number - num_done >= payloads.num_slots:
                num_done += self._peer.collect()
            slot = number % payloads.num_slots
            self._slots.pool.write_bytes(self._slots.pages(slot), payloads[number].data)
            num_done += self._peer.push(_COUNT.pack(slot))
        while num_done < num_messages:
            num_done += self._peer.collect()

    def close(self) -> None:
        self._peer.close()
        self._slots.pool.close()


class RingAlone:
    """Small records through the ring itself, copied in and out."""

    name = "mmrt ring"
    share = 1.0

    def __init__(self, run: RunDirectory, payloads: Payloads) -> None:
        self._peer = _RingPeer(run, "small", _sink_ring)

    def transfer(self, payloads: Payloads, num_messages: int) -> None:
        num_done = sum(self._peer.push(payloads[number].tobytes()) for number in range(num_messages))
        while num_done < num_messages:
            num_done += self._peer.collect()

    def close(self) -> None:
        self._peer.close()


class BusAlone:
    """Descriptors over the bus, whatever the payload: Run one after another, PlanDone for the last."""

    name = "mmrt bus"
    share = 1.0

    def __init__(self, run: RunDirectory, payloads: Payloads) -> None:
        self._bus = _BusPeer(run, _sink_descriptors)

    def transfer(self, payloads: Payloads, num_messages: int) -> None:
        for number in range(1, num_messages + 1):
            self._bus.send(Run(epoch=1, slot=int(number == num_messages), plan_id=number))
        self._bus.wait_for(lambda: bool(self._bus.finished()))

    def close(self) -> None:
        self._bus.close()


def _sink_descriptors(run_path: str) -> None:
    socket = ActorSocket(Path(run_path), "sink", 1)
    for message in _runs(socket):
        if message.slot:
            socket.send(PlanDone("sink", 1, message.plan_id, 0.0, Done()))


class PlainZmq:
    """The payload itself over a pair of ipc sockets, copied by ZeroMQ; one answer at the end."""

    name = "ZeroMQ"
    share = 1.0

    def __init__(self, run: RunDirectory, payloads: Payloads) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket: zmq.Socket[bytes] = bind_pair(self._context, run, "throughput-zmq", _window(payloads.num_bytes))
        self._peer = Peer(_sink_zmq, pair_endpoint(run, "throughput-zmq"), payloads.num_bytes)
        self._expect()

    def transfer(self, payloads: Payloads, num_messages: int) -> None:
        self._socket.send(_COUNT.pack(num_messages))
        for number in range(num_messages):
            self._socket.send(payloads[number].data)
        self._expect()

    def _expect(self) -> None:
        if not self._socket.poll(round(_TIMEOUT_S * 1000)):
            raise PeerError(f"the peer did not answer within {_TIMEOUT_S:g} s")
        self._socket.recv()

    def close(self) -> None:
        self._peer.stop()
        self._socket.close(0)
        self._context.term()


def _sink_zmq(endpoint: str, num_bytes: int) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    socket = context.socket(zmq.PAIR)
    socket.rcvhwm = _window(num_bytes)
    socket.connect(endpoint)
    socket.send(b"")
    while True:
        for _ in range(_COUNT.unpack(socket.recv())[0]):
            socket.recv()
        socket.send(b"")


class PlainQueue:
    """The payload itself through a multiprocessing.Queue; one answer at the end."""

    name = "multiprocessing.Queue"
    share = 0.25

    def __init__(self, run: RunDirectory, payloads: Payloads) -> None:
        self._queue: Any = SPAWN.Queue(_window(payloads.num_bytes))
        self._done: Any = SPAWN.Queue()
        self._peer = Peer(_sink_queue, self._queue, self._done)
        self._done.get(timeout=_TIMEOUT_S)

    def transfer(self, payloads: Payloads, num_messages: int) -> None:
        self._queue.put(num_messages)
        for number in range(num_messages):
            self._queue.put(payloads[number].tobytes())
        self._done.get(timeout=_TIMEOUT_S)

    def close(self) -> None:
        self._peer.stop()
        close_queues(self._queue, self._done)


def _sink_queue(queue: Any, done: Any) -> None:
    done.put(b"")
    while True:
        for _ in range(queue.get()):
            queue.get()
        done.put(b"")


RATES: tuple[Callable[[RunDirectory, Payloads], Throughput], ...] = (BusAlone, RingAlone, PlainZmq, PlainQueue)
BULKS: tuple[Callable[[RunDirectory, Payloads], Throughput], ...] = (Memcpy, PoolOverBus, PoolOverRing, PlainZmq, PlainQueue)
