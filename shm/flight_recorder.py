"""Flight recorders: the latest work of each process, in a ring of fixed-size records that can be read after its death.

One per actor and one for the supervisor, made by ``memory``. The active generation is the only writer and never waits; the next
one continues where a killed one stopped; ``mmrt trace`` and ``mmrt inspect`` read copies. The kinds of
records and the meaning of their numbers are in ``runtime/observe/flight.py``.
"""

import struct
import time
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from .errors import SegmentError, ShmError
from .fence import fence
from .run_directory import RunDirectory
from .segment import Layout, Segment

RECORD_BYTES = 64
NUM_RECORDS = 16384  # per recorder: one MiB, minutes of a busy actor

DTYPE = np.dtype([(name, "=u8") for name in ("time_ns", "duration_ns", "kind", "key", "a", "b", "c", "mark")])
"""``kind`` is generation << 16 | kind; ``mark`` is the record's position in the recorder's life plus one, and is written last."""

_KIND = "flight"
_RECORD = struct.Struct("=8Q")
_KIND_BITS = 16


def _segment_path(run: RunDirectory, actor: str) -> Path:
    return run.segment_path(f"flight-{actor}")


class FlightRecorder:
    """A ring of ``num_records`` records and the number of those ever written, which counts after the record is whole.

    A record that its writer was killed in is in the slot that the next one goes to, and that slot is never read.
    """

    def __init__(self, segment: Segment) -> None:
        """Use ``create`` or ``attach``."""
        (self.num_records, *_) = segment.geometry
        if self.num_records < 2:
            raise SegmentError(f"{segment.path} has {self.num_records} records, expected at least 2")
        num_bytes, head, self._data = _layout(self.num_records)
        segment.expect_bytes(num_bytes)
        self._segment = segment
        self._head = head // 8

    @classmethod
    def create(cls, run: RunDirectory, actor: str, num_records: int = NUM_RECORDS) -> Self:
        """Make the recorder of an actor. Raises: SpaceError, FileExistsError."""
        assert num_records > 1
        return cls(Segment.create(_segment_path(run, actor), _layout(num_records)[0], kind=_KIND, geometry=(num_records,)))

    @classmethod
    def attach(cls, run: RunDirectory, actor: str, writable: bool = True) -> Self:
        """Map it. Raises: MissingError, SegmentError."""
        return cls(Segment.attach(_segment_path(run, actor), kind=_KIND, writable=writable))

    def close(self) -> None:
        """Unmap."""
        self._segment.close()

    @property
    def num_written(self) -> int:
        """Records ever written; the last ``num_records - 1`` of them can be read."""
        return self._segment.words[self._head]

    def writer(self, generation: int) -> "FlightWriter":
        """Continue the ring. The caller holds the role lock (or is the supervisor): there is one writer at a time."""
        return FlightWriter(self._segment, self._data, self._head, self.num_records, generation)

    def read(self, limit: int | None = None) -> NDArray[Any]:
        """Copy the last records (DTYPE), oldest first, at most ``limit``. Never waits for the writer, alive or dead."""
        words, n = self._segment.words, self.num_records
        before = words[self._head]
        fence()
        first = max(0, before - n + 1, 0 if limit is None else before - limit)
        copy = np.frombuffer(self._copy(first % n, before - first), DTYPE)
        fence()
        valid = max(first, words[self._head] - n + 1)  # older records may have been overwritten meanwhile
        positions = np.arange(valid, max(valid, before), dtype=np.uint64)
        records: NDArray[Any] = copy[len(copy) - len(positions) :]
        whole: NDArray[Any] = records[records["mark"] == positions + np.uint64(1)]
        return whole

    def _copy(self, slot: int, count: int) -> bytes:
        """The bytes of ``count`` slots from ``slot`` on, round the end of the ring."""
        buf, data, end = self._segment.buf, self._data, min(slot + count, self.num_records)
        head = bytes(buf[data + slot * RECORD_BYTES : data + end * RECORD_BYTES])
        return head + bytes(buf[data : data + (slot + count - end) * RECORD_BYTES])


class FlightWriter:
    """The writing end. A record costs about half a microsecond (``mmrt bench recorder``)."""

    def __init__(self, segment: Segment, data: int, head: int, num_records: int, generation: int) -> None:
        """Use ``FlightRecorder.writer``."""
        self._words = segment.words
        self._buf = segment.buf
        self._data = data
        self._head = head
        self._num_records = num_records
        self._generation = generation << _KIND_BITS
        self._position = segment.words[head]

    def record(self, kind: int, time_ns: int, duration_ns: int = 0, key: int = 0, a: int = 0, b: int = 0, c: int = 0) -> None:
        """Add a record. Times are CLOCK_MONOTONIC; numbers are 64 bits, unsigned. Raises: struct.error for others."""
        position = self._position
        offset = self._data + position % self._num_records * RECORD_BYTES
        position += 1
        _RECORD.pack_into(self._buf, offset, time_ns, duration_ns, self._generation | kind, key, a, b, c, position)
        fence()
        self._words[self._head] = self._position = position

    def event(self, kind: int, key: int = 0, a: int = 0, b: int = 0, c: int = 0) -> None:
        """Add a record of an event that happens now and takes no time."""
        self.record(kind, time.monotonic_ns(), 0, key, a, b, c)


def read_recorders(run: RunDirectory, names: tuple[str, ...], limit: int | None = None) -> dict[str, NDArray[Any]]:
    """Read the last records of every existing recorder: a run that has only just begun has none yet."""
    found: dict[str, NDArray[Any]] = {}
    for name in names:
        try:
            recorder = FlightRecorder.attach(run, name, writable=False)
        except ShmError:
            continue
        try:
            found[name] = recorder.read(limit)
        finally:
            recorder.close()
    return found


def kind_of(records: NDArray[Any]) -> NDArray[np.uint64]:
    """The kinds of some records, without their generations."""
    kinds: NDArray[np.uint64] = records["kind"] & np.uint64((1 << _KIND_BITS) - 1)
    return kinds


def generation_of(records: NDArray[Any]) -> NDArray[np.uint64]:
    """The generations that wrote some records."""
    generations: NDArray[np.uint64] = records["kind"] >> np.uint64(_KIND_BITS)
    return generations


def _layout(num_records: int) -> tuple[int, int, int]:
    """(bytes of the segment, offset of the head, offset of the records)."""
    layout = Layout()
    head = layout.add(1, np.uint64).offset
    data = layout.add((num_records, RECORD_BYTES), np.uint8).offset
    return layout.num_bytes, head, data
