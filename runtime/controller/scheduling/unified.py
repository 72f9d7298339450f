"""Policy ``unified``: UnifiedServe's prefill-encode orchestration (US8, US9; paper Algorithm 3, corrected), plus video's order
(``video_order``).

Corrections: a request without free KV pages is skipped for prefill but its media are still encoded; both loops end when
the requests do; every candidate is considered once, so no chunk or image is planned twice; the encode batch is what is *to
be* encoded. Requests come in rank order, partly prefilled ones first (RS5).
"""

from typing import Any

from .batches import EncodeBatch, PrefillBatch, free_turns, in_turn, partial_first
from .facts import Facts
from .types import Candidate, Rank, StepLimits, StepPlan, View
from .video_order import plan_video


class Unified:
    """First come, first served, with the planning described above."""

    name = "unified"
    ages = False

    def rank(self, request: Candidate, facts: Facts) -> Rank:
        """Rank by order of arrival."""
        del facts
        return (request.arrival,)

    def plan(self, view: View, limits: StepLimits, memory: Any) -> tuple[StepPlan, Any]:
        """Plan one round: video work within its credit, at most one encode batch and one prefill batch."""
        analyse, preprocess = plan_video(view)
        takes_turns = view.num_decoding > 0
        if takes_turns and not free_turns(view):
            return StepPlan(analyse, preprocess), memory
        encode = EncodeBatch(view, limits.encode_rows).fill(view.requests).segments
        prefill = PrefillBatch(view, limits.prefill_tokens).fill(partial_first(view.requests)).chunks
        if takes_turns:
            encode, prefill = in_turn(view, encode, prefill)
        return StepPlan(analyse, preprocess, encode, prefill), memory
