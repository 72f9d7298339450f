"""Requests that need a broken actor.

The supervisor reports the actors that it has given up for now (``shm/outages.py``); without a supervisor, an actor absent for long
counts as broken. No request waits for one: a request that still needs a stage whose actors are all broken is refused, or ends, with
status 503. While another actor of the stage serves, it gets the plans of the broken one (``plan_results.skip_plans``), and the rows
that the broken one was to decode, with their pages (``ownership``), as soon as nobody is seen to hold the broken one's role lock.
Requests that do not need the stage go on: text without ``video`` and ``encoder``, and decoding without ``prefill``.
"""

import math
from collections.abc import Container

from ....schema.outage import Outage
from ....schema.rows import Phase
from ...bus.messages import RequestSpec
from ...errors import RequestError
from ...stage_table import STAGES, stage_of
from ..scheduling.types import SegmentStage
from ..state.request import Request
from ..state.state import ControllerState
from .lifecycle import fail
from .ownership import leave_lost

MEDIA_STAGES = frozenset(name for name, stage in STAGES.items() if stage.for_media)
MAX_RETRY_S = 60
_UNKNOWN_RETRY_S = 30  # if the time of the next try is unknown


def check_served(state: ControllerState, spec: RequestSpec) -> None:
    """Refuse a request that needs a broken actor. Raises RequestError."""
    if state.outages and (outage := _outage_of(state, _needed_by_new(spec))):
        raise _unavailable(outage, state.now)


def fail_stranded(state: ControllerState) -> None:
    """End the requests that cannot go on, in any phase, and take the rows of lost decodes."""
    if state.outages or state.away:
        leave_lost(state)
    if not state.outages:
        return
    for request in list(state.requests.values()):
        if request.failure is not None:
            continue
        if outage := _outage_of(state, needed_stages(request)):
            fail(state, request, _unavailable(outage, state.now))


def _unavailable(outage: Outage, now: float) -> RequestError:
    """Return a 503 error with the time to the next probe as Retry-After."""
    wait_s = outage.next_probe_s - now + 1 if outage.next_probe_s else _UNKNOWN_RETRY_S
    rest = "; requests without media are served" if stage_of(outage.actor) in MEDIA_STAGES else ""
    return RequestError(
        f"{outage.actor} is broken: {outage.reason}{rest}",
        status=503,
        type="overloaded_error",
        retry_after_s=max(1, min(MAX_RETRY_S, math.ceil(wait_s))),
    )


def needed_stages(request: Request) -> frozenset[str]:
    """Return the stages that the request has yet to pass."""
    if request.is_finished:
        return frozenset({"detokenizer"})
    if request.phase == Phase.DECODE:
        return frozenset({"decode", "detokenizer"})
    if not request.record.prepared:
        return _needed_by_new(request.spec)
    needed = _needed_by_answer(request.spec)
    if any(request.targets) and not (request.has_kv and request.is_prefilled):
        needed.add("prefill")
    for _, segment in request.record.segments():
        if segment.stage < SegmentStage.ENCODED:
            needed.add("encoder")
        if segment.stage < SegmentStage.PREPROCESSED:
            needed.add("video")
    return frozenset(needed)


def _needed_by_new(spec: RequestSpec) -> frozenset[str]:
    needed = _needed_by_answer(spec)
    if spec.items:
        needed |= MEDIA_STAGES
    if spec.items or spec.is_prefill_only or len(spec.prompt_ids) > 1 or len(spec.companion_ids or ()) > 1:
        needed.add("prefill")
    return frozenset(needed)


def _needed_by_answer(spec: RequestSpec) -> set[str]:
    return set() if spec.is_prefill_only else {"decode", "detokenizer"}


def _outage_of(state: ControllerState, needed: Container[str]) -> Outage | None:
    """Return an outage that leaves a needed stage without an actor: of its actors', that of the earliest probe."""
    for stage in map(stage_of, state.outages):
        if stage in needed:
            actors = [actor for actor in state.staying if stage_of(actor) == stage]
            outages = [state.outages[actor] for actor in actors if actor in state.outages]
            if len(outages) == len(actors) or state.limits.is_divided(stage):
                return min(outages, key=lambda outage: outage.next_probe_s or math.inf)
    return None
