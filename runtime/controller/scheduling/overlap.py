"""Policy ``overlap``: RServe's encoder scheduling and token scheduling (RS2-RS6, VL10; paper sections 4.1 and 4.2).

Algorithm 1 (RS3): media gather until they make C tokens, and are encoded then: neither one by one nor all at once. Algorithm 2 (RS4,
RS5): a prefill plan of B tokens is filled with schedulable tokens of all requests, begun ones first. So the encoder works on the rest
of a request, or on others, while its beginning is prefilled (RS6, VL10). The core has the embedding tracker (RS2).

The paper gives no values. B is the budget tau. C is the size at which the fixed cost of an encode plan is a tenth of it: small items
gather, large ones do not (RS11).

Corrections: what gathers does not wait if video brings nothing more, if prefill would idle, or for longer than ``MAX_GATHER_S``.
Encoder and prefill do not take turns beside decode: with one device for all, this costs time between tokens.
"""

from typing import NamedTuple

from .batches import EncodeBatch, PrefillBatch, partial_first
from .facts import Cost, Facts
from .types import Candidate, Rank, StepLimits, StepPlan, View
from .video_order import plan_video

MAX_GATHER_S = 0.2
FIXED_SHARE = 0.1  # of a plan of C rows, the fixed cost


class Gathering(NamedTuple):
    """The policy's memory: since when media wait for others to gather."""

    since_s: float


class Overlap:
    """First come, first served, in batches of B tokens and at least C rows."""

    name = "overlap"
    ages = False

    def __init__(self, gather_rows: int | None = None) -> None:
        """``gather_rows``: C, in patch rows; by the measured cost if it is None."""
        self._gather_rows = gather_rows

    def rank(self, request: Candidate, facts: Facts) -> Rank:
        """Rank by order of arrival."""
        del facts
        return (request.arrival,)

    def plan(self, view: View, limits: StepLimits, memory: Gathering | None) -> tuple[StepPlan, Gathering | None]:
        """Plan one round."""
        analyse, preprocess = plan_video(view)
        prefill = PrefillBatch(view, limits.prefill_tokens).fill(partial_first(view.requests)).chunks
        encode = EncodeBatch(view, limits.encode_rows).fill(view.requests)
        if not encode.segments:
            return StepPlan(analyse, preprocess, (), prefill), None
        since_s = memory.since_s if memory is not None else view.now
        more_comes = bool(analyse or preprocess) or any([request.video_in_flight for request in view.requests])
        is_prefill_idle = not prefill and not view.prefill_in_flight
        least = gather_rows(view.facts.encode) if self._gather_rows is None else self._gather_rows
        has_gathered = encode.is_closed or encode.num_rows >= least
        if more_comes and not is_prefill_idle and not has_gathered and view.now - since_s < MAX_GATHER_S:
            return StepPlan(analyse, preprocess, (), prefill), Gathering(since_s)
        return StepPlan(analyse, preprocess, encode.segments, prefill), None


def gather_rows(cost: Cost) -> float:
    """Return C, in rows: the plan of which the fixed cost is ``FIXED_SHARE``. 0 before any measurement."""
    return cost.base_s * (1 / FIXED_SHARE - 1) / cost.unit_s if cost.unit_s > 0 else 0.0
