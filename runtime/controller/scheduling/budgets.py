"""Token budgets of encode and prefill: found by search over a measured cost model, then steered by the slack in TBT (pure; US8,
US9).

The paper sets tau and alpha empirically. Here each actor's plans report (units, elapsed); a line fitted to the recent ones
predicts the duration of a batch, and a binary search finds the largest that stays within an allowance. The allowance begins at
the TBT target and is steered by how far decode's measured time between tokens is from it. Without measurements the budget grows
from a small start.
"""

from dataclasses import dataclass, replace

from ...config import MAX_STEP_TOKENS
from .facts import Cost
from .types import Limits

MIN_TOKENS = 256  # fewer would cost the same: a plan reads all weights once, regardless of its tokens
START_UNITS = 1  # start of a budget, in multiples of the least

TBT_FACTOR = 2.0  # the TBT objective, in steps alone, where none is configured or no step meets it

_DECAY = 0.9
_SHARE_LIMITS = (0.25, 4.0)
_IDLE_SHARE = 4.0


@dataclass(frozen=True, slots=True)
class CostModel:
    """elapsed = base_s + per_unit_s * units, by least squares with exponential forgetting."""

    weight: float = 0.0
    sum_x: float = 0.0
    sum_y: float = 0.0
    sum_xx: float = 0.0
    sum_xy: float = 0.0

    def observe(self, units: int, elapsed_s: float) -> "CostModel":
        """Update the model with a finished plan of ``units`` (tokens or rows)."""
        return CostModel(
            self.weight * _DECAY + 1.0,
            self.sum_x * _DECAY + units,
            self.sum_y * _DECAY + elapsed_s,
            self.sum_xx * _DECAY + units * units,
            self.sum_xy * _DECAY + units * elapsed_s,
        )

    def predict(self, units: int) -> float:
        """Predict the seconds of a plan of ``units``; never negative. 0 before any measurement."""
        if not self.weight:
            return 0.0
        mean_x, mean_y, slope = self._fit()
        return mean_y + slope * (units - mean_x)

    @property
    def line(self) -> tuple[float, float]:
        """Return the seconds of a plan of no units, and per unit; neither is negative."""
        if not self.weight:
            return 0.0, 0.0
        mean_x, mean_y, slope = self._fit()
        return max(0.0, mean_y - slope * mean_x), slope

    def _fit(self) -> tuple[float, float, float]:
        """Return mean units, mean seconds, and seconds per unit: between 0 and what makes a plan of no units take no time."""
        mean_x, mean_y = self.sum_x / self.weight, self.sum_y / self.weight
        variance = self.sum_xx / self.weight - mean_x * mean_x
        if variance > 1e-6 * mean_x * mean_x:
            slope = (self.sum_xy / self.weight - mean_x * mean_y) / variance
            slope = min(max(slope, 0.0), mean_y / mean_x if mean_x else 0.0)
        else:
            slope = mean_y / mean_x if mean_x else 0.0
        return mean_x, mean_y, slope


@dataclass(frozen=True, slots=True)
class Budget:
    """One actor's budget. ``fixed`` > 0 is configured and not touched. ``largest``: units of the largest plan seen."""

    low: int
    high: int
    value: int
    fixed: int = 0
    largest: int = 0
    cost: CostModel = CostModel()

    @property
    def units(self) -> int:
        return self.fixed or self.value

    @property
    def max_units(self) -> int:
        """What a policy's own budget may be."""
        return self.fixed or self.high

    @property
    def line(self) -> Cost:
        return Cost(*self.cost.line, self.largest)


def prefill_budget(configured: int) -> Budget:
    """Make the budget tau, in tokens."""
    return Budget(MIN_TOKENS, MAX_STEP_TOKENS, START_UNITS * MIN_TOKENS, configured)


def encode_budget(configured: int, rows_per_token: int) -> Budget:
    """Make the budget alpha, in patch rows; ``rows_per_token`` rows make one embedding token."""
    low = MIN_TOKENS * rows_per_token
    return Budget(low, MAX_STEP_TOKENS * rows_per_token, START_UNITS * low, configured)


def objective_s(limits: Limits, undisturbed_s: float) -> float:
    """Return the TBT objective where a step alone takes ``undisturbed_s``. One that is configured gives way where no step meets it:
    budgets would shrink to the least, and media wait without end."""
    if limits.tbt_factor:
        return max(limits.tbt_least_s, limits.tbt_factor * undisturbed_s)
    return limits.tbt_target_s if undisturbed_s <= limits.tbt_target_s else TBT_FACTOR * undisturbed_s


def steer_share(share: float, tbt_s: float | None, target_s: float) -> float:
    """Return the share of the TBT target for the next plan: less if decode is late, more if it has slack. Bounded both ways."""
    if tbt_s is None:
        return share
    if tbt_s > target_s:
        share *= 0.8
    elif tbt_s < 0.8 * target_s:
        share *= 1.1
    return min(max(share, _SHARE_LIMITS[0]), _SHARE_LIMITS[1])


def allowance_s(share: float, num_decoding: int, target_s: float) -> float:
    """Return the seconds that a plan may take. If no row decodes, only cancellation and pipelining bound it."""
    return target_s * (share if num_decoding else _IDLE_SHARE)


def search(cost: CostModel, allowance: float, low: int, high: int) -> int:
    """Return the most units in [low, high] predicted to take at most ``allowance`` seconds, ``low`` if there are none."""
    while low < high:
        middle = (low + high + 1) // 2
        if cost.predict(middle) <= allowance:
            low = middle
        else:
            high = middle - 1
    return low


def update(budget: Budget, units: int, elapsed_s: float, allowance: float) -> Budget:
    """Return the budget after a plan of ``units`` that took ``elapsed_s`` seconds."""
    if units <= 0 or elapsed_s < 0:
        return budget
    seen = replace(budget, cost=budget.cost.observe(units, elapsed_s), largest=max(budget.largest, units))
    return retarget(seen, allowance)


def retarget(budget: Budget, allowance: float) -> Budget:
    """Return the budget for an allowance. At most twice the largest plan seen: far from its data, the fitted model is a guess."""
    if budget.fixed or not budget.cost.weight:
        return budget
    found = search(budget.cost, allowance, budget.low, budget.high)
    return replace(budget, value=max(budget.low, min(found, max(START_UNITS * budget.low, 2 * budget.largest))))
