"""Poison requests: those whose plans fail or end their actor are suspected, tried alone, and given up.

A plan of several requests that fails as a whole says nothing about any one of them: each gets a *strike* and is tried alone, one
piece of work per plan, until that work succeeds, which takes its strikes away. A piece of work that has crashed its actor twice is
given up with its request (docs/recovery.md); its batch-mates go on. Strikes are kept in the row, by
the plan they come from, so that neither a new controller nor a repeated message counts one twice.
"""

from ..bus.messages import Died, ItemError
from ..bus.plans import Place, Plan
from ..errors import RequestError
from ..stage_table import WORKERS
from .lifecycle import fail
from .request import Request, Strike, StrikeKind
from .state import ControllerState, InflightPlan, owner

MAX_CRASHES = 2
MAX_STRIKES = MAX_CRASHES + 1  # of one piece of work: an error in a batch comes before its crashes alone
STRIKE_BYTES = 20  # of one strike in the row's record, at most


def is_suspect(request: Request) -> bool:
    """It shares no plan with others for now."""
    return bool(request.record.strikes)


def blame(state: ControllerState, inflight: InflightPlan, live: list[Request], result: ItemError | Died) -> None:
    """The plan failed, or its actor died in it. The work goes back to be done again, unless the request is to blame."""
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
    """Count this against the request. Returns its verdict, None while it may try again."""
    if isinstance(result, ItemError) and is_alone:
        if result.status < 500:
            media = inflight.plan.media
            return RequestError(result.message, status=result.status, param=media.path if media is not None else "messages")
        return RequestError(result.message, status=result.status, type="internal_error")
    kind = StrikeKind.ERROR if isinstance(result, ItemError) else StrikeKind.CRASHED
    strikes = request.record.strikes
    actor = WORKERS.index(inflight.actor)
    places = _places(request, inflight.plan)
    for place in places:
        if not any(strike.plan_id == inflight.plan_id and strike.place == place for strike in strikes):
            strikes.append(Strike(inflight.plan_id, actor, *place, kind))
    if not is_alone:
        return None
    for place in places:
        kinds = [strike.kind for strike in strikes if strike.actor == actor and strike.place == place]
        if (crashes := kinds.count(StrikeKind.CRASHED)) >= MAX_CRASHES:
            message = f"the request ended the {inflight.actor} process {crashes} times and is given up"
            return RequestError(message, status=500, type="internal_error")
    return None


def absolve(request: Request, plan: Plan) -> bool:
    """This plan was done: its work is not suspected any more. True if the record changed. Call it before the segments move on."""
    strikes = request.record.strikes
    if not strikes:
        return False
    actor, places = WORKERS.index(plan.STAGE), _places(request, plan)
    kept = [strike for strike in strikes if strike.actor != actor or strike.place not in places]
    request.record.strikes = kept
    return len(kept) < len(strikes)


def give_back(state: ControllerState, request: Request, plan: Plan) -> None:
    """The plan's work on this request is to be done again, into other pages. The caller saves the record, in the same turn."""
    for _, segment in request.segments_of(plan):
        pool, run = segment.give_back()
        state.pools[pool].retire(owner(request), run.pages)


def _places(request: Request, plan: Plan) -> list[Place]:
    return [plan.place] if plan.place is not None else [place for place, _ in request.segments_of(plan)]
