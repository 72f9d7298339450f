"""Calls of the policy by the core, and the fallback when it fails (pure).

``unified`` overrules a policy that raises, for that round; one that cannot rank, permanently; and one that plans nothing for
``STARVED_S`` while all actors are idle and something could run, for a round. Illegal choices are dropped. ``Totals`` counts both.
"""

import math

from .scheduling.legality import check
from .scheduling.policy import UNIFIED
from .scheduling.types import StepLimits, StepPlan, View
from .state import STUCK_S, ControllerState

STARVED_S = 1.0
RANK_S = 0.1  # between ranks of all requests by a policy that ages: they do not change faster than that
AGED_S = 60.0  # a request this old goes before younger ones, whatever the policy and the priorities
AGE_S = 1.0  # between searches for such requests


def rank_requests(state: ControllerState) -> None:
    """Rank the requests for this tick: new ones, or all from time to time if ranks change. A lower priority goes before any rank,
    and a request of ``AGED_S`` before any priority: nobody starves.

    A policy that cannot rank a request is not asked for ranks again: otherwise rows would alternate between two orders.
    """
    try:
        is_due = state.ranking.ages and state.now - state.ranked_s >= RANK_S
        requests = list(state.requests.values() if is_due else state.unranked)
        ranks = [tuple(map(float, state.ranking.rank(request, state.facts))) for request in requests]
        if any(math.isnan(number) for rank in ranks for number in rank):
            raise ValueError("a rank is not a number")
    except Exception as error:
        if state.ranking is UNIFIED:
            raise
        _overrule(state, f"rank: {error!r}")
        state.ranking, requests = UNIFIED, list(state.requests.values())
        ranks = [UNIFIED.rank(request, state.facts) for request in requests]
    for request, rank in zip(requests, ranks, strict=True):
        request.rank = (request.priority, *rank, request.arrival)
    if is_due:
        state.ranked_s = state.now
    if is_due or state.now - state.aged_s >= AGE_S:
        state.aged_s = state.now
        for request in state.requests.values():
            if state.now - request.arrived_s >= AGED_S:
                request.rank = (-math.inf, request.arrival)
    state.unranked.clear()


def choose(state: ControllerState, view: View, limits: StepLimits) -> StepPlan:
    """Return the choices to send in this round."""
    if not view.requests:
        state.starved_s = None
        return StepPlan()
    try:
        plan, memory = state.policy.plan(view, limits, state.policy_memory)
        legal, num_illegal = check(view, limits, plan)
    except Exception as error:
        if state.policy is UNIFIED:
            raise
        _overrule(state, f"plan: {error!r}")
        return UNIFIED.plan(view, limits, None)[0]
    state.policy_memory = memory
    state.totals.illegal += num_illegal
    if legal or state.policy is UNIFIED or any(state.now - inflight.begun_s < STUCK_S for inflight in state.plans.values()):
        state.starved_s = None
        return legal
    other, _ = UNIFIED.plan(view, limits, None)
    if not other:
        state.starved_s = None
    elif state.starved_s is None:
        state.starved_s = state.now
    elif state.now - state.starved_s >= STARVED_S:
        _overrule(state, f"nothing was planned for {state.now - state.starved_s:.1f} s")
        state.starved_s = None
        return other
    return legal


def _overrule(state: ControllerState, why: str) -> None:
    state.totals.overruled += 1
    state.overruled_because = why
