"""The active generation of an actor, and the number of the next. Used by every actor, the supervisor and ``status``.

The holder of the role lock may write the actor's words. The kernel releases the lock only after the holder's last thread has
left its address space, so holding it proves that no older generation can write any more.
"""

import os
import select
import time
import weakref
from pathlib import Path
from typing import Protocol, Self

from .file_lock import EXCLUSIVE, SHARED, open_lock, try_lock, unlock, wait_for_lock

_WORD = 8
_MOMENT_S = 0.001
_COUNTER, _HOLDER = 0, _WORD  # what the lock file contains: last generation given out, pid of the last holder
_live: "weakref.WeakSet[RoleLock]" = weakref.WeakSet()


class Run(Protocol):
    """The part of a RunDirectory that role locks need."""

    @property
    def path(self) -> Path: ...


def _read_word(fd: int, offset: int) -> int:
    return int.from_bytes(os.pread(fd, _WORD, offset), "little")


def _write_word(fd: int, offset: int, value: int) -> None:
    os.pwrite(fd, value.to_bytes(_WORD, "little"), offset)


def _path(run: Run, actor: str) -> Path:
    return run.path / f"{actor}.lock"


def next_generation(run: Run, actor: str) -> int:
    """A number that no process of this actor has had in this run: 1, 2, …"""
    lock = open_lock(run.path / "generations.lock")
    try:
        wait_for_lock(lock, EXCLUSIVE)
        fd = open_lock(_path(run, actor))
        try:
            generation = _read_word(fd, _COUNTER) + 1
            _write_word(fd, _COUNTER, generation)
            return generation
        finally:
            os.close(fd)
    finally:
        os.close(lock)


class RoleLock:
    """The right to act as ``actor`` and write its words, held by at most one process at a time.

    A forked child shares the open file and would keep the lock alive after its parent's death, while it could not be said to hold
    it; so every RoleLock is closed in forked children, without touching the parent's. A holder must not fork without exec all the
    same: the child keeps the mappings.
    """

    def __init__(self, run: Run, actor: str) -> None:
        self.actor = actor
        self.held = False
        self._path = _path(run, actor)
        self._fd = -1
        _live.add(self)

    def try_acquire(self) -> bool:
        """Take the lock if it is free; True also if this process has it already."""
        if self.held:
            return True
        if self._fd < 0:
            self._fd = open_lock(self._path)
        if not try_lock(self._fd, EXCLUSIVE):
            return False
        _write_word(self._fd, _HOLDER, os.getpid())
        self.held = True
        return True

    def wait_for_holder(self, timeout_s: float) -> None:
        """Wait until the process that has it ends, or for ``timeout_s``. It may give it up earlier. Call it behind ``try_acquire``."""
        if _lives(_read_word(self._fd, _HOLDER), timeout_s):
            return
        time.sleep(min(_MOMENT_S, timeout_s))  # the lock may last a moment longer, or its holder has not written its pid yet

    def acquire(self, poll_s: float = 0.01, timeout_s: float | None = None) -> bool:
        """Wait for the lock, looking every ``poll_s``. False if ``timeout_s`` passed first."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while not self.try_acquire():
            if deadline is not None and time.monotonic() > deadline:
                return False
            time.sleep(poll_s)
        return True

    def release(self) -> None:
        """Release the lock, even if a child shares the file. The caller has written its last word and dropped its mappings."""
        if self.held:
            unlock(self._fd)
        self.close()

    def close(self) -> None:
        """Close the file without unlocking it: what a forked child does."""
        self.held = False
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.release()

    @staticmethod
    def is_held(run: Run, actor: str) -> bool:
        """Return whether any process acts as ``actor``."""
        return RoleLock.holder(run, actor) is not None

    @staticmethod
    def holder(run: Run, actor: str) -> int | None:
        """The pid of the process that acts as ``actor``, or None."""
        try:
            fd = open_lock(_path(run, actor), create=False)
        except FileNotFoundError:
            return None
        try:
            # Shared: probes do not meet each other, and a standby that meets one looks again.
            return None if try_lock(fd, SHARED) else _read_word(fd, _HOLDER)
        finally:
            os.close(fd)

    @staticmethod
    def acts(run: Run, actor: str, pid: int) -> bool:
        """Return whether this process lives and acts as ``actor``. The lock of a successor names its predecessor until it has written
        its own pid."""
        return RoleLock.holder(run, actor) == pid and _lives(pid)


def _lives(pid: int, for_s: float = 0.0) -> bool:
    """Return whether the process does not end, with all its threads, for so long; one that waits to be reaped has."""
    try:
        fd = os.pidfd_open(pid)
    except OSError:  # there is none; EINVAL: nobody has written a pid
        return False
    try:
        poll = select.poll()  # select knows no descriptors above 1023, which a gateway with many connections has
        poll.register(fd, select.POLLIN)
        return not poll.poll(for_s * 1000)
    finally:
        os.close(fd)


def _close_inherited() -> None:
    for lock in list(_live):
        lock.close()


os.register_at_fork(after_in_child=_close_inherited)
