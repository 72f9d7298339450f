"""Times vary around the cost model's lines and rates: each is multiplied by a measured factor, which the seed draws (pure)."""

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from itertools import accumulate
from random import Random

from .costs import CONTEXT_QUANTUM
from .interference import stage_set

PERIOD = 1024  # steps after which their factors come again

Spreads = Mapping[str, Mapping[str, Sequence[float]]]
"""See ``Costs.spreads``."""


class StepTimes:
    """The times of decode's steps, in ns, by their numbers: ``length_ns`` times the factor of each. The factors, at least
    ``CONTEXT_QUANTUM`` of them, come again and again."""

    def __init__(self, factors: Sequence[float], length_ns: float) -> None:
        assert len(factors) >= CONTEXT_QUANTUM
        times = [round(length_ns * factor) or 1 for factor in factors]
        self._period = len(times)
        self._sums = [0, *accumulate(times + times[:CONTEXT_QUANTUM])]

    def of(self, step: int) -> int:
        """Return the time of this step."""
        begin = step % self._period
        return self._sums[begin + 1] - self._sums[begin]

    def after(self, step: int, count: int) -> int:
        """Return the time of ``count`` steps after this one: -1, which takes this one off, to ``CONTEXT_QUANTUM``."""
        assert -1 <= count <= CONTEXT_QUANTUM
        begin = step % self._period + 1
        return self._sums[begin + count] - self._sums[begin]

    def gaps_after(self, step: int, most: int, time_ns: int) -> list[int]:
        """Return the times of the steps after this one that end within that time after it: ``most`` at most, which is
        ``CONTEXT_QUANTUM`` at most."""
        sums, begin = self._sums, step % self._period + 1
        end = bisect_right(sums, sums[begin] + time_ns, begin + 1, begin + 1 + most)
        return [sums[at] - sums[at - 1] for at in range(begin + 1, end)]


class Jitter:
    """Draws factors. A set of stages without measured ones has those of the stage alone, or none."""

    def __init__(self, spreads: Spreads, seed: int) -> None:
        self._spreads, self._seed = spreads, seed
        self._random = Random(seed)
        self._factors: dict[str, list[float]] = {}
        self._plan_factors: dict[tuple[str, str], Sequence[float]] = {}  # of a stage, while this set of stages is at work
        self._times: dict[tuple[str, int, float], StepTimes] = {}
        self.has_steps = "decode" in spreads  # steps of decode vary

    def factor(self, stage: str, together: str) -> float:
        """Draw a factor for a plan of this stage, while this set of stages, with or without it, is at work."""
        if not self._spreads:
            return 1.0
        key = stage, together
        if key not in self._plan_factors:
            self._plan_factors[key] = self._spread(stage_set({stage, *together.split("+")} - {""}), stage)
        spread = self._plan_factors[key]
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
