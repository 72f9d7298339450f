"""The turn to compute: one for each device of a run whose encoder, prefill and decode compute one at a time (``actors.turns``), in any
processes.

Whoever waits sleeps in the kernel, and the turn of one that dies is free at once (``robust_mutex``). So a process can be killed between
any two instructions here: nothing has to be proven or mended. A turn protects no data: whoever loses patience may go on without one.
``memory`` makes the words; ``actors/host/turns`` uses them.
"""

import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol, Self

import numpy as np

from .robust_mutex import NUM_BYTES, RobustMutex, make_mutex
from .run_directory import RunDirectory
from .segment import Field, Layout, Segment

BEAT_S = 0.5  # between signs of life of one that waits

_KIND = "turns"
_NUM_MUTEXES = 4

Beat = Callable[[], object]


class Mutex(Protocol):
    """One of a turnstile's two: ``RobustMutex``."""

    def try_acquire(self) -> bool: ...

    def acquire(self, timeout_s: float) -> bool: ...

    def release(self) -> None: ...


class Turnstile:
    """Lets one in at a time. Of two that come again and again each is in every other time.

    A mutex alone would be taken again by its last holder, which is awake. Here only the holder of ``following`` waits for ``current``,
    and keeps others out until it is in.
    """

    def __init__(self, current: Mutex, following: Mutex) -> None:
        self._current, self._following = current, following

    def enter(self, patience_s: float = math.inf, beat: Beat = lambda: None) -> bool:
        """Wait to be let in, and call ``beat`` meanwhile, now and then. False if that takes longer than ``patience_s``."""
        until_s = time.monotonic() + patience_s
        if not _take(self._following, until_s, beat):
            return False
        try:
            return _take(self._current, until_s, beat)
        finally:
            self._following.release()

    def leave(self) -> None:
        """Let the next one in. The caller is in."""
        self._current.release()

    @property
    def is_wanted(self) -> bool:
        """True if somebody waits until the caller, which is in, leaves."""
        if not self._following.try_acquire():
            return True
        self._following.release()
        return False


def _take(mutex: Mutex, until_s: float, beat: Beat) -> bool:
    while not mutex.acquire(min(BEAT_S, max(0.0, until_s - time.monotonic()))):
        beat()
        if time.monotonic() >= until_s:
            return False
    return True


class Turns:
    """``turn``: whose turn it is to compute. ``plans``: which of those that work on plans asks for it; the others wait there.

    So one that waits for the turn is never behind more than one plan's quantum, and plans are never behind more than one step of each
    decode.
    """

    def __init__(self, segment: Segment) -> None:
        """Use ``create`` or ``attach``."""
        places, step, num_bytes = _layout()
        segment.expect_bytes(num_bytes)
        self._segment = segment
        self._places = segment.field(places)
        self._step = segment.words[step.offset // 8 : step.offset // 8 + 1]
        mutexes = [RobustMutex(place) for place in self._places]
        self.turn, self.plans = Turnstile(*mutexes[:2]), Turnstile(*mutexes[2:])

    @classmethod
    def create(cls, run: RunDirectory, device: int = 0) -> Self:
        """Make those of the device with this number. Raises: SpaceError, FileExistsError, OSError where the C library has no such
        mutexes."""
        places, _, num_bytes = _layout()
        segment = Segment.create(_path(run, device), num_bytes, kind=_KIND, publish=False)
        try:
            for place in segment.field(places):
                make_mutex(place)
            segment.publish()
            return cls(segment)
        except BaseException:
            segment.close()
            raise

    @classmethod
    def attach(cls, run: RunDirectory, device: int = 0) -> Self:
        """Map them. Raises: MissingError, SegmentError."""
        return cls(Segment.attach(_path(run, device), kind=_KIND))

    def close(self) -> None:
        """Unmap. The caller has no turn."""
        self._step.release()
        del self._places, self.turn, self.plans
        self._segment.close()

    @property
    def step_s(self) -> float:
        """The time of a step of decode with all processors, as decode has set it last; 0 before."""
        return self._step[0] / 1e9

    def set_step_s(self, seconds: float) -> None:
        """Set it. decode only; of several the last one counts."""
        self._step[0] = int(1e9 * seconds)


def _path(run: RunDirectory, device: int) -> Path:
    return run.segment_path(f"turns.{device}" if device else "turns")


def _layout() -> tuple[Field, Field, int]:
    """(mutexes, time of a step, bytes of the segment)."""
    layout = Layout()
    return layout.add((_NUM_MUTEXES, NUM_BYTES), np.uint8), layout.add(1, np.uint64), layout.num_bytes
