"""``mmrt bench sim --validate``: the same loads live and simulated, side by side, with the spread of the live runs.

The loads are closed loops, which suit a model of any speed. A run begins with all clients at once, so the requests that were sent
first do not count. Each load of each round has requests of its own, which no other leaves in the caches, the same live and simulated.

The speed of a machine differs from one minute to the next. So the passes of a profile can come between the rounds, and a short
reference comes before and after each load: requests one at a time, live and simulated. The *slowness*, the live reference divided by
the simulated one, tells where the machine was not as it was for the profile. Figures are not corrected by it: it says more of one
stream than of several.
"""

import asyncio
import itertools
import math
import statistics
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
from typing import NamedTuple

import msgspec
import uvloop
from rich.console import Console

from mmrt.bench.environment import Environment, read_environment
from mmrt.bench.output import Tell
from mmrt.bench.own_run import own_run
from mmrt.bench.render import show_environment, show_table, show_targets
from mmrt.bench.serve.command import run_bench
from mmrt.bench.serve.errors import BenchError
from mmrt.bench.serve.options import parse_options
from mmrt.bench.serve.planned import plan_requests
from mmrt.bench.serve.record import Record
from mmrt.bench.serve.report import ALL_GROUP, Distribution, count_failures, distribution, summarise_group
from mmrt.models.config import load_model_config
from mmrt.runtime.config.runtime_config import RuntimeConfig
from mmrt.runtime.config.sections import ServerSection
from mmrt.runtime.process.run import DEFAULT_MODEL

from .costs import Costs

LOADS = {
    "steady text": ("--scenario", "steady", "--input-tokens", "16-128", "--max-tokens", "48", "--num-requests", "400"),
    "mixed": (
        *("--scenario", "mixed", "--modality", "text:1,image:1", "--input-tokens", "16-128", "--max-tokens", "48"),
        *("--num-requests", "300"),
    ),
    "chat": ("--scenario", "chat", "--turns", "3", "--max-tokens", "32", "--num-requests", "80"),
}
REFERENCE = ("--scenario", "steady", "--concurrency", "1", "--input-tokens", "64", "--max-tokens", "32", "--num-requests", "16")
_REFERENCE_SEED = 10_000  # the first of those of references
_WARM_UP = 0.1  # share of the requests that do not count: those sent first
_LIMITS = {"TTFT P50": 0.15, "TTFT P90": 0.15, "TTFT P99": 0.30, "TBT mean": 0.15, "TBT P99": 0.30}
_KINDS = {"mixed": ("text", "image")}  # with a P50 and P90 of TTFT each: that of all lies between the two, where few requests are

Simulate = Callable[[Sequence[str]], Sequence[Record]]
"""Simulates the load of these arguments."""


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """A figure in seconds. ``spread``: of the live runs, (largest - least) / median. ``simulated``: the median of the same rounds;
    ``error``: its own, of the live runs' median."""

    load: str
    figure: str
    live: list[float]
    spread: float
    simulated: float
    error: float
    limit: float

    @property
    def is_within(self) -> bool:
        return abs(self.error) <= self.limit


class Validation(msgspec.Struct, frozen=True, kw_only=True):
    """``environment``: of the live runs; the cost model has its own. ``slowness``: by load, of each round."""

    environment: Environment
    costs: str
    num_rounds: int
    slowness: dict[str, list[float]]
    comparisons: list[Comparison]

    @property
    def is_valid(self) -> bool:
        return all(comparison.is_within for comparison in self.comparisons)


