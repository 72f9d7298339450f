"""The times between the commits of a member's tokens, as its client sees them in a stream (TBT)."""

from collections import Counter
from collections.abc import Callable, Collection


class GapCounter:
    """Counts the gaps of members by ``add(gap_ns, count)``. A member's first token, and time outside the running set, make no gap."""

    def __init__(self, add: Callable[[int, int], None]) -> None:
        self._add = add
        self._rows: list[int] = []  # of the last step, those that are members still
        self._committed_ns = 0  # by the last step
        self._behind: dict[int, int] = {}  # other members, and when their last tokens were committed

    def committed(self, rows: list[int], members: Collection[int], now_ns: int) -> None:
        """Count the gaps that end with a step: ``rows`` got a token now, ``members`` go on."""
        if rows == self._rows and not self._behind:
            self._add(now_ns - self._committed_ns, len(rows))
        else:
            last_ns = {**self._behind, **dict.fromkeys(self._rows, self._committed_ns)}
            gaps_ns = Counter(now_ns - last_ns.pop(row) for row in rows if row in last_ns)
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
