"""Rates of stages that work at the same time (pure).

The measured rates are of one instance of each stage. For sets that were not measured, and for further instances, the scheduler of the
operating system is assumed: threads share the cores by their niceness, none gets more than a core. What a pair's measured rates
differ from that, by caches and memory, counts in every larger set.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations

from .costs import Costs

Counts = Mapping[str, int]
"""Instances at work, by stage; none that are 0."""

_WEIGHT_STEP = 1.25  # of Linux: between the weights of two levels of niceness


def stage_set(stages: Iterable[str]) -> str:
    """The key of a set of stages in ``Costs.interference``."""
    return "+".join(sorted(stages))


def stage_sets(stages: Sequence[str]) -> list[tuple[str, ...]]:
    """Every set of these stages but the empty one, each in alphabetical order."""
    return [together for size in range(1, len(stages) + 1) for together in combinations(sorted(stages), size)]


class Interference:
    """Rates by the instances at work. ``together`` keeps what it has computed."""

    def __init__(self, costs: Costs) -> None:
        self._costs = costs
        self._known: dict[tuple[str, ...], tuple[str, dict[str, float]]] = {}

    def together(self, stages: tuple[str, ...]) -> tuple[str, dict[str, float]]:
        """``stage_set`` of these stages, each named once for each instance at work, in order, and their rates."""
        if stages not in self._known:
            self._known[stages] = stage_set({*stages}), self.rates(Counter(stages))
        return self._known[stages]

    def rates(self, counts: Counts) -> dict[str, float]:
        """Rates of an instance of each of these stages, as shares of its speed alone."""
        one, all_of_them = self._shares(dict.fromkeys(counts, 1)), self._shares(counts)
        return {stage: self._rate(stage, frozenset(counts)) * all_of_them[stage] / one[stage] for stage in counts}

    def _rate(self, stage: str, together: frozenset[str]) -> float:
        """Of the stage within a set, with one instance of each."""
        measured = self._costs.interference.get(stage_set(together), {})
        if stage in measured:
            return measured[stage]
        rate = self._shares(dict.fromkeys(together, 1))[stage]
        for pair in combinations(sorted(together), 2) if len(together) > 2 else ():
            if stage in self._costs.interference.get(stage_set(pair), {}):
                rate *= self._costs.interference[stage_set(pair)][stage] / self._shares(dict.fromkeys(pair, 1))[stage]
        return rate

    def _shares(self, counts: Counts) -> dict[str, float]:
        """The share of a core that each thread of a stage gets: in proportion to its weight, at most a whole one."""
        costs = self._costs
        weights = {stage: _WEIGHT_STEP ** -costs.nice.get(stage, 0) for stage in counts}
        threads = {stage: costs.threads.get(stage, 1) * count for stage, count in counts.items()}
        shares: dict[str, float] = {}
        cores, rest = float(costs.num_cores), set(counts)
        while rest:
            total = sum(weights[stage] * threads[stage] for stage in rest)
            full = {stage for stage in rest if total == 0 or cores * weights[stage] >= total}
            if not full:
                return shares | {stage: cores * weights[stage] / total for stage in rest}
            shares |= dict.fromkeys(full, 1.0)
            cores -= sum(threads[stage] for stage in full)
            rest -= full
        return shares
