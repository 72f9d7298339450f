"""Poison requests: requests whose plans fail or end their actor are suspected, tried alone, and finally failed.

When a plan of several requests fails as a whole, the cause is unknown: each request gets a *strike* and is tried alone, one
piece of work per plan, until that work succeeds, which clears its strikes. A request whose piece of work has crashed its actor
twice fails (docs/recovery.md); the others of the batch go on. Strikes are kept in the row, keyed by plan, so that neither a new
controller nor a repeated message counts one twice.
"""

from ...bus.messages import Died, ItemError
from ...bus.plan_base import Place
from ...bus.plans import Plan
from ...errors import RequestError
from ...stage_table import WORKERS
from ..state.inflight_plan import InflightPlan
from ..state.request import Request
from ..state.row_record import Strike, StrikeKind
from ..state.state import ControllerState, owner
from .lifecycle import fail

MAX_CRASHES = 2
MAX_STRIKES = MAX_CRASHES + 1  # of one piece of work: an error in a batch comes before its crashes alone
STRIKE_BYTES = 20  # of one strike in the row's record, at most


def is_suspect(request: Request) -> bool:
    """Return whether the request must not share plans with others for now."""
    return bool(request.record.strikes)


def blame(state: ControllerState, inflight: InflightPlan, live: list[Request], result: ItemError | Died) -> None:
    """Handle a plan that failed or whose actor died in it. The work is done again, except for requests that caused the failure."""
    is_alone = len({request.key for request in inflight.requests}) == 1
    for request in live:
        error = _charge(request, inflight, result, is_alone)
        if error is not None:
            state.totals.quarantined += isinstance(result, Died)
            fail(state, request, error)
        else:
            give_back(state, request, inflight.plan)
            state.save(request)


def _charge(request: Request, inflight: InflightPlan, result: ItemError | Died, is_alone: bool) -> RequestError | None:
    """Count this against the request. Returns the error to fail it with, None while it may try again."""
    if isinstance(result, ItemError) and not request.awaits(inflight.plan):
        return None  # another plan does this work, or has done it
    if isinstance(result, ItemError) and is_alone:
        if result.status < 500:
            media = inflight.plan.media
            return RequestError(result.message, status=result.status, param=media.path if media is not None else "messages")
        return RequestError(result.message, status=result.status, type="internal_error")
    kind = StrikeKind.ERROR if isinstance(result, ItemError) else StrikeKind.CRASHED
    strikes = request.record.strikes
    actor = WORKERS.index(inflight.plan.STAGE)
    places = _places(request, inflight.plan)
    for place in places:
        if not any(strike.plan_id == inflight.plan_id and strike.place == place for strike in strikes):
            strikes.append(Strike(inflight.plan_id, actor, *place, kind))
    if not is_alone:
        return None
    for place in places:
        kinds = [strike.kind for strike in strikes if strike.actor == actor and strike.place == place]
        if (crashes := kinds.count(StrikeKind.CRASHED)) >= MAX_CRASHES:
            message = f"the request ended the {inflight.plan.STAGE} process {crashes} times and is given up"
            return RequestError(message, status=500, type="internal_error")
    return None


def absolve(request: Request, plan: Plan) -> bool:
    """Clear suspicion of the work of a plan that is done. True if the record changed. Call it before the segments advance."""
    strikes = request.record.strikes
    if not strikes:
        return False
    actor, places = WORKERS.index(plan.STAGE), _places(request, plan)
    request.record.forgive(places, actor)
    return len(request.record.strikes) < len(strikes)


def give_back(state: ControllerState, request: Request, plan: Plan) -> None:
    """Reset the plan's work on this request, to be done again into other pages. The caller saves the record in the same turn."""
    for _, segment in request.segments_of(plan):
        pool, run = segment.give_back()
        state.pools[pool].retire(owner(request), run.pages)


def _places(request: Request, plan: Plan) -> list[Place]:
    return [plan.place] if plan.place is not None else [place for place, _ in request.segments_of(plan)]
