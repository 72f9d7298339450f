"""Deaths at lines of the source, for ``mmrt chaos --lines``: a process is told to die at the n-th line of mmrt that it comes to next
and that nobody has died at before.

Disabled unless MMRT_FAULTS names a fault file. The storm then has a file beside it for each process (``LineOrders`` in the lab), which
the process maps while it may still open files; ``LINE_SIGNAL`` makes it look. Python traces its lines from there on, in the main thread
(from the start on in all threads), so it is slower until it dies.
"""

import mmap
import os
import signal
import struct
import sys
import threading
import time
import zlib
from pathlib import Path
from types import FrameType
from typing import Any

from ..environment import Environment

LINE_SIGNAL = signal.SIGRTMIN + 8  # not used elsewhere in mmrt
MAX_KNOWN = 8192
TEXT_BYTES = 248
HEAD = struct.Struct("=4I")  # lines still to come, 1 if from the start on, number of known lines, bytes of the text
KNOWN_AT = HEAD.size + TEXT_BYTES
FILE_BYTES = KNOWN_AT + 4 * MAX_KNOWN
_ROOT = f"{Path(__file__).parents[2]}{os.sep}"
_CONFINED = "video"  # may not send signals, not even to itself: the storm does it
_SELVES = (__file__,)


def order_path(fault_file: Path, name: str) -> Path:
    """Return the file of a process's order."""
    return fault_file.with_name(f"{fault_file.name}.{name}.line")


def key_of(line: str) -> int:
    """Return the number by which a line, "path:number", is known."""
    return zlib.crc32(line.encode())


def die_at_lines(name: str, environment: Environment) -> None:
    """Make this process die when it is told to, if MMRT_FAULTS is set. Call it in the main thread. ``name``: an actor's or other's."""
    if environment.fault_file is None:
        return
    try:
        with order_path(environment.fault_file, name).open("r+b") as file:
            mapped = mmap.mmap(file.fileno(), FILE_BYTES)
    except (OSError, ValueError):
        return
    death = _Death(mapped, name)
    signal.signal(LINE_SIGNAL, lambda _, frame: death.await_line(frame))
    if death.is_from_the_start:
        death.await_line(sys._getframe())


class _Death:
    def __init__(self, order: mmap.mmap, name: str) -> None:
        self._order = order
        self._name = name
        self._pid = os.getpid()
        self._seen: set[tuple[str, int]] = set()
        self._left = 0
        self._known: set[int] = set()

    @property
    def is_from_the_start(self) -> bool:
        left, from_start, _, _ = HEAD.unpack_from(self._order)
        return bool(left and from_start)

    def await_line(self, frame: FrameType | None) -> None:
        """Trace all that runs from now on in this thread, and in threads to come."""
        self._left, from_start, num_known, _ = HEAD.unpack_from(self._order)
        self._known = {*struct.unpack_from(f"={num_known}I", self._order, KNOWN_AT)}
        if not self._left:
            return
        if from_start:
            threading.settrace(self._on_call)
        while frame is not None:
            frame.f_trace = self._on_call(frame, "call", None)
            frame = frame.f_back
        sys.settrace(self._on_call)

    def _on_call(self, frame: FrameType, event: str, argument: Any) -> Any:
        file = frame.f_code.co_filename
        return self._on_line if file.startswith(_ROOT) and file not in _SELVES else None

    def _on_line(self, frame: FrameType, event: str, argument: Any) -> Any:
        place = (frame.f_code.co_filename, frame.f_lineno)
        if event == "line" and place not in self._seen:
            self._seen.add(place)
            line = f"{place[0].removeprefix(_ROOT)}:{place[1]}"
            if key_of(line) not in self._known:
                self._left -= 1
                if self._left == 0 and os.getpid() == self._pid:  # a fork of the zygote lives on
                    self._die(line)
        return self._on_line

    def _die(self, line: str) -> None:
        text = line.encode()[:TEXT_BYTES]
        self._order[HEAD.size : HEAD.size + len(text)] = text
        HEAD.pack_into(self._order, 0, 0, 0, 0, len(text))
        while True:
            if self._name != _CONFINED:
                os.kill(self._pid, signal.SIGKILL)
            time.sleep(0.001)
