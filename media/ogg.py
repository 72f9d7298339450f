"""The links of a chained Ogg file (RFC 3533, 4): files put together, as recorders of streams make them. Called by ``audio``.

FFmpeg goes on with the first link's decoder, and ends or makes noise where a later link has other channels or another rate. Here each
link is a file of its own.
"""

import io

from .limits import GuardedReader, Reader, TimeBudget

_CAPTURE = b"OggS"
_HEAD_BYTES = 27
_BEGINS = 0x02  # among a page's flags: the first page of a stream


def links_of(reader: Reader, budget: TimeBudget) -> list[Reader]:
    """A reader for each link; the reader itself for any other file. All use it, one at a time."""
    starts = _link_starts(GuardedReader(reader, budget))
    reader.seek(0)
    if len(starts) < 2:
        return [reader]
    reader.seek(0, io.SEEK_END)
    ends = [*starts[1:], reader.tell()]
    return [_Part(reader, start, end) for start, end in zip(starts, ends, strict=True)]


def _link_starts(reader: GuardedReader) -> list[int]:
    """Offsets of pages that begin a stream and follow one that does not. What is no page ends the search."""
    starts: list[int] = []
    at, begun = 0, False
    while True:
        reader.seek(at)
        head = reader.read(_HEAD_BYTES + 255)
        if len(head) < _HEAD_BYTES or not head.startswith(_CAPTURE):
            return starts
        begins = bool(head[5] & _BEGINS)
        if begins and not begun:
            starts.append(at)
        begun = begins
        num_segments = head[26]
        at += _HEAD_BYTES + num_segments + sum(head[_HEAD_BYTES : _HEAD_BYTES + num_segments])


class _Part(io.RawIOBase):
    """Bytes ``start`` to ``end`` of a reader, as a file."""

    def __init__(self, reader: Reader, start: int, end: int) -> None:
        super().__init__()
        self._reader = reader
        self._start = start
        self._num_bytes = end - start
        self._position = 0

    def read(self, size: int = -1, /) -> bytes:
        left = max(0, self._num_bytes - self._position)
        self._reader.seek(self._start + self._position)
        data = self._reader.read(left if size < 0 else min(size, left)) or b""
        self._position += len(data)
        return data

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._num_bytes}[whence]
        self._position = base + offset
        return self._position

    def tell(self) -> int:
        return self._position
