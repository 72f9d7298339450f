"""A sparse file beside the sequence table, one part per row, for what only some requests ask for.

Unlike a segment its space is not reserved: a row takes memory while somebody asks, and gives it back when it is free. It is not
mapped either, so where the file system is full a write raises, and its request fails alone.
"""

import ctypes
import os

from .errors import MissingError
from .run_directory import RunDirectory

_PAGE_BYTES = 4096
_LIBC = ctypes.CDLL(None)
_FALLOC_FL_KEEP_SIZE, _FALLOC_FL_PUNCH_HOLE = 1, 2


def whole_pages(num_bytes: int) -> int:
    """Return the size of the file system's pages that hold so many bytes."""
    return -(-num_bytes // _PAGE_BYTES) * _PAGE_BYTES


class RowFile:
    """The file, opened when it is first needed."""

    def __init__(self, run: RunDirectory, name: str, row_bytes: int, *, writable: bool) -> None:
        """``row_bytes``: of a row's part, whole pages."""
        self._path = run.segment_path(name)
        self._row_bytes = row_bytes
        self._writable = writable
        self._fd = -1

    def create(self) -> None:
        """Make the file, empty. Raises: FileExistsError."""
        os.close(os.open(self._path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600))

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def write_at(self, row: int, offset: int, data: bytes) -> None:
        """Write into a row's part, from ``offset`` in it on. Raises: OSError, ENOSPC."""
        start = row * self._row_bytes + offset
        while data:
            written = os.pwrite(self._open(), data, start)
            start, data = start + written, data[written:]

    def read_at(self, row: int, offset: int, num_bytes: int) -> bytes:
        """Read so many bytes of a row's part, or fewer where the file ends before. Those never written are 0."""
        return os.pread(self._open(), num_bytes, row * self._row_bytes + offset)

    def release(self, row: int) -> None:
        """Give the row's memory back. Nobody may be writing it. Best effort."""
        start, size = ctypes.c_longlong(row * self._row_bytes), ctypes.c_longlong(self._row_bytes)
        _LIBC.fallocate(self._open(), _FALLOC_FL_KEEP_SIZE | _FALLOC_FL_PUNCH_HOLE, start, size)

    def _open(self) -> int:
        if self._fd < 0:
            try:
                self._fd = os.open(self._path, (os.O_RDWR if self._writable else os.O_RDONLY) | os.O_CLOEXEC | os.O_NOFOLLOW)
            except FileNotFoundError:
                raise MissingError(f"no file {self._path.name!r} in {self._path.parent}") from None
        return self._fd
