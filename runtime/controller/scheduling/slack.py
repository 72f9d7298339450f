"""Policy ``slack``: ModServe's modality-aware batching (MS2, MS3; the slides' "Batch Scheduling").

Short texts go first, since they are promised the least TTFT; then the request with the least slack, which is what remains of its TTFT
objective after its wait and its own service. A request takes at most half of a batch while others could use the rest, so that one with
many images does not block those behind it. With several encoders, the images of one request are divided among them, and the core sends
a plan to the actor with the fewest pending units (MS2).

All slacks fall alike, so least slack is the order of the latest start, which does not change with time.

Corrections: least slack alone serves those first that are already late, and then everyone is. A request that cannot meet its objective
any more goes behind those that can; nobody starves, since it goes before all once it has waited for twice its objective.
"""

from collections.abc import Sequence
from typing import Any

from .batches import EncodeBatch, PrefillBatch, can_prefill, free_turns, in_turn
from .facts import Facts
from .types import Candidate, Rank, RequestView, SegmentStage, StepLimits, StepPlan, View
from .video_order import plan_video

SHORT_TOKENS = 512
PATIENCE = 2.0  # objectives that a request waits at most before it goes first

OVERDUE, SHORT, IN_TIME, LATE = range(4)


class Slack:
    """Short texts, then the least slack."""

    name = "slack"
    ages = True

    def rank(self, request: Candidate, facts: Facts) -> Rank:
        """Rank by class, then by arrival or by the latest start that meets the objective. One with a token is past its objective: as a
        late one it would be preempted first, and go on last."""
        left, objective_s = request.tokens_left, request.objective.ttft_s
        waited_s = facts.now - request.arrived_s
        if not left or waited_s > PATIENCE * objective_s:
            return OVERDUE, request.arrived_s
        slack_s = objective_s - waited_s - service_s(request, facts)
        if slack_s < 0:
            return LATE, request.arrived_s
        return SHORT if request.kind == "text" and left <= SHORT_TOKENS else IN_TIME, facts.now + slack_s

    def plan(self, view: View, limits: StepLimits, memory: Any) -> tuple[StepPlan, Any]:
        """Plan one round, as ``unified`` does, in rank order alone and with shares of the batches."""
        analyse, preprocess = plan_video(view)
        takes_turns = view.num_decoding > 0
        if takes_turns and not free_turns(view):
            return StepPlan(analyse, preprocess), memory
        rows = [_num_rows(request) for request in view.requests]
        encode = EncodeBatch(view, _rows_each(view, limits, sum(rows))).fill(view.requests, _share(limits.encode_rows, rows)).segments
        tokens = [request.tokens_ready if can_prefill(request) else 0 for request in view.requests]
        prefill = PrefillBatch(view, limits.prefill_tokens).fill(view.requests, _share(limits.prefill_tokens, tokens)).chunks
        if takes_turns:
            encode, prefill = in_turn(view, encode, prefill)
        return StepPlan(analyse, preprocess, encode, prefill), memory


def service_s(request: Candidate, facts: Facts) -> float:
    """Return the seconds of work until its first token: encoding and prefill, or the decoding of its videos, which goes on beside them.
    Analyses do not count: before one, nothing says how long it takes."""
    computing_s = facts.encode.seconds(request.rows_left) + facts.prefill.seconds(request.tokens_left)
    return max(computing_s, facts.video.seconds(request.video_rows_left))


def _share(budget: int, sizes: Sequence[int]) -> int:
    """Return what one request may take of a batch: half of it, and what the smaller ones leave; a token for each of a pair."""
    return max(2, budget // 2, budget - (sum(sizes) - max(sizes, default=0)))


def _rows_each(view: View, limits: StepLimits, num_rows: int) -> int:
    """Return the rows of an encode plan: of all that can be encoded, an equal part for each idle encoder (MS2)."""
    num_idle = max(1, view.num_encoders - view.encode_in_flight)
    return min(limits.encode_rows, -(-num_rows // num_idle))


def _num_rows(request: RequestView) -> int:
    """Return the rows of it that could be encoded now."""
    return sum([segment.num_rows for segment in request.segments if segment.stage == SegmentStage.PREPROCESSED])