def figures_of(load: str, records: Sequence[Record]) -> dict[str, float]:
    """The compared figures of a run, in seconds, without those sent first. Raises: BenchError for a run without them."""
    if failures := count_failures(records):
        raise BenchError(f"{load}: requests failed: {failures}")
    settled = sorted(records, key=lambda record: record.sent_s)[math.ceil(_WARM_UP * len(records)) :]
    group = summarise_group(ALL_GROUP, settled, 0.0)
    if group.ttft is None or group.tbt is None:
        raise BenchError(f"{load}: no tokens came")
    ttfts = {"": group.ttft}
    if load in _KINDS:
        ttfts = {f" of {kind}": _ttft_of(kind, load, settled) for kind in _KINDS[load]}
    return {
        **{f"TTFT P50{kind}": ttft.p50 for kind, ttft in ttfts.items()},
        **{f"TTFT P90{kind}": ttft.p90 for kind, ttft in ttfts.items()},
        "TTFT P99": group.ttft.p99,
        "TBT mean": group.tbt.mean,
        "TBT P99": group.tbt.p99,
    }


def _ttft_of(kind: str, load: str, records: Sequence[Record]) -> Distribution:
    ttft = distribution(record.ttft_s for record in records if record.group == kind and record.ttft_s is not None)
    if ttft is None:
        raise BenchError(f"{load}: none of the {len(records)} requests that count is of kind {kind}")
    return ttft


def reference_s(records: Sequence[Record]) -> float:
    """The time of a reference: the median of its requests. Raises: BenchError if one failed."""
    if failures := count_failures(records):
        raise BenchError(f"reference: requests failed: {failures}")
    return statistics.median(record.e2e_s for record in records)


def slowness_of(references_s: Sequence[Sequence[float]], expected_s: float) -> dict[str, list[float]]:
    """By load, of each round: the mean of the references before and after it, of the simulated one. ``references_s``: of each round,
    before each load and after the last one."""
    found = [[(before + after) / 2 / expected_s for before, after in itertools.pairwise(one)] for one in references_s]
    return dict(zip(LOADS, map(list, zip(*found, strict=True)), strict=True))


def compare(load: str, live: Sequence[Sequence[Record]], simulated: Sequence[Sequence[Record]]) -> list[Comparison]:
    """Each figure of one load, over its rounds. Raises: BenchError."""
    runs, mine = ([figures_of(load, records) for records in rounds] for rounds in (live, simulated))
    comparisons = []
    for figure in runs[0]:
        values, median_s = [run[figure] for run in runs], statistics.median(run[figure] for run in mine)
        middle, limit = statistics.median(values), _LIMITS[figure.partition(" of ")[0]]
        comparisons.append(
            Comparison(
                load=load,
                figure=figure,
                live=values,
                spread=(max(values) - min(values)) / middle,
                simulated=median_s,
                error=median_s / middle - 1,
                limit=limit,
            )
        )
    return comparisons


class LiveRounds(NamedTuple):
    """The results of the live runs. ``records``: by load, of each round. ``references_s``: see ``slowness_of``."""

    environment: Environment
    records: dict[str, list[Sequence[Record]]]
    references_s: list[list[float]]


def check_loads(num_rounds: int, more: Sequence[str]) -> None:
    """Raises: ValueError for so few requests that a round lacks a kind that has figures of its own."""
    for number, (at, (load, arguments)) in product(range(num_rounds), enumerate(LOADS.items())):
        plans = plan_requests(parse_options([*arguments, *more, "--seed", _seed(number, at)]))
        counted = {plan.group for plan in plans[math.ceil(_WARM_UP * len(plans)) :]}
        if missing := [kind for kind in _KINDS.get(load, ()) if kind not in counted]:
            raise ValueError(f"{len(plans)} requests are too few: round {number + 1} of {load} would compare none of kind {missing[0]}")


