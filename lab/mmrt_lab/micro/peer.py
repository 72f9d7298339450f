"""A process beside a bench's own: spawned, so that it shares nothing but what it attaches, and gone when its parent is."""

import ctypes
import multiprocessing
import os
import signal
from collections.abc import Callable
from multiprocessing.context import SpawnProcess
from typing import Any

SPAWN = multiprocessing.get_context("spawn")
STOP_GRACE_S = 5.0
_PR_SET_PDEATHSIG = 1


class Peer:
    """A running child. ``stop`` it: it may not end otherwise."""

    def __init__(self, target: Callable[..., None], *arguments: Any, may_start_others: bool = False) -> None:
        daemon = not may_start_others
        self._process: SpawnProcess = SPAWN.Process(target=_run, args=(os.getpid(), target, arguments), daemon=daemon)
        self._process.start()

    @property
    def exitcode(self) -> int | None:
        """None while it runs."""
        return self._process.exitcode

    @property
    def sentinel(self) -> int:
        """A descriptor that becomes readable when it and all that it has forked are dead."""
        return self._process.sentinel

    def stop(self) -> None:
        """Kill it and wait."""
        self._process.kill()
        self._process.join(STOP_GRACE_S)
        self._process.close()


def _run(parent_pid: int, target: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    """Entry of the child: die with the parent, however that dies."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() == parent_pid:
        target(*arguments)
