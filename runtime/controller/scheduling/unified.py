"""Policy ``unified``: UnifiedServe's prefill-encode orchestration (US8, US9; paper Algorithm 3, corrected), plus video's order
(``video_order``).

Corrections: a request without free KV pages is skipped for prefill but its media are still encoded; both loops end when
the requests do; every candidate is considered once, so no chunk or image is planned twice; the encode batch is what is *to
be* encoded. Requests come in rank order, partly prefilled ones first (RS5). An earlier request short of pages stops
later ones from taking them, so that the first always makes progress.
"""

from typing import Any

from .facts import Facts
from .legality import may_take
from .types import MAX_PARTS, Candidate, ChunkChoice, Rank, SegmentChoice, SegmentStage, StepLimits, StepPlan, View
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
        takes_turns = limits.exclusive and view.num_decoding > 0
        num_free = view.num_turns - view.encode_in_flight - view.prefill_in_flight
        is_taken = takes_turns and num_free <= 0
        encode = _encode_batch(view, limits) if view.encoder_credit > 0 and not is_taken else ()
        prefill = _prefill_batch(view, limits) if view.prefill_credit > 0 and not is_taken else ()
        if takes_turns and num_free == 1 and encode and prefill:
            encode, prefill = (encode, ()) if view.last == "prefill" else ((), prefill)
        return StepPlan(analyse, preprocess, encode, prefill), memory


def get_next_chunk_size(ready: int, next_token: int, budget: int, num_planned: int) -> int:
    """Return the tokens of a member to put into this batch: the ready ones, within the remaining budget."""
    return max(0, min(ready - next_token, budget - num_planned))


def _prefill_batch(view: View, limits: StepLimits) -> tuple[ChunkChoice, ...]:
    """Build a prefill batch. US9: n_p <= tau always. A pair's members are taken together, the longer one over several rounds (CF3)."""
    chunks: list[ChunkChoice] = []
    num_planned = 0
    candidates = [request for request in view.requests if request.has_kv and not request.prefill_in_flight]
    for request in sorted(candidates, key=lambda request: not request.is_partial):
        if num_planned == limits.prefill_tokens:
            break
        if request.alone and chunks:
            if any(state.ready > state.next for state in request.members):
                break  # otherwise a later request would start now, and precede it from then on
            continue
        for member, state in enumerate(request.members):
            size = get_next_chunk_size(state.ready, state.next, limits.prefill_tokens, num_planned)
            if size:
                chunks.append(ChunkChoice(request.key, member, state.next, state.next + size))
                num_planned += size
        if request.alone and chunks:
            break
    assert num_planned <= limits.prefill_tokens
    return tuple(chunks)


def _encode_batch(view: View, limits: StepLimits) -> tuple[SegmentChoice, ...]:
    """Gather decoded segments while embedding pages last, n_e <= alpha. A larger one runs alone: no image is split (US7)."""
    batch: list[SegmentChoice] = []
    num_rows = 0
    num_free = view.num_free_embedding_pages
    for request in view.requests:
        held = request.embedding_held
        if request.alone and batch:
            continue
        for segment in request.segments:
            if segment.stage < SegmentStage.PREPROCESSED:
                break  # in order: a later segment must not hold the pages that an earlier one needs
            if segment.stage != SegmentStage.PREPROCESSED:
                continue
            if batch and (num_rows + segment.num_rows > limits.encode_rows or len(batch) >= MAX_PARTS):
                return tuple(batch)
            need = segment.embedding_pages
            if not may_take(view.num_embedding_pages, num_free, held, need, request.has_kv):
                break
            if need > num_free:
                return tuple(batch)
            num_free -= need
            held += need
            num_rows += segment.num_rows
            batch.append(SegmentChoice(request.key, segment.item, segment.segment))
            if request.alone:
                return tuple(batch)  # a single piece of work, so that its result is attributable
    return tuple(batch)
