"""The owners of rows (pure; rules over ``ControllerState``): the decode actor that a row goes to, and the way from one to another.

A row in phase DECODE has an owner word: the decode actor that runs it. Its record names the one that may have it in its running set,
which ends one acknowledgement later. A change of owner is: no owner, Drop, Dropped, the new owner, Admit. Pages and committed ids stay
where they are, so nothing is copied: the new owner goes on after the last committed id, as a new generation of the old one would.

A lost decode, broken or away, answers no Drop. It is dead, and its rows go on, once nobody held its role lock after they had lost
their owner: a process that takes the role later touches only rows that it owns.
"""

from collections.abc import Collection

from ....schema.rows import Phase
from ...bus.messages import Admit, Drop
from ...pools import PoolName
from ...stage_table import InstanceId, stage_of
from ..caches.prefix_cache import check_unnamed, name_filled
from ..caches.snapshots import has_states, keep_last_states
from ..state.effects import SetOwner
from ..state.inflight_plan import LONG_AGO_S
from ..state.request import Request
from ..state.state import ControllerState, membership
from .absence import leaves_row
from .lifecycle import settle


def hand_over(state: ControllerState, request: Request) -> None:
    """Hand a row whose prompt is in the KV cache to a decode actor of its pool. The membership is recorded first, the phase is written
    last."""
    actor = choose_decode(state, request.kv_pool)
    request.record.join(actor)
    request.answer.forget_window()
    state.windows_s = LONG_AGO_S
    state.save(request)
    for pool, pages in request.granted_pages():
        state.pools[pool].use(membership(request), pages)
    if request.caches.keys:
        check_unnamed(state, request)
    set_owner(state, request, actor)
    if request.phase == Phase.DECODE:
        state.totals.handed_over += 1
    else:
        state.set_phase(request, Phase.DECODE)
    state.send(actor, Admit(state.epoch, request.row, request.row_generation))


def choose_decode(state: ControllerState, pool: PoolName) -> InstanceId:
    """Return a serving decode actor of a pool: by ``least_load`` that with the fewest sequences to step, then with the fewest tokens in
    the KV cache (TI7, MS2)."""
    actors = [actor for actor in state.staying if stage_of(actor) == "decode" and state.pool_of(actor) == pool]
    unbroken = [actor for actor in actors if not state.is_lost(actor)] or actors
    serving = [actor for actor in unbroken if actor in state.actors] or unbroken
    serving = [actor for actor in serving if actor not in state.absent] or serving
    if len(serving) == 1:
        return serving[0]
    loads = {actor: [0.0, 0.0] for actor in serving}
    for request in state.decoding():
        if request.ownership.decode is not None and (load := loads.get(request.ownership.decode)) is not None:
            load[0] += len(request.kv.lengths)
            load[1] += sum(request.kv.lengths) + len(request.kv.lengths) * request.answer.committed
    return state.routes.choose({actor: tuple(load) for actor, load in loads.items()})


def is_orphan(request: Request) -> bool:
    """Return whether a row of decode has left its owner, and needs another one."""
    return (
        request.phase == Phase.DECODE
        and request.ownership.decode is None
        and request.record.member_of is None
        and not request.is_finished
    )


def take_back(state: ControllerState, request: Request) -> None:
    """Begin a change of owner. The row has none until the old one has dropped it, or is dead."""
    set_owner(state, request, None)
    settle(state, request)


def leave_lost(state: ControllerState) -> None:
    """Take all rows from lost decode actors, also those that are over: what they hold is free once the actor is known to be dead."""
    for request in list(state.requests_in_rows()):
        if request.ownership.decode is not None and leaves_row(state, request):
            take_back(state, request)


def set_owner(state: ControllerState, request: Request, actor: InstanceId | None) -> None:
    request.ownership.give(actor)
    state.emit(SetOwner(request.row, actor))


def send_drops(state: ControllerState, now: float) -> None:
    """Ask decode actors to drop rows, repeatedly until they answer."""
    for request in [state.drops[row] for row in sorted(state.drops)]:
        actor = request.record.member_of
        if actor is not None and now - request.ownership.drop_sent_s >= state.limits.resend_s:
            if state.send(actor, Drop(state.epoch, request.row, request.row_generation, request.ownership.drop_ticket)):
                request.ownership.sent_drop(now)


def resend_drops(state: ControllerState, actor: InstanceId) -> None:
    """A new generation of a decode actor is there: what its predecessor was asked is asked again at once."""
    for request in state.requests_in_rows():
        if request.record.member_of == actor:
            request.ownership.send_drop_again()


def on_dropped(state: ControllerState, actor: InstanceId, row: int, row_generation: int, ticket: int) -> None:
    """End the row's membership: the active generation of the decode actor has dropped it."""
    request = state.rows[row] if 0 <= row < len(state.rows) else None
    if request is None or request.row_generation != row_generation or not ticket or request.ownership.drop_ticket != ticket:
        return
    if request.record.member_of == actor:
        _end_membership(state, request, is_final=True)


def undropped(state: ControllerState) -> set[InstanceId]:
    """Return lost decode actors that rows wait for. ``on_gone`` takes those whose role nobody holds now."""
    asked = (
        request.record.member_of
        for request in state.requests_in_rows()
        if request.ownership.drop_ticket and request.ownership.decode is None
    )
    return {actor for actor in asked if actor is not None and state.is_lost(actor)}


def on_gone(state: ControllerState, actors: Collection[InstanceId]) -> None:
    """End the memberships that wait for these decode actors: their role locks were free after all effects up to now."""
    for request in list(state.requests_in_rows()) if actors else ():
        if request.ownership.drop_ticket and request.ownership.decode is None and request.record.member_of in actors:
            _end_membership(state, request, is_final=False)


def _end_membership(state: ControllerState, request: Request, *, is_final: bool) -> None:
    """``is_final``: decode's last words for the row have been read."""
    gives_up = request.ending or request.record.evicting or request.is_finished
    if gives_up and (is_final or request.is_finished) and has_states(state) and request.caches.keys:
        name_filled(state, request)
        keep_last_states(state, request)
    request.ownership.dropped()
    del state.drops[request.row]
    request.record.leave()
    state.save(request)
    for pool in state.pools_beside(request.kv_pool):
        state.pools[pool].drop(membership(request))
    settle(state, request)
