"""Log-probabilities of tokens, for requests that ask for them: a sparse file beside the sequence table, one part per row.

decode writes the record of an id of an answer before the count that commits the id; prefill writes those of a prompt before its plan
is done; the gateway reads both. Unlike a segment its space is not reserved: a row takes memory while somebody asks, and gives it
back when it is free. It is not mapped either, so where the file system is full a write raises, and its request fails alone.

A record belongs to the generation that its row has; who reads checks that after reading.
"""

import ctypes
import os
from typing import NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from .errors import MissingError
from .run_directory import RunDirectory

MAX_ALTERNATIVES = 20
PROMPT, ANSWER = 0, 1  # parts of a row

_NAME = "logprobs"
_NUM_PARTS = 2
_PAGE_BYTES = 4096
_WORD_BYTES = 4
_LIBC = ctypes.CDLL(None)
_FALLOC_FL_KEEP_SIZE, _FALLOC_FL_PUNCH_HOLE = 1, 2


class Logprobs(NamedTuple):
    """Of N tokens: their own log-probability, float32 [N], and its rank among all, int32 [N], 1 being the likeliest; and the K
    likeliest ids, int32 [N, K], with their log-probabilities, float32 [N, K], in falling order."""

    own: NDArray[np.float32]
    rank: NDArray[np.int32]
    ids: NDArray[np.int32]
    values: NDArray[np.float32]

    @staticmethod
    def record_bytes(num_alternatives: int) -> int:
        return _WORD_BYTES * (2 + 2 * num_alternatives)

    def part(self, first: int, last: int, num_alternatives: int) -> "Logprobs":
        """Return those of tokens [first, last), with at most so many alternatives."""
        alternatives = np.s_[first:last, :num_alternatives]
        return Logprobs(self.own[first:last], self.rank[first:last], self.ids[alternatives], self.values[alternatives])

    def pack(self) -> bytes:
        """Return the records, one behind another."""
        columns = (self.own.view(np.int32)[:, None], self.rank[:, None], self.ids, self.values.view(np.int32))
        return np.concatenate(columns, axis=1, dtype=np.int32).tobytes()

    @classmethod
    def unpack(cls, data: bytes, num_alternatives: int) -> Self:
        words = np.frombuffer(data, np.int32).reshape(-1, 2 + 2 * num_alternatives)
        ids, values = words[:, 2 : 2 + num_alternatives], words[:, 2 + num_alternatives :]
        return cls(words[:, 0].view(np.float32), words[:, 1], ids, np.ascontiguousarray(values).view(np.float32))


class LogprobFile:
    """The file, opened when it is first needed. Records of one request have the same number of alternatives, K."""

    def __init__(self, run: RunDirectory, max_context: int, *, writable: bool) -> None:
        self._path = run.segment_path(_NAME)
        self._writable = writable
        self._fd = -1
        size = max_context * Logprobs.record_bytes(MAX_ALTERNATIVES)
        self._part_bytes = -(-size // _PAGE_BYTES) * _PAGE_BYTES

    def create(self) -> None:
        """Make the file, empty. Raises: FileExistsError."""
        os.close(os.open(self._path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600))

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def write(self, row: int, part: int, first: int, logprobs: Logprobs) -> None:
        """Write the records of tokens [first, first + N) of a row's prompt or answer. Raises: OSError, ENOSPC."""
        data = logprobs.pack()
        num_bytes = len(data) // max(1, len(logprobs.own))
        start = self._start(row, part) + first * num_bytes
        while data:
            written = os.pwrite(self._open(), data, start)
            start, data = start + written, data[written:]

    def read(self, row: int, part: int, first: int, last: int, num_alternatives: int) -> Logprobs:
        """Read the records of tokens [first, last). Raises: ValueError where they have not been written."""
        num_bytes = Logprobs.record_bytes(num_alternatives)
        wanted = (last - first) * num_bytes
        data = os.pread(self._open(), wanted, self._start(row, part) + first * num_bytes)
        if len(data) < wanted:
            raise ValueError(f"row {row} has no records of tokens {first} to {last}")
        return Logprobs.unpack(data, num_alternatives)

    def release(self, row: int) -> None:
        """Give the row's memory back. Nobody may be writing it. Best effort."""
        start, size = self._start(row, 0), _NUM_PARTS * self._part_bytes
        _LIBC.fallocate(self._open(), _FALLOC_FL_KEEP_SIZE | _FALLOC_FL_PUNCH_HOLE, ctypes.c_longlong(start), ctypes.c_longlong(size))

    def _start(self, row: int, part: int) -> int:
        return (row * _NUM_PARTS + part) * self._part_bytes

    def _open(self) -> int:
        if self._fd < 0:
            try:
                self._fd = os.open(self._path, (os.O_RDWR if self._writable else os.O_RDONLY) | os.O_CLOEXEC | os.O_NOFOLLOW)
            except FileNotFoundError:
                raise MissingError(f"no file {self._path.name!r} in {self._path.parent}") from None
        return self._fd
