"""``mmrt bench goodput``: the same loads on each system, what came of them side by side, as tables, JSON, a picture and a page."""

import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

from ...runtime.errors import ConfigError, UserError
from ...shm.errors import ShmError
from ..environment import read_environment
from ..output import Tell, open_console, progress, write_json
from ..own_run import OwnRunError
from ..serve.client import BenchError
from ..serve.load_options import settings_of
from ..serve.plot import PlotError, require_matplotlib
from ..sim.simulation import SimulationError
from .live import live
from .options import GoodputOptions, parse_goodput
from .report import GoodputReport, Point, SystemReport, summarise
from .search import area, bounds, find_goodput
from .show import show_goodput, write_goodput
from .simulated import Measure, simulated
from .systems import System

_START_RATE = 1.0  # requests/s

Open = Callable[[GoodputOptions, System], AbstractContextManager[Measure]]


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
    points = {system.name: _measure(options, system, tell) for system in options.systems}
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
    for name in ("url", "model", "rate", "concurrency", "temperature", "extensions", "timeout_s", "num_warmup", "compare_caches"):
        plain.pop(name, None)
    return plain | {"apart": options.apart, "seconds": options.seconds}


def _measure(options: GoodputOptions, system: System, tell: Tell) -> list[Point]:
    """The load at each rate that was asked for or searched, in order of rate."""
    points: dict[float, Point] = {}
    opener: Open = live if options.costs is None else simulated
    tell(f"{system.name}: starting")
    with opener(options, system) as run:

        def attainment(rate: float) -> float:
            tell(f"{system.name}: {rate:.3g} requests/s")
            points[rate] = summarise(rate, run(rate), options.objective)
            return points[rate].attainment

        if options.searches:
            find_goodput(
                attainment,
                options.rates or [min(max(_START_RATE, options.least_rate), options.most_rate)],
                target=options.target,
                precision=options.precision,
                least=options.least_rate,
                most=options.most_rate,
            )
        else:
            for rate in options.rates:
                attainment(rate)
    return [points[rate] for rate in sorted(points)]


def _summarise(options: GoodputOptions, system: System, points: Sequence[Point]) -> SystemReport:
    found = bounds(((point.rate, point.attainment) for point in points), options.target)
    return SystemReport(
        name=system.name,
        policy=system.config.scheduling.policy.rpartition("/")[2],
        layout=system.config.actors.layout,
        goodput=found.goodput if options.searches else None,
        fails=found.fails,
        area=area((point.rate, point.attainment) for point in points if point.rate in options.rates),
        points=list(points),
    )


if __name__ == "__main__":
    sys.exit(main())
