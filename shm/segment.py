"""A file in the run directory that processes map: made whole or not at all, and never a SIGBUS.

Every other module here lays its words and arrays out in a ``Segment``. Its creator (the ``memory`` actor or the supervisor)
makes it under no name (O_TMPFILE), reserves its space, writes its header, and links it last: attachers, also those of a creator
that was killed, find either nothing or all of it.
"""

import errno
import os
import resource
import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np
from numpy.typing import DTypeLike, NDArray

from .errors import MissingError, SegmentError, SpaceError
from .mapping import map_file, use_huge_pages

LINE_BYTES = 64  # a cache line; words of different writers never share one
PAGE_BYTES = 4096
HEADER_BYTES = PAGE_BYTES

_HEADER = struct.Struct("=8s8s8q")  # magic and layout version, kind, geometry
_MAGIC = b"mmrtseg1"
_MAX_GEOMETRY = 8


class Field(NamedTuple):
    """The place of an array in a segment."""

    offset: int
    shape: tuple[int, ...]
    dtype: np.dtype[Any]


class Layout:
    """Places arrays one after another behind the header. ``num_bytes`` is the size of the segment that holds them all."""

    def __init__(self) -> None:
        self.num_bytes = HEADER_BYTES

    def add(self, shape: int | tuple[int, ...], dtype: DTypeLike, align: int = LINE_BYTES) -> Field:
        """Reserve an array that starts on a border of ``align`` bytes and shares no cache line with the one before it."""
        shape = (shape,) if isinstance(shape, int) else shape
        offset = -(-self.num_bytes // align) * align
        field = Field(offset, shape, np.dtype(dtype))
        self.num_bytes = -(-(offset + field.dtype.itemsize * int(np.prod(shape))) // LINE_BYTES) * LINE_BYTES
        return field


def _reserve(fd: int, path: Path, num_bytes: int) -> None:
    space = os.fstatvfs(fd)
    available = space.f_bavail * space.f_frsize
    try:
        if num_bytes > available:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        os.posix_fallocate(fd, 0, num_bytes)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise
        raise SpaceError(
            f"segment {path.name!r} needs {num_bytes} bytes, but {path.parent} has {available} available",
            num_bytes,
            available,
        ) from None


class Segment:
    """One mapped file. ``buf`` is all of it, ``words`` the same as 64-bit words, ``geometry`` its creator's numbers."""

    def __init__(self, fd: int, path: Path, kind: str, writable: bool) -> None:
        """Map an open file; use ``create`` or ``attach``. Takes no ownership of ``fd``."""
        self.path = path
        self.kind = kind
        self.writable = writable
        self.num_bytes = os.fstat(fd).st_size
        try:
            self._map: memoryview | None = map_file(fd, self.num_bytes, writable)
        except OSError as error:
            if error.errno != errno.ENOMEM:
                raise
            limit = resource.getrlimit(resource.RLIMIT_AS)[0]
            limited = "" if limit == resource.RLIM_INFINITY else f", and a process may have {limit} (ulimit -v)"
            raise SegmentError(f"segment {path.name!r} needs {self.num_bytes} bytes of addresses{limited}: {error.strerror}") from None
        self.buf = self._map[:]
        self.words = self.buf[: self.num_bytes // 8 * 8].cast("Q")
        self._unpublished: int | None = None

    @classmethod
    def create(cls, path: Path, num_bytes: int, *, kind: str = "raw", geometry: Sequence[int] = (), publish: bool = True) -> Self:
        """Make a zeroed segment of ``num_bytes`` (header included: the first HEADER_BYTES are not the caller's), mode 0600.

        With ``publish=False`` it has no name until ``publish()``, so that it can be filled first.

        Raises: SpaceError, with nothing left behind; FileExistsError if there is one of this name already.
        """
        assert num_bytes >= HEADER_BYTES and len(kind) <= 8 and len(geometry) <= _MAX_GEOMETRY
        fd = os.open(path.parent, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
        try:
            _reserve(fd, path, num_bytes)
            segment = cls(fd, path, kind, writable=True)
            padded = (*geometry, *(0,) * (_MAX_GEOMETRY - len(geometry)))
            _HEADER.pack_into(segment.buf, 0, _MAGIC, kind.encode().ljust(8), *padded)
            segment._unpublished = os.dup(fd)
        finally:
            os.close(fd)
        if publish:
            try:
                segment.publish()
            except OSError:
                segment.close()
                raise
        return segment

    @classmethod
    def attach(cls, path: Path, *, kind: str = "raw", writable: bool = True) -> Self:
        """Map an existing segment.

        Raises: MissingError if nothing has that name; SegmentError if it is of another kind or truncated.
        """
        try:
            fd = os.open(path, (os.O_RDWR if writable else os.O_RDONLY) | os.O_CLOEXEC | os.O_NOFOLLOW)
        except FileNotFoundError:
            raise MissingError(f"no segment {path.name!r} in {path.parent}") from None
        try:
            size = os.fstat(fd).st_size
            if size < HEADER_BYTES:
                raise SegmentError(f"{path} has {size} bytes, fewer than a header's {HEADER_BYTES}")
            segment = cls(fd, path, kind, writable)
        finally:
            os.close(fd)
        magic, found, *_ = _HEADER.unpack_from(segment.buf)
        if (magic, found) != (_MAGIC, kind.encode().ljust(8)):
            segment.close()
            raise SegmentError(f"{path} is a {magic + found!r} segment, not {_MAGIC + kind.encode()!r}")
        return segment

    def publish(self, *, sealed: bool = False) -> None:
        """Give an unpublished segment its name. ``sealed``: its file is read-only from now on. Raises: FileExistsError."""
        assert self._unpublished is not None, f"segment {self.path.name!r} has its name already"
        if sealed:
            os.fchmod(self._unpublished, 0o400)
        # a directory descriptor makes Python call linkat, which follows the link; an absolute path ignores it
        os.link(f"/proc/self/fd/{self._unpublished}", self.path, src_dir_fd=self._unpublished)
        os.close(self._unpublished)
        self._unpublished = None

    @property
    def geometry(self) -> tuple[int, ...]:
        """The eight numbers that the creator wrote into the header."""
        return tuple(_HEADER.unpack_from(self.buf)[2:])

    def expect_bytes(self, num_bytes: int) -> None:
        """Raise SegmentError unless the file holds the ``num_bytes`` that its geometry asks for."""
        if self.num_bytes < num_bytes:
            raise SegmentError(f"{self.path} has {self.num_bytes} bytes, but its header asks for {num_bytes}")

    def array(self, offset: int, shape: int | tuple[int, ...], dtype: DTypeLike) -> NDArray[Any]:
        """A numpy view of the segment from ``offset`` bytes on; writable as the segment is."""
        shape = (shape,) if isinstance(shape, int) else shape
        assert self._map is not None, f"segment {self.path.name!r} is closed"
        count = int(np.prod(shape))
        return np.frombuffer(self._map, dtype, count, offset).reshape(shape)

    def field(self, field: Field) -> NDArray[Any]:
        """The numpy view of a field of the segment's layout."""
        return self.array(*field)

    def part_to_write(self, field: Field) -> NDArray[Any]:
        """The numpy view of a field that begins on a page's border and shares its pages with no other, mapped anew for writing.

        So a process that attached the rest for reading can write this, and cannot write the rest. Raises: MissingError, OSError.
        """
        assert field.offset % PAGE_BYTES == 0
        num_bytes = field.dtype.itemsize * int(np.prod(field.shape))
        try:
            fd = os.open(self.path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except FileNotFoundError:
            raise MissingError(f"no segment {self.path.name!r} in {self.path.parent}") from None
        try:
            part = map_file(fd, num_bytes, writable=True, offset=field.offset)
        finally:
            os.close(fd)
        return np.frombuffer(part, field.dtype).reshape(field.shape)

    def use_huge_pages(self, progress: Callable[[], None]) -> int:
        """Put a segment that was just created into pages of 2 MiB, for what is read a lot at a time. Returns the number of bytes
        that Linux had some for (``mapping.use_huge_pages``)."""
        assert self._map is not None and self.writable, f"segment {self.path.name!r} is closed or read-only"
        return use_huge_pages(self._map, progress)

    def close(self) -> None:
        """Drop the mapping. Views that still exist keep the memory mapped until the last of them is dropped."""
        self.words.release()
        self.buf.release()
        if self._unpublished is not None:
            os.close(self._unpublished)
            self._unpublished = None
        self._map = None  # views keep it; the last reference unmaps, where closing it would refuse

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()
