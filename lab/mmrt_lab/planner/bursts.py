"""Bursts as ModServe saw them: not of requests, but of the pictures in each (pure; MS4).

A load's requests with many pictures come together in some periods, those with few in the others; over a long time each number of
pictures is as frequent as in the workload.
"""

import random
from collections.abc import Sequence

import msgspec

from mmrt.bench.serve.workload import RequestPlan

PERIOD_S = 180.0
SHARE = 0.29  # of the periods are bursts: as of the requests with pictures in the Azure trace have 9 or more
FEW = ((1, 0.66), (4, 0.05))  # (pictures, weight), as in ``serve.presets``
MANY = ((9, 0.15), (16, 0.02), (25, 0.12))


def with_bursts(plans: Sequence[RequestPlan], seed: int) -> list[RequestPlan]:
    """The same plans, with few or many pictures in those that have any. Arrivals stay."""
    return [_redrawn(plan, seed) if plan.media else plan for plan in plans]


def is_burst(at_s: float, seed: int) -> bool:
    """Return whether this moment lies in a burst. Bursts are random; two periods in a row never have one."""
    period = int(at_s / PERIOD_S)
    return _drawn(period, seed) and not (period and is_burst((period - 1) * PERIOD_S, seed))


def _drawn(period: int, seed: int) -> bool:
    return random.Random(f"{seed}/burst/{period}").random() < SHARE / (1 - SHARE)


def _redrawn(plan: RequestPlan, seed: int) -> RequestPlan:
    counts, weights = zip(*(MANY if is_burst(plan.arrival_s, seed) else FEW), strict=True)
    (count,) = random.Random(f"{seed}/burst/pictures/{plan.index}").choices(counts, weights)
    return msgspec.structs.replace(plan, media=plan.media[:1] * count)
