"""Plans on their way: the choice of an actor (MS2), the plan table, commands to actors, and the pages that plans hold (pure).

``planner`` decides what is done, ``kinds`` makes the plans, and ``plan_results`` applies the results.
"""

from collections.abc import Iterable, Sequence
from functools import cache

from ...bus.media_work import estimated_work
from ...bus.messages import Run
from ...bus.plans import Analyse, Plan, PreprocessSegment
from ...bus.wire import encode
from ...pools import PoolName
from ...stage_table import InstanceId, instance_id, stage_of
from ..scheduling.types import SegmentStage, VideoRoom, num_relays
from ..state.effects import ClearPlan, WritePlan
from ..state.inflight_plan import InflightPlan
from ..state.pages import User
from ..state.request import Request
from ..state.state import ControllerState


def credit(state: ControllerState, stage: str, pool: PoolName | None = None) -> int:
    """Return how many more plans the actors of a stage may be sent: depth for each less its unacknowledged ones. ``pool``: only those
    with this KV pool."""
    if state.limits.is_divided(stage):
        return _pipeline_credit(state)
    depth, num_plans, total = state.limits.depth, state.num_plans, 0
    for actor in _able(state, stage, pool):
        free = depth - num_plans.get(actor, 0)
        if free > 0:
            total += free
    return total


def _pipeline_credit(state: ControllerState) -> int:
    """Return how many more plans may enter prefill's pipeline: none while one of its stages is missing."""
    ranks = [instance_id("prefill", rank) for rank in range(state.limits.prefill_ranks)]
    if any(actor not in state.actors or actor in state.outages for actor in ranks):
        return 0
    return min(max(0, state.limits.depth - state.num_plans.get(ranks[0], 0)), len(free_relays(state)))


def free_relays(state: ControllerState) -> list[int]:
    """Return the relays that no plan has."""
    used = {inflight.plan.relay for inflight in state.plans.values()}
    return [relay for relay in range(num_relays(state.limits.prefill_ranks, state.limits.depth)) if relay not in used]


def _able(state: ControllerState, stage: str, pool: PoolName | None) -> list[InstanceId]:
    """Return the active actors of a stage that get work: dead ones get some only if all are."""
    actors, outages = state.actors, state.outages
    able = [actor for actor in _of_stage(state.staying, stage) if actor in actors and actor not in outages]
    if pool is not None and len(state.kv_pools) > 1:
        able = [actor for actor in able if pool == state.pool_of(actor)]
    return able if not state.absent else [actor for actor in able if actor not in state.absent] or able


@cache
def _of_stage(actors: Sequence[InstanceId], stage: str) -> list[InstanceId]:
    return [actor for actor in actors if stage_of(actor) == stage]


def video_rooms(state: ControllerState) -> tuple[VideoRoom, ...]:
    """Return the room of each process of video that gets work, if they are several."""
    able = _able(state, "video", None)
    if len(able) < 2:
        return ()
    large, depth = _with_large(state), state.limits.depth
    return tuple([VideoRoom(actor, max(0, depth - state.num_plans.get(actor, 0)), actor in large) for actor in able])


def _with_large(state: ControllerState) -> set[InstanceId]:
    """Return the actors that have a plan of large work."""
    return {inflight.actor for inflight in state.plans.values() if inflight.is_large}


def place_plan(
    state: ControllerState,
    plan: Plan,
    requests: Iterable[Request],
    now: float,
    pool: PoolName | None = None,
    actor: InstanceId | None = None,
) -> None:
    """Write a plan into a slot, hold the pages that it names, and send it to ``actor``, or to one of its stage: that with the least to
    do (MS2), unless ``scheduling.routing`` says otherwise; of those with this KV pool if one is given."""
    actor = actor or _choose_actor(state, plan.STAGE, pool)
    inflight = InflightPlan(state.number(), state.free_slots.pop(), actor, plan, list(requests), begun_s=now)
    adopt_plan(state, inflight)
    user = User("plan", inflight.plan_id)
    for pool, pages in inflight.pages():
        state.pools[pool].use(user, pages)
    state.effects.append(WritePlan(inflight.slot, inflight.plan_id, inflight.actor, encode(plan)))
    send_plan(state, inflight, now)


