"""Bursts as ModServe saw them: not of requests, but of the pictures in each (pure; MS4)."""

import random
from collections.abc import Sequence

import msgspec

from ..serve.workload import RequestPlan

PERIOD_S = 180.0
SHARE = 0.2  # of the periods are bursts
COUNTS = (9, 16, 25)  # pictures of a request in a burst: the upper third of the Azure trace's, evenly


def with_bursts(plans: Sequence[RequestPlan], seed: int) -> list[RequestPlan]:
    """The same plans, where every request with pictures has many of them in some periods. Arrivals stay."""
    return [_in_burst(plan, seed) if plan.media and is_burst(plan.arrival_s, seed) else plan for plan in plans]


def is_burst(at_s: float, seed: int) -> bool:
    """Whether this moment lies in a burst: at random, never two periods in a row."""
    period = int(at_s / PERIOD_S)
    return _drawn(period, seed) and not (period and is_burst((period - 1) * PERIOD_S, seed))


def _drawn(period: int, seed: int) -> bool:
    return random.Random(f"{seed}/burst/{period}").random() < SHARE / (1 - SHARE)


def _in_burst(plan: RequestPlan, seed: int) -> RequestPlan:
    count = random.Random(f"{seed}/burst/pictures/{plan.index}").choice(COUNTS)
    return msgspec.structs.replace(plan, media=plan.media[:1] * count)
