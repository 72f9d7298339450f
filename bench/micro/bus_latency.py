"""One-way latency of a small message between two processes: our bus and ring with doorbell beside ZeroMQ and multiprocessing.Queue.

Half of a round trip, by ping-pong; with a gap before each ping the receiver has gone to sleep, as it has between real steps. The
functions named ``_echo_*`` run in the spawned peer, everything else in the process of ``bench bus``.
"""

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import uvloop
import zmq
import zmq.asyncio

from ...runtime.bus.messages import Done, Hello, PlanDone, Run, ToActor, ToController
from ...runtime.bus.transport import ActorSocket, ControllerSocket, drain_in_loop
from ...shm.doorbell import Listener, Ringer
from ...shm.ring import Ring
from ...shm.run_directory import RunDirectory
from .peer import SPAWN, Peer

MESSAGE_BYTES = 64
_RING_BYTES = 1 << 16
_HELLO_S = 0.02
_POLL_MS = 1000


class PeerError(RuntimeError):
    """The peer did not answer."""


class Latency(Protocol):
    """One transport with its peer. ``wakes_loop``: both ends are asyncio processes, as the gateway and the controller are."""

    name: str
    wakes_loop: bool

    def measure(self, num_pings: int, gap_s: float) -> list[float]:
        """One-way times in seconds."""
        ...

    def close(self) -> None: ...


class _LoopPinger:
    """Ping-pong driven by callbacks in an event loop: ``ping`` sends, ``pong`` is called when the answer is there."""

    def __init__(self, ping: Callable[[int], None], num_pings: int, gap_s: float) -> None:
        self._ping = ping
        self._num_pings = num_pings
        self._gap_s = gap_s
        self._loop = asyncio.get_running_loop()
        self._done: asyncio.Future[None] = self._loop.create_future()
        self._times_s: list[float] = []
        self._sent_s = 0.0

    async def run(self) -> list[float]:
        self._send()
        async with asyncio.timeout(30 + 2 * self._num_pings * (self._gap_s + 0.001)):
            await self._done
        return self._times_s

    def _send(self) -> None:
        self._sent_s = time.perf_counter()
        self._ping(len(self._times_s))

    def pong(self) -> None:
        self._times_s.append((time.perf_counter() - self._sent_s) / 2)
        if len(self._times_s) == self._num_pings:
            self._done.set_result(None)
        elif self._gap_s > 0:
            self._loop.call_later(self._gap_s, self._send)
        else:
            self._send()


class BusLatency:
    """Run to an actor, PlanDone back: the real messages over the real sockets."""

    name = "mmrt bus"
    wakes_loop = True

    def __init__(self, run: RunDirectory) -> None:
        self._socket = ControllerSocket(run.path)
        self._runner = asyncio.Runner(loop_factory=uvloop.new_event_loop)
        self._peer = Peer(_echo_bus, str(run.path))
        self._connected = False

    def measure(self, num_pings: int, gap_s: float) -> list[float]:
        return self._runner.run(self._measure(num_pings, gap_s))

    async def _measure(self, num_pings: int, gap_s: float) -> list[float]:
        connected = asyncio.Event()

        def receive(arrival: tuple[str, int, ToController]) -> None:
            if isinstance(arrival[2], Hello):
                connected.set()
            elif isinstance(arrival[2], PlanDone):
                pinger.pong()

        def ping(number: int) -> None:
            if not self._socket.send("echo", 1, Run(epoch=1, slot=0, plan_id=number)):
                raise PeerError("the bus does not take a message for the peer")
            reader.poke()

        reader = drain_in_loop(asyncio.get_running_loop(), self._socket, receive)
        pinger = _LoopPinger(ping, num_pings, gap_s)
        try:
            if not self._connected:
                async with asyncio.timeout(30):
                    await connected.wait()
                self._connected = True
            return await pinger.run()
        finally:
            reader.close()

    def close(self) -> None:
        self._peer.stop()
        self._runner.close()
        self._socket.close()


