"""The arguments of ``mmrt bench goodput``: parsed, checked, and frozen, before anything runs."""

import argparse
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from mmrt.bench.output import JSON_HELP, json_file, report_folder
from mmrt.bench.serve.load_options import add_load, load_values, number, precision, refuse_options, share
from mmrt.bench.serve.options import Options, server_options
from mmrt.bench.serve.presets import WORKLOADS
from mmrt.runtime.config.runtime_config import RuntimeConfig
from mmrt.runtime.errors import ConfigError

from ..sim.costs import Costs, CostsError, load_costs
from ..sim.options import add_run, base_config
from .objective import DEFAULT_SLO, Objective
from .systems import System, default_systems, parse_systems

_NUM_REQUESTS = {True: 400, False: 48}  # of each load at least: simulated, live
_LEAST_S = 10.0
_OBJECTIVES = 3  # times the objective of TTFT: a load must last longer than a queue that breaks the objective takes to grow

_OF_RATES = ("rates", "seconds", "least_rate", "most_rate", "precision", "target")  # options that a load without a rate does not have


class GoodputOptions(msgspec.Struct, frozen=True, kw_only=True):
    """``load``: of each run, but for its rate. ``costs``: of a simulation; None for live runs of ``checkpoint``. ``rates``: at which
    every system is measured; none for a load without a rate. ``searches``: the goodput is searched for, from there. ``apart``: see
    ``devices.link_of``. ``kills_per_minute``: of processes of a live run, while the load comes."""

    systems: list[System]
    load: Options
    objective: Objective
    costs: Costs | None
    checkpoint: Path | None
    apart: bool
    seconds: float
    rates: list[float]
    num_rounds: int
    searches: bool
    target: float
    precision: float
    least_rate: float
    most_rate: float
    kills_per_minute: float
    json: Path | None
    out: Path | None

    @property
    def has_rate(self) -> bool:
        """The load comes at rates. Otherwise it is measured as it is."""
        return bool(self.rates) or self.searches

    def load_at(self, rate: float | None, number: int = 0) -> Options:
        """The load at a rate: so many requests that they arrive over ``seconds``, and not fewer than were asked for. None: the load as
        it was asked for. ``number``: of the round, which has requests of its own."""
        load = msgspec.structs.replace(self.load, seed=self.load.seed + number)
        if rate is None:
            return load
        return msgspec.structs.replace(load, rate=rate, num_requests=max(load.num_requests or 0, math.ceil(rate * self.seconds)))


def parse_goodput(argv: Sequence[str]) -> GoodputOptions:
    """Parse the command line. Exits with status 2 and a message for a bad one."""
    parser = make_parser()
    given = parser.parse_args(argv)
    values = _load(parser, given)
    values["slo"] = values["slo"] or DEFAULT_SLO
    objective = Objective(values["slo"], given.slo_text)
    try:
        costs = load_costs(given.costs) if given.sim else None
        systems = parse_systems(given.systems, _base(given, costs), objective)
    except (ConfigError, CostsError) as error:
        parser.error(str(error))
    if bad := [rate for rate in given.rates or () if not given.least_rate <= rate <= given.most_rate]:
        parser.error(f"--rates {bad[0]:g} is outside of --least-rate {given.least_rate:g} and --most-rate {given.most_rate:g}")
    return GoodputOptions(
        systems=systems,
        load=server_options(values),
        objective=objective,
        costs=costs,
        checkpoint=given.checkpoint,
        apart=given.apart,
        seconds=given.seconds or max(_LEAST_S, _OBJECTIVES * objective.slo.ttft_s),
        rates=sorted({*(given.rates or ())}),
        num_rounds=given.rounds,
        searches=given.searches,
        target=given.target,
        precision=given.precision,
        least_rate=given.least_rate,
        most_rate=given.most_rate,
        kills_per_minute=given.kills_per_minute or 0.0,
        json=given.json,
        out=given.out,
    )


def _base(given: argparse.Namespace, costs: Costs | None) -> RuntimeConfig:
    """The configuration of all systems; one that takes the media of the workload's requests. Raises: ConfigError."""
    base = base_config(given, costs)
    most = WORKLOADS[given.workload].most_media if given.workload else 0
    return msgspec.structs.replace(base, media=msgspec.structs.replace(base.media, max_items=max(most, base.media.max_items)))


