"""The histogram of the times between tokens: words that decode alone writes, for as long as the run lasts.

Each count is a word of its own that only grows, so a reader never sees half of one, and a writer killed at any point leaves counts
that the next generation continues.
"""

from typing import Self

import numpy as np

from ..schema.gap_buckets import NUM_BUCKETS, bucket_of
from .run_directory import RunDirectory
from .segment import Layout, Segment

_KIND = "gaps"


class StepGaps:
    """Counts of gaps by bucket (``schema.gap_buckets``), and their sum."""

    def __init__(self, segment: Segment) -> None:
        """Use ``create`` or ``attach``."""
        offset, num_bytes = _layout()
        segment.expect_bytes(num_bytes)
        self._segment = segment
        self._words = segment.words[offset // 8 : offset // 8 + NUM_BUCKETS + 1]

    @classmethod
    def create(cls, run: RunDirectory) -> Self:
        """Make it. Raises: SpaceError, FileExistsError."""
        return cls(Segment.create(run.segment_path("gaps"), _layout()[1], kind=_KIND))

    @classmethod
    def attach(cls, run: RunDirectory, writable: bool = True) -> Self:
        """Map it. Raises: MissingError, SegmentError."""
        return cls(Segment.attach(run.segment_path("gaps"), kind=_KIND, writable=writable))

    def close(self) -> None:
        """Unmap."""
        self._words.release()
        self._segment.close()

    def add(self, gap_ns: int, count: int) -> None:
        """Count ``count`` gaps of ``gap_ns``. decode only."""
        self._words[bucket_of(gap_ns)] += count
        self._words[NUM_BUCKETS] += gap_ns * count

    def read(self) -> list[int]:
        """Return the counts by bucket, since the run began."""
        return self._words[:NUM_BUCKETS].tolist()

    @property
    def sum_s(self) -> float:
        """The sum of all gaps."""
        return self._words[NUM_BUCKETS] / 1e9


def _layout() -> tuple[int, int]:
    """(offset of the words, bytes of the segment)."""
    layout = Layout()
    words = layout.add(NUM_BUCKETS + 1, np.uint64).offset
    return words, layout.num_bytes
