"""The controller's append-only file of what is stored nowhere else: request specs, failures and ends (controller process).

Every record has a length and a checksum and goes out in one ``write`` before anything that follows from it is done, so even
kill -9 keeps the order of effects. A half-written last record was never acted upon; opening the file cuts it off. There is no
fsync: the file lies in the run directory, on tmpfs, and ends with the run. When ended requests make up most of a large file, it
is rewritten beside itself and renamed, so live requests bound its size. Room for failures and ends is reserved ahead: when the
file system is full, new requests are refused and admitted ones still come to their ends.

File: 8 bytes of magic, then records of (length u32, crc32 u32, MessagePack).
No record names a path: where the era is kept follows from the configuration.
"""

import contextlib
import ctypes
import errno
import logging
import os
import struct
import zlib
from collections import OrderedDict
from pathlib import Path
from typing import Self

import msgspec

from ...runtime.controller.state.records import KEPT_ENDS, CacheEra, Ended, JournalRecord, JournalState, Submitted

log = logging.getLogger(__name__)

JOURNAL_NAME = "journal"
RESERVE_BYTES = 64 * 1024  # for failures and ends alone
MAX_RECORD_BYTES = 256 << 20  # more than any request's: a length beyond it is none
_FAREWELL_BYTES = 1024  # more, for those of each live request
_STEP_BYTES = 256 * 1024  # room is taken in pieces of this size
_END_BYTES = 24
_ERA = -1  # in the place of a key
_FALLOC_FL_KEEP_SIZE = 1
_MAGIC = b"mmrtjnl1"
_HEAD = struct.Struct("=II")


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(JournalRecord).decode


