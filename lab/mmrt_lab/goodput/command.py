"""``mmrt bench goodput``: the same loads on each system, what came of them side by side, as tables, JSON, a picture and a page."""

import sys
from collections import defaultdict
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack
from itertools import product

from mmrt.bench.environment import read_environment
from mmrt.bench.output import Tell, open_console, progress, write_json
from mmrt.bench.own_run import OwnRunError
from mmrt.bench.serve.errors import BenchError
from mmrt.bench.serve.load_options import settings_of
from mmrt.bench.serve.plot import PlotError, require_matplotlib
from mmrt.runtime.errors import ConfigError, UserError
from mmrt.shm.errors import ShmError

from ..sim.simulation import SimulationError
from .live import fit_at_once, live
from .options import GoodputOptions, parse_goodput
from .report import GoodputReport, Measured, Point, SystemReport, summarise
from .search import area, bounds, find_goodput
from .show import show_goodput, write_goodput
from .simulated import Measure, simulated
from .systems import System

_START_RATE = 1.0  # requests/s


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. Returns the exit status."""
    options = parse_goodput(sys.argv[1:] if argv is None else argv)
    console = open_console(options.json)
    try:
        if options.out:
            require_matplotlib()
        with progress(console) as tell:
            report = judge(options, tell)
        show_goodput(console, report)
        write_json(options.json, report)
        if options.out:
            write_goodput(options.out, report)
    except (BenchError, ConfigError, OwnRunError, PlotError, ShmError, SimulationError, UserError, OSError, ValueError) as error:
        print(f"mmrt bench goodput: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("mmrt bench goodput: interrupted", file=sys.stderr)
        return 130
    return 0


def judge(options: GoodputOptions, tell: Tell) -> GoodputReport:
    """Measure every system. Raises: as ``live`` or ``simulated`` do."""
    environment = read_environment() if options.costs is None else options.costs.environment
    points = _search(options, tell) if options.searches else _measure(options, tell)
    costs, load = options.costs, options.load
    return GoodputReport(
        origin="live" if costs is None else costs.origin,
        costs="" if costs is None else costs.name,
        note="" if costs is None else costs.note,
        model=str(options.checkpoint or "demo") if costs is None else costs.name,
        load=load.workload or load.scenario,
        settings=_settings(options),
        environment=environment,
        objective=str(options.objective),
        slo_ttft_s=options.objective.slo.ttft_s,
        slo_tbt_s=options.objective.slo.tbt_s if options.objective.slo.tbt_s < float("inf") else None,
        slo_text_s=options.objective.text_ttft_s,
        target=options.target,
        rates=options.rates,
        systems=[_summarise(options, system, points[system.name]) for system in options.systems],
    )


def _settings(options: GoodputOptions) -> dict[str, str | int | float | bool | None]:
    """Of the load, without those of a server; and how stages share devices."""
    plain = settings_of(options.load)
    for name in ("url", "model", "rate", "temperature", "extensions", "timeout_s", "num_warmup", "compare_caches"):
        plain.pop(name, None)
    if options.has_rate or options.load.scenario == "stall":
        plain.pop("concurrency", None)
    seconds = {"seconds": options.seconds} if options.has_rate else {}
    kills = {"kills_per_minute": options.kills_per_minute} if options.kills_per_minute else {}
    return plain | seconds | kills | {"apart": options.apart, "rounds": options.num_rounds}


def _search(options: GoodputOptions, tell: Tell) -> dict[str, list[Point]]:
    """The loads by which each system's goodput was found, in order of rate."""
    points: dict[str, dict[float, Point]] = {system.name: {} for system in options.systems}
    for system in options.systems:
        mine = points[system.name]
        with _opened(options, system, tell) as run:

            def attainment(rate: float, system: System = system, mine: dict[float, Point] = mine, run: Measure = run) -> float:
                tell(f"{system.name}: {rate:.3g} requests/s")
                mine[rate] = summarise(rate, [run(options.load_at(rate))], options.objective)
                return mine[rate].attainment

            find_goodput(
                attainment,
                options.rates or [min(max(_START_RATE, options.least_rate), options.most_rate)],
                target=options.target,
                precision=options.precision,
                least=options.least_rate,
                most=options.most_rate,
            )
    return {name: [mine[rate] for rate in sorted(mine)] for name, mine in points.items()}


def _measure(options: GoodputOptions, tell: Tell) -> dict[str, list[Point]]:
    """The loads at the given rates, of all rounds. Systems take turns, so that what the machine does otherwise falls to all of them: at
    each rate where all of them have room at once, otherwise from round to round."""
    measured: dict[tuple[str, float | None], list[Measured]] = defaultdict(list)
    rates: Sequence[float | None] = options.rates or [None]
    rounds = range(options.num_rounds)
    if options.costs is not None or fit_at_once(options):
        at_once = [(options.systems, rounds)]
    else:
        at_once = [([system], range(number, number + 1)) for number in rounds for system in options.systems]
    for systems, numbers in at_once:
        with ExitStack() as opened:
            runs = {system.name: opened.enter_context(_opened(options, system, tell)) for system in systems}
            for number, (at, rate) in product(numbers, enumerate(rates)):
                first = (number + at) % len(runs)
                for name in [*runs][first:] + [*runs][:first]:
                    what = f"{rate:.3g} requests/s" if rate is not None else options.load.workload or options.load.scenario
                    tell(f"{name}: {what}, round {number + 1} of {options.num_rounds}")
                    measured[name, rate].append(runs[name](options.load_at(rate, number)))
    return {
        system.name: [summarise(rate, measured[system.name, rate], options.objective) for rate in rates] for system in options.systems
    }


def _opened(options: GoodputOptions, system: System, tell: Tell) -> AbstractContextManager[Measure]:
    tell(f"{system.name}: starting")
    return live(options, system) if options.costs is None else simulated(options, system)


def _summarise(options: GoodputOptions, system: System, points: Sequence[Point]) -> SystemReport:
    attainments = [(point.rate, point.attainment) for point in points if point.rate is not None]
    found = bounds(attainments, options.target)
    return SystemReport(
        name=system.name,
        policy=system.config.scheduling.policy.rpartition("/")[2],
        layout=system.config.actors.layout,
        goodput=found.goodput if options.searches else None,
        fails=found.fails,
        area=area((rate, attainment) for rate, attainment in attainments if rate in options.rates),
        points=list(points),
    )


if __name__ == "__main__":
    sys.exit(main())