def run_live(
    config: RuntimeConfig, num_rounds: int, more: Sequence[str], tell: Tell, before_round: Callable[[], object] = lambda: None
) -> LiveRounds:
    """Run all loads ``num_rounds`` times, in turn, against a run of this configuration. ``more``: arguments for all loads.

    Raises: BenchError, OwnRunError, OSError, and what ``before_round`` raises.
    """
    found = LiveRounds(read_environment(), {load: [] for load in LOADS}, [])
    seeds = itertools.count(_REFERENCE_SEED)
    with own_run() as run:
        tell("starting a run")
        run.up(config)
        url = run.report().endpoint

        def refer() -> float:
            return reference_s(_run(url, [*REFERENCE, "--seed", str(next(seeds))]))

        refer()  # the first requests of a run take longer
        for number in range(num_rounds):
            before_round()
            references_s = [refer()]
            for at, (load, arguments) in enumerate(LOADS.items()):
                tell(f"{load}, live: {number + 1} of {num_rounds}")
                found.records[load].append(_run(url, [*arguments, *more, "--seed", _seed(number, at)]))
                references_s.append(refer())
            found.references_s.append(references_s)
    return found


def live_config(config: RuntimeConfig, checkpoint: Path | None, dtype: str = "") -> RuntimeConfig:
    """That of the live runs, with this checkpoint and a free port. ``dtype`` empty: the configuration's."""
    path = str(checkpoint.absolute()) if checkpoint else ""
    model = msgspec.structs.replace(config.model, path=path, dtype=dtype or config.model.dtype)
    return msgspec.structs.replace(config, model=model, server=ServerSection(port=0))


def simulate_rounds(live: LiveRounds, costs: Costs, more: Sequence[str], simulate: Simulate) -> Validation:
    """Simulate the same loads, and compare. Raises: BenchError."""
    num_rounds = len(next(iter(live.records.values())))
    expected_s = reference_s(simulate([*REFERENCE, "--seed", str(_REFERENCE_SEED)]))
    simulated: dict[str, list[Sequence[Record]]] = {}
    for at, (load, arguments) in enumerate(LOADS.items()):
        simulated[load] = [simulate([*arguments, *more, "--seed", _seed(number, at)]) for number in range(num_rounds)]
    return Validation(
        environment=live.environment,
        costs=costs.title,
        num_rounds=num_rounds,
        slowness=slowness_of(live.references_s, expected_s),
        comparisons=[one for load in LOADS for one in compare(load, live.records[load], simulated[load])],
    )


def _run(url: str, arguments: Sequence[str]) -> Sequence[Record]:
    """Send this load to a live run."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(run_bench(parse_options([*arguments, "--url", url]), [url], Console(quiet=True)))[1]


def _seed(number: int, load: int) -> str:
    """Of a load in this round."""
    return str(number * len(LOADS) + load)


def check_model(checkpoint: Path | None, costs: Costs) -> None:
    """Raises: ValueError for a checkpoint (None: the demo model) that is not of the costs' shape; CheckpointError."""
    found = load_model_config(checkpoint or DEFAULT_MODEL, "bfloat16" if costs.model.dtype == "bfloat16" else "float32")
    for name in ("language", "vision", "audio"):
        if getattr(found, name) != getattr(costs.model, name):
            raise ValueError(f"the costs {costs.name} are of another model than {checkpoint or 'the demo model'}: {name} differs")


def show_validation(console: Console, validation: Validation) -> None:
    """A line for each figure, and the verdict."""
    show_environment(console, validation.environment)
    rows = []
    for one in validation.comparisons:
        times = [f"{1e3 * statistics.median(one.live):.1f}", f"{one.spread:.0%}", f"{1e3 * one.simulated:.1f}"]
        rows.append([f"{one.load}: {one.figure}", *times, f"{one.error:+.0%}", f"{one.limit:.0%}"])
    title = f"{validation.costs} beside {validation.num_rounds} live runs, ms"
    show_table(console, title, ["", "live", "spread", "simulated", "error", "limit"], rows)
    for load, found in validation.slowness.items():
        factors = ", ".join(f"{one:.2f}" for one in found)
        console.print(f"{load}: beside it the machine took {factors} times as long for a reference as the costs say")
    show_targets(console, {f"{load}: every figure within its limit": _is_within(validation, load) for load in LOADS})


def _is_within(validation: Validation, load: str) -> bool:
    return all(one.is_within for one in validation.comparisons if one.load == load)
