"""What a gateway leaves of each connection for its successor: bytes of the client, bytes for the client, and a state.

One memfd holds all records, so no name leads to clients' headers: whoever has the descriptor may map it, the supervisor (which makes
it) and the gateway. It is sparse: a page is taken by its first use. Places in both rings are counted from a base that the state has.
A record is written by the process that serves its connection, and read by one that knows that process to be gone.
"""

import fcntl
import mmap
import os
from typing import NamedTuple, Self

from .fence import fence
from .workplace import Workplace

MAX_STATE_BYTES = 12 * 1024
_PAGE = mmap.PAGESIZE
_STATE_AT = (64, 16 * 1024)  # of the two copies
_HEAD_BYTES = 32 * 1024
_LENGTH_BYTES = 4
_EXTRA_IN_BYTES = 1 << 20  # for headers, and the frames of chunks around a body
_OUT_BYTES = 256 << 20
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_LOOK_BYTES = 4 * 1024  # that are searched at first
_KEPT_BYTES = 64 * 1024  # that a ring may keep when it is empty


class RecordSizes(NamedTuple):
    """The number of records, and the bytes of the rings in each."""

    number: int
    in_bytes: int
    out_bytes: int = _OUT_BYTES

    @classmethod
    def of(cls, number: int, max_body_bytes: int) -> Self:
        """Return the sizes for bodies of up to so many bytes."""
        return cls(number, -(-(2 * max_body_bytes + _EXTRA_IN_BYTES) // _PAGE) * _PAGE)

    @property
    def stride(self) -> int:
        return _HEAD_BYTES + self.in_bytes + self.out_bytes


class ByteRing:
    """Bytes of a stream, by their offsets from ``base``."""

    def __init__(self, memory: mmap.mmap, start: int, size: int) -> None:
        self.size = size
        self.base = 0
        self._memory = memory
        self._start = start
        self._bytes = memoryview(memory)[start : start + size]

    def put(self, at: int, data: bytes) -> None:
        """Write ``data`` at this offset. The caller sees to the room."""
        place = (at - self.base) % self.size
        tail = self.size - place
        if len(data) <= tail:
            self._bytes[place : place + len(data)] = data
        else:
            self._bytes[place:] = data[:tail]
            self._bytes[: len(data) - tail] = data[tail:]

    def get(self, at: int, end: int) -> bytes:
        """Return the bytes of [at, end)."""
        place, size = (at - self.base) % self.size, end - at
        tail = self.size - place
        if size <= tail:
            return bytes(self._bytes[place : place + size])
        return bytes(self._bytes[place:]) + bytes(self._bytes[: size - tail])

    def find(self, mark: bytes, at: int, end: int) -> int:
        """Return the offset at which ``mark`` begins in [at, end), -1 if nowhere. Where it is near, little is read."""
        num_bytes = _LOOK_BYTES
        while at + len(mark) <= end:
            stop = min(end, at + num_bytes)
            if (found := self.get(at, stop).find(mark)) >= 0:
                return at + found
            at, num_bytes = stop - len(mark) + 1, 4 * num_bytes
        return -1

    def space(self, at: int, num_bytes: int) -> memoryview:
        """Return where up to ``num_bytes`` may be received at this offset, in one piece."""
        place = (at - self.base) % self.size
        return self._bytes[place : min(self.size, place + num_bytes)]

    def empty(self, at: int) -> None:
        """Begin anew at this offset; what lay before it is not needed, and its memory is given back if it is much."""
        num_used = min(at - self.base, self.size)
        self.base = at
        if num_used > _KEPT_BYTES:
            self._memory.madvise(mmap.MADV_REMOVE, self._start + _KEPT_BYTES, self.size - _KEPT_BYTES)


class ConnectionRecord:
    """One record. ``commit`` replaces its state as a whole; the bytes in the rings mean what the state says."""

    def __init__(self, memory: mmap.mmap, words: memoryview, start: int, sizes: RecordSizes) -> None:
        self.received = ByteRing(memory, start + _HEAD_BYTES, sizes.in_bytes)
        self.sent = ByteRing(memory, start + _HEAD_BYTES + sizes.in_bytes, sizes.out_bytes)
        self._memory = memory
        self._words = words
        self._word = start // 8
        self._start = start
        self._num_bytes = sizes.stride

    def commit(self, state: bytes) -> None:
        """Replace the state: the copy that is not in use is written, then the word that chooses it. Raises: ValueError if it is longer
        than ``MAX_STATE_BYTES``, and nothing has changed."""
        if len(state) > MAX_STATE_BYTES:
            raise ValueError(f"a connection's state of {len(state)} bytes, the limit is {MAX_STATE_BYTES}")
        version = self._words[self._word] + 1
        at = self._start + _STATE_AT[version & 1]
        self._memory[at : at + _LENGTH_BYTES + len(state)] = len(state).to_bytes(_LENGTH_BYTES, "little") + state
        fence()
        self._words[self._word] = version

    def load(self) -> bytes:
        """Return the state, b"" before the first."""
        version = self._words[self._word]
        if not version:
            return b""
        at = self._start + _STATE_AT[version & 1]
        length = int.from_bytes(self._memory[at : at + _LENGTH_BYTES], "little")
        if length > MAX_STATE_BYTES:
            raise ValueError(f"a connection's state of {length} bytes, the limit is {MAX_STATE_BYTES}")
        return self._memory[at + _LENGTH_BYTES : at + _LENGTH_BYTES + length]

    def set_at_work(self, place: Workplace, is_at_work: bool) -> None:
        """Say that the request is worked on there, or not any more. Each place has one writer at a time, and a word behind the one that
        chooses the state."""
        self._words[self._word + place] = is_at_work

    def is_at_work(self, place: Workplace) -> bool:
        """Return whether the request is worked on there, or was when its process died."""
        return bool(self._words[self._word + place])

    @property
    def is_used(self) -> bool:
        """Return whether anything was committed."""
        return bool(self._words[self._word])

    def clear(self) -> None:
        """Forget the connection: the next one that gets the record finds nothing of it."""
        self._words[self._word] = 0
        self._memory.madvise(mmap.MADV_REMOVE, self._start, self._num_bytes)


class ConnectionRecords:
    """All records. ``descriptor`` is the memfd, for another process to ``attach``."""

    def __init__(self, descriptor: int, sizes: RecordSizes) -> None:
        self.descriptor = descriptor
        self.sizes = sizes
        self._memory = mmap.mmap(descriptor, sizes.number * sizes.stride)
        self._memory.madvise(mmap.MADV_DONTDUMP)  # a core would have it whole, and fill every hole on the way
        self._words = memoryview(self._memory).cast("Q")

    @classmethod
    def create(cls, sizes: RecordSizes) -> Self:
        """Make empty records. Raises: OSError."""
        descriptor = os.memfd_create("mmrt-connections", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(descriptor, sizes.number * sizes.stride)
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
            return cls(descriptor, sizes)
        except BaseException:
            os.close(descriptor)
            raise

    def record(self, number: int) -> ConnectionRecord:
        if not 0 <= number < self.sizes.number:
            raise ValueError(f"record {number} of {self.sizes.number}")
        return ConnectionRecord(self._memory, self._words, number * self.sizes.stride, self.sizes)

    def close(self) -> None:
        """Close the descriptor; the memory stays mapped as long as a record is in use."""
        os.close(self.descriptor)
