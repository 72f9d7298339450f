"""Compare a live load with the one that a plan was made for (pure; TI11).

A plan has the seconds that each stage needs for its trace. With what requests ask for now they give another division of the devices
among the stages. When that has differed from the plan's for some looks in a row, the plan should be made again: the text reruns
Algorithm 2 then and reloads. This only says so.
"""

import msgspec

from mmrt.runtime.autoscale.demand import Demand

from .heuristic import Division, partition

LOOKS = 3  # in a row
LEAST_REQUESTS = 30  # of a look: fewer say little


class Drift(msgspec.Struct, frozen=True, kw_only=True):
    """``factors``: what a request asks of each stage now, as a multiple of the plan's, by letter. ``shares``: devices that Algorithm 2
    would give the stages now; none if the plan's trace had no media and there are some."""

    factors: dict[str, float]
    shares: dict[str, int]
    num_looks: int

    def __str__(self) -> str:
        if not self.shares:
            return "requests bring media, and the plan's trace had none"
        stages = {"E": "encode", "P": "prefill", "D": "decode"}
        asked = ", ".join(f"{stages[letter]} {factor:.2g}" for letter, factor in self.factors.items())
        division = " ".join(f"{count}{letter}" for letter, count in self.shares.items())
        return f"a request asks for other work than in the plan ({asked} times as much): the devices would be divided {division} now"


class DriftDetector:
    """Compares what requests ask for with a plan's trace."""

    def __init__(self, planned: Demand, division: Division) -> None:
        self._planned, self._division = planned, division
        self._num_looks = 0

    def look(self, now: Demand) -> Drift | None:
        """``now``: sums since the last look. None while the division would stay, or not for long enough; a look at few requests
        counts for nothing."""
        if now.num_requests < LEAST_REQUESTS:
            return None
        factors = {letter: _per_request(now, letter) / planned for letter in "EPD" if (planned := _per_request(self._planned, letter))}
        shares = {}
        if self._planned.encode_rows or not now.encode_rows:
            seconds = {letter: factors.get(letter, 0.0) * seconds for letter, seconds in self._division.seconds.items()}
            shares = partition(sum(self._division.shares.values()), seconds)
        self._num_looks = self._num_looks + 1 if shares != self._division.shares else 0
        return Drift(factors=factors, shares=shares, num_looks=self._num_looks) if self._num_looks >= LOOKS else None


def _per_request(demand: Demand, letter: str) -> float:
    sums = {"E": demand.encode_rows, "P": demand.prompt_tokens, "D": demand.decode_tokens}
    return sums[letter] / demand.num_requests if demand.num_requests else 0.0
