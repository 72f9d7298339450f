"""Threads that compute a kernel's parts together with the thread that calls it.

A decode step has four products in each layer. A thread that sleeps takes about 70 µs to come to one, and threads that keep looking for
work take a processor from others that have some. So the threads of a team look for the next call for ``_SPIN_NS`` and then sleep, and a
call waits only for those that have begun (``team_code``).
"""

import ctypes
import logging
import mmap
import struct
import threading
import weakref

from .object_code import LoadedCode
from .team_code import CLOCK_GETTIME, END, GET_CPU, HELP, LEAD, NEXT_PART, NUM_WORDS, SPIN_NS, SYSCALL

log = logging.getLogger(__name__)

_SPIN_NS = 100_000  # the calls of a layer follow each other in less
_WORD_BYTES = 8
_SET_NAME = 15  # of the calling thread


class Team:
    """The calling thread, which leads, and helpers, which begin with the first call that wants them and sleep while there is none. A
    team has one leader. A helper that could not be started is not tried again. The helpers end with the object."""

    def __init__(self, code: LoadedCode) -> None:
        self._shared = _Shared(code)
        self._num_helpers = 0
        self.next_part = self._shared.address + _WORD_BYTES * NEXT_PART
        weakref.finalize(self, self._shared.run, END)

    def call(self, function: int, call: bytes, num_threads: int) -> None:
        """Call a function with the address of ``call`` in up to so many threads at a time. Each computes parts until none is left, and
        takes their numbers from the 64 bits at ``next_part``, which are 0 at first."""
        while self._num_helpers + 1 < num_threads:
            self._num_helpers += 1
            name = f"helper-{self._num_helpers}"
            try:
                threading.Thread(target=self._shared.help, args=(name,), name=name, daemon=True).start()
            except RuntimeError as error:  # no helper is needed
                log.warning("%s of %d cannot start, and computes nothing: %s", name, num_threads - 1, error)
        self._shared.run(LEAD, function, call, num_threads - 1)


class _Shared:
    """A team's code and memory, which its threads share. The memory has words of 64 bits."""

    def __init__(self, code: LoadedCode) -> None:
        arguments = ctypes.c_void_p, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_long
        self._code, self._run = code, ctypes.CFUNCTYPE(None, *arguments)(code.address)
        self._memory = mmap.mmap(-1, _WORD_BYTES * NUM_WORDS, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # a fork has its own
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        library = ctypes.CDLL(None)
        functions = {CLOCK_GETTIME: library.clock_gettime, GET_CPU: library.sched_getcpu, SYSCALL: library.syscall}
        words = {index: ctypes.cast(function, ctypes.c_void_p).value for index, function in functions.items()}
        for index, value in {**words, SPIN_NS: _SPIN_NS}.items():
            struct.pack_into("=q", self._memory, _WORD_BYTES * index, value)

    def help(self, name: str) -> None:
        """Be a helper, with this name in ``top -H``."""
        ctypes.CDLL(None).prctl(_SET_NAME, name.encode(), 0, 0, 0)
        self.run(HELP)

    def run(self, what: int, function: int = 0, call: bytes = b"", num_helpers: int = 0) -> None:
        """The code of ``team_code``."""
        self._run(self.address, what, function, call, num_helpers)
