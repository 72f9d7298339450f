"""Actors that are away: dead for a while, though not broken, while another of their stage serves (pure; rules over
``ControllerState``).

What waits for such an actor goes to another one, on the way that leads from a broken actor: see ``outages`` and ``ownership``. A
process that is killed is usually back in less than a second, with everything in its place, and its work is left to it. One that starts
without the zygote, or whose start fails, may take minutes, and no request should.

Its own next process tells who ended it (``poison``). So work moves once, and again only if it has got on meanwhile: work that ends
every process that takes it waits for the second one.
"""

from ...stage_table import InstanceId, stage_of
from ..state.inflight_plan import InflightPlan
from ..state.request import Request
from ..state.state import ControllerState

AWAY_S = 2.0
"""For how long work waits for a dead actor: longer than usual starts of a killed process (0.2 to 1 s), so that these move nothing, and
short for a reader who waits for the next word."""


def note_absence(state: ControllerState) -> None:
    """Take note of how long actors have been dead, once in each tick."""
    if not state.absent and not state.absent_since_s:
        return
    now = state.now
    state.absent_since_s = {actor: state.absent_since_s.get(actor, now) for actor in state.absent}
    late = [actor for actor, since_s in state.absent_since_s.items() if now - since_s >= AWAY_S]
    state.away = frozenset(actor for actor in late if _has_substitute(state, actor))


def _has_substitute(state: ControllerState, actor: InstanceId) -> bool:
    stage = stage_of(actor)
    return not state.limits.is_divided(stage) and any(
        stage_of(other) == stage and other in state.actors and other not in state.absent and other not in state.outages
        for other in state.staying
    )


def leaves_row(state: ControllerState, request: Request) -> bool:
    """Return whether a row is to leave the decode actor that has it, which is lost. Take note that it does."""
    actor = request.record.member_of
    if actor is None or not state.is_lost(actor):
        return False
    if actor not in state.outages:
        if request.ownership.moved_at == request.answer.committed and not request.is_finished:
            return False
        request.ownership.move_row(request.answer.committed)
    return True


def leaves_plan(state: ControllerState, inflight: InflightPlan) -> bool:
    """Return whether a plan is to leave its actor, which is lost."""
    is_away = inflight.actor not in state.outages
    return state.is_lost(inflight.actor) and not (is_away and any(request.ownership.has_moved for request in inflight.requests))
