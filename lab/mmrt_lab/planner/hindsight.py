"""``mmrt advise --replay``: which policy and layout would have served the last hour of a run's own traffic better (TI9, TI11).

The traffic is simulated on the present system first, with all costs times a factor by which its times to the first token are those that
the clients had: so the machine is as fast as it was, whatever else it did. Then others are simulated in the same way. How sure a
difference is tells the share of resamplings of the traffic, a stretch at a time, in which it stays.
"""

import math
import random
import statistics
import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import msgspec
from rich.console import Console

from mmrt.bench.output import Tell
from mmrt.bench.render import show_table
from mmrt.bench.serve.load_options import LoadOptions
from mmrt.bench.serve.record import Record
from mmrt.bench.serve.slo import Slo, is_met
from mmrt.runtime.config.runtime_config import RuntimeConfig, convert_config, is_policy_file, to_data
from mmrt.runtime.config.sections import POLICY_NAMES
from mmrt.runtime.controller.scheduling.facts import KINDS
from mmrt.runtime.errors import ConfigError, UserError
from mmrt.runtime.stage_table import STAGES, scale_layout

from ..sim.command import run_load
from ..sim.costs import Costs, Line, load_costs
from ..sim.options import load_policy, parse_sim
from ..sim.report import Steps
from ..sim.validate import check_model
from .past_traffic import Past, quantiles

LEAST_REQUESTS = 20
DOUBT = 0.1  # that the best of the others is better by chance, at most; divided among all of them (Bonferroni)
_FACTORS, _NUM_TRIALS = (0.05, 40.0), 9  # of the costs, and to find theirs
_NUM_STRETCHES, _NUM_RESAMPLINGS = 20, 1000


class Served(msgspec.Struct, frozen=True, kw_only=True):
    """The traffic on one system. ``ttft_s``: P50 and P90; ``tbt_s``: P90. ``sure``: that it serves better than the present one, as a
    share of resamplings; ``gain``: of attainment, the middle of them, from their 5th to their 95th percentile."""

    policy: str
    layout: str
    attainment: float
    ttft_s: tuple[float, float]
    mean_ttft_s: float
    tbt_s: float
    sure: float = 0.0
    gain: tuple[float, float, float] = (0.0, 0.0, 0.0)


class Hindsight(msgspec.Struct, frozen=True, kw_only=True):
    """``factor``: of the costs. ``was_s``: P50 and P90 of TTFT as clients had them; those of ``present`` are simulated. ``best``: None
    where no other system is surely better."""

    num_requests: int
    seconds: float
    costs: str
    factor: float
    was_s: tuple[float, float]
    present: Served
    others: list[Served]
    best: Served | None


def replay(past: Past, config: RuntimeConfig, costs_name: str, model: Path | None, tell: Tell) -> Hindsight:
    """Find what would have served ``past`` better than ``config``. ``model``: the run's; None: the demo model.

    Raises: UserError for too little traffic; CostsError, ConfigError, ValueError, SimulationError.
    """
    if len(past.rows) < LEAST_REQUESTS or len(past.ttfts_s) < LEAST_REQUESTS:
        raise UserError(f"{len(past.rows)} requests were recorded, {LEAST_REQUESTS} are needed: come back later, or give --trace")
    costs = load_costs(costs_name)
    check_model(model, costs)
    config = _simulated(config)
    with tempfile.TemporaryDirectory(prefix="mmrt-advise-") as place:
        trace = Path(place) / "past.jsonl"
        past.write(trace)
        load = parse_sim(["--trace", str(trace), "--costs", costs_name])[0]

        def serve(config: RuntimeConfig, costs: Costs) -> list[Record]:
            tell(f"{config.scheduling.policy} with {config.actors.layout}")
            return _serve(load, config, costs)

        factor = find_factor(past.ttfts_s, lambda factor: serve(config, times(costs, factor)))
        costs = times(costs, factor)
        present = serve(config, costs)
        found = [(other, serve(other, costs)) for other in _policies(config)]
        ahead = max(found, key=lambda one: _merit(config, one[1]), default=(config, present))[0]
        ahead = ahead if found and _merit(config, serve(ahead, costs)) > _merit(config, present) else config
        found += [(other, serve(other, costs)) for other in layouts(ahead)]
    others = [compare(config, other, records, present) for other, records in found]
    others.sort(key=lambda one: (-one.attainment, one.mean_ttft_s))
    return Hindsight(
        num_requests=len(past.rows),
        seconds=past.seconds,
        costs=costs_name,
        factor=factor,
        was_s=past.quantiles_s(),
        present=_served(config, config, present),
        others=others,
        best=next((one for one in others if 1 - one.sure <= DOUBT / len(others)), None),
    )


