"""Logs: the output of actors, from their pipes to the terminal and to size-rotated files, and back for ``mmrt logs``.

``LogPump`` (one per process) and ``LogFile`` (one per name of a process) run in the supervisor; ``LogReader`` in the command line. A
log file is ``<state>/mmrt/<run>/<process>.log``; each line is a UTC timestamp, a space and what the actor printed, or an object of JSON
(``json_log``).
"""

import asyncio
import contextlib
import heapq
import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from io import FileIO
from pathlib import Path
from typing import BinaryIO

from ..errors import ConfigError
from ..process.json_log import time_of, timestamp, wrapped
from ..stage_table import DEFAULT_LAYOUT, check_layout, devices_of

MAX_FILE_BYTES = 8 << 20
NUM_OLD_FILES = 3
MAX_LINE_BYTES = 16 << 10
NUM_TAIL_LINES = 40
_READ_BYTES = 1 << 16
_LAYOUT = "layout"


class LogFile:
    """Appends lines to a file, which becomes ``.1``, ``.2`` … when it is full.

    Failing to write is reported once and ends the file, not the run.
    """

    def __init__(
        self, path: Path, on_error: Callable[[str], None], max_bytes: int = MAX_FILE_BYTES, *, has_times: bool = False
    ) -> None:
        """``has_times``: the lines are objects of JSON, which hold their times."""
        self.path = path
        self._has_times = has_times
        self._max_bytes = max_bytes
        self._on_error = on_error
        self._file: FileIO | None = None
        try:
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._file = _open_private(path)
        except OSError as error:
            on_error(f"no log file {path}: {error.strerror}")

    def write(self, lines: Sequence[str]) -> None:
        if self._file is None or not lines:
            return
        stamp = "" if self._has_times else f"{timestamp(time.time())} "
        data = "".join(f"{stamp}{line}\n" for line in lines).encode(errors="replace")
        try:
            if self._file.tell() + len(data) > self._max_bytes and self._file.tell():
                self._rotate()
            self._file.write(data)
        except OSError as error:
            self._on_error(f"stopped logging to {self.path}: {error.strerror}")
            self.close()

    def _rotate(self) -> None:
        assert self._file is not None
        self._file.close()
        for number in range(NUM_OLD_FILES, 0, -1):
            older = self.path.with_name(f"{self.path.name}.{number}")
            newer = self.path.with_name(f"{self.path.name}.{number - 1}") if number > 1 else self.path
            with contextlib.suppress(FileNotFoundError):
                newer.replace(older)
        self._file = _open_private(self.path)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


def _open_private(path: Path) -> FileIO:
    return FileIO(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600), "a")


class LogFiles:
    """The log files of one run by name, each opened at its first line. ``is_json``: each line is an object."""

    def __init__(self, directory: Path, on_error: Callable[[str], None], *, is_json: bool = False) -> None:
        self._directory = directory
        self._on_error = on_error
        self._is_json = is_json
        self._files: dict[str, LogFile] = {}

    def begin(self, layout: str) -> None:
        """Record the layout of the run that logs from now on."""
        with contextlib.suppress(OSError):  # what cannot be written is said of the logs
            self._directory.mkdir(parents=True, exist_ok=True, mode=0o700)
            (self._directory / _LAYOUT).write_text(layout)

    def write(self, name: str, lines: Sequence[str], pid: int | None = None) -> Sequence[str]:
        """Write what a process has printed; return the lines, as objects if they are written so."""
        if self._is_json:
            lines = [wrapped(line, time.time(), name, pid) for line in lines]
        if name not in self._files:
            self._files[name] = LogFile(self._directory / f"{name}.log", self._on_error, has_times=self._is_json)
        self._files[name].write(lines)
        return lines

    def close(self) -> None:
        for file in self._files.values():
            file.close()


def read_layout_of_logs(directory: Path) -> str:
    """Return the layout of the last run that logged there; the default if none is recorded."""
    try:
        layout = (directory / _LAYOUT).read_text()
    except OSError:
        layout = ""
    try:
        check_layout(layout, tuple(devices_of(layout).values()))
    except ConfigError:
        return DEFAULT_LAYOUT
    return layout


