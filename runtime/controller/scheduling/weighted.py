"""Policy ``weighted``: compute-weighted scheduling with priority classes (CW1-CW4, PC1, PC2; "The Unified Scheduler" of the E/P/D/G
text).

CW1: the budget counts effective tokens. A token costs 1 in prefill. A patch row costs what the encoder needs for it, in tokens of
prefill, where both share a device; 0 where the encoder has its own. CW2: decode is paid first, 1 for each token of its step, 2 for
a pair (CF3), then prefill from the rest; a request that exceeds it is chunked. CW4: chunks are as large as the budget. PC1: while
texts wait, media leave them ``TEXT_SHARE`` of it. PC2: a video gets what all others leave.

Corrections: a request costs what of it can be prefilled now, so that no video is prefilled for the price of its text before it is
encoded; one that cannot go on is passed over, where the text's ``break`` stops all behind it; a video that has waited for its TTFT
objective is no longer put behind, so nobody starves.
"""

from typing import Any

from .batches import EncodeBatch, PrefillBatch, can_prefill, free_turns, in_turn
from .facts import Facts
from .types import Candidate, Rank, RequestView, StepLimits, StepPlan, View
from .video_order import plan_video

TEXT_SHARE = 0.25
LEAST_TOKENS = 64  # of a plan, however many rows decode; the text's min_chunk_size has no value
ROW_WEIGHT = 0.25  # effective tokens of a patch row before anything was measured: four rows make an embedding token


class Weighted:
    """Effective tokens; a share for texts; videos last until they have waited."""

    name = "weighted"
    ages = False

    def __init__(self, row_weight: float | None = None, chunk_tokens: int | None = None) -> None:
        """``row_weight``: effective tokens of a patch row, 0 for an encoder with a device of its own; as measured if it is None.
        ``chunk_tokens``: the budget in effective tokens (CW4); the run's own if it is None."""
        self._row_weight = row_weight
        self._chunk_tokens = chunk_tokens

    def rank(self, request: Candidate, facts: Facts) -> Rank:
        """Rank by arrival, a video later by its objective (PC2)."""
        del facts
        return (request.arrived_s + (request.objective.ttft_s if request.kind == "video" else 0.0),)

    def plan(self, view: View, limits: StepLimits, memory: Any) -> tuple[StepPlan, Any]:
        """Plan one round, in ``unified``'s turns beside decode."""
        analyse, preprocess = plan_video(view)
        takes_turns = view.num_decoding > 0
        if takes_turns and not free_turns(view):
            return StepPlan(analyse, preprocess), memory
        budget = limits.prefill_tokens if self._chunk_tokens is None else min(self._chunk_tokens, limits.max_prefill_tokens)
        left = max(min(LEAST_TOKENS, budget), budget - view.num_decode_tokens)
        order = sorted(view.requests, key=lambda request: not request.is_partial or is_deferred(request, view.now))
        prefill = self._prefill(view, order, left)
        encode = self._encode(view, order, limits, left if takes_turns else left - prefill.num_tokens)
        if takes_turns:
            return StepPlan(analyse, preprocess, *in_turn(view, encode.segments, prefill.chunks)), memory
        return StepPlan(analyse, preprocess, encode.segments, prefill.chunks), memory

    @staticmethod
    def _prefill(view: View, order: list[RequestView], left: int) -> PrefillBatch:
        texts = sum([request.tokens_ready for request in order if request.kind == "text" and can_prefill(request)])
        batch, for_media = PrefillBatch(view, left), left - min(texts, int(TEXT_SHARE * left))
        for request in order:
            if batch.is_closed:
                break
            if request.kind == "text":
                batch.add(request)
            elif for_media > 0:
                for_media -= batch.add(request, for_media)
        return batch

    def _encode(self, view: View, order: list[RequestView], limits: StepLimits, left: int) -> EncodeBatch:
        weight = row_weight(view.facts) if self._row_weight is None else self._row_weight
        rows = left / weight if weight > 0 else limits.max_encode_rows
        return EncodeBatch(view, int(min(rows, limits.max_encode_rows))).fill(order)


def is_deferred(request: RequestView, now: float) -> bool:
    """Return whether it is a video that has waited less than its TTFT objective (PC2). Its rank is behind all others of its priority,
    and it does not go before them for being begun."""
    return request.kind == "video" and now - request.arrived_s < request.objective.ttft_s


def row_weight(facts: Facts) -> float:
    """Return the effective tokens of a patch row (CW1): the ratio of the measured costs."""
    if facts.encode.unit_s <= 0 or facts.prefill.unit_s <= 0:
        return ROW_WEIGHT
    return facts.encode.unit_s / facts.prefill.unit_s