def find_factor(ttfts_s: Sequence[float], serve: Callable[[float], Sequence[Record]]) -> float:
    """Return the factor of the costs with which the geometric mean of the times to the first token is that of ``ttfts_s``. It
    halves the logarithm of its bounds again and again: more costs never make it shorter."""
    wanted = statistics.fmean(map(math.log, ttfts_s))
    low, high = map(math.log, _FACTORS)
    for _ in range(_NUM_TRIALS):
        middle = (low + high) / 2
        found = [record.ttft_s for record in serve(math.exp(middle)) if record.is_success]
        is_slow = not found or statistics.fmean(math.log(max(ttft_s or 0.0, 1e-6)) for ttft_s in found) > wanted
        low, high = (low, middle) if is_slow else (middle, high)
    return math.exp((low + high) / 2)


def times(costs: Costs, factor: float) -> Costs:
    """Return the costs of a machine that takes so many times as long for everything."""

    def slower(value: object) -> object:
        match value:
            case Line():
                return value.times(factor)
            case dict():
                return {key: slower(each) for key, each in value.items()}
            case list():
                return [slower(each) for each in value]
            case float():
                return value * factor
            case msgspec.Struct():
                return type(value)(**{name: slower(getattr(value, name)) for name in value.__struct_fields__})
        return value

    names = ("analyse", "preprocess", "encode", "prefill", "decode", "decode_context_s", "decode_wake_s", "overheads", "alone")
    return msgspec.structs.replace(
        costs, **{name: slower(getattr(costs, name)) for name in (*names, "beside", "egress", "egress_single")}
    )


def compare(config: RuntimeConfig, other: RuntimeConfig, records: Sequence[Record], present: Sequence[Record]) -> Served:
    """Judge a system beside the present one, by the objectives of ``config``: request by request, and by resampled stretches."""
    pairs = list(zip(_verdicts(config, records), _verdicts(config, present), strict=True))
    size = math.ceil(len(pairs) / _NUM_STRETCHES)
    stretches = [pairs[at : at + size] for at in range(0, len(pairs), size)]
    draws = random.Random(len(pairs))
    gains, num_better = [], 0
    for _ in range(_NUM_RESAMPLINGS):
        drawn = [pair for stretch in draws.choices(stretches, k=len(stretches)) for pair in stretch]
        met, ttft = (statistics.fmean(mine[part] - its[part] for mine, its in drawn) for part in (0, 1))
        gains.append(met)
        num_better += met > 0 or (met == 0 and ttft < 0)
    gains.sort()
    low, middle, high = (gains[round(share * (len(gains) - 1))] for share in (0.05, 0.5, 0.95))
    served = _served(config, other, records)
    return msgspec.structs.replace(served, sure=num_better / _NUM_RESAMPLINGS, gain=(low, middle, high))


def _verdicts(config: RuntimeConfig, records: Sequence[Record]) -> list[tuple[int, float]]:
    """Return of each request whether it meets its objective, and the logarithm of its time to the first token."""
    return [(int(is_met(one, _objective(config, one.group))), math.log(max(one.ttft_s or one.e2e_s, 1e-6))) for one in records]


def _merit(config: RuntimeConfig, records: Sequence[Record]) -> tuple[float, float]:
    met, logs = zip(*_verdicts(config, records), strict=True)
    return statistics.fmean(met), -statistics.fmean(logs)


def _objective(config: RuntimeConfig, group: str) -> Slo:
    """Return the objective of a request: that of its most demanding medium."""
    kind = max((kind for kind in KINDS if kind in group.split("+")), key=KINDS.index, default=KINDS[0])
    section = getattr(config.slo, kind)
    tbt_ms = section.tbt_ms or config.scheduling.tbt_target_ms
    return Slo(section.ttft_ms / 1000, tbt_ms / 1000 if tbt_ms else math.inf)


def _served(config: RuntimeConfig, other: RuntimeConfig, records: Sequence[Record]) -> Served:
    ttfts_s = [ttft_s for record in records if (ttft_s := record.ttft_s) is not None]
    return Served(
        policy=other.scheduling.policy,
        layout=other.actors.layout,
        attainment=_merit(config, records)[0],
        ttft_s=quantiles(ttfts_s),
        mean_ttft_s=statistics.fmean(ttfts_s) if ttfts_s else 0.0,
        tbt_s=quantiles([tbt_s for record in records for tbt_s in record.tbts_s])[1],
    )