class LogPump:
    """Reads one process's output pipe and hands whole lines to ``sink``. Keeps the last ``NUM_TAIL_LINES`` in ``tail``."""

    def __init__(self, fd: int, sink: Callable[[list[str]], None]) -> None:
        """Take over ``fd``, a nonblocking read end, and close it in the end."""
        self.tail: deque[str] = deque(maxlen=NUM_TAIL_LINES)
        self._fd = fd
        self._sink = sink
        self._rest = b""
        self._open = True
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(fd, self._read)

    def _read(self) -> bool:
        """Read once. Returns False when there is nothing more for now."""
        try:
            data = os.read(self._fd, _READ_BYTES)
        except BlockingIOError:
            return False
        if not data:
            self._end()
            return False
        *lines, rest = (self._rest + data).split(b"\n")
        while len(rest) > MAX_LINE_BYTES:
            lines.append(rest[:MAX_LINE_BYTES])
            rest = rest[MAX_LINE_BYTES:]
        lines = [line[start : start + MAX_LINE_BYTES] for line in lines for start in range(0, len(line) or 1, MAX_LINE_BYTES)]
        self._rest = rest
        self._emit(lines)
        return True

    def _emit(self, lines: Sequence[bytes]) -> None:
        # A progress bar rewrites its line with carriage returns: only its last state counts.
        texts = [line.rstrip(b"\r").rpartition(b"\r")[2].decode(errors="replace") for line in lines]
        if texts:
            self.tail.extend(texts)
            self._sink(texts)

    def finish(self) -> None:
        """Read the rest of the pipe after the process's end, and stop, even if another process holds its other end."""
        while self._open and self._read():
            pass
        if self._open:
            self._end()

    def _end(self) -> None:
        self._open = False
        self._loop.remove_reader(self._fd)
        os.close(self._fd)
        if self._rest:
            self._emit([self._rest])
            self._rest = b""


class LogReader:
    """Reads the log files of a run for users: the last lines of all or some actors in order of time, then new lines."""

    def __init__(self, directory: Path, actors: Sequence[str] = ()) -> None:
        self._directory = directory
        self._wanted = frozenset(actors)
        self._files: dict[Path, BinaryIO] = {}

    def last(self, num_lines: int) -> list[tuple[str, str]]:
        """Return the last ``num_lines`` lines over all chosen actors as (actor, line)."""
        tails = []
        for path in self._paths():
            file = self._opened(path)
            end, num_bytes = file.seek(0, os.SEEK_END), num_lines * 512
            while True:
                position = max(0, end - num_bytes)
                file.seek(position)
                lines = _whole_lines(file)[1 if position else 0 :]
                if len(lines) >= num_lines or not position:
                    break
                num_bytes *= 2
            tails.append([(path.stem, line) for line in lines[max(0, len(lines) - num_lines) :]])
        merged = list(heapq.merge(*tails, key=_stamp))
        return merged[max(0, len(merged) - num_lines) :]

    def new(self) -> list[tuple[str, str]]:
        """Return the lines appended since the last call of ``last`` or ``new``, across rotations."""
        found = []
        for path in self._paths():
            file = self._opened(path)
            try:
                is_rotated = os.fstat(file.fileno()).st_ino != path.stat().st_ino
            except FileNotFoundError:  # at this moment
                is_rotated = False
            found += [(path.stem, line) for line in _whole_lines(file)]  # after its rotation it gets no more lines
            if is_rotated:
                file.close()
                self._files[path] = path.open("rb")
                found += [(path.stem, line) for line in _whole_lines(self._files[path])]
        return sorted(found, key=_stamp)

    def close(self) -> None:
        for file in self._files.values():
            file.close()
        self._files.clear()

    def _opened(self, path: Path) -> BinaryIO:
        if path not in self._files:
            self._files[path] = path.open("rb")
        return self._files[path]

    def _paths(self) -> list[Path]:
        paths = sorted(self._directory.glob("*.log"))
        return [path for path in paths if not self._wanted or path.stem in self._wanted]


def _whole_lines(file: BinaryIO) -> list[str]:
    """Read complete lines up to the end; a line still being written is left for the next call."""
    start = file.tell()
    whole, newline, _ = file.read().rpartition(b"\n")
    file.seek(start + len(whole) + len(newline))
    return whole.decode(errors="replace").split("\n") if newline else []


def _stamp(entry: tuple[str, str]) -> str:
    """Return the sort key, the time alone: simultaneous lines keep their order."""
    return time_of(entry[1])
