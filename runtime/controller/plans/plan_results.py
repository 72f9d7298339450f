"""Apply the results of plans: what all kinds have in common. ``kinds`` has what differs.

Results are idempotent: one is applied where the record still names the pages that its plan wrote. Any result acknowledges the
plan: its slot is free, and it no longer holds pages.
"""

from collections.abc import Collection

from ...bus.messages import Died, ItemError, Overran, Result, Skipped
from ...bus.plans import Plan
from ...stage_table import InstanceId
from ..rows.absence import leaves_plan
from ..rows.intake import timed_out
from ..rows.lifecycle import fail, settle
from ..rows.poison import blame, give_back
from ..state.inflight_plan import InflightPlan
from ..state.request import Request
from ..state.state import ControllerState
from .kinds.base import Encoded
from .kinds.table import KINDS
from .plan_dispatch import clear_plan, place_plan


def finish_plan(state: ControllerState, inflight: InflightPlan, result: Result, elapsed_s: float) -> None:
    """Apply a plan's result to its rows, free its slot, and release the pages that it held."""
    plan = inflight.plan
    kind = KINDS[type(plan)]
    live = [request for request in inflight.requests if not request.ending]
    encoded: Encoded = ()
    kind.answered(state, plan, live, result)
    if isinstance(result, (ItemError, Died)):
        blame(state, inflight, live, result)
    elif isinstance(result, Skipped):
        _skip(state, plan, live)
    elif isinstance(result, Overran):
        _correct_work(state, plan, live)
    else:
        _learn_cost(state, inflight, live, elapsed_s)
        for request in live:
            request.ownership.plan_done()
        if kind.is_part(state, plan):
            _place_rest(state, plan, live)  # before the plan leaves the table, so that its pages stay held
        else:
            encoded = kind.apply(state, plan, live, result)
    clear_plan(state, inflight)
    kind.cleared(state, plan, live, encoded)
    for request in inflight.requests:
        settle(state, request)


def _place_rest(state: ControllerState, plan: Plan, live: list[Request]) -> None:
    """Place what is left to do of a plan, if anybody wants it."""
    if (rest := KINDS[type(plan)].rest(state, plan, live)) is not None:
        next_plan, actor = rest
        rows = set(next_plan.rows)
        place_plan(state, next_plan, [request for request in live if request.key_in_table in rows], state.now, actor=actor)


def skip_plans(state: ControllerState, actors: Collection[InstanceId]) -> None:
    """Give back the plans of these actors: nobody works on them, since their role locks were free after all effects up to now."""
    for inflight in [one for one in state.plans.values() if one.actor in actors and leaves_plan(state, one)]:
        for request in inflight.requests:
            request.ownership.move_plan(is_away=inflight.actor in state.away)
        finish_plan(state, inflight, Skipped(), 0.0)


def _learn_cost(state: ControllerState, inflight: InflightPlan, live: list[Request], elapsed_s: float) -> None:
    """Learn the cost of the parts of live rows: for policies, and for the budgets of encode and prefill."""
    plan = inflight.plan
    if not plan.COMPUTES:
        return
    keys = {request.key_in_table for request in live}
    done = plan.only(lambda row, generation: (row, generation) in keys)
    num_units = done.units if done is not None else 0
    if inflight.disturbs_decode or plan.is_streamed:
        state.costs.observe(inflight.actor, num_units, elapsed_s)
    KINDS[type(plan)].learn_cost(state, num_units, elapsed_s)


def _skip(state: ControllerState, plan: Plan, live: list[Request]) -> None:
    """Handle a skipped plan: live requests past their deadlines fail, for all processes share a clock; others get the work back."""
    for request in live:
        if 0 < request.spec.generation.deadline_s <= state.now and not request.is_finished:
            fail(state, request, timed_out())
        else:
            give_back(state, request, plan)
            state.save(request)


def _correct_work(state: ControllerState, plan: Plan, live: list[Request]) -> None:
    """Mark the work as large, to be done again. A new controller has to find this out again."""
    for request in live:
        KINDS[type(plan)].correct_work(state, plan, request)
        give_back(state, request, plan)
        state.save(request)
