"""The captured plans of an actor that may open no file: one file among the run's notes, opened before, that others empty.

The actor appends records; ``mmrt replay --capture`` empties the file when it gives an order, and takes them out. A record is the
length of its contents, 64 bits, and these; one with the length ``_DONE`` has the number of the order that is carried out. The length is
written last, so what an actor has left half-written is not there.
"""

import os
import struct
import weakref
from collections.abc import Iterator
from pathlib import Path

from ...shm.run_directory import NOTES
from ..errors import UserError
from .capture import SUFFIX, Capture

_WORD = struct.Struct("<Q")
_DONE = (1 << 64) - 1
_PIECE_BYTES = 1 << 20


def _path(run: Path, actor: str) -> Path:
    return run / NOTES / f"captured-{actor}"


class CaptureSpool:
    """The actor's end."""

    def __init__(self, run: Path, actor: str) -> None:
        """Raises: OSError."""
        self._fd = os.open(_path(run, actor), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        weakref.finalize(self, os.close, self._fd)
        self._end = os.fstat(self._fd).st_size

    def save(self, capture: Capture) -> None:
        """Append a plan. Raises: OSError."""
        data = memoryview(capture.encoded())
        self._append(len(data), data)

    def finish(self, number: int) -> None:
        """Say that the order of this number is carried out. Raises: OSError."""
        self._append(_DONE, memoryview(_WORD.pack(number)))

    def _append(self, word: int, data: memoryview) -> None:
        start = self._end if self._is_whole() else 0
        at, left = start + _WORD.size, data
        while left:
            num_bytes = os.pwrite(self._fd, left, at)
            at, left = at + num_bytes, left[num_bytes:]
        os.pwrite(self._fd, _WORD.pack(word), start)
        self._end = at

    def _is_whole(self) -> bool:
        """Return whether nobody has emptied the file. One that was emptied while a record was written begins with zeros."""
        return os.fstat(self._fd).st_size >= self._end and any(os.pread(self._fd, _WORD.size, 0))


def empty_spool(run: Path, actor: str) -> None:
    """Remove all records. Raises: OSError."""
    if _path(run, actor).exists():
        os.truncate(_path(run, actor), 0)


def is_finished(run: Path, actor: str, number: int) -> bool:
    """Return whether the spool says that this order is carried out."""
    try:
        with _path(run, actor).open("rb") as spool:
            ends = [start for word, start in _records(spool.fileno()) if word == _DONE]
            return _WORD.pack(number) in [os.pread(spool.fileno(), _WORD.size, start) for start in ends]
    except FileNotFoundError:
        return False


def take_out(run: Path, actor: str, directory: Path) -> list[Path]:
    """Write each plan of the spool to a file of its own in ``directory``, the last record of each; return their paths.

    What is no plan of this actor is left out: a stranger may have taken the actor over. Raises: OSError.
    """
    taken: dict[Path, None] = {}
    if not _path(run, actor).exists():
        return []
    directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    part = directory / f".{actor}.{os.getpid()}"
    with _path(run, actor).open("rb") as spool:
        for word, start in _records(spool.fileno()):
            if word == _DONE:
                continue
            try:
                _copy(spool.fileno(), start, word, part)
                header = Capture.load(part).header
                path = directory / f"{actor}-{header.plan_id:x}{SUFFIX}"
                if header.actor == actor and header.plan_id >= 0:
                    os.replace(part, path)
                    taken[path] = None
            except UserError:
                continue
            finally:
                part.unlink(missing_ok=True)
    return list(taken)


def _records(fd: int) -> Iterator[tuple[int, int]]:
    """The first word of each whole record, and where its contents begin."""
    at, size = 0, os.fstat(fd).st_size
    while len(read := os.pread(fd, _WORD.size, at)) == _WORD.size and (word := _WORD.unpack(read)[0]):
        start = at + _WORD.size
        at = start + (_WORD.size if word == _DONE else word)
        if at > size:
            return
        yield word, start


def _copy(source: int, start: int, num_bytes: int, path: Path) -> None:
    target = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    with open(target, "wb") as file:
        for at in range(start, start + num_bytes, _PIECE_BYTES):
            file.write(os.pread(source, min(_PIECE_BYTES, start + num_bytes - at), at))
