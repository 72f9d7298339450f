"""Token budgets of encode and prefill: found by search over a measured cost model, then steered by the slack in TBT (pure; US8,
US9).

The paper sets tau and alpha empirically. Here each actor's plans report (units, elapsed); a line fitted to the recent ones
predicts the duration of a batch, and a binary search finds the largest that stays within an allowance. The allowance begins at
the TBT target and is steered by how far decode's measured time between tokens is from it. Without measurements the budget grows
from a small start.
"""

from typing import NamedTuple, Protocol

import msgspec

from ...config.runtime_config import MAX_STEP_TOKENS, RuntimeConfig
from .costs import CostModel
from .facts import UNKNOWN, Cost

MIN_TOKENS = 256  # fewer would cost the same: a plan reads all weights once, regardless of its tokens
START_UNITS = 1  # start of a budget, in multiples of the least

TBT_FACTOR = 2.0  # the TBT objective, in steps alone, where none is configured or no step meets it
OWN_FACTOR = 1.25  # the least of it where none is configured, in the longest steps that decode can have on its own cores
DEFAULT_TBT_TARGET_S = 0.05  # until a step alone has been measured; on CUDA, steps take 5 to 100 ms by model and device

_SHARE_LIMITS = (0.25, 4.0)
_IDLE_SHARE = 4.0
_LONE_SHARE = 20.0
_LONE_S = 2.0


class Budget(msgspec.Struct, frozen=True):
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


def prefill_budget(configured: int, known: Cost = UNKNOWN) -> Budget:
    """Make the budget tau, in tokens. ``known``: what earlier runs have learned."""
    return Budget(MIN_TOKENS, MAX_STEP_TOKENS, START_UNITS * MIN_TOKENS, configured, known.largest, CostModel.of(known))


def encode_budget(configured: int, rows_per_token: int, known: Cost = UNKNOWN) -> Budget:
    """Make the budget alpha, in patch rows; ``rows_per_token`` rows make one embedding token."""
    low = MIN_TOKENS * rows_per_token
    return Budget(low, MAX_STEP_TOKENS * rows_per_token, START_UNITS * low, configured, known.largest, CostModel.of(known))


class TbtRule(Protocol):
    """The rule that gives the TBT objective, as in ``Limits``."""

    @property
    def tbt_target_s(self) -> float: ...

    @property
    def tbt_factor(self) -> float: ...

    @property
    def tbt_least_s(self) -> float: ...


class ConfiguredTbt(NamedTuple):
    """The rule of a configuration."""

    tbt_target_s: float
    tbt_factor: float
    tbt_least_s: float


def tbt_rule(config: RuntimeConfig) -> ConfiguredTbt:
    """Return the configuration's rule. A step alone has idle cores as well (``actors.host.cores``), one beside plans has not, and takes
    longer in proportion to the cores at most: an objective below that would be missed whatever plans there are."""
    configured_s = config.scheduling.tbt_target_ms / 1000
    least_s = 0.0 if config.model.on_cuda else DEFAULT_TBT_TARGET_S
    factor = max(TBT_FACTOR, OWN_FACTOR * _lent(config))
    return ConfiguredTbt(configured_s or DEFAULT_TBT_TARGET_S, 0.0 if configured_s else factor, least_s)


def _lent(config: RuntimeConfig) -> float:
    """Return the cores that decode has alone, in those that it has beside others."""
    threads = config.actor("decode").threads
    lends = threads and config.actors.turns == "off" and not config.model.on_cuda
    return config.most_threads("decode") / threads if lends else 1.0


def objective_s(limits: TbtRule, undisturbed_s: float) -> float:
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


def lone_units(budget: Budget, target_s: float) -> int:
    """Return the units of a plan of the only request, while no row decodes, where short plans of others need not wait for its end. So
    only cancellation and what a death undoes bound it: to 2 s, or to what such a plan has where others wait, if that is more. One plan
    of 1,010 tokens takes 8 % less time than four (CPU, bfloat16)."""
    return retarget(budget, min(target_s * _LONE_SHARE, max(target_s * _IDLE_SHARE, _LONE_S))).units


def search(cost: CostModel, allowance: float, low: int, high: int) -> int:
    """Return the most units in [low, high] predicted to take at most ``allowance`` seconds, ``low`` if there are none."""
    predict = cost.predictor()
    while low < high:
        middle = (low + high + 1) // 2
        if predict(middle) <= allowance:
            low = middle
        else:
            high = middle - 1
    return low


def update(budget: Budget, units: int, elapsed_s: float, allowance: float) -> Budget:
    """Return the budget after a plan of ``units`` that took ``elapsed_s`` seconds."""
    if units <= 0 or elapsed_s < 0:
        return budget
    seen = msgspec.structs.replace(budget, cost=budget.cost.observe(units, elapsed_s), largest=max(budget.largest, units))
    return retarget(seen, allowance)


def retarget(budget: Budget, allowance: float) -> Budget:
    """Return the budget for an allowance. At most twice the largest plan seen: far from its data, the fitted model is a guess."""
    if budget.fixed or not budget.cost.weight:
        return budget
    found = search(budget.cost, allowance, budget.low, budget.high)
    return msgspec.structs.replace(budget, value=max(budget.low, min(found, max(START_UNITS * budget.low, 2 * budget.largest))))
