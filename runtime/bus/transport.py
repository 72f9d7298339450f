"""The bus: the controller's ROUTER and every actor's DEALER over ``ipc://`` in the run directory. Only this module imports zmq.

Actors connect to the controller. One that is confined can connect to nothing, so the controller connects to it (``meet``): to a socket
that was made before, and at which each new controller finds it again.

Messages can be lost, so nothing here waits for delivery: ``send`` returns whether the message left, and a caller that needs an
answer sends again. Messages to one receiver may share a transfer: each transfer wakes threads in both processes, which takes many times
what a message does. Frames that do not decode are dropped and logged. Peers are checked by their credentials (SO_PEERCRED): only
messages of this user's processes are accepted, in addition to the run directory's mode 0700, and a process that is confined, as a
video actor is, speaks for that actor alone.
"""

import asyncio
import logging
import os
import re
import socket
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol, TypeVar, cast

import msgspec
import zmq

from ...shm.confined import is_confined
from ...shm.named_socket import bind_in_place
from ..stage_table import InstanceId, stage_of
from . import messages, wire
from .faults import BusFaults, bus_faults
from .messages import ToActor, ToController

log = logging.getLogger(__name__)

SOCKET_NAME = "bus"
_HIGH_WATER_MARK = 10_000
_DRAIN_LIMIT = 256
_TOGETHER = 64  # messages of a transfer
_CONFINED_STAGE = "video"
_BACKLOG = 4
_MAX_SPEAKERS = 1024
_GENERATION = re.compile("[0-9]{1,18}")  # it goes into words of 64 bits


def _path(run: Path, actor: str = "") -> Path:
    """The socket of the controller, or of a confined actor."""
    path = run / (f"{actor}.{SOCKET_NAME}" if actor else SOCKET_NAME)
    if len(os.fsencode(path)) > 107:
        raise ValueError(f"socket path has {len(os.fsencode(path))} bytes, the system's limit is 107: {path}")
    return path


class Listening(NamedTuple):
    """What the ``ActorSocket`` of a confined process needs, opened before."""

    socket: socket.socket
    faults: BusFaults | None


def listen_for_controller(run: Path, actor: str) -> Listening:
    """Make the socket at which the controller finds ``actor``, in the place of its predecessor's; give it to ``ActorSocket``."""
    return Listening(bind_in_place(_path(run, actor), socket.SOCK_STREAM, _BACKLOG), bus_faults(actor))


def _configure(socket: zmq.Socket[bytes]) -> None:
    socket.linger = 0
    socket.sndhwm = socket.rcvhwm = _HIGH_WATER_MARK
    socket.reconnect_ivl = 10


