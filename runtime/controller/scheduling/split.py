"""Policy ``split``: the batch rule of an engine that is split into EP and D (US15: vLLM-d, SGLang-d; DistServe), for the preset of
that name.

First come, first served, begun prompts first. Encoder and prefill are one instance: one plan at a time, in turn, whether or not
somebody decodes. Decode is another, which they do not reckon with: budgets are fixed (US11: 2048 tokens).
"""

from typing import Any

from .batches import EncodeBatch, PrefillBatch, free_turns, in_turn, partial_first
from .facts import Facts
from .types import Candidate, Rank, StepLimits, StepPlan, View
from .video_order import plan_video


class Split:
    """First come, first served; encoder and prefill always take turns."""

    name = "split"
    ages = False

    def rank(self, request: Candidate, facts: Facts) -> Rank:
        """Rank by order of arrival."""
        del facts
        return (request.arrival,)

    def plan(self, view: View, limits: StepLimits, memory: Any) -> tuple[StepPlan, Any]:
        """Plan one round."""
        analyse, preprocess = plan_video(view)
        if not free_turns(view):
            return StepPlan(analyse, preprocess), memory
        encode = EncodeBatch(view, limits.encode_rows).fill(view.requests).segments
        prefill = PrefillBatch(view, limits.prefill_tokens).fill(partial_first(view.requests)).chunks
        return StepPlan(analyse, preprocess, *in_turn(view, encode, prefill)), memory