def _serve(load: LoadOptions, config: RuntimeConfig, costs: Costs) -> list[Record]:
    simulation, _ = run_load(load, config, costs, load_policy(config.scheduling.policy))
    steps = Steps(simulation, costs)
    return sorted((steps.record(record) for record in simulation.gateway.records), key=lambda record: record.index)


def _simulated(config: RuntimeConfig) -> RuntimeConfig:
    """Return the configuration without what a simulation does not have. Raises: ConfigError."""
    if config.num_kv_pools > 1 or config.actors.turns == "layers":
        raise ConfigError('[[devices]] and actors.turns = "layers" are not simulated')
    data = to_data(config)
    data["cache"]["dir"], data["scheduling"]["preset"] = "", ""
    return convert_config(data)


def _policies(config: RuntimeConfig) -> Iterable[RuntimeConfig]:
    """Yield the configuration with each other policy of mmrt's."""
    for policy in POLICY_NAMES:
        if policy != config.scheduling.policy or is_policy_file(config.scheduling.policy):
            yield _with(config, "scheduling", "policy", policy)


def layouts(config: RuntimeConfig) -> Iterable[RuntimeConfig]:
    """Yield it with one process more, or one fewer, of each stage that can have several; those of a pipeline stay as many."""
    layout, seen = config.actors.layout, {config.actors.layout}
    divided = {"prefill"} if config.scheduling.prefill_pipeline else set()
    for stage in [name for name, record in STAGES.items() if record.letter and name not in divided]:
        count = sum(actor.partition(".")[0] == stage for actor in config.instances)
        for wanted in (count - 1, count + 1):
            try:
                other = _with(config, "actors", "layout", scale_layout(layout, stage, wanted))
            except ConfigError:
                continue  # there is no such layout
            if other.actors.layout not in seen:
                seen.add(other.actors.layout)
                yield other


def _with(config: RuntimeConfig, section: str, name: str, value: str) -> RuntimeConfig:
    data = to_data(config)
    data[section][name] = value
    return convert_config(data)


def show(console: Console, found: Hindsight) -> None:
    """Print what was replayed, the systems, and the advice."""
    present, (was_s, was_tail_s) = found.present, found.was_s
    console.print(
        f"{found.num_requests} requests of {found.seconds / 60:.0f} min, simulated with costs {found.costs} times {found.factor:.2g}: "
        f"the present system has TTFT P50 {present.ttft_s[0]:.3g} s and P90 {present.ttft_s[1]:.3g} s; clients had {was_s:.3g} and "
        f"{was_tail_s:.3g} s.",
        highlight=False,
    )
    columns = ("system", "in time", "gain", "TTFT P50", "P90", "TBT P90", "sure")
    rows = [_row(present, is_present=True), *(_row(one) for one in found.others)]
    show_table(console, "The last hour again", columns, rows)
    if found.best is None:
        sure = 1 - DOUBT / max(1, len(found.others))
        console.print(f"None of the others is better in {sure:.0%} of the resamplings, as one of so many must be: keep this one.")
        return
    best = found.best
    console.print(
        f"{best.policy} with {best.layout} serves it better: {best.attainment:.1%} in time, not {present.attainment:.1%}, and "
        f"a mean TTFT of {best.mean_ttft_s:.3g}, not {present.mean_ttft_s:.3g} s; so in {best.sure:.0%} of the resamplings.",
        highlight=False,
    )
    orders = [f"mmrt policy set {best.policy}"] * (best.policy != present.policy) + [f"mmrt layout set {best.layout}"] * (
        best.layout != present.layout
    )
    console.print(f"  would run: {'; '.join(orders)}", highlight=False)


def _row(one: Served, is_present: bool = False) -> tuple[str, ...]:
    low, middle, high = (100 * gain for gain in one.gain)
    return (
        f"{one.policy} {one.layout}{' (now)' if is_present else ''}",
        f"{one.attainment:.1%}",
        "" if is_present else f"{middle:+.1f} ({low:+.1f} to {high:+.1f})",
        f"{one.ttft_s[0]:.3g} s",
        f"{one.ttft_s[1]:.3g} s",
        f"{1000 * one.tbt_s:.0f} ms",
        "" if is_present else f"{one.sure:.0%}",
    )
