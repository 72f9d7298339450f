"""The gateways as a stage: the processor time that a load asks of them, and how many it needs (pure).

What they do for a request is the same with every model, so their costs are not in cost files. A token is counted as a piece of text of
its own, as decode's steps make it; where the gateway is late, several come together and cost less.
"""

import math

from mmrt.actors.gateway.watching.own_load import FULL
from mmrt.runtime.stage_table import STAGES

REQUEST_S = 1.5e-3
"""Processor time of a gateway for a request with its first text: ``mmrt bench gateway``, ``mmrt bench burst`` (measurements.md)."""
TOKEN_S = 59e-6
"""For each further piece of text of a stream: 17,000 a second take all of one."""


def gateways_busy(num_requests: int, num_tokens: int, seconds: float) -> float:
    """Return how many gateways' whole time so many requests, with so many tokens together, take in these seconds."""
    if seconds <= 0:
        return 0.0
    return (num_requests * REQUEST_S + max(0, num_tokens - num_requests) * TOKEN_S) / seconds


def gateways_needed(busy: float) -> int:
    """Return how many gateways share this work so that none is busier than ``FULL``; at most as many as a run can have. A busier
    gateway says so in its log."""
    return min(max(1, math.ceil(busy / FULL)), STAGES["gateway"].max_count)


def in_words(busy: float, num_gateways: int) -> str:
    """Say whether so many gateways are the limit of a load that takes ``busy`` of them."""
    share = f"{busy / num_gateways:.0%} of the time of {'the gateway' if num_gateways == 1 else f'each of {num_gateways} gateways'}"
    if busy <= FULL * num_gateways:
        return f"endpoint: {share}"
    if (needed := gateways_needed(busy)) <= num_gateways:
        return f"endpoint: {share}: it is the limit, and a run has no more gateways"
    return f'endpoint: {share}: it is the limit, actors.layout = "{needed}G+…" has more gateways'