def _load(parser: argparse.ArgumentParser, given: argparse.Namespace) -> dict[str, Any]:
    """The values of the load. Exits with status 2."""
    refuse_options(parser, given, ("rate",), "rates are those of --rates and of the search")
    if given.scenario == "chat":
        refuse_options(parser, given, ("slo_text",), "the turns of a conversation have one objective")
    if given.concurrency is not None or given.scenario in ("stall", "chat"):
        load = f"--scenario {given.scenario}" if given.concurrency is None else f"--concurrency {given.concurrency}"
        refuse_options(parser, given, _OF_RATES, f"{load} has no rate")
        given.searches = False
    elif not given.searches and not given.rates:
        parser.error("--no-search needs --rates")
    elif given.num_requests is None:
        given.num_requests = _NUM_REQUESTS[given.sim]
    if given.sim:
        refuse_options(parser, given, ("checkpoint",), "a simulation has --costs")
        refuse_options(parser, given, ("kills_per_minute",), "a simulation has no processes")
    else:
        refuse_options(parser, given, ("costs", "apart"), "only a simulation (--sim) has costs")
    if given.least_rate > given.most_rate:
        parser.error(f"--least-rate {given.least_rate:g} is above --most-rate {given.most_rate:g}")
    if given.rounds > 1 and given.searches:
        parser.error(f"--rounds {given.rounds} needs --no-search: each round measures the same rates")
    return load_values(parser, given)


def make_parser() -> argparse.ArgumentParser:
    """The systems, the load, the objective, and how the goodput is searched for."""
    parser = argparse.ArgumentParser(
        prog="mmrt bench goodput",
        description="Compare policies and presets: attainment of an objective, the highest rate that meets it, latency in parts.",
        epilog="Exit status: 0, 1 if a run could not be measured, 2 for a bad command line. See lab/docs/goodput.md.",
    )
    add = parser.add_argument
    add("--sim", action="store_true", help="simulate, in place of runs on this machine")
    add(
        "--systems",
        default=",".join(default_systems()),
        metavar="NAME[@LAYOUT[:pipeline]],…",
        help="a policy, the preset monolithic or split, or a policy's file NAME.py; each with a layout if it needs one, :pipeline makes"
        " its prefills stages of one (%(default)s)",
    )
    add(
        "--slo-text", type=number("seconds", float, above=0), metavar="S", help="TTFT of requests without media, in place of --slo-ttft"
    )
    add("--rates", type=_rates, metavar="R,…", help="requests per second that every system is measured at")
    add(
        "--seconds",
        type=number("seconds", float, above=0),
        metavar="S",
        help=f"for which requests arrive, at least ({_OBJECTIVES} times the objective of TTFT, and not below {_LEAST_S:g})",
    )
    add("--no-search", dest="searches", action="store_false", help="measure --rates only, and search for no goodput")
    add("--rounds", type=number("rounds", int, least=1), default=1, help="measure all systems so many times in turn; a search has one")
    add("--target", type=share, default=0.9, metavar="SHARE", help="of requests that must meet the objective (%(default)s)")
    add("--precision", type=precision, default=0.05, metavar="SHARE", help="the search ends within this share (%(default)s)")
    add("--least-rate", type=number("rate", float, above=0), default=0.01, metavar="R", help="lowest rate of the search (%(default)s)")
    add("--most-rate", type=_finite_rate, default=1000.0, metavar="R", help="highest rate of the search (%(default)s)")
    add("--apart", action="store_true", help="simulated: each process of a layout has a device, but for presets")
    add("--checkpoint", type=Path, metavar="DIR", help="of live runs (the demo model)")
    add(
        "--kills-per-minute",
        type=number("kills", float, above=0),
        metavar="K",
        help="live: kill -9 a process so often, each in turn",
    )
    add_run(parser)
    add_load(parser)
    add("--json", type=json_file, metavar="FILE", help=JSON_HELP)
    add("--out", type=report_folder, metavar="DIR", help="write report.json, goodput.png and index.html there")
    return parser


def _finite_rate(text: str) -> float:
    rate = number("rate", float, above=0)(text)
    if rate == math.inf:
        raise argparse.ArgumentTypeError("rate inf must be finite")
    return rate


def _rates(text: str) -> list[float]:
    return [_finite_rate(part) for part in text.split(",")]
