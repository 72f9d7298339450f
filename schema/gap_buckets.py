"""Buckets of a histogram of times between tokens: sixteen octaves, each of sixteen equal buckets, from 0.07 ms up to 34 s.

Times that are much alike lie in one bucket, and interpolation spreads them over all of it: a P99 and a share over a limit are right to
the width of a bucket, 6 % at most. Of steps that just keep an objective, wider ones would report many as late.
"""

from collections.abc import Iterable, Sequence
from itertools import compress, pairwise

OCTAVE = 16  # buckets
NUM_BUCKETS = 16 * OCTAVE
_UNIT_BITS = 16  # a unit is 2**16 ns
_OCTAVE_BITS = OCTAVE.bit_length()


def bucket_of(gap_ns: int) -> int:
    """Return the bucket of a gap. The last one takes all longer ones."""
    units = gap_ns >> _UNIT_BITS
    if units < 2 * OCTAVE:
        return units if units > 0 else 0
    octave = units.bit_length() - _OCTAVE_BITS
    bucket = OCTAVE * octave + (units >> octave)
    return bucket if bucket < NUM_BUCKETS else NUM_BUCKETS - 1


def _begin_s(bucket: int) -> float:
    octave = max(0, bucket // OCTAVE - 1)
    return ((bucket - OCTAVE * octave) << octave << _UNIT_BITS) / 1e9


BEGINS_S = tuple(_begin_s(bucket) for bucket in range(NUM_BUCKETS + 1))  # of each bucket, and the end of the last one

_BOUNDS_S = tuple(pairwise(BEGINS_S))


def _filled(counts: Sequence[int]) -> Iterable[tuple[tuple[float, float], int]]:
    """Return the bounds and the count of each bucket that is not empty."""
    assert len(counts) == NUM_BUCKETS
    return zip(compress(_BOUNDS_S, counts), filter(None, counts), strict=True)


def longest_s(counts: Sequence[int]) -> float:
    """Return the end of the bucket of the longest gap; 0 without any."""
    return max((end_s for (_, end_s), _ in _filled(counts)), default=0.0)


def share_over(counts: Sequence[int], limit_s: float) -> float | None:
    """Return the share of gaps longer than ``limit_s``; None without any. Within a bucket they count as evenly spread."""
    total = sum(counts)
    if not total:
        return None
    over = 0.0
    for (begin_s, end_s), count in _filled(counts):
        if end_s > limit_s:
            over += count * min(1.0, (end_s - limit_s) / (end_s - begin_s))
    return over / total


def quantile_s(counts: Sequence[int], share: float) -> float | None:
    """Return the gap that this share of all does not exceed; None without any."""
    total = sum(counts)
    left = share * total
    for (begin_s, end_s), count in _filled(counts):
        if left <= count:
            return begin_s + (end_s - begin_s) * left / count
        left -= count
    return BEGINS_S[-1] if total else None
