"""Batches as large as a plan may be, first come, first served: TriInfer without its stage-level scheduling (TI20)."""

from typing import Any

from mmrt.runtime.controller.scheduling.batches import EncodeBatch, PrefillBatch
from mmrt.runtime.controller.scheduling.facts import Facts
from mmrt.runtime.controller.scheduling.types import Candidate, Rank, StepLimits, StepPlan, View
from mmrt.runtime.controller.scheduling.video_order import plan_video


class NoBudgets:
    """No batch is cut for the sake of its time."""

    name = "no_budgets"
    ages = False

    def rank(self, request: Candidate, facts: Facts) -> Rank:
        """Rank by order of arrival."""
        del facts
        return (request.arrival,)

    def plan(self, view: View, limits: StepLimits, memory: Any) -> tuple[StepPlan, Any]:
        """Plan one round."""
        analyse, preprocess = plan_video(view)
        encode = EncodeBatch(view, limits.max_encode_rows).fill(view.requests).segments
        prefill = PrefillBatch(view, limits.max_prefill_tokens).fill(view.requests).chunks
        return StepPlan(analyse, preprocess, encode, prefill), memory


policy = NoBudgets()
