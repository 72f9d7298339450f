"""The actors of a run while it changes (pure; rules over ``ControllerState``): who gets work, and who has none left.

An actor that leaves gets no more plans and rows. Its plans come to their ends; its rows go to other decodes, with their pages
(``ownership``). It is drained when nothing names it: then its process can end.
"""

from collections.abc import Collection, Mapping, Sequence

from ...stage_table import InstanceId
from ..state.state import ControllerState
from .ownership import take_back


def set_instances(
    state: ControllerState,
    instances: Sequence[InstanceId],
    leaving: Collection[InstanceId],
    devices: Mapping[InstanceId, int] | None = None,
) -> None:
    """Set the actors that belong to the run, those of them that leave it, and their devices, if these are given. One that comes back
    gets work once it says Hello."""
    state.devices = state.devices if devices is None else devices
    for actor in [actor for actor in state.actors if actor not in instances]:
        del state.actors[actor]
    state.leaving = frozenset(leaving)
    state.staying = tuple(actor for actor in instances if actor not in state.leaving)


def empty_leaving(state: ControllerState) -> None:
    """Take rows from decodes that leave. Rows that are over are dropped by them in any case."""
    for request in state.decoding() if state.leaving else ():
        if request.ownership.decode in state.leaving:
            take_back(state, request)


def drained(state: ControllerState) -> list[InstanceId]:
    """Return the leaving actors that hold nothing."""
    return sorted(actor for actor in state.leaving if not _holds(state, actor))


def _holds(state: ControllerState, actor: InstanceId) -> bool:
    has_plan = any(inflight.actor == actor for inflight in state.plans.values())
    return has_plan or any(request.record.member_of == actor for request in state.requests_in_rows())
