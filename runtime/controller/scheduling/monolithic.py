"""Policy ``monolithic``: the batch rule of a monolithic engine (US15: vLLM-s, SGLang-s; TI16), for the preset of that name.

First come, first served. All media of a request are encoded at once, within the budget, when all are decoded; its prompt is prefilled
when all are encoded, in chunks of the budget (US11: 2048 tokens). Nothing overlaps within a request. The preset lets one thing compute
at a time: an encode or prefill plan, or a step of decode (``actors.turns``).

Exceptions, without which it would wait for ever: a request goes on with what it has if its own pages keep it from more (its media
exceed its share of a pool), if video has done nothing for it since ``PATIENCE_S``, or if nothing is at work and nothing else can be
(others hold the pages that it needs).
"""

from typing import Any

from .batches import EncodeBatch, PrefillBatch, partial_first
from .facts import Facts
from .legality import fits_share
from .types import Candidate, Rank, RequestView, SegmentStage, StepLimits, StepPlan, View
from .video_order import plan_video

PATIENCE_S = 5.0


class Monolithic:
    """First come, first served; a request's media at once, then its prompt."""

    name = "monolithic"
    ages = False

    def rank(self, request: Candidate, facts: Facts) -> Rank:
        """Rank by order of arrival."""
        del facts
        return (request.arrival,)

    def plan(self, view: View, limits: StepLimits, memory: Any) -> tuple[StepPlan, Any]:
        """Plan one round."""
        analyse, preprocess = plan_video(view)
        decoded = (request for request in view.requests if is_decoded(request, view))
        encode = EncodeBatch(view, limits.encode_rows).fill(decoded).segments
        whole = (request for request in partial_first(view.requests) if is_encoded(request, view))
        prefill = PrefillBatch(view, limits.prefill_tokens).fill(whole).chunks
        if analyse or preprocess or encode or prefill or is_at_work(view):
            return StepPlan(analyse, preprocess, encode, prefill), memory
        encode = EncodeBatch(view, limits.encode_rows).fill(view.requests).segments
        prefill = () if encode else PrefillBatch(view, limits.prefill_tokens).fill(partial_first(view.requests)).chunks
        return StepPlan(encode=encode, prefill=prefill), memory


def is_decoded(request: RequestView, view: View) -> bool:
    """Return whether all its media are decoded, or no more will be."""
    pending = next((segment for segment in request.segments if segment.stage == SegmentStage.PENDING), None)
    if pending is not None and not fits_share(view.num_patch_pages, request.patch_held, pending.patch_pages):
        return True
    if view.now - request.video_since_s >= PATIENCE_S:
        return True
    return all([segment.stage >= SegmentStage.PREPROCESSED for segment in request.segments])


def is_encoded(request: RequestView, view: View) -> bool:
    """Return whether all of its prompt can be prefilled, or no more will be ready before some of it is."""
    waiting = next((segment for segment in request.segments if segment.stage < SegmentStage.ENCODING), None)
    if waiting is not None and not fits_share(view.num_embedding_pages, request.embedding_held, waiting.embedding_pages):
        return True
    return all([member.ready == member.target for member in request.members])


def is_at_work(view: View) -> bool:
    """Return whether a result of some plan will come."""
    return bool(view.encode_in_flight or view.prefill_in_flight) or any([request.video_in_flight for request in view.requests])
