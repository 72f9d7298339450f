"""The histograms of the times between tokens: two for each decode actor, which alone writes them, for as long as the run lasts.

Those between a first token that prefill drew and the second have one of their own. Such a time is a hand-over and up to two steps,
however little prefill does: so it counts for observers, and not where the work beside decode is steered.

Each count is a word of its own that only grows, so a reader never sees half of one, and a writer killed at any point leaves counts
that the next generation continues.
"""

from typing import Self

import numpy as np

from ..schema.gap_buckets import NUM_BUCKETS, bucket_of
from .run_directory import RunDirectory
from .segment import Field, Layout, Segment

_KIND = "gaps"
_NUM_WORDS = NUM_BUCKETS + 1


class StepGaps:
    """Counts of gaps by bucket (``schema.gap_buckets``), and their sums, for each decode actor by its number."""

    def __init__(self, segment: Segment, decode: int) -> None:
        """Use ``create`` or ``attach``."""
        (num_decodes,) = segment.geometry[:1]
        field, num_bytes = _layout(num_decodes)
        segment.expect_bytes(num_bytes)
        if not 0 <= decode < num_decodes:
            raise ValueError(f"there is no decode {decode} of {num_decodes}")
        self._segment = segment
        self._all = segment.field(field)
        own = field.offset // 8 + decode * 2 * _NUM_WORDS
        self._own = segment.words[own : own + _NUM_WORDS]
        self._first = segment.words[own + _NUM_WORDS : own + 2 * _NUM_WORDS]

    @classmethod
    def create(cls, run: RunDirectory, num_decodes: int) -> Self:
        """Make them. Raises: SpaceError, FileExistsError."""
        segment = Segment.create(run.segment_path("gaps"), _layout(num_decodes)[1], kind=_KIND, geometry=(num_decodes,))
        return cls(segment, 0)

    @classmethod
    def attach(cls, run: RunDirectory, decode: int | None = None) -> Self:
        """Map them, to read all, or also to write those of one decode actor. Raises: MissingError, SegmentError, ValueError."""
        return cls(Segment.attach(run.segment_path("gaps"), kind=_KIND, writable=decode is not None), decode or 0)

    def close(self) -> None:
        """Unmap."""
        self._own.release()
        self._first.release()
        del self._all
        self._segment.close()

    def add(self, gap_ns: int, count: int) -> None:
        """Count ``count`` gaps of ``gap_ns``. Its decode actor only."""
        self._own[bucket_of(gap_ns)] += count
        self._own[NUM_BUCKETS] += gap_ns * count

    def add_first(self, gap_ns: int, count: int) -> None:
        """Count gaps behind a first token that prefill drew. Its decode actor only."""
        self._first[bucket_of(gap_ns)] += count
        self._first[NUM_BUCKETS] += gap_ns * count

    def read(self) -> list[int]:
        """Return the counts of all by bucket, since the run began."""
        counts: list[int] = self._all[..., :NUM_BUCKETS].sum(axis=(0, 1)).tolist()
        return counts

    def read_of_steps(self) -> list[int]:
        """Return the same, without the gaps behind first tokens that prefill drew."""
        counts: list[int] = self._all[:, 0, :NUM_BUCKETS].sum(axis=0).tolist()
        return counts

    def read_each(self) -> list[list[int]]:
        """Return the counts of each decode actor by bucket, by its number, as ``read_of_steps``."""
        counts: list[list[int]] = self._all[:, 0, :NUM_BUCKETS].tolist()
        return counts

    @property
    def sum_s(self) -> float:
        """The sum of all gaps."""
        return float(self._all[..., NUM_BUCKETS].sum()) / 1e9


def _layout(num_decodes: int) -> tuple[Field, int]:
    """(counts and sum of both of each, bytes of the segment)."""
    layout = Layout()
    return layout.add((num_decodes, 2, _NUM_WORDS), np.uint64), layout.num_bytes
