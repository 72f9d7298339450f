"""The times between a member's tokens (TBT), which come to its client when they are committed."""

from collections import Counter
from collections.abc import Callable, Collection, Sequence


class GapCounter:
    """Counts the gaps of members by ``add(gap_ns, count)``. A member's first token, and time outside the running set, make no gap."""

    def __init__(self, add: Callable[[int, int], None]) -> None:
        self._add = add
        self._rows: list[int] = []  # of the last step, those that are members still
        self._committed_ns = 0  # by the last step
        self._behind: dict[int, int] = {}  # other members, and when their last tokens were committed

    def committed(self, rows: list[int], members: Collection[int], now_ns: int, num_tokens: Sequence[int] = ()) -> None:
        """Count the gaps that end with a step: ``rows`` got a token now, or so many each, which share the time; ``members`` go on."""
        counts = [max(1, count) for count in num_tokens] or [1] * len(rows)
        if rows == self._rows and not self._behind and max(counts, default=1) == 1:
            self._add(now_ns - self._committed_ns, len(rows))
        else:
            last_ns = {**self._behind, **dict.fromkeys(self._rows, self._committed_ns)}
            gaps_ns = Counter[int]()
            for row, count in zip(rows, counts, strict=True):
                if row in last_ns:
                    gaps_ns[(now_ns - last_ns.pop(row)) // count] += count
            for gap_ns, count in gaps_ns.items():
                self._add(gap_ns, count)
            self._behind = {row: at_ns for row, at_ns in last_ns.items() if row in members}
        staying = set(members)
        self._rows = [row for row in rows if row in staying]
        self._committed_ns = now_ns

    def left(self, row: int) -> None:
        """Forget a row that leaves between two steps: its next token is the first of another membership."""
        self._behind.pop(row, None)
        if row in self._rows:
            self._rows.remove(row)
