"""The order of ``auto``: first come, first served, except where that makes a request late for nothing (pure; MS3's slack, bounded).

From the measured costs of the work that is left follows when each request will have its first token, if one is served after the other.
A request that would not have it by ``SOON`` of its objective goes ahead of those before it, one after the other, while these will have
theirs by ``IN_TIME`` of theirs. So nobody is made late, and nobody starves: who is late, or would be, is passed by nobody. Where all
are in time, and under overload, where all are late, this is the order of arrival.
"""

from collections.abc import Iterable

from .facts import Facts
from .types import RequestView, SegmentStage

ENCODING = SegmentStage.ENCODING
SOON, IN_TIME = 0.5, 0.8  # of the objective: predictions err


def timely(requests: Iterable[RequestView], facts: Facts) -> tuple[list[RequestView], set[int]]:
    """Return the requests in the order in which they should be served, and the keys of those that have passed others. None passes one
    of another priority."""
    order: list[RequestView] = []
    early: set[int] = set()
    services_s: list[float] = []
    slacks_s: list[float] = []  # by how much more each may be delayed
    end_s = facts.now
    for request in requests:
        own_s = service_s(request, facts)
        end_s += own_s
        place, done_s = len(order), end_s
        objective_s = request.objective.ttft_s
        soon_s = request.arrived_s + SOON * objective_s
        while place and done_s > soon_s and slacks_s[place - 1] >= own_s and may_pass(request, order[place - 1]):
            place -= 1
            done_s -= services_s[place]
            slacks_s[place] -= own_s
            early.add(request.key)
        order.insert(place, request)
        services_s.insert(place, own_s)
        slacks_s.insert(place, request.arrived_s + IN_TIME * objective_s - done_s)
    return order, early


def may_pass(request: RequestView, before: RequestView) -> bool:
    """Return whether the request was promised an earlier first token than one of equal priority before it."""
    due_s, due_before_s = request.arrived_s + request.objective.ttft_s, before.arrived_s + before.objective.ttft_s
    return due_s < due_before_s and request.priority == before.priority


def service_s(request: RequestView, facts: Facts) -> float:
    """Return the seconds of encoding and prefill until its first token, as far as its media are known."""
    num_rows = num_tokens = 0  # loops: hundreds of requests are looked at in every plan
    for segment in request.segments:
        if segment.stage < ENCODING:
            num_rows += segment.num_rows
    for member in request.members:
        num_tokens += member.target - member.next
    return facts.encode.seconds(num_rows) + facts.prefill.seconds(num_tokens)
