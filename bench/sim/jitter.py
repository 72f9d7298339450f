"""Times vary around the cost model's lines and rates: each is multiplied by a measured factor, which the seed draws (pure)."""

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from itertools import accumulate
from random import Random

from .interference import stage_set

PERIOD = 1024  # steps after which their factors come again

Spreads = Mapping[str, Mapping[str, Sequence[float]]]
"""See ``Costs.spreads``."""


class StepTimes:
    """The times of decode's steps, in ns, by their numbers: ``length_ns`` times the factor of each."""

    def __init__(self, factors: Sequence[float], length_ns: float) -> None:
        self._sums = [0, *accumulate(max(1, round(length_ns * factor)) for factor in factors)]

    def total(self, first: int, count: int) -> int:
        """Return the time of ``count`` steps from this one on."""
        return self._upto(first + count) - self._upto(first)

    def gaps(self, first: int, count: int) -> list[int]:
        """Return the time of each of these steps."""
        return [self.total(step, 1) for step in range(first, first + count)]

    def num_within(self, first: int, most: int, time_ns: int) -> int:
        """Return the number of steps, from this one on, that end within that time: ``most`` at most."""
        return bisect_right(range(1, most + 1), time_ns, key=lambda count: self.total(first, count))

    def _upto(self, step: int) -> int:
        rounds, rest = divmod(step, len(self._sums) - 1)
        return rounds * self._sums[-1] + self._sums[rest]


class Jitter:
    """Draws factors. A set of stages without measured ones has those of the stage alone, or none."""

    def __init__(self, spreads: Spreads, seed: int) -> None:
        self._spreads, self._seed = spreads, seed
        self._random = Random(seed)
        self._factors: dict[str, list[float]] = {}
        self._times: dict[tuple[str, int, float], StepTimes] = {}
        self.has_steps = "decode" in spreads  # steps of decode vary

    def factor(self, stage: str, others: Mapping[str, int]) -> float:
        """Draw a factor for a plan of this stage, beside those at work."""
        spread = self._spread(stage_set({stage, *others}), stage) if self._spreads else ()
        return self._random.choice(spread) if spread else 1.0

    def step_times(self, together: str, cost_ns: int, rate: float) -> StepTimes:
        """The times of steps that take ``cost_ns`` alone, at this rate, while this set of stages is at work."""
        key = together, cost_ns, rate
        if key not in self._times:
            if together not in self._factors:
                self._factors[together] = self._drawn(together)
            self._times[key] = StepTimes(self._factors[together], cost_ns / rate)
        return self._times[key]

    def _spread(self, together: str, stage: str) -> Sequence[float]:
        return self._spreads.get(together, {}).get(stage) or self._spreads.get(stage, {}).get(stage, ())

    def _drawn(self, together: str) -> list[float]:
        """A period's factors of decode: each of the spread equally often, in a random order, so that their mean is kept."""
        spread = self._spread(together, "decode")
        factors = [*spread] * -(-PERIOD // len(spread))
        Random(f"{self._seed}/{together}").shuffle(factors)
        return factors
