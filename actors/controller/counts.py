"""The controller's counts, as other processes read them (``shm/controller_stats.py``). Pure."""

from ...runtime.controller.state.state import ControllerState
from ...runtime.pools import kind_of_pool
from ...schema.policy_report import NO_POLICY_YET, PolicyReport
from ...shm.controller_stats import WAITING_FOR, PoolUse, StatsSnapshot


def stats_of(state: ControllerState, before: StatsSnapshot, policy: PolicyReport = NO_POLICY_YET) -> StatsSnapshot:
    """Return the controller's current counts. Totals continue those of ``before``, the last snapshot of the previous controllers."""
    totals, steering = state.totals, state.steering
    return StatsSnapshot(
        epoch=state.epoch,
        waiting=len(state.waiting),
        waiting_for=sorted({WAITING_FOR[kind_of_pool(name)] for name in state.waits_for}),
        preparing=len(state.preparing()),
        running=state.num_decoding,
        plans=len(state.plans),
        rows_left=sum([request.rows_left for request in state.requests.values()]),
        tokens_left=sum([request.tokens_left for request in state.requests.values()]),
        video_left=sum([request.video_left for request in state.requests.values() if request.spec.items]),
        work_left_s=_work_left_s(state),
        admitted_total=before.admitted_total + totals.admitted,
        finished_total=before.finished_total + totals.finished,
        failed_total=before.failed_total + totals.failed,
        preempted_total=before.preempted_total + totals.preempted,
        handed_over_total=before.handed_over_total + totals.handed_over,
        transferred_bytes_total=before.transferred_bytes_total + totals.transferred_bytes,
        evicted_total=before.evicted_total + totals.evicted,
        quarantined_total=before.quarantined_total + totals.quarantined,
        overruled_total=before.overruled_total + totals.overruled,
        illegal_choices_total=before.illegal_choices_total + totals.illegal,
        prompt_tokens_total=before.prompt_tokens_total + totals.prompt_tokens,
        looked_up_tokens_total=before.looked_up_tokens_total + totals.looked_up_tokens,
        cached_tokens_total=before.cached_tokens_total + totals.cached_tokens,
        media_queries_total=before.media_queries_total + totals.media_queries,
        media_hits_total=before.media_hits_total + totals.media_hits,
        generated_tokens_total=before.generated_tokens_total + totals.generated_tokens,
        encode_budget=steering.encode.units,
        prefill_budget=steering.prefill.units,
        tbt_s=steering.tbt_s or 0.0,
        tbt_objective_s=state.facts.tbt_s,
        tbt_p99_s=state.facts.tbt_p99_s,
        late_share=state.facts.late_share,
        pools={name: PoolUse(p.num_pages, p.num_used, len(p.cache), p.cache.num_idle) for name, p in state.pools.items()},
        broken={outage.actor: outage.reason for outage in state.outages.values()},
        policy=policy,
    )


def _work_left_s(state: ControllerState) -> float:
    """Return the seconds of encoding and prefill until all requests have their first token, with one instance of each at work. Pictures
    that are not analysed count by the pixels that they say they have."""
    rows = new_rows = tokens = 0
    limits = state.limits
    for request in state.requests.values():
        rows, tokens = rows + request.rows_left, tokens + request.tokens_left
        if not request.record.prepared:
            pixels = [min(max(item.num_pixels, 0), limits.most_pixels) * item.options.known_share for item in request.spec.items]
            new_rows += int(sum(pixels)) // limits.row_pixels
    rows, tokens = rows + new_rows, tokens + new_rows // limits.rows_per_token
    encode, prefill = state.facts.encode, state.facts.prefill
    return (encode.seconds(rows) if rows else 0.0) + (prefill.seconds(tokens) if tokens else 0.0)
