"""The actors that the run does without for now, and why: written by the supervisor, read by the controller.

It exists from the start of the run, so that a full file system cannot hide an outage.
"""

from typing import Self

import msgspec
import numpy as np

from ..schema.outage import Outage
from .run_directory import RunDirectory
from .segment import Layout, Segment
from .versioned import VersionedBlob

NAME = "outages"  # without the run id: a memory that makes its segments anew leaves it alone
_KIND = "outages"
_MAX_BYTES = 16384  # every actor of the largest run may be broken
_decode = msgspec.msgpack.Decoder(tuple[Outage, ...]).decode


class OutageTable:
    """All outages of a run, replaced as a whole."""

    def __init__(self, segment: Segment) -> None:
        """Use ``create`` or ``attach``."""
        word, slots, num_bytes = _layout()
        segment.expect_bytes(num_bytes)
        self._segment = segment
        self._word = word // 8
        self._blob = VersionedBlob(segment, self._word, slots, _MAX_BYTES)

    @classmethod
    def create(cls, run: RunDirectory) -> Self:
        """Make it. Raises: SpaceError, FileExistsError."""
        return cls(Segment.create(run.path / NAME, _layout()[2], kind=_KIND))

    @classmethod
    def attach(cls, run: RunDirectory) -> Self:
        """Map it for reading. Raises: MissingError where no supervisor has made it."""
        return cls(Segment.attach(run.path / NAME, kind=_KIND, writable=False))

    def close(self) -> None:
        """Unmap."""
        self._segment.close()

    @property
    def version(self) -> int:
        """Changes with every ``publish``. Costs next to nothing."""
        return int(self._segment.words[self._word])

    def publish(self, outages: tuple[Outage, ...]) -> None:
        """Replace them. Supervisor only."""
        self._blob.write(1, msgspec.msgpack.encode([outage.shortened() for outage in outages]))

    def read(self) -> tuple[Outage, ...]:
        """The last that were published; none before the first."""
        blob = self._blob.read(1)
        return () if blob is None else _decode(blob)


def _layout() -> tuple[int, int, int]:
    """(offset of the word, offset of the slots, bytes of the segment)."""
    layout = Layout()
    word = layout.add(1, np.uint64).offset
    slots = layout.add((2, VersionedBlob.slot_bytes(_MAX_BYTES)), np.uint8).offset
    return word, slots, layout.num_bytes
