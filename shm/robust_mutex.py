"""A mutex in shared memory that the kernel frees when its holder dies: POSIX's, process-shared and robust. Beneath ``turns``.

The kernel frees it while the holder's thread ends, whatever killed it, and wakes one that waits. So nobody has to look whether the
holder lives. It guards time and no data, so after a death there is nothing to mend. Waiting is the kernel's as well (futex).
"""

import ctypes
import errno
import os
import time
from typing import Any

import numpy as np
from numpy.typing import NDArray

NUM_BYTES = 64  # glibc's has 40 on x86-64, 48 on arm64; a cache line of its own
HOLDER = 0x3FFF_FFFF  # the bits of its first 32 that name the holding thread; Linux's FUTEX_TID_MASK, 0: nobody holds it

_PROCESS_SHARED, _ROBUST = 1, 1
_ATTRIBUTE_BYTES = 16
_libc = ctypes.CDLL(None)
_held: "set[RobustMutex]" = set()  # stay mapped: the kernel walks through them when their thread dies
_clocklock = getattr(_libc, "pthread_mutex_clocklock", None)  # since glibc 2.30


class _Time(ctypes.Structure):
    _fields_ = (("tv_sec", ctypes.c_long), ("tv_nsec", ctypes.c_long))


def make_mutex(place: NDArray[np.uint8]) -> None:
    """Make a free mutex of NUM_BYTES zeros, before others see them. Raises: OSError where the C library has none of this kind."""
    attributes = ctypes.create_string_buffer(_ATTRIBUTE_BYTES)
    _check(_libc.pthread_mutexattr_init(attributes))
    _check(_libc.pthread_mutexattr_setpshared(attributes, _PROCESS_SHARED))
    _check(_libc.pthread_mutexattr_setrobust(attributes, _ROBUST))
    _check(_libc.pthread_mutex_init(ctypes.c_void_p(place.ctypes.data), attributes))


class RobustMutex:
    """A mutex as this process sees it. The thread that has taken it releases it; its death does so as well."""

    def __init__(self, place: NDArray[np.uint8]) -> None:
        assert place.nbytes == NUM_BYTES and place.ctypes.data % NUM_BYTES == 0
        self._place = place
        self._mutex = ctypes.c_void_p(place.ctypes.data)

    def try_acquire(self) -> bool:
        """Take it if it is free."""
        return self._is_mine(_libc.pthread_mutex_trylock(self._mutex))

    def acquire(self, timeout_s: float) -> bool:
        """Take it, waiting for it up to ``timeout_s``."""
        if self.try_acquire():
            return True
        clock = time.CLOCK_REALTIME if _clocklock is None else time.CLOCK_MONOTONIC
        at_ns = time.clock_gettime_ns(clock) + max(0, int(1e9 * timeout_s))
        until: Any = ctypes.byref(_Time(*divmod(at_ns, 1_000_000_000)))
        if _clocklock is None:
            return self._is_mine(_libc.pthread_mutex_timedlock(self._mutex, until))
        return self._is_mine(_clocklock(self._mutex, clock, until))

    def release(self) -> None:
        """Give it up. The caller has it."""
        _held.discard(self)
        _check(_libc.pthread_mutex_unlock(self._mutex))

    def _is_mine(self, error: int) -> bool:
        if error in (errno.EBUSY, errno.ETIMEDOUT):
            return False
        if error == errno.EOWNERDEAD:  # its holder died; whoever dies before the next line leaves it the same again
            error = _libc.pthread_mutex_consistent(self._mutex)
        _check(error)
        _held.add(self)
        return True


def _check(error: int) -> None:
    if error:
        raise OSError(error, os.strerror(error))
