"""The search for goodput on a grid of rates that all layouts share (pure; TI13).

Two layouts whose goodputs are the same rate of the grid are equal as far as the search can tell. That makes ranks comparable; rates
found by bisection would differ by chance.
"""

import math
from collections.abc import Mapping, Sequence

LEAST_RATE, MOST_RATE = 0.01, 10_000.0
_FACTOR = 1.2  # about, from one rate to the next, until the goodput lies between two; then twice as many steps of the grid


class Grid:
    """Rates (1 + precision)^k requests per second."""

    def __init__(self, precision: float) -> None:
        self._base = 1.0 + precision
        self.stride = max(1, round(math.log(_FACTOR) / math.log(self._base)))  # steps of a coarse search

    def rate(self, step: int) -> float:
        """The rate of a step."""
        return float(f"{self._base**step:.4g}")

    def step(self, rate: float) -> int:
        """The last step whose rate is not above this one, within the limits."""
        step, rate = 0, min(max(rate, LEAST_RATE), MOST_RATE)
        while self._base ** (step + 1) <= rate:
            step += 1
        while self._base**step > rate:
            step -= 1
        return step


class Bracket:
    """The bounds of one layout's goodput. ``passes``: the highest step found to pass below any that fails. ``fails``: the lowest step
    that fails. None: not found yet."""

    def __init__(self, grid: Grid, start: int) -> None:
        self.passes: int | None = None
        self.fails: int | None = None
        self._least, self._most = grid.step(LEAST_RATE), grid.step(MOST_RATE)
        self._start, self._stride = start, grid.stride

    @property
    def width(self) -> float:
        """Grid steps between the bounds; infinite until there are two."""
        return float("inf") if self.passes is None or self.fails is None else self.fails - self.passes

    @property
    def may_reach(self) -> float:
        """The highest step that the goodput may be."""
        return float("inf") if self.fails is None else self.fails - 1

    def next(self, width: int) -> int | None:
        """The step to measure next; None once the bounds are no further apart than ``width``, or no rate is left."""
        if self.passes is None and self.fails is None:
            return self._start
        if self.passes is None:
            assert self.fails is not None
            return max(self.fails - self._stride, self._least) if self.fails > self._least else None
        if self.fails is None:
            return min(self.passes + self._stride, self._most) if self.passes < self._most else None
        return (self.passes + self.fails) // 2 if self.width > width else None

    def note(self, step: int, is_passed: bool) -> None:
        """Take note of a measurement at ``next``'s step."""
        is_first = self.passes is None and self.fails is None
        if is_passed:
            self.passes = step
        else:
            self.fails = step
        if not is_first and (self.passes is None or self.fails is None):
            self._stride *= 2


def undecided(brackets: Mapping[str, Bracket], chosen_from: Sequence[str]) -> list[str]:
    """Return the layouts to search further. A layout is undecided while it may still beat the best one, and while it may both equal the
    best of ``chosen_from`` and not; these two are as well."""
    best = max(_least(bracket) for bracket in brackets.values())
    chosen = max(_least(brackets[layout]) for layout in chosen_from)
    return [
        layout
        for layout, bracket in brackets.items()
        if bracket.width > 1 and (layout in chosen_from or bracket.may_reach > best or _least(bracket) <= chosen <= bracket.may_reach)
    ]


def _least(bracket: Bracket) -> float:
    return float("-inf") if bracket.passes is None else bracket.passes
