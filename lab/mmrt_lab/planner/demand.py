"""The work that a load asks of each stage (pure): TriInfer's W_e, W_p and W_d, lines 1 to 5 of Algorithm 2 (TI9)."""

from collections.abc import Sequence

from mmrt.bench.serve.workload import RequestPlan
from mmrt.runtime.autoscale.demand import Demand

from ..sim.costs import encode_squares, prefill_squares
from ..sim.requests import Requests


def demand_of(plans: Sequence[RequestPlan], requests: Requests) -> Demand:
    """Sum up what these requests need."""
    num_rows, row_squares, num_prompt, prompt_squared = 0, 0.0, 0, 0.0
    for plan in plans:
        asked = requests.ask(plan, plan.seed)
        segments = [segment for shape in asked.shapes for segment in shape.segments]
        num_rows += sum(segment.num_rows for segment in segments)
        row_squares += sum(encode_squares(segment.num_rows) for segment in segments)
        length = len(asked.spec.prompt_ids) + sum(shape.num_tokens - 1 for shape in asked.shapes)  # a medium is one id in the request
        num_prompt += length
        prompt_squared += prefill_squares(0, length)
    return Demand(
        num_requests=len(plans),
        encode_rows=num_rows,
        encode_squares=row_squares,
        prompt_tokens=num_prompt,
        prompt_squares=prompt_squared,
        decode_tokens=sum(plan.max_tokens for plan in plans),
    )
