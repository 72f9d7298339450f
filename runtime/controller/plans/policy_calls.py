"""Calls of the policy by the core, the fallback when it fails, and its replacement (pure).

``unified`` overrules a policy that raises, for the rest of that tick; one that cannot rank, permanently; and one that plans nothing for
``STARVED_S`` while all actors are idle and something could run, for a round. Illegal choices are dropped. ``Totals`` counts both.
A policy overruled ``MAX_FAILURES`` times within ``FAILURES_S`` is set aside: ``unified`` is in charge until the next ``swap``.

``ControllerState.guard`` makes the calls: the actor measures them there, and ends those of a user's policy that take too long. What
reads a policy's own objects is inside as well, since it can run the policy's code.
"""

import math
from collections.abc import Sequence

from ..scheduling.legality import check
from ..scheduling.policy import UNIFIED, Policy, PolicyFailure, PolicyRecord
from ..scheduling.types import Rank, StepLimits, StepPlan, View
from ..state.inflight_plan import LONG_AGO_S
from ..state.request import Request
from ..state.state import STUCK_S, ControllerState

STARVED_S = 1.0
RANK_S = 0.1  # between ranks of all requests by a policy that ages: they do not change faster than that
AGED_S = 60.0  # a request this old goes before younger ones, whatever the policy and the priorities
AGE_S = 1.0  # between searches for such requests
MAX_FAILURES, FAILURES_S = 5, 10.0
MAX_RANK = 16  # numbers in a rank
_MAX_ERROR = 400  # characters kept of a message


def swap(state: ControllerState, policy: Policy) -> None:
    """Put another policy in charge, between two ticks. It begins without memory, and ranks all requests anew: ranks of two policies are
    never compared."""
    state.policy = state.ranking = policy
    state.policy_memory = None
    state.policy_record = PolicyRecord()
    state.starved_s = None
    state.unranked = list(state.requests.values())
    state.aged_s = LONG_AGO_S


def rank_requests(state: ControllerState) -> None:
    """Rank the requests for this tick: new ones, or all from time to time if ranks change. A lower priority goes before any rank,
    and a request of ``AGED_S`` before any priority: nobody starves.

    A policy that cannot rank a request is not asked for ranks again: otherwise rows would alternate between two orders.
    """
    is_due = state.ranking.ages and state.now - state.ranked_s >= RANK_S
    requests = list(state.requests.values() if is_due else state.unranked)
    state.unranked.clear()
    if requests:
        _rank(state, requests)
    if is_due:
        state.ranked_s = state.now
    if is_due or state.now - state.aged_s >= AGE_S:
        state.aged_s = state.now
        for request in state.requests.values():
            if state.now - request.arrived_s >= AGED_S:
                request.rank = (-math.inf, request.arrival)


def _rank(state: ControllerState, requests: list[Request]) -> None:
    try:
        ranks = state.guard(state.ranking, lambda: _ranks(state, requests))
    except Exception as error:
        if state.ranking is UNIFIED:
            raise
        _overrule(state, f"rank: {_describe(error)}")
        state.ranking, requests = UNIFIED, list(state.requests.values())
        state.policy_record.rank_length = 0
        state.aged_s = LONG_AGO_S
        ranks = [UNIFIED.rank(request, state.facts) for request in requests]
    for request, rank in zip(requests, ranks, strict=True):
        request.rank = (request.priority, *rank, request.arrival)


def _ranks(state: ControllerState, requests: Sequence[Request]) -> list[Rank]:
    """Return ranks that can be compared with each other and with those before. Raises any exception."""
    facts = state.facts
    ranks = [tuple(map(float, state.ranking.rank(request, facts))) for request in requests]
    length = state.policy_record.rank_length or len(ranks[0])
    for rank in ranks:
        if any(math.isnan(number) for number in rank):
            raise ValueError("a rank is not a number")
        if not 0 < len(rank) <= MAX_RANK:
            raise ValueError(f"a rank has {len(rank)} numbers, it must have 1 to {MAX_RANK}")
        if len(rank) != length:
            raise ValueError(f"a rank has {len(rank)} numbers, others have {length}")
    state.policy_record.rank_length = length
    return ranks


def choose(state: ControllerState, view: View, limits: StepLimits) -> StepPlan:
    """Return the choices to send in this round."""
    record = state.policy_record
    if record.failed_s and record.failed_s[-1] == state.now:  # it may have used up its time
        return UNIFIED.plan(view, limits, None)[0]

    def plan() -> tuple[StepPlan, int]:
        plan, memory = state.policy.plan(view, limits, state.policy_memory)
        checked = check(view, limits, plan)
        state.policy_memory = memory
        return checked

    legal: StepPlan
    try:
        legal, num_illegal = state.guard(state.policy, plan)
    except Exception as error:
        if state.policy is UNIFIED:
            raise
        _overrule(state, f"plan: {_describe(error)}")
        return UNIFIED.plan(view, limits, None)[0]
    state.totals.illegal += num_illegal
    record.illegal += num_illegal
    has_work = bool(legal)
    record.plans += has_work
    if has_work or state.policy is UNIFIED or any([state.now - inflight.begun_s < STUCK_S for inflight in state.plans.values()]):
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


def _describe(error: Exception) -> str:
    return str(error) if isinstance(error, PolicyFailure) else repr(error)


def _overrule(state: ControllerState, why: str) -> None:
    record = state.policy_record
    state.totals.overruled += 1
    state.overruled_because = record.error = why[:_MAX_ERROR]
    record.overruled += 1
    record.failed_s = [*(at_s for at_s in record.failed_s if state.now - at_s <= FAILURES_S), state.now]
    if len(record.failed_s) >= MAX_FAILURES:
        swap(state, UNIFIED)
        record.set_aside = f"overruled {len(record.failed_s)} times within {FAILURES_S:g} s, last because of {record.error}"
        record.rank_length = 0
        state.policy_record = record