def _has_message(socket: zmq.Socket[bytes]) -> bool:
    """Return whether ``recv`` would give a message: a third of the time that its exception takes."""
    return bool(cast(int, socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN)


class ControllerSocket:
    """The controller's end. ``fd`` is edge-triggered: after it fires and after every send, receive until empty."""

    def __init__(self, run: Path, pid_of: Callable[[str], int] | None = None) -> None:
        """``pid_of``: of the process that is an actor now; without it one that is confined speaks for the first of its stage."""
        path = _path(run)
        self._run, self._pid_of = run, pid_of
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        _configure(self._socket)
        self._socket.router_mandatory = True
        self._socket.router_handover = True
        self._socket.bind(f"ipc://{path}")
        path.chmod(0o600)
        self._socket.immediate = True  # each connection is a new peer; else it would keep the first one's name
        self._met: set[str] = set()
        self.meet([_CONFINED_STAGE])
        self.fd = int(self._socket.FD)
        self._own_uid = str(os.getuid())
        self._speakers: OrderedDict[tuple[bytes, str], bool] = OrderedDict()  # name and pid: whether it may have that name
        self._held: dict[tuple[str, int], list[bytes]] = {}
        self._faults = bus_faults("controller")

    def meet(self, actors: Iterable[str]) -> None:
        """Connect to those of these actors that are confined, and to no others."""
        wanted = {actor for actor in actors if stage_of(actor) == _CONFINED_STAGE}
        for actor in wanted - self._met:
            self._socket.connect(f"ipc://{_path(self._run, actor)}")
        for actor in self._met - wanted:
            self._socket.disconnect(f"ipc://{_path(self._run, actor)}")
        self._met = wanted

    def receive(self) -> list[tuple[InstanceId, int, ToController]]:
        """Return the messages that have arrived, at most a few hundred, as (actor, generation, message)."""
        received: list[tuple[InstanceId, int, ToController]] = []
        while len(received) < _DRAIN_LIMIT and _has_message(self._socket):
            try:
                identity, *body = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                break
            name = identity.bytes
            if not self._is_ours(name, identity):
                continue
            try:
                actor, generation = name.decode().rsplit(":", 1)
                if not _GENERATION.fullmatch(generation):
                    raise ValueError(f"{generation!r} is no generation")
            except ValueError as error:
                log.warning("dropped a message from %r: %s", name, error)
                continue
            for frame in body:
                try:
                    received.append((InstanceId(actor), int(generation), messages.decode_to_controller(frame.buffer)))
                except msgspec.DecodeError as error:
                    log.warning("dropped a message from %r: %s", name, error)
        return received if self._faults is None else self._faults.incoming(received)

    def _is_ours(self, name: bytes, frame: zmq.Frame) -> bool:
        """Check that the peer is this user's. Libzmq reports an ipc peer as ``localhost:uid:gid:pid``; peers without that are rejected.

        Called for every message: any process that connects can claim a name, and the last one gets it.
        """
        _, *credentials = str(frame.get("Peer-Address")).split(":")
        uid = credentials[0] if len(credentials) == 3 else "unknown"
        if uid != self._own_uid:
            log.warning("ignored a message from %r: user %s, this run belongs to user %s", name, uid, self._own_uid)
            return False
        return self._may_speak(name, credentials[2])

    def _may_speak(self, name: bytes, pid: str) -> bool:
        """Return whether the process may have that name. Before it is confined a process has no reason to claim another's."""
        speaker = name, pid
        if speaker not in self._speakers:
            self._speakers[speaker] = self._is_itself(name.rpartition(b":")[0], int(pid)) or not is_confined(int(pid))
            if not self._speakers[speaker]:
                log.warning("ignored messages from %r: process %s is confined, and speaks for itself alone", name, pid)
            if len(self._speakers) > _MAX_SPEAKERS:
                self._speakers.popitem(last=False)
        return self._speakers[speaker]

    def _is_itself(self, name: bytes, pid: int) -> bool:
        """Return whether the process is the actor of that name, of the stage that is confined."""
        actor = name.decode(errors="replace")
        if self._pid_of is None:
            return actor == _CONFINED_STAGE
        return stage_of(actor) == _CONFINED_STAGE and self._pid_of(actor) == pid

    def send(self, actor: str, generation: int, message: ToActor) -> bool:
        """Send to one actor generation; False when it is not connected or its queue is full."""
        if self._faults is not None:
            return self._faults.outgoing(lambda: self._send(actor, generation, [wire.encode(message)]))
        return self._send(actor, generation, [wire.encode(message)])

    def hold(self, actor: str, generation: int, message: ToActor) -> None:
        """Send with the others of ``flush``."""
        if self._faults is not None:
            self._faults.outgoing(lambda: self._hold(actor, generation, message))
        else:
            self._hold(actor, generation, message)

    def _hold(self, actor: str, generation: int, message: ToActor) -> bool:
        self._held.setdefault((actor, generation), []).append(wire.encode(message))
        return True

    def flush(self) -> list[str]:
        """Send what is held, to each actor in its order; the actors that some did not leave for: see ``send``."""
        held, self._held, missed = self._held, {}, []
        for (actor, generation), frames in held.items():
            if not all([self._send(actor, generation, frames[at : at + _TOGETHER]) for at in range(0, len(frames), _TOGETHER)]):
                missed.append(actor)
        return missed

    def _send(self, actor: str, generation: int, frames: list[bytes]) -> bool:
        try:
            self._socket.send_multipart([f"{actor}:{generation}".encode(), *frames], zmq.NOBLOCK)
        except zmq.Again:
            return False
        except zmq.ZMQError as error:
            if error.errno == zmq.EHOSTUNREACH:
                return False
            raise
        return True

    def close(self) -> None:
        self._socket.close(0)
        self._context.term()


class ActorSocket:
    """An actor's end. A plain loop uses ``poll``; an asyncio one ``drain_in_loop``."""

    def __init__(self, run: Path, actor: str, generation: int, listening: Listening | None = None) -> None:
        """``listening``: of ``listen_for_controller``, where the controller connects; else this connects to the controller."""
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        _configure(self._socket)
        self._socket.immediate = True
        self._socket.routing_id = f"{actor}:{generation}".encode()
        if listening is None:
            self._socket.connect(f"ipc://{_path(run)}")
        else:
            self._socket.setsockopt(zmq.USE_FD, listening.socket.detach())
            self._socket.bind(f"ipc://{_path(run, actor)}")
        self.fd = int(self._socket.FD)
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._extra: set[int] = set()
        self._held: list[bytes] = []
        self._has_left = True
        self._faults = bus_faults(actor) if listening is None else listening.faults

    def receive(self) -> list[ToActor]:
        """Return the messages that have arrived, at most a few hundred, without blocking."""
        received: list[ToActor] = []
        while len(received) < _DRAIN_LIMIT and _has_message(self._socket):
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                break
            for frame in frames:
                try:
                    received.append(messages.decode_to_actor(frame))
                except msgspec.DecodeError as error:
                    log.warning("dropped a message from the controller: %s", error)
        return received if self._faults is None else self._faults.incoming(received)

    def send(self, message: ToController) -> bool:
        """Send to the controller; False when it is away or its queue is full."""
        if self._faults is not None:
            return self._faults.outgoing(lambda: self._send([wire.encode(message)]))
        return self._send([wire.encode(message)])

    def hold(self, message: ToController) -> bool:
        """Send with the others of ``flush``; False when those of the last one have not left."""
        if self._faults is not None:
            return self._faults.outgoing(lambda: self._hold(message))
        return self._hold(message)

    def _hold(self, message: ToController) -> bool:
        self._held.append(wire.encode(message))
        return self._has_left

    def flush(self) -> bool:
        """Send what is held, in its order; False when some has not left."""
        held, self._held = self._held, []
        if not held:
            return True
        self._has_left = all([self._send(held[at : at + _TOGETHER]) for at in range(0, len(held), _TOGETHER)])
        return self._has_left

    def _send(self, frames: list[bytes]) -> bool:
        try:
            self._socket.send_multipart(frames, zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    def poll(self, timeout_s: float, extra_fds: Sequence[int] = ()) -> None:
        """Block until a message arrives, one of ``extra_fds`` is readable, or the time is over."""
        for fd in extra_fds:
            if fd not in self._extra:
                self._poller.register(fd, zmq.POLLIN)
                self._extra.add(fd)
        self._poller.poll(max(0, round(timeout_s * 1000)))

    def close(self) -> None:
        self._socket.close(0)
        self._context.term()


MessageT = TypeVar("MessageT")


class _Receives(Protocol[MessageT]):
    fd: int

    def receive(self) -> list[MessageT]: ...


class LoopReader:
    """Calls ``handler`` in an event loop with every message that arrives at a socket.

    The FD is edge-triggered and a send can consume its edge: call ``poke`` after every send (measured: without it replies stall).
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, socket: _Receives[MessageT], handler: Callable[[MessageT], None]) -> None:
        def drain() -> None:
            self._scheduled = False
            received = socket.receive()
            for message in received:
                handler(message)
            if received:
                self.poke()

        self._loop = loop
        self._fd = socket.fd
        self._drain = drain
        self._scheduled = False
        loop.add_reader(self._fd, drain)
        self.poke()

    def poke(self) -> None:
        if not self._scheduled:
            self._scheduled = True
            self._loop.call_soon(self._drain)

    def close(self) -> None:
        self._loop.remove_reader(self._fd)


def drain_in_loop(loop: asyncio.AbstractEventLoop, socket: _Receives[MessageT], handler: Callable[[MessageT], None]) -> LoopReader:
    """Receive from ``socket`` in ``loop``. Returns the reader, to ``poke`` after each send and to ``close``."""
    return LoopReader(loop, socket, handler)
