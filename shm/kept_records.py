"""Records that outlive the process that writes them: each has a head that is replaced as a whole, a body, and a log that grows.

They lie in one memfd, which another process holds open meanwhile and never reads: what is in them is of clients, and no file of the run
has it. It is sparse: a record takes memory for what is written, and gives it back when it is cleared. It is not mapped, so where memory
is short a write raises. One process at a time uses it; its threads may share it, each record by one writer.
"""

import ctypes
import fcntl
import os
import struct
import threading
import weakref
from collections.abc import Iterator
from typing import Self

from .workplace import Workplace

_LIBC = ctypes.CDLL(None)
_FALLOC_FL_KEEP_SIZE, _FALLOC_FL_PUNCH_HOLE = 1, 2
_PAGE = 4096
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_WORD = struct.Struct("<Q")
_FIRST_MARK = 1 << 60  # of a word: its lower bits are the version, and choose the head
_VERSION = (_FIRST_MARK << 1) - 1
_LENGTH = struct.Struct("<I")

NUM_RECORDS = 4096
MAX_HEAD_BYTES = 16 * 1024 - _LENGTH.size
_HEAD_BYTES = 16 * 1024  # of each of the two copies
MAX_BODY_BYTES = MAX_LOG_BYTES = 256 << 20
_BODY_AT, _LOG_AT = 2 * _HEAD_BYTES, 2 * _HEAD_BYTES + MAX_BODY_BYTES
_STRIDE = 2 * _HEAD_BYTES + MAX_BODY_BYTES + MAX_LOG_BYTES
_INDEX_BYTES = -(-NUM_RECORDS * _WORD.size // _PAGE) * _PAGE


def pages_of(num_bytes: int) -> int:
    """Return the bytes of memory that so many take."""
    return -(-num_bytes // _PAGE) * _PAGE


class KeptRecords:
    """All records, by their numbers. The descriptor is the caller's."""

    def __init__(self, descriptor: int) -> None:
        """Use the records of this memfd, and give back the memory of those that were being begun or cleared. Raises: OSError;
        ValueError if it has another size."""
        size = os.fstat(descriptor).st_size
        if size != _INDEX_BYTES + NUM_RECORDS * _STRIDE:
            raise ValueError(f"kept records of {size} bytes, expected {_INDEX_BYTES + NUM_RECORDS * _STRIDE}")
        self._fd = descriptor
        self._lock = threading.Lock()  # of the words
        words = [word for (word,) in _WORD.iter_unpack(os.pread(descriptor, NUM_RECORDS * _WORD.size, 0))]
        self._versions = [word & _VERSION for word in words]
        self._marks = [word & ~_VERSION for word in words]  # of the places where it is worked on
        first = 0
        for number, version in enumerate([*self._versions, 1]):
            if version:
                if number > first:
                    self._punch(_INDEX_BYTES + first * _STRIDE, (number - first) * _STRIDE)
                first = number + 1

    @staticmethod
    def create() -> int:
        """Return the descriptor of a new memfd without records. Raises: OSError."""
        descriptor = os.memfd_create("mmrt-answers", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(descriptor, _INDEX_BYTES + NUM_RECORDS * _STRIDE)
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
        except BaseException:
            os.close(descriptor)
            raise
        return descriptor

    @classmethod
    def own(cls) -> Self:
        """Make records that end with this object. Raises: OSError."""
        records = cls(cls.create())
        weakref.finalize(records, os.close, records._fd)
        return records

    def used(self) -> Iterator[int]:
        """Yield the numbers of records that have a head."""
        return (number for number, version in enumerate(self._versions) if version)

    def free(self) -> int | None:
        """Return the number of a record that has none, None if all have."""
        return next((number for number, version in enumerate(self._versions) if not version), None)

    def commit(self, number: int, head: bytes) -> None:
        """Replace the head: the copy that is not in use is written, then the word that chooses it. Raises: OSError; ValueError if it is
        longer than ``MAX_HEAD_BYTES``. Then nothing has changed."""
        if len(head) > MAX_HEAD_BYTES:
            raise ValueError(f"a kept record's head of {len(head)} bytes, the limit is {MAX_HEAD_BYTES}")
        version = self._versions[number] + 1
        self._write(_place(number) + (version & 1) * _HEAD_BYTES, _LENGTH.pack(len(head)) + head)
        with self._lock:
            self._write(number * _WORD.size, _WORD.pack(version | self._marks[number]))
            self._versions[number] = version

    def set_at_work(self, number: int, place: Workplace, is_at_work: bool) -> None:
        """Say that the record in use is worked on there, or not any more. Raises: OSError."""
        with self._lock:
            others = self._marks[number] & ~(_FIRST_MARK << place)
            self._marks[number] = others | is_at_work * (_FIRST_MARK << place)
            self._write(number * _WORD.size, _WORD.pack(self._versions[number] | self._marks[number]))

    def is_at_work(self, number: int, place: Workplace) -> bool:
        """Return whether the record is worked on there, or was when its process died."""
        return bool(self._marks[number] & _FIRST_MARK << place)

    def head(self, number: int) -> bytes:
        """Return the head of a record in use. Raises: OSError; ValueError if it is none."""
        at = _place(number) + (self._versions[number] & 1) * _HEAD_BYTES
        (length,) = _LENGTH.unpack(os.pread(self._fd, _LENGTH.size, at))
        if length > MAX_HEAD_BYTES:
            raise ValueError(f"a kept record's head of {length} bytes, the limit is {MAX_HEAD_BYTES}")
        return os.pread(self._fd, length, at + _LENGTH.size)

    def write_body(self, number: int, data: bytes) -> None:
        """Write the body. It counts once a head says how long it is. Raises: OSError; ValueError if it is too long."""
        _check("body", len(data), MAX_BODY_BYTES)
        self._write(_place(number) + _BODY_AT, data)

    def body(self, number: int, num_bytes: int) -> bytes:
        """Return so much of the body. Raises: OSError."""
        return self._read(_place(number) + _BODY_AT, num_bytes)

    def write_log(self, number: int, at: int, data: bytes) -> None:
        """Write into the log. It counts once a head says how long it is. Raises: as ``write_body``."""
        _check("log", at + len(data), MAX_LOG_BYTES)
        self._write(_place(number) + _LOG_AT + at, data)

    def log(self, number: int, start: int, end: int) -> bytes:
        """Return the log's bytes of [start, end). Raises: OSError."""
        return self._read(_place(number) + _LOG_AT + start, end - start)

    def clear(self, number: int) -> None:
        """Forget a record, and give its memory back. Raises: OSError; then it is still there."""
        with self._lock:
            self._write(number * _WORD.size, _WORD.pack(0))
            self._versions[number] = self._marks[number] = 0
        self._punch(_place(number), _STRIDE)

    def drop_log(self, number: int) -> None:
        """Give the memory of the log back."""
        self._punch(_place(number) + _LOG_AT, MAX_LOG_BYTES)

    def _write(self, at: int, data: bytes) -> None:
        left = memoryview(data)
        while left:
            written = os.pwrite(self._fd, left, at)
            at, left = at + written, left[written:]

    def _read(self, at: int, num_bytes: int) -> bytes:
        parts = []
        while num_bytes and (part := os.pread(self._fd, num_bytes, at)):
            parts.append(part)
            at, num_bytes = at + len(part), num_bytes - len(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def _punch(self, start: int, size: int) -> None:
        mode = _FALLOC_FL_KEEP_SIZE | _FALLOC_FL_PUNCH_HOLE
        _LIBC.fallocate(self._fd, mode, ctypes.c_longlong(start), ctypes.c_longlong(size))  # at worst it stays taken


def _place(number: int) -> int:
    if not 0 <= number < NUM_RECORDS:
        raise ValueError(f"kept record {number} of {NUM_RECORDS}")
    return _INDEX_BYTES + number * _STRIDE


def _check(what: str, num_bytes: int, limit: int) -> None:
    if num_bytes > limit:
        raise ValueError(f"a kept record's {what} of {num_bytes} bytes, the limit is {limit}")
