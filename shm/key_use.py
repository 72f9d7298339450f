"""The use of API keys, where a run has several gateways: what each key has under way at each of them, and what is left of its limits
per minute. So a limit counts once, whichever gateway a request comes to.

``memory`` makes the table; gateways read and change it under a lock of its file, which the kernel gives up when its holder dies. A
key's row is found by its name.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import blake2b
from typing import Any, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from .file_lock import EXCLUSIVE, open_lock, unlock, wait_for_lock
from .run_directory import RunDirectory
from .segment import Field, Layout, Segment

MAX_NAMES = 4096  # of keys, in the life of a run
_MAX_GATEWAYS = 8
_KIND = "key-use"
_NAME = "key-use"
_ALLOWANCE_WORDS = 3


class KeyRow(NamedTuple):
    """The row of one key. ``open``: requests under way, by the number of their gateway. ``requests``, ``tokens``: of an allowance."""

    open: NDArray[np.int64]
    requests: NDArray[np.float64]
    tokens: NDArray[np.float64]


class KeyUse:
    """The table, in a gateway."""

    def __init__(self, segment: Segment, lock: int) -> None:
        """Use ``create`` or ``attach``."""
        names, open_, requests, tokens = _fields()[1]
        self._segment, self._lock = segment, lock
        self._names: NDArray[np.uint64] = segment.field(names)
        self._open: NDArray[np.int64] = segment.field(open_)
        self._requests: NDArray[np.float64] = segment.field(requests)
        self._tokens: NDArray[np.float64] = segment.field(tokens)

    @staticmethod
    def create(run: RunDirectory) -> None:
        """Make the table, empty. Raises: SpaceError, FileExistsError."""
        Segment.create(run.segment_path(_NAME), _fields()[0], kind=_KIND).close()

    @classmethod
    def attach(cls, run: RunDirectory) -> Self:
        """Map the table. Raises: MissingError, SegmentError."""
        path = run.segment_path(_NAME)
        return cls(Segment.attach(path, kind=_KIND), open_lock(path, create=False))

    def begin(self, gateway: int) -> None:
        """Note that the gateway of this number has nothing under way: the one before is dead."""
        self._open[:, gateway] = 0

    def close(self) -> None:
        """Unmap."""
        os.close(self._lock)
        self._segment.close()

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keep other gateways from the table."""
        wait_for_lock(self._lock, EXCLUSIVE)
        try:
            yield
        finally:
            unlock(self._lock)

    def row(self, name: str) -> KeyRow | None:
        """Return the row of the key of this name, None where there were too many names."""
        digest = np.uint64(int.from_bytes(blake2b(name.encode(), digest_size=8).digest()) or 1)
        with self.locked():
            found = np.flatnonzero(self._names == digest)
            free = np.flatnonzero(self._names == 0) if not len(found) else found
            if not len(free):
                return None
            self._names[free[0]] = digest
            place: Any = free[0]
            return KeyRow(self._open[place], self._requests[place], self._tokens[place])


def _fields() -> tuple[int, tuple[Field, Field, Field, Field]]:
    layout = Layout()
    names = layout.add(MAX_NAMES, np.uint64)
    open_ = layout.add((MAX_NAMES, _MAX_GATEWAYS), np.int64)
    requests, tokens = (layout.add((MAX_NAMES, _ALLOWANCE_WORDS), np.float64) for _ in range(2))
    return layout.num_bytes, (names, open_, requests, tokens)
