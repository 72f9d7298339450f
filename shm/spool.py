"""Bytes that a process keeps outside of its own memory: in a file of memory without a name, which it reads and writes in pieces.

Nothing of it is mapped for longer than a look, and the memory of bytes that are no longer wanted goes back to the system at once; a
heap would keep much of it. Of one process; its threads may share it.
"""

import ctypes
import itertools
import mmap
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

PIECE_BYTES = 256 * 1024
_PLACE_BYTES = 1 << 32  # addresses in the file for each, of which only those in use take memory
_KEEP_SIZE, _PUNCH_HOLE = 1, 2

_libc = ctypes.CDLL(None, use_errno=True)
_libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]


_M_MMAP_THRESHOLD = -3  # of mallopt


def give_back(num_bytes: int) -> None:
    """Have the heap of this process give each freed block of so many bytes back at once. By itself it keeps more and more of them."""
    mallopt = getattr(_libc, "mallopt", None)  # of glibc
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, num_bytes)


class Spool:
    """The file. It lasts as long as any bytes in it."""

    def __init__(self) -> None:
        """Raises: OSError."""
        self.descriptor = os.memfd_create("mmrt-spool", os.MFD_CLOEXEC)
        self._places = itertools.count()

    def new(self) -> "SpooledBytes":
        """Return bytes that are empty so far."""
        return SpooledBytes(self, next(self._places) * _PLACE_BYTES)

    def close(self) -> None:
        """Close the file. A collection may do so before it ends the bytes: they must not find another file by its number."""
        descriptor, self.descriptor = self.descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def __del__(self) -> None:
        self.close()


class SpooledBytes:
    """Bytes in a spool, which others are added to. Their memory is given back with the last reference, or by ``close``."""

    def __init__(self, spool: Spool, start: int) -> None:
        """Use ``Spool.new``."""
        self._spool = spool
        self._start = start
        self._num_bytes = 0

    def __len__(self) -> int:
        return self._num_bytes

    def append(self, data: bytes | bytearray | memoryview) -> None:
        """Add bytes. Raises: OSError, ENOSPC where there is no memory for them."""
        view = memoryview(data)
        while view:
            done = os.pwrite(self._spool.descriptor, view, self._start + self._num_bytes)
            self._num_bytes += done
            view = view[done:]

    def read(self, start: int = 0, end: int | None = None) -> bytes:
        """Return the bytes [start, end), as far as there are any."""
        end = self._num_bytes if end is None else min(end, self._num_bytes)
        return os.pread(self._spool.descriptor, max(0, end - start), self._start + start)

    def pieces(self, start: int = 0, end: int | None = None) -> Iterator[bytes]:
        """Return the bytes [start, end) in pieces of ``PIECE_BYTES``, the last one shorter."""
        end = self._num_bytes if end is None else min(end, self._num_bytes)
        for at in range(start, end, PIECE_BYTES):
            yield self.read(at, min(end, at + PIECE_BYTES))

    @contextmanager
    def mapped(self) -> Iterator[mmap.mmap]:
        """Map them for reading, for a short time. Raises: ValueError if there are none."""
        with mmap.mmap(self._spool.descriptor, self._num_bytes, access=mmap.ACCESS_READ, offset=self._start) as mapping:
            yield mapping

    def beside(self) -> "SpooledBytes":
        """Return other bytes in the same spool, empty so far."""
        return self._spool.new()

    def close(self) -> None:
        """Forget them."""
        if self._num_bytes:
            _libc.fallocate(
                self._spool.descriptor, _KEEP_SIZE | _PUNCH_HOLE, self._start, -(-self._num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
            )
            self._num_bytes = 0

    def __del__(self) -> None:
        self.close()


AnyBytes = bytes | SpooledBytes


def pieces_of(data: AnyBytes) -> Iterator[bytes]:
    """Return bytes in pieces, those in memory as one."""
    return data.pieces() if isinstance(data, SpooledBytes) else iter((data,) if data else ())


def beginning_of(data: AnyBytes, num_bytes: int) -> bytes:
    """Return the first bytes, fewer where there are fewer."""
    return data.read(0, num_bytes) if isinstance(data, SpooledBytes) else data[:num_bytes]


def whole(data: AnyBytes) -> bytes:
    """Return bytes in memory."""
    return b"".join(data.pieces()) if isinstance(data, SpooledBytes) else data


class Pages(Protocol):
    """The part of a page pool that is written."""

    def write_bytes(self, pages: Sequence[int], data: bytes, start: int = 0) -> None: ...


def write_pages(pool: Pages, pages: Sequence[int], data: AnyBytes) -> None:
    """Write bytes over pages. Raises: as ``PagePool.write_bytes``."""
    start = 0
    for piece in pieces_of(data):
        pool.write_bytes(pages, piece, start)
        start += len(piece)
