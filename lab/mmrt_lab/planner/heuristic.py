"""TriInfer's Algorithm 2: how many devices each stage gets, from what a trace asks of it (pure; TI9).

Budgets are searched over the cost model in place of a device, and throughputs follow from it. Lines 17 to 23, the replay of the three
methods, are the planner's own simulations. The text's errors are mended:

* Line 9 has gamma (C - C_model) N_r / (W_p + W_d), which is in bytes times requests per token, as a bound of a number of sequences.
  Here it is divided by the bytes of a token in the KV cache.
* W_e counts visual tokens, tau_e images. Here both count patch rows, in which encoding is paid.
* Lines 14 and 15 give E+P+D and EP+D the same name.
* tau_d is bounded by the rows of a run as well.
"""

import math
from collections.abc import Callable

import msgspec

from mmrt.bench.serve.slo import Slo
from mmrt.runtime.autoscale.demand import Demand
from mmrt.runtime.config.runtime_config import MAX_STEP_TOKENS

from ..sim.costs import Costs, step_seconds
from .candidates import METHODS, divided, processes

ALPHA = BETA = 0.5  # of the objective of TTFT: for an encode batch, and for a prefill batch
GAMMA = 0.9  # of the memory beside the weights is KV cache


class Memory(msgspec.Struct, frozen=True, kw_only=True):
    """Of a device. ``free_bytes``: C - C_model; 0: unknown. ``token_bytes``: of a token in the KV cache. ``num_rows``: most sequences
    of a decode."""

    free_bytes: int
    token_bytes: float
    num_rows: int


class Division(msgspec.Struct, frozen=True, kw_only=True):
    """Algorithm 2 up to line 16. ``budgets``: tau of each stage, in patch rows, tokens and sequences; ``seconds``: t of each stage for
    the whole trace on one device; ``shares``: devices; all by the stage's letter. ``layouts``: of the three methods."""

    budgets: dict[str, int]
    seconds: dict[str, float]
    shares: dict[str, int]
    layouts: list[str]


def divide(num_devices: int, demand: Demand, costs: Costs, slo: Slo, memory: Memory) -> Division:
    """Run Algorithm 2 for this trace. Raises: ValueError if the objective cannot be met by one request alone."""
    check_objective(demand, costs, slo)
    budgets = _budgets(demand, costs, slo, memory)
    seconds = stage_seconds(demand, costs, budgets)
    shares = partition(num_devices, seconds)
    layouts = [divided(method, shares) for method in METHODS]
    return Division(budgets=budgets, seconds=seconds, shares=shares, layouts=layouts)


def check_objective(demand: Demand, costs: Costs, slo: Slo) -> None:
    """Raises: ValueError for an objective that no layout meets: the mean request alone takes longer."""
    count = max(1, demand.num_requests)
    prefill_s = costs.prefill.seconds(demand.prompt_tokens / count, demand.prompt_squares / count)
    encode_s = _encode_seconds(costs, demand.encode_rows / count, demand.encode_squares / count)
    step_s = step_seconds(costs, 1, round(demand.tokens_per_request))
    if encode_s + prefill_s + step_s >= slo.ttft_s:
        alone_s = encode_s + prefill_s + step_s
        raise ValueError(f"no layout meets a TTFT of {slo.ttft_s:g} s: a request alone takes {alone_s:.3g} s until its first token")
    if step_s >= slo.tbt_s:
        raise ValueError(f"no layout meets a TBT of {slo.tbt_s:g} s: a step of one sequence takes {step_s:.3g} s")


def _budgets(demand: Demand, costs: Costs, slo: Slo, memory: Memory) -> dict[str, int]:
    """Lines 6 to 9: the most units of a batch within its share of the objective."""
    rows_per_token, context = costs.model.rows_per_token(), demand.tokens_per_request
    most = memory.num_rows
    if memory.free_bytes and context:
        most = min(most, max(1, int(GAMMA * memory.free_bytes / memory.token_bytes / context)))
    row_square = demand.encode_squares / demand.encode_rows if demand.encode_rows else 0.0
    token_square = demand.prompt_squares / demand.prompt_tokens if demand.prompt_tokens else 0.0
    return {
        "E": _largest(lambda n: _encode_seconds(costs, n, n * row_square), ALPHA * slo.ttft_s, MAX_STEP_TOKENS * rows_per_token),
        "P": _largest(lambda n: costs.prefill.seconds(n, n * token_square), BETA * slo.ttft_s, MAX_STEP_TOKENS),
        "D": _largest(lambda n: step_seconds(costs, n, round(n * context)), slo.tbt_s, most),
    }


def stage_seconds(demand: Demand, costs: Costs, budgets: dict[str, int]) -> dict[str, float]:
    """Lines 10 and 11: t = W / tp, the seconds of each stage for the whole trace on one device, in batches of the budgets."""

    def batches(units: float, stage: str) -> float:
        return units / budgets[stage]

    encode, prefill = batches(demand.encode_rows, "E"), batches(demand.prompt_tokens, "P")
    per_encode = _encode_seconds(costs, budgets["E"], 0.0) if demand.encode_rows else 0.0
    square_s = _encode_seconds(costs, 0, demand.encode_squares) - _encode_seconds(costs, 0, 0.0) if demand.encode_rows else 0.0
    step_s = step_seconds(costs, budgets["D"], round(budgets["D"] * demand.tokens_per_request))
    return {
        "E": encode * per_encode + square_s,
        "P": prefill * costs.prefill.seconds(budgets["P"]) + costs.prefill.per_square_s * demand.prompt_squares,
        "D": batches(demand.decode_tokens, "D") * step_s,
    }


def partition(num_devices: int, seconds: dict[str, float]) -> dict[str, int]:
    """Line 12: devices in proportion to the seconds, rounded, at least one each; the sum stays."""
    total = sum(seconds.values())
    exact = {stage: num_devices * share / total if total else num_devices / len(seconds) for stage, share in seconds.items()}
    shares = {stage: max(1, math.floor(share)) for stage, share in exact.items()}
    while sum(shares.values()) < num_devices:
        stage = max(shares, key=lambda stage: exact[stage] - shares[stage])
        shares[stage] += 1
    while sum(shares.values()) > num_devices:
        stage = max((stage for stage in shares if shares[stage] > 1), key=lambda stage: shares[stage] - exact[stage])
        shares[stage] -= 1
    return shares


def capacity(layout: str, demand: Demand, seconds: dict[str, float]) -> float:
    """Return the requests per second that a layout can serve at most, if the stages of a device share it by time slices."""
    rates = []
    for letters, count in processes(layout):
        busy_s = sum(seconds[letter] for letter in letters)
        if busy_s > 0:
            rates.append(count * demand.num_requests / busy_s)
    return min(rates, default=math.inf)


def _encode_seconds(costs: Costs, rows: float, squares: float) -> float:
    """Of pictures; of the first other kind of medium where the model takes no pictures."""
    line = costs.encode.get("image") or next(iter(costs.encode.values()), None)
    return line.seconds(rows, squares) if line is not None and rows + squares > 0 else 0.0


def _largest(seconds: Callable[[int], float], limit_s: float, most: int) -> int:
    """Return the most units, at least 1, that take at most so long."""
    low, high = 1, max(1, most)
    while low < high:
        middle = (low + high + 1) // 2
        if seconds(middle) <= limit_s:
            low = middle
        else:
            high = middle - 1
    return low
