"""Injected faults for ``mmrt chaos``: lost and late messages, and processes that unexpectedly exit with status 0.

Disabled unless MMRT_FAULTS names a fault file; then ``transport`` passes every message through this module. The storm writes the
file (``FaultFile``), and every process of the run maps it (``BusFaults``). Only a storm sets that variable. Writing a fault file
takes write access to the run directory, and a process with that access could kill the run's processes anyway.
"""

import mmap
import os
import random
import signal
import struct
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from ..environment import Environment, read_environment
from ..stage_table import STAGES, stage_of

_FILE = struct.Struct("=8s6Q")  # magic, episode, mask of actors, lost and late per million, longest delay in us, seed
_MAGIC = b"mmrtflt1"
_EPISODE = struct.Struct("=Q")
_FIELDS = struct.Struct("=5Q")  # the fields after the episode
_MILLION = 1_000_000
EXIT_SIGNAL = signal.SIGRTMIN + 9  # not used elsewhere in mmrt
MessageT = TypeVar("MessageT")


class FaultFile:
    """The writing end: one episode of faults at a time. Owned by the storm."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._episode = 0
        path.write_bytes(_FILE.pack(_MAGIC, 0, 0, 0, 0, 0, 0))
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), _FILE.size)

    def begin(self, actor: str, *, seed: int, lost: float = 0.0, late: float = 0.0, max_delay_s: float = 0.0) -> None:
        """Start to lose or delay this share of the messages that ``actor`` sends and receives."""
        self._episode += 1
        rates = (int(lost * _MILLION), int(late * _MILLION), int(max_delay_s * 1e6))
        self._write(_bit(actor), *rates, seed)

    def end(self) -> None:
        """Stop losing and delaying messages. Messages already delayed still arrive."""
        self._episode += 1
        self._write(0, 0, 0, 0, 0)

    def _write(self, *fields: int) -> None:
        """Write the episode's number last: a reader that sees it also sees the other fields."""
        _FIELDS.pack_into(self._map, _FILE.size - _FIELDS.size, *fields)
        _EPISODE.pack_into(self._map, len(_MAGIC), self._episode)

    def close(self) -> None:
        self.end()
        self._map.close()


class BusFaults:
    """The reading end, one per socket. ``outgoing`` and ``incoming`` sit between the socket and its user."""

    def __init__(self, path: Path, actor: str) -> None:
        with path.open("rb") as file:
            self._map = mmap.mmap(file.fileno(), _FILE.size, prot=mmap.PROT_READ)
        self._actor, self._bit = actor, _bit(actor)
        self._random = random.Random(0)
        self._episode = 0
        self._lost = self._late = self._max_delay_s = 0.0
        self._held_out: deque[tuple[float, Callable[[], bool]]] = deque()
        self._held_in: deque[tuple[float, object]] = deque()

    def _look(self) -> None:
        """Check for a new episode. The writer writes its number last; this reads it first."""
        (episode,) = _EPISODE.unpack_from(self._map, len(_MAGIC))
        if episode == self._episode:
            return
        mask, lost, late, delay_us, seed = _FIELDS.unpack_from(self._map, _FILE.size - _FIELDS.size)
        self._episode = episode
        self._random.seed(f"{seed}:{self._actor}")
        mine = bool(mask & self._bit)
        self._lost, self._late = (lost / _MILLION, late / _MILLION) if mine else (0.0, 0.0)
        self._max_delay_s = delay_us / 1e6

    def outgoing(self, send: Callable[[], bool]) -> bool:
        """Call ``send`` now, later, or never. Returns True where it was not called: a sender cannot tell that a message was lost."""
        self._look()
        self.release()
        drawn = self._random.random() if self._lost or self._late else 1.0
        if drawn < self._lost:
            return True
        if drawn < self._lost + self._late:
            self._held_out.append((self._due_s(), send))
            return True
        return send()

    def incoming(self, received: list[MessageT]) -> list[MessageT]:
        """Return delayed messages that are due, then those of ``received`` that get through. Late messages are also out of order."""
        self._look()
        self.release()
        now_s = time.monotonic()
        through: list[MessageT] = []
        for _ in range(len(self._held_in)):
            due_s, message = self._held_in.popleft()
            if due_s <= now_s:
                through.append(message)  # type: ignore[arg-type]
            else:
                self._held_in.append((due_s, message))
        if not self._lost and not self._late:
            return through + received
        for arrived in received:
            drawn = self._random.random()
            if drawn >= self._lost + self._late:
                through.append(arrived)
            elif drawn >= self._lost:
                self._held_in.append((self._due_s(), arrived))
        return through

    def release(self) -> None:
        """Send the delayed messages that are due."""
        now_s = time.monotonic()
        for _ in range(len(self._held_out)):
            due_s, send = self._held_out.popleft()
            if due_s <= now_s:
                send()
            else:
                self._held_out.append((due_s, send))

    def _due_s(self) -> float:
        return time.monotonic() + self._random.uniform(0, self._max_delay_s)


def bus_faults(actor: str) -> BusFaults | None:
    """Return the faults to inject into this process; None without MMRT_FAULTS."""
    path = read_environment().fault_file
    return None if path is None or stage_of(actor) not in STAGES else BusFaults(path, actor)


def _bit(actor: str) -> int:
    """Return the bit of the actor's stage in an episode's mask: an episode hits all actors of a stage."""
    return 1 << [*STAGES].index(stage_of(actor))


def exit_when_told(environment: Environment) -> None:
    """Make this process exit with status 0 on EXIT_SIGNAL if MMRT_FAULTS is set. Call it in the main thread."""
    if environment.fault_file is not None:
        signal.signal(EXIT_SIGNAL, lambda *_: os._exit(0))
