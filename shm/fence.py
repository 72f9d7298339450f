"""The one place that knows about weak memory orders. Used by every structure here, in every process.

A state is one aligned 64-bit word, written after everything that it vouches for; readers load the word first. x86-64 keeps stores
in order and loads in order, and CPython reorders nothing, so nothing has to be done there.
"""

import platform
import threading

_lock = threading.Lock()


def _no_fence() -> None:
    """Nothing to do: x86-64 reorders neither stores with stores nor loads with loads."""


def _lock_fence() -> None:
    """A full barrier made of lock operations.

    Accesses may move *into* a critical section, past its acquire or its release, but not through a release that an acquire follows:
    hence twice.
    """
    with _lock:
        pass
    with _lock:
        pass


fence = _no_fence if platform.machine().lower() in ("x86_64", "amd64") else _lock_fence
"""Writers call it before they publish a word, readers after they have loaded one."""
