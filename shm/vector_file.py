"""Vectors pooled from the hidden states of prompts, for requests that ask for one: a ``RowFile`` with two slots per row.

prefill writes what a row's prompt adds up to so far, chunk by chunk, before the plan of the chunk is done; the gateway reads the last
one. A slot says how many tokens it stands for, and a chunk is never written over the vector that it begins with, so a chunk that
is computed again, after prefill was killed, gives what it would have given.

A vector belongs to the generation that its row has; who reads checks that after reading.
"""

import struct

import numpy as np
from numpy.typing import NDArray

from .row_file import RowFile, whole_pages
from .run_directory import RunDirectory

MAX_VECTOR = 1 << 15  # numbers

_NAME = "vectors"
_HEADER = struct.Struct("<qq")  # tokens that the slot stands for, and numbers in it
_NUM_BYTES = 8
_SLOT_BYTES = whole_pages(_HEADER.size + _NUM_BYTES * MAX_VECTOR)
_NUM_SLOTS = 2


class VectorFile(RowFile):
    """float64 vectors of any size up to ``MAX_VECTOR``."""

    def __init__(self, run: RunDirectory, *, writable: bool) -> None:
        super().__init__(run, _NAME, _NUM_SLOTS * _SLOT_BYTES, writable=writable)

    def write(self, row: int, start: int, end: int, vector: NDArray[np.float64]) -> None:
        """Write the vector of prompt tokens [0, end). That of [0, start) stays as it is. Raises: OSError, ENOSPC."""
        assert len(vector) <= MAX_VECTOR
        slot = int(self._header(row, 0)[0] == start)
        self.write_at(row, slot * _SLOT_BYTES, _HEADER.pack(0, 0))
        self.write_at(row, slot * _SLOT_BYTES + _HEADER.size, vector.tobytes())
        self.write_at(row, slot * _SLOT_BYTES, _HEADER.pack(end, len(vector)))

    def read(self, row: int, end: int) -> NDArray[np.float64]:
        """Return the vector of prompt tokens [0, end), of at least one. Raises: ValueError where it has not been written."""
        for slot in range(_NUM_SLOTS):
            num_tokens, size = self._header(row, slot)
            if num_tokens == end:
                return np.frombuffer(self.read_at(row, slot * _SLOT_BYTES + _HEADER.size, _NUM_BYTES * size), np.float64)
        raise ValueError(f"row {row} has no vector of {end} tokens")

    def _header(self, row: int, slot: int) -> tuple[int, int]:
        data = self.read_at(row, slot * _SLOT_BYTES, _HEADER.size)
        return _HEADER.unpack(data.ljust(_HEADER.size, b"\0"))
