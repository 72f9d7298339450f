"""Policy ``stage_level``: TriInfer's stage-level batching (TI3, TI4, TI5; paper Algorithm 1 and section 4.2, corrected).

Lines 1-5: a batch may take ALPHA * TTFT_max where decode is not in the same instance (types E, EP, P), and TBT_max where it is (ED,
EPD, PD). The budgets tau_t and tau_e are searched for that, here over the measured cost of plans. Lines 7-9: where decode is in
prefill's instance, every token of its step counts against tau_t; a guidance pair is two (CF3). Lines 10-16: begun requests come
first. Lines 17-24: then new texts fill tau_t, and new media fill tau_e. Encoder and prefill work at once (TI5: a stream for each).

An instance is a process of the layout: processes are thought of as having devices of their own.

Corrections: both loops end when the requests do, or the pages; texts that keep coming do not starve media: a request with media counts
as if it had come its TTFT objective later, so it precedes all texts that come after that. tau_e counts patch rows, not images, which
differ in size.
"""

from typing import Any

from .batches import EncodeBatch, PrefillBatch
from .budgets import MIN_TOKENS
from .facts import Facts
from .types import Candidate, Rank, RequestView, SegmentStage, StepLimits, StepPlan, View
from .video_order import plan_video

ALPHA = 0.5  # at least two iterations to the first token: encode and prefill
LEAST_ROWS = 4 * MIN_TOKENS


class StageLevel:
    """Text before media among new requests; budgets by the latency that the stage's instance may have."""

    name = "stage_level"
    ages = False

    def rank(self, request: Candidate, facts: Facts) -> Rank:
        """Rank by arrival, with media later by their objective (lines 17-24)."""
        del facts
        return (request.arrived_s + (0.0 if request.kind == "text" else request.objective.ttft_s),)

    def plan(self, view: View, limits: StepLimits, memory: Any) -> tuple[StepPlan, Any]:
        """Plan one round: Algorithm 1 for the encoder's instance and for prefill's."""
        analyse, preprocess = plan_video(view)
        order = sorted(view.requests, key=lambda request: not is_running(request))  # lines 10-16 before 17-24
        tau_t, tau_e = budgets(view, limits)
        encode, prefill = EncodeBatch(view, tau_e).fill(order), PrefillBatch(view, tau_t).fill(order)
        return StepPlan(analyse, preprocess, encode.segments, prefill.chunks), memory


def is_running(request: RequestView) -> bool:
    """Return whether an iteration has worked on it: Algorithm 1's S_running, where it does not decode."""
    if request.is_partial:
        return True
    if request.kind == "text" or not request.members:
        return False
    return not request.segments or any([segment.stage >= SegmentStage.ENCODING for segment in request.segments])


def budgets(view: View, limits: StepLimits) -> tuple[int, int]:
    """Return tau_t, in tokens, and tau_e, in patch rows (lines 1-9)."""
    facts = view.facts
    ttft_s = min([request.objective.ttft_s for request in view.requests], default=0.0)

    def latency_s(stage: str) -> float:
        return facts.tbt_s if stage in limits.with_decode else ALPHA * ttft_s

    low_t, low_e = min(MIN_TOKENS, limits.max_prefill_tokens), min(LEAST_ROWS, limits.max_encode_rows)
    tau_t = facts.prefill.units(latency_s("prefill"), low_t, limits.max_prefill_tokens)
    tau_e = facts.encode.units(latency_s("encoder"), low_e, limits.max_encode_rows)
    if "prefill" in limits.with_decode:
        tau_t = max(low_t, tau_t - view.num_decode_tokens)
    return tau_t, tau_e
