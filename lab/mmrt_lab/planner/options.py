"""The arguments of ``mmrt plan``: parsed, checked, and frozen, before anything runs."""

import argparse
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from mmrt.bench.output import JSON_HELP, json_file
from mmrt.bench.serve.load_options import LoadOptions, add_load, load_values, number, precision, refuse_options, share
from mmrt.bench.serve.presets import WORKLOADS
from mmrt.runtime.config.runtime_config import RuntimeConfig
from mmrt.runtime.controller.scheduling.policy import POLICIES
from mmrt.runtime.errors import ConfigError

from ..goodput.objective import DEFAULT_SLO, Objective
from ..goodput.systems import configure
from ..sim.costs import Costs, CostsError, load_costs
from ..sim.link_options import add_link, link_of
from ..sim.links import Link
from ..sim.options import add_run, base_config
from .candidates import LEAST_DEVICES, MOST_DEVICES, colocated

_ROWS = 64  # of each device: more take more time to simulate
_NUM_REQUESTS = 200  # of each load at least
_LEAST_S, _OBJECTIVES = 10.0, 3  # see ``goodput.options``
_MAX_WAITING = 1 << 20  # the objective bounds the queue
NVLINK_GB_S = 450.0  # of an H200, in each direction


class PlanOptions(msgspec.Struct, frozen=True, kw_only=True):
    """``load``: of each simulation, but for its rate, and if ``rate`` is None: then goodputs are searched for. ``base``: the
    configuration but for layout and policy. ``link``: between devices."""

    num_devices: int
    load: LoadOptions
    rate: float | None
    objective: Objective
    costs: Costs
    base: RuntimeConfig
    policy: str
    link: Link
    target: float
    precision: float
    seconds: float
    num_workers: int
    json: Path | None

    def load_at(self, rate: float) -> LoadOptions:
        """The load at a rate: so many requests that they arrive over ``seconds``, and not fewer than were asked for."""
        count = max(self.load.num_requests or 0, math.ceil(rate * self.seconds))
        return msgspec.structs.replace(self.load, rate=rate, num_requests=count)

    def config(self, layout: str) -> RuntimeConfig:
        """The configuration with this layout. Raises: ConfigError."""
        return configure(f"{self.policy}@{layout}", self.base, self.objective)


def parse_plan(argv: Sequence[str]) -> PlanOptions:
    """Parse the command line. Exits with status 2 and a message for a bad one."""
    parser = make_parser()
    return plan_options(parser, parser.parse_args(argv))


def plan_options(parser: argparse.ArgumentParser, given: argparse.Namespace) -> PlanOptions:
    """Check the options of ``add_plan``. Exits with status 2 and a message for bad ones."""
    values = _load(parser, given)
    values["slo"] = values["slo"] or DEFAULT_SLO
    rate, objective = values.pop("rate"), Objective(values["slo"])
    if given.rows is None:
        given.rows = _ROWS * given.devices
    given.caches = False
    try:
        costs = _decoding(load_costs(given.costs), given.decoders or given.devices)
        base = _base(given, costs)
        configure(f"{given.policy}@{colocated(given.devices)}", base, objective)
    except (ConfigError, CostsError) as error:
        parser.error(str(error))
    return PlanOptions(
        num_devices=given.devices,
        load=LoadOptions(**values, rate=None),
        rate=rate,
        objective=objective,
        costs=costs,
        base=base,
        policy=given.policy,
        link=link_of(parser, given) or Link(),
        target=given.target,
        precision=given.precision,
        seconds=given.seconds or max(_LEAST_S, _OBJECTIVES * objective.slo.ttft_s),
        num_workers=given.workers,
        json=given.json,
    )


def _load(parser: argparse.ArgumentParser, given: argparse.Namespace) -> dict[str, Any]:
    """The values of the load. Exits with status 2."""
    refuse_options(parser, given, ("concurrency",), "layouts are compared at rates")
    if given.scenario not in ("steady", "mixed"):
        parser.error(f"--scenario {given.scenario} has no rate: steady or mixed, or a --workload")
    if given.rate == math.inf:
        parser.error("--rate inf must be finite")
    if given.num_requests is None:
        given.num_requests = _NUM_REQUESTS
    return load_values(parser, given)


def _base(given: argparse.Namespace, costs: Costs) -> RuntimeConfig:
    """The configuration of all layouts; one that takes the media of the load's requests. Raises: ConfigError."""
    base = base_config(given, costs)
    most = WORKLOADS[given.workload].most_media if given.workload else 0
    media = msgspec.structs.replace(base.media, max_items=max(most, base.media.max_items))
    server = msgspec.structs.replace(base.server, max_waiting=_MAX_WAITING)
    return msgspec.structs.replace(base, media=media, server=server)


def _decoding(costs: Costs, num_decoders: int) -> Costs:
    """The costs where media are decoded on the host as fast as by so many processes of ``video``."""
    return msgspec.structs.replace(
        costs,
        analyse={kind: line.times(1 / num_decoders) for kind, line in costs.analyse.items()},
        preprocess={kind: line.times(1 / num_decoders) for kind, line in costs.preprocess.items()},
    )


def make_parser() -> argparse.ArgumentParser:
    """The devices, the load, the objective, and how the layouts are compared."""
    parser = argparse.ArgumentParser(
        prog="mmrt plan",
        description="Simulate a load on every layout of stages over devices, and say which serves it best.",
        epilog="Exit status: 0, 1 if a load could not be simulated, 2 for a bad command line. See lab/docs/planner.md. "
        f"Without an objective: --slo-ttft {DEFAULT_SLO.ttft_s:g} --slo-tbt {DEFAULT_SLO.tbt_s:g}.",
    )
    add_plan(parser)
    return parser


def add_plan(parser: argparse.ArgumentParser) -> None:
    """Add the options of simulated loads on several devices."""
    add = parser.add_argument
    add(
        "--devices",
        type=_devices,
        default=MOST_DEVICES,
        metavar="N",
        help=f"to divide among the stages, {LEAST_DEVICES} to {MOST_DEVICES} (%(default)s)",
    )
    add("--policy", default="stage_level", metavar="NAME|FILE", help=f"{', '.join(POLICIES)}, or NAME.py (%(default)s)")
    add_link(parser, NVLINK_GB_S, "%(default)s")
    add(
        "--decoders",
        type=number("number", int, least=1),
        metavar="N",
        help="media are decoded as by so many processes (N of --devices)",
    )
    add("--target", type=share, default=0.9, metavar="SHARE", help="of requests that must meet the objective (%(default)s)")
    add("--precision", type=precision, default=0.05, metavar="SHARE", help="between two rates of the search (%(default)s)")
    add(
        "--seconds",
        type=number("seconds", float, above=0),
        metavar="S",
        help="that requests come for (3 times the TTFT, at least 10)",
    )
    add("--workers", type=number("number", int, least=1), default=2, metavar="N", help="simulations at a time (%(default)s)")
    add_run(parser)
    parser.set_defaults(costs="qwen2.5-vl-7b-h200")
    add_load(parser)
    add("--json", type=json_file, metavar="FILE", help=JSON_HELP)


def _devices(text: str) -> int:
    count = number("devices", int)(text)
    if not LEAST_DEVICES <= count <= MOST_DEVICES:
        raise argparse.ArgumentTypeError(f"{count} devices: a plan is made for {LEAST_DEVICES} to {MOST_DEVICES}")
    return count
