"""The requests of a load, from its options. Called by ``command`` and by ``sim``, which plan the same ones."""

from collections.abc import Sequence

import msgspec

from .chat import plan_chat
from .dataset import plan_dataset
from .load_options import LoadOptions
from .presets import WORKLOADS, plan_workload
from .stall import STREAM_GROUP, StallPlan
from .traces import load_trace, scale_to_rate
from .workload import RequestPlan, plan_mixed, plan_steady, poisson_arrivals, with_arrivals, with_trace

_STALL_POOL = 256  # distinct texts for streams; a stream that is started again takes the next one


def plan_requests(options: LoadOptions) -> list[RequestPlan]:
    """The requests of the run; for ``stall`` the fresh ones. Raises: OSError, ValueError for a trace or a data set that cannot be
    used."""
    if options.scenario == "stall":
        count = options.num_requests or max(1, int(options.phase_s / options.fresh_interval_s))
        lengths = msgspec.structs.replace(options.lengths, max_tokens=options.fresh_max_tokens)
        return plan_steady(options.modalities, count, lengths, options.seed)
    if options.scenario == "chat":
        return plan_chat(options.modalities, options.num_requests or 1, options.num_turns, options.lengths, options.seed)
    rows = load_trace(options.trace)[: options.num_requests] if options.trace else None
    count = len(rows) if rows is not None else options.num_requests or 0
    if options.dataset is not None:
        plans = plan_dataset(options.dataset, count or None, options.seed, options.lengths.max_tokens, options.own_output)
        count = len(plans)
    elif options.workload is not None:
        plans = plan_workload(WORKLOADS[options.workload], count, options.seed)
    else:
        plan = plan_mixed if options.scenario == "mixed" else plan_steady
        plans = plan(options.modalities, count, options.lengths, options.seed)
    if rows is not None:
        rows = scale_to_rate(rows, options.rate) if options.rate is not None else rows
        if options.dataset is not None:
            return with_arrivals(plans, [row.arrival_s for row in rows])
        return with_trace(plans, rows, own_input=options.own_input, own_output=options.own_output)
    if options.rate is not None:
        return with_arrivals(plans, poisson_arrivals(options.rate, count, options.seed))
    return plans


def plan_stall(options: LoadOptions, fresh: Sequence[RequestPlan]) -> tuple[StallPlan, list[RequestPlan]]:
    """The phases of ``stall`` with these fresh requests, and the texts of its streams."""
    texts = [
        msgspec.structs.replace(plan, group=STREAM_GROUP, index=len(fresh) + plan.index)
        for plan in plan_steady({"text": 1.0}, _STALL_POOL, options.lengths, options.seed)
    ]
    plan = StallPlan(num_streams=options.num_streams, phase_s=options.phase_s, interval_s=options.fresh_interval_s, fresh=tuple(fresh))
    return plan, texts