def place_video_plan(state: ControllerState, request: Request, plan: Analyse | PreprocessSegment, now: float) -> None:
    """Place a plan for a medium of one row, and note what policies ask of such plans."""
    request.note_video(now)
    if plan.is_large:
        state.steering.last_streamed = plan.is_streamed
    place_plan(state, plan, [request], now, actor=_choose_video(state, request, plan))


def _choose_video(state: ControllerState, request: Request, plan: Analyse | PreprocessSegment) -> InstanceId:
    """Return the process of video that has the request's media, or the one for them: without other large work if theirs is large."""
    able = [actor for actor in _able(state, plan.STAGE, None) if state.num_plans.get(actor, 0) < state.limits.depth]
    if request.video in able:
        return InstanceId(request.video)
    if plan.is_large and (free := [actor for actor in able if actor not in _with_large(state)]):
        able = free
    if len(able) == 1:
        return able[0]
    pending = dict.fromkeys(able, 0)
    for other in state.preparing():
        if other.video in pending:
            pending[InstanceId(other.video)] += _video_work(other)
    return state.routes.choose({actor: (work, state.num_plans.get(actor, 0)) for actor, work in pending.items()})


def _video_work(request: Request) -> int:
    """Return the work of its media that are not decoded."""
    undone = SegmentStage.PREPROCESSED
    return sum(
        estimated_work(media)
        for media, item in zip(request.spec.items, request.record.items, strict=True)
        if item.shape is None or any(segment.stage < undone for segment in item.segments)
    )


def _choose_actor(state: ControllerState, stage: str, pool: PoolName | None) -> InstanceId:
    """Return the actor with room for a plan and, by ``least_load``, the fewest pending units, by their cost (MS2)."""
    depth, num_plans = state.limits.depth, state.num_plans
    able = [actor for actor in _able(state, stage, pool) if num_plans.get(actor, 0) < depth]
    if len(able) == 1:
        return able[0]
    pending = dict.fromkeys(able, 0.0)
    for inflight in state.plans.values():
        if inflight.actor in pending:
            pending[inflight.actor] += inflight.plan.cost or 0.0
    return state.routes.choose({actor: (pending[actor], num_plans.get(actor, 0)) for actor in able})


def adopt_plan(state: ControllerState, inflight: InflightPlan) -> None:
    """Account for a plan that is, or is about to be, in the plan table, except for its pages."""
    state.plans[inflight.plan_id] = inflight
    state.num_plans[inflight.actor] = state.num_plans.get(inflight.actor, 0) + 1
    if inflight.disturbs_decode:
        state.steering.disturbed_s = state.now
    for request in inflight.requests:
        request.plans[inflight.plan_id] = inflight.plan
        if inflight.plan.STAGE == "video":
            request.video = inflight.actor
        state.touch(request)


def _waits(inflight: InflightPlan) -> bool:
    """Return whether a chunk would overtake the one before it in a pipeline: that has the same rank still."""
    if not (rank := inflight.plan.rank):
        return False
    others = [item for request in inflight.requests for item in request.plans.items()]
    return any(number < inflight.plan_id and other.rank == rank for number, other in others)


def send_plan(state: ControllerState, inflight: InflightPlan, now: float) -> None:
    """Send its actor the command to do a plan, unless nobody holds the actor's role now, or the plan has to wait for another."""
    if _waits(inflight):
        return
    deadlines_s = [request.spec.generation.deadline_s for request in inflight.requests]
    deadline_s = max(deadlines_s) if deadlines_s and all(deadlines_s) else 0.0
    if state.send(inflight.actor, Run(state.epoch, inflight.slot, inflight.plan_id, deadline_s)):
        inflight.sent_s = now


def clear_plan(state: ControllerState, inflight: InflightPlan) -> None:
    """Remove an acknowledged plan, which no actor works on. First its slot is freed, then its pages."""
    del state.plans[inflight.plan_id]
    state.num_plans[inflight.actor] -= 1
    state.effects.append(ClearPlan(inflight.slot))
    state.free_slots.append(inflight.slot)
    user = User("plan", inflight.plan_id)
    for pool in state.pools.values():
        pool.drop(user)
    for request in inflight.requests:
        request.plans.pop(inflight.plan_id, None)
        state.touch(request)
