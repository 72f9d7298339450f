"""A value that one process replaces whole and others read, also after its death: ``ControllerStats`` and ``OutageTable``.

It is never torn: a writer killed at any point leaves the old value.
"""

from pathlib import Path
from typing import ClassVar, Generic, Self, TypeVar

import msgspec
import numpy as np

from .run_directory import RunDirectory
from .segment import Layout, Segment
from .versioned import VersionedBlob

T = TypeVar("T")

_encode = msgspec.msgpack.Encoder().encode


class Published(Generic[T]):
    """A subclass names its segment, the most bytes of its values, their decoder, and the value that stands before the first one."""

    NAME: ClassVar[str]
    MAX_BYTES: ClassVar[int]
    DECODER: msgspec.msgpack.Decoder[T]
    FIRST: T

    def __init__(self, segment: Segment) -> None:
        """Use ``create`` or ``attach``."""
        word, slots, num_bytes = self._layout()
        segment.expect_bytes(num_bytes)
        self._segment = segment
        self._word = word // 8
        self._blob = VersionedBlob(segment, self._word, slots, self.MAX_BYTES)

    @classmethod
    def create(cls, run: RunDirectory) -> Self:
        """Make it. Raises: SpaceError, FileExistsError."""
        return cls(Segment.create(cls._path(run), cls._layout()[2], kind=cls.NAME))

    @classmethod
    def attach(cls, run: RunDirectory, writable: bool = False) -> Self:
        """Map it. Raises: MissingError, SegmentError."""
        return cls(Segment.attach(cls._path(run), kind=cls.NAME, writable=writable))

    def close(self) -> None:
        """Unmap."""
        self._segment.close()

    @property
    def version(self) -> int:
        """Changes with every ``publish``. Costs next to nothing."""
        return int(self._segment.words[self._word])

    def publish(self, value: T) -> None:
        """Replace the value. One writer at a time. Raises: ValueError if it is too long."""
        self._blob.write(1, _encode(value))

    def read(self) -> T:
        """The value that was published last."""
        blob = self._blob.read(1)
        return self.FIRST if blob is None else self.DECODER.decode(blob)

    @classmethod
    def _path(cls, run: RunDirectory) -> Path:
        return run.segment_path(cls.NAME)

    @classmethod
    def _layout(cls) -> tuple[int, int, int]:
        """(offset of the word, offset of the slots, bytes of the segment)."""
        layout = Layout()
        word = layout.add(1, np.uint64).offset
        slots = layout.add((2, VersionedBlob.slot_bytes(cls.MAX_BYTES)), np.uint8).offset
        return word, slots, layout.num_bytes
