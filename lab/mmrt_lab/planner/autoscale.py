"""``mmrt bench autoscale``: what it saves to have more processes in bursts only, simulated (MS4, MS9).

The same load is served by the fewest processes that meet the objective throughout, and by as many as the scaler asks for.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import Executor

import msgspec
from rich.console import Console

from mmrt.bench.output import Tell, open_console, progress, write_json
from mmrt.bench.render import show_table
from mmrt.bench.serve.load_options import number
from mmrt.bench.serve.planned import plan_requests
from mmrt.bench.serve.workload import RequestPlan
from mmrt.runtime.autoscale.scaler import Rules, Scaler
from mmrt.runtime.errors import ConfigError
from mmrt.runtime.stage_table import STAGES, processes_of, stage_of

from ..sim.command import run_load
from ..sim.costs import CostsError
from ..sim.options import load_policy
from ..sim.requests import Requests
from ..sim.simulation import Simulation, SimulationError
from .bursts import with_bursts
from .candidates import LEAST_DEVICES, join, processes
from .command import memory_of
from .demand import demand_of
from .heuristic import capacity, divide
from .measure import Hopeless, Outcome, Watch, outcome_of
from .options import PlanOptions, add_plan, plan_options
from .pool import workers
from .scaled_run import Change, ScaledRun

_SECONDS = 1800.0  # of the load
_WORKLOAD = "modserve"
_SPLIT = "E+PD"  # image instances and text instances (MS1)


class AutoscaleOptions(msgspec.Struct, frozen=True, kw_only=True):
    """``method``: the kinds of processes that are scaled apart. ``start_s``: until a new one serves. ``look_s``: between decisions."""

    plan: PlanOptions
    rate: float
    method: str
    start_s: float
    look_s: float
    rules: Rules


class Served(msgspec.Struct, frozen=True, kw_only=True):
    """One run of the load. ``process_hours``: of all processes together. ``changes``: none where the number stays."""

    layout: str
    outcome: Outcome
    process_hours: float
    changes: list[Change]


class AutoscaleReport(msgspec.Struct, frozen=True, kw_only=True):
    """``static``: the fewest processes that meet the objective from the beginning to the end, None if 8 of each kind do not.
    ``saved``: the share of their hours that the scaled run does without."""

    costs: str
    note: str
    load: str
    objective: str
    target: float
    rate: float
    seconds: float
    rules: Rules
    start_s: float
    static: Served | None
    scaled: Served
    saved: float | None


_options: AutoscaleOptions  # of a process that simulates


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. Returns the exit status."""
    argv = sys.argv[1:] if argv is None else argv
    options = parse_autoscale(argv)
    console = open_console(options.plan.json)
    try:
        with progress(console) as tell, workers(options.plan.num_workers, _begin, [*argv]) as pool:
            report = compare(options, pool, tell)
        show(console, report)
        write_json(options.plan.json, report)
    except (ConfigError, CostsError, SimulationError, OSError, ValueError) as error:
        print(f"mmrt bench autoscale: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("mmrt bench autoscale: interrupted", file=sys.stderr)
        return 130
    return 0


def parse_autoscale(argv: Sequence[str]) -> AutoscaleOptions:
    """Parse the command line. Exits with status 2 and a message for a bad one."""
    parser = make_parser()
    given = parser.parse_args(argv)
    if given.rate is None:
        parser.error("--rate is needed: the mean rate of the load")
    if given.trace is None and given.workload is None:
        given.workload = _WORKLOAD
    plan = plan_options(parser, given)
    rules = Rules(busy=given.busy, backlog_s=given.backlog * plan.objective.slo.ttft_s, calm_s=given.calm, most=plan.num_devices)
    return AutoscaleOptions(plan=plan, rate=given.rate, method=_SPLIT, start_s=given.start, look_s=given.look, rules=rules)


def make_parser() -> argparse.ArgumentParser:
    """The load, the objective, and how quickly processes come and go."""
    parser = argparse.ArgumentParser(
        prog="mmrt bench autoscale",
        description="Simulate a load in bursts on E and PD processes: the fewest that meet the objective, and as many as are needed.",
        epilog=f"Without --trace the pictures of --workload ({_WORKLOAD}) come in bursts. See lab/docs/planner.md.",
    )
    add_plan(parser)
    parser.set_defaults(seconds=_SECONDS)
    add = parser.add_argument
    add("--start", type=number("seconds", float, least=0), default=3.0, metavar="S", help="until a new process serves (%(default)s)")
    add("--look", type=number("seconds", float, above=0), default=2.0, metavar="S", help="between decisions (%(default)s)")
    add("--calm", type=number("seconds", float, above=0), default=20.0, metavar="S", help="before a process is given up (%(default)s)")
    add("--busy", type=number("share", float, above=0), default=0.9, metavar="SHARE", help="of the time, at most (%(default)s)")
    add("--backlog", type=number("share", float, above=0), default=0.5, metavar="SHARE", help="of the TTFT may wait (%(default)s)")
    return parser


def compare(options: AutoscaleOptions, pool: Executor, tell: Tell) -> AutoscaleReport:
    """Serve the load both ways. Raises: as ``planner.command.plan``."""
    plan, costs = options.plan, options.plan.costs
    planned = plan_load(options)
    requests = Requests(costs, plan.load.shapes, plan.base.media)
    requests.check(planned)
    demand = demand_of(planned, requests)
    seconds = divide(LEAST_DEVICES, demand, costs, plan.objective.slo, memory_of(plan)).seconds

    def is_able(layout: str) -> bool:
        return capacity(layout, demand, seconds) >= options.rate

    tell("as many as are needed")
    most = options.rules.most
    begin = next((n for n in range(1, most) if is_able(join(options.method, (n, n)))), most)  # what the mean of the load needs
    scaled = pool.submit(_serve, join(options.method, (1, begin)), True)
    static = _fewest(options, is_able, pool, tell)
    with_scaler = scaled.result()
    return AutoscaleReport(
        costs=costs.name,
        note=costs.note,
        load=plan.load.trace.name if plan.load.trace else f"{plan.load.workload} in bursts",
        objective=str(plan.objective),
        target=plan.target,
        rate=options.rate,
        seconds=planned[-1].arrival_s,
        rules=options.rules,
        start_s=options.start_s,
        static=static,
        scaled=with_scaler,
        saved=None if static is None else 1 - with_scaler.process_hours / static.process_hours,
    )


def plan_load(options: AutoscaleOptions) -> list[RequestPlan]:
    """The requests, of a trace as they are, else in bursts. Raises: ValueError, OSError."""
    load = options.plan.load_at(options.rate)
    planned = plan_requests(load)
    return planned if load.trace else with_bursts(planned, load.seed)


def _fewest(options: AutoscaleOptions, is_able: Callable[[str], bool], pool: Executor, tell: Tell) -> Served | None:
    """The fewest processes that meet the objective; of equally many, those that meet it for most requests. ``is_able``: a layout serves
    the mean of the load."""
    most = options.rules.most
    for total in range(2, 2 * most + 1):
        layouts = [join(options.method, (n, total - n)) for n in range(max(1, total - most), min(most, total - 1) + 1)]
        tell(f"{total} processes throughout")
        served = [future.result() for future in [pool.submit(_serve, layout, False) for layout in layouts if is_able(layout)]]
        passed = [one for one in served if one.outcome.attainment >= options.plan.target]
        if passed:
            return max(passed, key=lambda one: one.outcome.attainment)
    return None


def _begin(argv: Sequence[str]) -> None:
    global _options
    _options = parse_autoscale(argv)


def _serve(layout: str, is_scaled: bool) -> Served:
    """Serve the load with this layout, or from this layout on as the scaler says. One that fails is ended early."""
    options, plan = _options, _options.plan
    planned = plan_load(options)
    config = plan.config(layout)
    runs: list[ScaledRun] = []
    together = [actors for actors in processes_of(layout).values() if STAGES[stage_of(actors[0])].has_device]

    def watch(simulation: Simulation) -> None:
        scaler = Scaler(options.rules) if is_scaled else None
        runs.append(ScaledRun(simulation, together, scaler, options.look_s, options.start_s))
        if not is_scaled:
            Watch(simulation, plan.objective.slo, len(planned), plan.target)

    try:
        simulation, _ = run_load(
            plan.load_at(options.rate),
            config,
            plan.costs,
            load_policy(config.scheduling.policy),
            link=plan.link,
            num_devices=2 * plan.num_devices if is_scaled else sum(count for _, count in processes(layout)),
            plans=planned,
            watch=watch,
        )
    except Hopeless as hopeless:
        share = hopeless.attainment
        outcome = Outcome(rate=options.rate, num_requests=len(planned), attainment=share, is_cut=True, missed="TTFT")
        return Served(layout=layout, outcome=outcome, process_hours=0.0, changes=[])
    end_ns = max(record.end_ns for record in simulation.gateway.records)
    hours = runs[0].process_s(end_ns) / 3600
    return Served(layout=layout, outcome=outcome_of(plan, options.rate, simulation), process_hours=hours, changes=runs[0].changes)


def show(console: Console, report: AutoscaleReport) -> None:
    """Print both runs side by side, and the changes."""
    console.print(f"simulated with costs {report.costs}. {report.note}", style="dim", soft_wrap=True, highlight=False)
    title = f"{report.load}: {report.objective} for {report.target:.0%} of the requests, {report.rate:g} requests/s"
    rows = []
    for name, served in (("fewest throughout", report.static), ("as needed", report.scaled)):
        if served is not None:
            one = served.outcome
            ttft, tbt = (f"{1000 * value:.0f}" if value is not None else "" for value in (one.ttft_p90_s, one.tbt_p99_s))
            hours = f"{served.process_hours:.3f}"
            rows.append([name, served.layout, f"{one.attainment:.1%}", ttft, tbt, hours, str(len(served.changes))])
    show_table(console, title, ["processes", "layout", "attained", "TTFT P90", "TBT P99", "process hours", "changes"], rows)
    if report.saved is not None:
        console.print(f"saved: {report.saved:.0%} of the process hours")
    else:
        console.print(f"{report.rules.most} processes of each kind do not meet the objective")


if __name__ == "__main__":
    sys.exit(main())
