"""Goodput: the highest rate at which enough requests meet their objective (pure; TI13)."""

import math
from collections.abc import Callable, Iterable
from itertools import pairwise

import msgspec

FACTOR = 2.0  # from one rate to the next, until the goodput lies between two


class Bounds(msgspec.Struct, frozen=True, kw_only=True):
    """``goodput``: the highest rate found to pass. ``fails``: the lowest above it that failed; None if none did up to the limit."""

    goodput: float
    fails: float | None

    def is_narrow(self, precision: float) -> bool:
        """The two are no further apart than ``precision`` of the lower one."""
        return self.fails is not None and self.goodput > 0 and self.fails <= self.goodput * (1 + precision)


def bounds(attainments: Iterable[tuple[float, float]], target: float) -> Bounds:
    """The bounds that measured (rate, attainment) give. The goodput lies below the first rate that fails, whatever comes after: one
    that passes above it did so by chance."""
    goodput = 0.0
    for rate, attainment in sorted(attainments):
        if attainment < target:
            return Bounds(goodput=goodput, fails=rate)
        goodput = rate
    return Bounds(goodput=goodput, fails=None)


def find_goodput(
    measure: Callable[[float], float], rates: Iterable[float], *, target: float, precision: float, least: float, most: float
) -> Bounds:
    """Measure these rates, then double or halve until the goodput is enclosed, then bisect.

    ``measure``: the attainment at a rate, in [0, 1]. ``precision``: relative distance of the bounds at which the search ends. Outside
    of [least, most] requests per second nothing is measured; the goodput is 0 if ``least`` fails.
    """
    measured = {rate: measure(rate) for rate in dict.fromkeys(rates)}
    while True:
        found = bounds(measured.items(), target)
        if found.fails is None:
            rate = min(found.goodput * FACTOR, most)
        elif found.goodput == 0:
            rate = max(found.fails / FACTOR, least)
        elif found.is_narrow(precision):
            return found
        else:
            rate = math.sqrt(found.goodput * found.fails)
        if rate in measured:
            return found
        measured[rate] = measure(rate)


def area(attainments: Iterable[tuple[float, float]]) -> float | None:
    """The mean attainment over the rates, by trapezoids: the area under the curve (RS9), for curves over the same rates. None for less
    than two rates."""
    points = sorted(attainments)
    if len(points) < 2:
        return None
    total = sum((after[0] - before[0]) * (before[1] + after[1]) / 2 for before, after in pairwise(points))
    return total / (points[-1][0] - points[0][0])