def _echo_bus(run_path: str) -> None:
    async def serve() -> None:
        loop = asyncio.get_running_loop()
        socket = ActorSocket(Path(run_path), "echo", 1)
        heard = asyncio.Event()

        def receive(message: ToActor) -> None:
            heard.set()
            if isinstance(message, Run):
                socket.send(PlanDone("echo", 1, message.plan_id, 0.0, Done()))
                reader.poke()

        reader = drain_in_loop(loop, socket, receive)
        while not heard.is_set():
            socket.send(Hello("echo", 1, 0, True))
            reader.poke()
            await asyncio.sleep(_HELLO_S)
        await asyncio.Event().wait()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve())


class RingLatency:
    """A record in a ring and a doorbell, each way: decode to detokenizer to gateway."""

    name = "mmrt ring + doorbell"
    wakes_loop = True

    def __init__(self, run: RunDirectory) -> None:
        self._pings = Ring.create(run, "ping", _RING_BYTES)
        self._pongs = Ring.create(run, "pong", _RING_BYTES)
        self._bell = Listener(run, "pong")
        self._ringer = Ringer(run, "ping")
        self._runner = asyncio.Runner(loop_factory=uvloop.new_event_loop)
        self._peer = Peer(_echo_ring, str(run.path))
        self._connected = False

    def measure(self, num_pings: int, gap_s: float) -> list[float]:
        return self._runner.run(self._measure(num_pings, gap_s))

    async def _measure(self, num_pings: int, gap_s: float) -> list[float]:
        loop = asyncio.get_running_loop()
        connected = asyncio.Event()
        payload = bytes(MESSAGE_BYTES)

        def receive() -> None:
            self._bell.drain()
            for record in self._pongs.pop_all():
                if record:
                    pinger.pong()
                else:
                    connected.set()
            self._pongs.ack()

        def ping(number: int) -> None:
            if not self._pings.try_push(payload):
                raise PeerError("the ring to the peer is full")
            self._ringer.ring()

        loop.add_reader(self._bell.fd, receive)
        pinger = _LoopPinger(ping, num_pings, gap_s)
        try:
            if not self._connected:
                async with asyncio.timeout(30):
                    await connected.wait()
                self._connected = True
            return await pinger.run()
        finally:
            loop.remove_reader(self._bell.fd)

    def close(self) -> None:
        self._peer.stop()
        self._runner.close()
        for part in (self._pings, self._pongs, self._bell, self._ringer):
            part.close()


def _echo_ring(run_path: str) -> None:
    run = RunDirectory.attach(Path(run_path))
    pings, pongs = Ring.attach(run, "ping"), Ring.attach(run, "pong")
    bell, ringer = Listener(run, "ping"), Ringer(run, "pong")

    def receive() -> None:
        bell.drain()
        for record in pings.pop_all():
            pongs.try_push(record)
            ringer.ring()
        pings.ack()

    async def serve() -> None:
        asyncio.get_running_loop().add_reader(bell.fd, receive)
        pongs.try_push(b"")  # connected
        ringer.ring()
        await asyncio.Event().wait()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve())


class ZmqLatency:
    """A pair of plain sockets over ipc, blocking at both ends."""

    name = "ZeroMQ, blocking"
    wakes_loop = False

    def __init__(self, run: RunDirectory) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = bind_pair(self._context, run, "latency-zmq")
        self._peer = Peer(_echo_zmq, pair_endpoint(run, "latency-zmq"))
        _expect(self._socket)

    def measure(self, num_pings: int, gap_s: float) -> list[float]:
        payload = bytes(MESSAGE_BYTES)

        def ping() -> None:
            self._socket.send(payload)
            _expect(self._socket)

        return _blocking_pings(ping, num_pings, gap_s)

    def close(self) -> None:
        self._peer.stop()
        self._socket.close(0)
        self._context.term()


def _echo_zmq(endpoint: str) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    socket = context.socket(zmq.PAIR)
    socket.connect(endpoint)
    socket.send(b"")
    while True:
        socket.send(socket.recv())


