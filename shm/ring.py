"""A ring of records: one producer, one consumer, variable lengths, in order. For small things between two actors.

The producer's position (bytes ever committed) is written after the record; the consumer's position (bytes ever acknowledged) is its
acknowledgement. Either may be killed anywhere and attach again: a record is either not there or whole, and one that was not
acknowledged is seen again. A full ring is backpressure, never loss.
"""

from typing import Self

import numpy as np

from .errors import SegmentError
from .fence import fence
from .run_directory import RunDirectory
from .segment import Layout, Segment

_KIND = "ring"
_LENGTH_BYTES = 8


class Ring:
    """Positions are bytes since the ring was made and only grow; a record is an 8-byte length and its bytes, padded to 8.

    Invariant: acknowledged <= committed <= acknowledged + capacity, all multiples of 8; each position has one writer.
    """

    def __init__(self, segment: Segment, name: str) -> None:
        """Use ``create`` or ``attach``. A consumer starts at the last acknowledged record."""
        self.name = name
        self._segment = segment
        (self.capacity, *_) = segment.geometry
        layout, committed, acknowledged, data = _layout(self.capacity)
        segment.expect_bytes(layout)
        self._committed = committed // 8
        self._acknowledged = acknowledged // 8
        self._data = data
        self._read = segment.words[self._acknowledged]

    @classmethod
    def create(cls, run: RunDirectory, name: str, num_bytes: int) -> Self:
        """Make the ring ``name`` with room for ``num_bytes`` (rounded up to 8). Raises: SpaceError, FileExistsError."""
        capacity = -(-num_bytes // 8) * 8
        path = run.segment_path(f"ring-{name}")
        return cls(Segment.create(path, _layout(capacity)[0], kind=_KIND, geometry=(capacity,)), name)

    @classmethod
    def attach(cls, run: RunDirectory, name: str) -> Self:
        """Map the ring ``name``. Raises: MissingError, SegmentError."""
        return cls(Segment.attach(run.segment_path(f"ring-{name}"), kind=_KIND), name)

    def close(self) -> None:
        """Unmap."""
        self._segment.close()

    def try_push(self, record: bytes) -> bool:
        """Append a record; False, and nothing changed, if there is no room for it now.

        Raises: ValueError if there never will be.
        """
        size = _LENGTH_BYTES + -(-len(record) // 8) * 8
        if size > self.capacity:
            raise ValueError(f"a record of {len(record)} bytes takes {size} in ring {self.name!r}, which has {self.capacity}")
        words = self._segment.words
        committed = words[self._committed]
        if committed + size - words[self._acknowledged] > self.capacity:
            return False
        fence()
        offset = committed % self.capacity
        words[(self._data + offset) // 8] = len(record)
        self._put((offset + _LENGTH_BYTES) % self.capacity, record)
        fence()
        words[self._committed] = committed + size
        return True

    def _put(self, offset: int, record: bytes) -> None:
        start = self._data + offset
        tail = self.capacity - offset
        if len(record) <= tail:
            self._segment.buf[start : start + len(record)] = record
        else:
            self._segment.buf[start : start + tail] = record[:tail]
            self._segment.buf[self._data : self._data + len(record) - tail] = record[tail:]

    def pop(self) -> bytes | None:
        """The next record that this consumer has not seen, or None. It stays in the ring until ``ack``."""
        records = self.pop_all(1)
        return records[0] if records else None

    def pop_all(self, limit: int = 1024) -> list[bytes]:
        """Up to ``limit`` next records. They stay in the ring until ``ack``: a consumer that dies before sees them again."""
        committed = self._segment.words[self._committed]
        fence()
        records: list[bytes] = []
        while self._read < committed and len(records) < limit:
            offset = self._read % self.capacity
            length = self._segment.words[(self._data + offset) // 8]
            size = _LENGTH_BYTES + -(-length // 8) * 8
            if size > committed - self._read:
                raise SegmentError(f"ring {self.name!r}: a record of {length} bytes at {self._read}, {committed} committed")
            records.append(self._get((offset + _LENGTH_BYTES) % self.capacity, length))
            self._read += size
        return records

    def _get(self, offset: int, length: int) -> bytes:
        start = self._data + offset
        tail = self.capacity - offset
        if length <= tail:
            return bytes(self._segment.buf[start : start + length])
        wrapped = self._segment.buf[self._data : self._data + length - tail]
        return bytes(self._segment.buf[start : start + tail]) + bytes(wrapped)

    def ack(self) -> None:
        """Acknowledge every record that was popped: their effects are durable, and their room is the producer's again."""
        fence()
        self._segment.words[self._acknowledged] = self._read


def _layout(capacity: int) -> tuple[int, int, int, int]:
    """(bytes of the segment, offset of the producer's word, of the consumer's word, of the data); a line each."""
    layout = Layout()
    committed = layout.add(1, np.uint64).offset
    acknowledged = layout.add(1, np.uint64).offset
    data = layout.add(capacity, np.uint8).offset
    return layout.num_bytes, committed, acknowledged, data
