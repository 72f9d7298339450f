"""The times between tokens of the last few seconds, from a histogram that only grows (pure).

A share of one in a hundred needs some hundred gaps. So the window reaches back until it has ``ENOUGH``, between ``LEAST_S`` and
``MOST_S``: with many rows it follows a change of load within a second. With few rows P99 is the longest gap of three seconds: what
steers by it must act within that time.
"""

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from ....schema.gap_buckets import NUM_BUCKETS, quantile_s, share_over

SLICE_S = 0.25
LEAST_S, MOST_S = 1.0, 3.0
ENOUGH = 400


class _Look(NamedTuple):
    now: float
    counts: Sequence[int]
    total: int


class GapWindow:
    """What the last window says, which began at ``began_s``; None while it has no gaps."""

    def __init__(self) -> None:
        self.late_share: float | None = None  # longer than the objective
        self.p99_s: float | None = None
        self.began_s = 0.0
        self._looks: deque[_Look] = deque()

    def look(self, now: float, counts: Sequence[int], objective_s: float) -> None:
        """Take the histogram as it is now; looks within a slice are ignored. The first look is where the window begins."""
        if self._looks and now - self._looks[-1].now < SLICE_S or len(counts) != NUM_BUCKETS:
            return
        self._looks.append(_Look(now, tuple(counts), sum(counts)))
        while len(self._looks) > 2 and now - self._looks[1].now >= MOST_S:
            self._looks.popleft()
        began = self._began()
        window = [count - before for count, before in zip(counts, began.counts, strict=True)]
        self.began_s = began.now
        self.late_share, self.p99_s = share_over(window, objective_s), quantile_s(window, 0.99)

    def _began(self) -> _Look:
        """Return the look at which the window begins."""
        last = self._looks[-1]
        for look in reversed(self._looks):
            if last.now - look.now >= LEAST_S and last.total - look.total >= ENOUGH:
                return look
        return self._looks[0]