class ZmqAsyncioLatency:
    """The same sockets through zmq.asyncio."""

    name = "ZeroMQ, zmq.asyncio"
    wakes_loop = True

    def __init__(self, run: RunDirectory) -> None:
        self._runner = asyncio.Runner(loop_factory=uvloop.new_event_loop)
        self._context = zmq.asyncio.Context()
        self._run = run
        self._socket: Any = None
        self._peer = Peer(_echo_zmq_asyncio, pair_endpoint(run, "latency-zmq-asyncio"))

    def measure(self, num_pings: int, gap_s: float) -> list[float]:
        return self._runner.run(self._measure(num_pings, gap_s))

    async def _measure(self, num_pings: int, gap_s: float) -> list[float]:
        async with asyncio.timeout(30 + 2 * num_pings * (gap_s + 0.001)):
            if self._socket is None:
                self._socket = bind_pair(self._context, self._run, "latency-zmq-asyncio")
                await self._socket.recv()
            payload = bytes(MESSAGE_BYTES)
            times_s = []
            for _ in range(num_pings):
                if gap_s > 0:
                    await asyncio.sleep(gap_s)
                sent_s = time.perf_counter()
                await self._socket.send(payload)
                await self._socket.recv()
                times_s.append((time.perf_counter() - sent_s) / 2)
        return times_s

    def close(self) -> None:
        self._peer.stop()
        if self._socket is not None:
            self._socket.close(0)
        self._context.term()
        self._runner.close()


def _echo_zmq_asyncio(endpoint: str) -> None:
    async def serve() -> None:
        socket: Any = zmq.asyncio.Context().socket(zmq.PAIR)
        socket.connect(endpoint)
        await socket.send(b"")
        while True:
            await socket.send(await socket.recv())

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve())


class QueueLatency:
    """Two multiprocessing.Queues, blocking at both ends."""

    name = "multiprocessing.Queue"
    wakes_loop = False

    def __init__(self, run: RunDirectory) -> None:
        self._pings: Any = SPAWN.Queue()
        self._pongs: Any = SPAWN.Queue()
        self._peer = Peer(_echo_queue, self._pings, self._pongs)
        self._pongs.get(timeout=30)

    def measure(self, num_pings: int, gap_s: float) -> list[float]:
        payload = bytes(MESSAGE_BYTES)

        def ping() -> None:
            self._pings.put(payload)
            self._pongs.get(timeout=30)

        return _blocking_pings(ping, num_pings, gap_s)

    def close(self) -> None:
        self._peer.stop()
        close_queues(self._pings, self._pongs)


def _echo_queue(pings: Any, pongs: Any) -> None:
    pongs.put(b"")
    while True:
        pongs.put(pings.get())


def pair_endpoint(run: RunDirectory, name: str) -> str:
    """Where a plain pair of sockets meets."""
    return f"ipc://{run.path}/{name}"


def bind_pair(context: Any, run: RunDirectory, name: str, window: int = 1000) -> Any:
    """Our end of the pair; the peer connects. ``window``: messages that may wait here."""
    socket = context.socket(zmq.PAIR)
    socket.linger = 0
    socket.sndhwm = window
    socket.bind(pair_endpoint(run, name))
    return socket


def close_queues(*queues: Any) -> None:
    """Close them without waiting for a peer that will read no more."""
    for queue in queues:
        queue.cancel_join_thread()
        queue.close()


def _expect(socket: "zmq.Socket[bytes]") -> bytes:
    """The next message. Raises: PeerError after 30 s."""
    for _ in range(30):
        if socket.poll(_POLL_MS):
            return socket.recv()
    raise PeerError("the peer did not answer within 30 s")


def _blocking_pings(ping: Callable[[], None], num_pings: int, gap_s: float) -> list[float]:
    times_s = []
    for _ in range(num_pings):
        if gap_s > 0:
            time.sleep(gap_s)
        sent_s = time.perf_counter()
        ping()
        times_s.append((time.perf_counter() - sent_s) / 2)
    return times_s


LATENCIES: tuple[Callable[[RunDirectory], Latency], ...] = (
    BusLatency,
    RingLatency,
    ZmqLatency,
    ZmqAsyncioLatency,
    QueueLatency,
)