class Journal:
    """The open file. One writer at a time: the active controller."""

    def __init__(self, path: Path, fd: int, compact_bytes: int) -> None:
        """Use ``open``."""
        self._path = path
        self._fd = fd
        self._compact_bytes = compact_bytes
        self._size = 0
        self._room = 0  # bytes from the start of the file that the file system has set aside
        self._spans: dict[int, list[tuple[int, int]]] = {}  # live key, or ``_ERA`` -> its records as (offset, bytes)
        self._live_bytes = 0
        self._ends: OrderedDict[int, None] = OrderedDict()

    @classmethod
    def open(cls, directory: Path, compact_bytes: int = 1 << 20) -> tuple[Self, JournalState]:
        """Open or make ``directory``/journal, cut off a torn tail, and return its contents.

        From ``compact_bytes`` on the file is compacted whenever that halves it.
        """
        path = directory / JOURNAL_NAME
        journal = cls(path, os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600), compact_bytes)
        state = journal._load()
        with contextlib.suppress(OSError):  # a full file system: only what must be written is, as far as that goes
            journal._room = _reserve(journal._fd, journal._size, journal._reserve_bytes())
        return journal, state

    @property
    def num_bytes(self) -> int:
        return self._size

    def append(self, record: JournalRecord) -> None:
        """Write a record; it is in the file on return. Raises OSError, with nothing added, when the file system is full.

        A Submitted record raises while there is still room for the ends of all other requests.
        """
        data = _frame(record)
        if isinstance(record, Submitted):
            reserve = self._reserve_bytes(1)
            if self._size + len(data) + reserve > self._room:
                self._room = _reserve(self._fd, self._size + len(data), reserve)
        try:
            _write_all(self._fd, data, self._size)
        except OSError:
            os.ftruncate(self._fd, self._size)
            self._room = self._size
            raise
        self._account(record, self._size, len(data))
        self._size += len(data)
        if self._size >= self._compact_bytes and self._size >= 2 * (self._live_bytes + len(self._ends) * _END_BYTES):
            self._compact()

    def _reserve_bytes(self, num_more: int = 0) -> int:
        """Bytes to reserve for the failures and ends of all live requests and of ``num_more`` others."""
        return RESERVE_BYTES + _FAREWELL_BYTES * (len(self._spans) + num_more)

    def close(self) -> None:
        os.close(self._fd)

    def _load(self) -> JournalState:
        """Read every whole record and cut the file after the last one."""
        state = JournalState()
        data = os.pread(self._fd, os.fstat(self._fd).st_size, 0)
        if not data.startswith(_MAGIC):
            if data:
                log.warning("%s does not begin with %r: starting anew", self._path, _MAGIC)
            os.ftruncate(self._fd, 0)
            data = _MAGIC
            _write_all(self._fd, data, 0)
        self._size = len(_MAGIC)
        while (found := _next_record(data, self._size)) is not None:
            record, num_bytes = found
            if record is None:
                log.warning("%s: skipped a record of %d bytes, which this version of mmrt does not know", self._path, num_bytes)
            else:
                self._account(record, self._size, num_bytes)
                state.apply(record)
            self._size += num_bytes
        if self._size < len(data):
            log.warning("%s: cut off a torn record of %d bytes", self._path, len(data) - self._size)
            os.ftruncate(self._fd, self._size)
        state.live = dict(sorted(state.live.items(), key=lambda item: item[1].arrival))
        state.ended = list(self._ends)
        return state

    def _account(self, record: JournalRecord, offset: int, num_bytes: int) -> None:
        if isinstance(record, CacheEra):
            self._live_bytes += num_bytes - sum(size for _, size in self._spans.get(_ERA, ()))
            self._spans[_ERA] = [(offset, num_bytes)]
            return
        if not isinstance(record, Ended):
            self._spans.setdefault(record.key, []).append((offset, num_bytes))
            self._live_bytes += num_bytes
            return
        self._live_bytes -= sum(size for _, size in self._spans.pop(record.key, ()))
        self._ends[record.key] = None
        self._ends.move_to_end(record.key)
        if len(self._ends) > KEPT_ENDS:
            self._ends.popitem(last=False)

    def _compact(self) -> None:
        """Write live requests, recent ends and the era beside the journal and rename: a crash leaves the old file or the new one."""
        part = self._path.with_suffix(".part")
        spans: dict[int, list[tuple[int, int]]] = {}
        offset = len(_MAGIC)
        fd = -1
        try:
            fd = os.open(part, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
            chunks = [_MAGIC]
            for key in self._ends:
                chunks.append(_frame(Ended(key)))
                offset += len(chunks[-1])
            for key, places in self._spans.items():
                for start, size in places:
                    chunks.append(os.pread(self._fd, size, start))
                    spans.setdefault(key, []).append((offset, size))
                    offset += size
            data = b"".join(chunks)
            room = _reserve(fd, len(data), self._reserve_bytes())
            _write_all(fd, data, 0)
            os.replace(part, self._path)
        except OSError as error:
            log.warning("%s could not be compacted: %s", self._path, error)
            if fd >= 0:
                os.close(fd)
            part.unlink(missing_ok=True)
            self._compact_bytes *= 2
            return
        os.close(self._fd)
        self._fd, self._size, self._spans, self._room = fd, offset, spans, room
        self._live_bytes = sum(size for places in spans.values() for _, size in places)


def read_journal(directory: Path) -> JournalState:
    """Read the journal of a run for observers: nothing is opened for writing, nothing is cut off."""
    state = JournalState()
    try:
        data = (directory / JOURNAL_NAME).read_bytes()
    except FileNotFoundError:
        return state
    offset = len(_MAGIC)
    while data.startswith(_MAGIC) and (found := _next_record(data, offset)) is not None:
        record, num_bytes = found
        if record is not None:
            state.apply(record)
        offset += num_bytes
    state.live = dict(sorted(state.live.items(), key=lambda item: item[1].arrival))
    return state


def _reserve(fd: int, size: int, reserve: int) -> int:
    """Reserve ``size`` bytes and ``reserve`` more without changing the file's length. Returns how much there is.

    Raises OSError (ENOSPC) if there is no such room. Where the file system cannot reserve any, none is needed.
    """
    wanted = -(-(size + reserve) // _STEP_BYTES) * _STEP_BYTES
    libc = ctypes.CDLL(None, use_errno=True)
    for room in (wanted, size + reserve):
        if libc.fallocate(fd, _FALLOC_FL_KEEP_SIZE, ctypes.c_longlong(0), ctypes.c_longlong(room)) == 0:
            return room
        number = ctypes.get_errno()
        if number in (errno.EOPNOTSUPP, errno.ENOSYS):
            return 1 << 62
    raise OSError(number, os.strerror(number))


def _next_record(data: bytes, offset: int) -> tuple[JournalRecord | None, int] | None:
    """Return the record at ``offset``, or None for one that only a later version of mmrt knows, and its size in the file. Returns None
    at the end and where the file is torn."""
    if len(data) - offset < _HEAD.size:
        return None
    length, checksum = _HEAD.unpack_from(data, offset)
    if length > MAX_RECORD_BYTES:
        return None
    payload = data[offset + _HEAD.size : offset + _HEAD.size + length]
    if len(payload) < length or zlib.crc32(payload) != checksum:
        return None
    try:
        return _decode(payload), _HEAD.size + length
    except msgspec.DecodeError:
        return None, _HEAD.size + length


def _write_all(fd: int, data: bytes, offset: int) -> None:
    view = memoryview(data)
    while view:
        written = os.pwrite(fd, view, offset)
        view, offset = view[written:], offset + written


def _frame(record: JournalRecord) -> bytes:
    payload = _encode(record)
    return _HEAD.pack(len(payload), zlib.crc32(payload)) + payload
