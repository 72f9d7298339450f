"""The times between a member's tokens (TBT), which come to its client when they are committed."""

from collections import Counter
from collections.abc import Callable, Collection, Sequence

Add = Callable[[int, int], None]


class GapCounter:
    """Counts the gaps of members by ``add(gap_ns, count)``; by ``add_first`` those behind first tokens that prefill drew. A first token
    that decode draws makes no gap, nor does time outside the running set, but behind a first token of prefill."""

    def __init__(self, add: Add, add_first: Add) -> None:
        self._add, self._add_first = add, add_first
        self._rows: list[int] = []  # of the last step, those that are members still
        self._committed_ns = 0  # by the last step
        self._behind: dict[int, int] = {}  # other members, and when their last tokens were committed
        self._first_ns: dict[int, int] = {}  # members without a step so far, and when prefill committed their first tokens

    def joined(self, row: int, first_ns: int | None) -> None:
        """Remember when prefill committed the only token of a new member; None if it has none, or others."""
        self.left(row)
        if first_ns is not None:
            self._first_ns[row] = first_ns

    def committed(self, rows: list[int], members: Collection[int], now_ns: int, num_tokens: Sequence[int] = ()) -> None:
        """Count the gaps that end with a step: ``rows`` got a token now, or so many each, which share the time; ``members`` go on."""
        counts = [max(1, count) for count in num_tokens] or [1] * len(rows)
        if self._first_ns:
            self._count_first(rows, counts, members, now_ns)
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

    def _count_first(self, rows: list[int], counts: list[int], members: Collection[int], now_ns: int) -> None:
        for row, count in zip(rows, counts, strict=True):
            if (first_ns := self._first_ns.pop(row, None)) is not None:
                self._add_first((now_ns - first_ns) // count, count)
        self._first_ns = {row: at_ns for row, at_ns in self._first_ns.items() if row in members}

    def left(self, row: int) -> None:
        """Forget a row that leaves between two steps: its next token is the first of another membership."""
        self._behind.pop(row, None)
        self._first_ns.pop(row, None)
        if row in self._rows:
            self._rows.remove(row)
