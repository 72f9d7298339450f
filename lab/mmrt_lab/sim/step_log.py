"""The decode steps of a simulation, as runs of equal gaps: when each step committed its tokens."""

from array import array
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Stretch = tuple[int, int]
"""A row's consecutive tokens, as the first and the last of the steps that committed them."""


class StepLog:
    """Steps are numbered from 0. The gap of a step is the time since the commit before it."""

    def __init__(self, begin_ns: int) -> None:
        self.num_steps = 0
        self.last_ns = self._begin_ns = begin_ns
        self._gaps = array("q")
        self._counts = array("q")

    def add(self, commit_ns: int, num_more: int = 0, gap_ns: int = 0) -> None:
        """Add a step that committed at ``commit_ns``, and ``num_more`` after it, ``gap_ns`` apart."""
        self._gaps.append(commit_ns - self.last_ns)
        self._counts.append(1)
        if num_more:
            self._gaps.append(gap_ns)
            self._counts.append(num_more)
        self.num_steps += 1 + num_more
        self.last_ns = commit_ns + num_more * gap_ns

    def add_each(self, gaps_ns: Sequence[int]) -> None:
        """Add steps with these gaps."""
        if not gaps_ns:
            return
        self._gaps.extend(gaps_ns)
        self._counts.extend([1] * len(gaps_ns))
        self.num_steps += len(gaps_ns)
        self.last_ns += sum(gaps_ns)

    def gaps(self) -> Ints:
        """The gap of each step, in ns."""
        return np.repeat(np.frombuffer(self._gaps, np.int64), np.frombuffer(self._counts, np.int64)) if self._gaps else _nothing()

    def commits(self) -> Ints:
        """The time of each commit, in ns."""
        return self._begin_ns + np.cumsum(self.gaps())


def _nothing() -> Ints:
    return np.zeros(0, np.int64)


def weights(num_steps: int, stretches: Iterable[Sequence[Stretch]]) -> Ints:
    """Return for each step how many of the rows with these stretches have its gap as a time between two of their tokens."""
    edges = np.zeros(num_steps + 1, np.int64)
    firsts = [first + 1 for row in stretches for first, _ in row]
    lasts = [last + 1 for row in stretches for _, last in row]
    np.add.at(edges, firsts, 1)
    np.add.at(edges, lasts, -1)
    return np.cumsum(edges[:-1])


def num_rows(num_steps: int, stretches: Iterable[Sequence[Stretch]]) -> Ints:
    """Return for each step how many of the rows with these stretches have a token of it."""
    edges = np.zeros(num_steps + 1, np.int64)
    np.add.at(edges, [first for row in stretches for first, _ in row], 1)
    np.add.at(edges, [last + 1 for row in stretches for _, last in row], -1)
    return np.cumsum(edges[:-1])


def pauses(commits: Ints, stretches: Sequence[Stretch]) -> list[int]:
    """The times between a row's stretches, in ns."""
    return [int(commits[after[0]] - commits[before[1]]) for before, after in zip(stretches, stretches[1:], strict=False)]
