"""A scheduling policy for mmrt: shortest job first, with aging. Try it: mmrt policy set examples/shortest_first.py"""

from typing import Any

from mmrt.runtime.controller.scheduling.batches import EncodeBatch, PrefillBatch, free_turns, in_turn
from mmrt.runtime.controller.scheduling.facts import Facts
from mmrt.runtime.controller.scheduling.types import Candidate, Rank, StepLimits, StepPlan, View
from mmrt.runtime.controller.scheduling.video_order import plan_video

AGING = 0.2  # a request that has waited for a second goes before one that needs 0.2 s less


class ShortestFirst:
    """The request with the least work until its first token goes first, also before one whose prefill has begun."""

    ages = True  # ranks change with time

    def rank(self, request: Candidate, facts: Facts) -> Rank:
        work_s = facts.prefill.seconds(request.tokens_left) + facts.encode.seconds(request.rows_left)
        return (work_s - AGING * (facts.now - request.arrived_s),)

    def plan(self, view: View, limits: StepLimits, memory: Any) -> tuple[StepPlan, Any]:
        analyse, preprocess = plan_video(view)
        encode = EncodeBatch(view, limits.encode_rows).fill(view.requests).segments
        prefill = PrefillBatch(view, limits.prefill_tokens).fill(view.requests).chunks
        if view.num_decoding:  # encoding and prefill take turns beside decode
            encode, prefill = in_turn(view, encode, prefill) if free_turns(view) else ((), ())
        return StepPlan(analyse, preprocess, encode, prefill), memory


policy = ShortestFirst()
