"""``mmrt bench sim``: simulate a load, and report as ``mmrt bench serve`` does."""

import argparse
import gc
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from rich.console import Console

from mmrt.bench.output import open_console, progress, write_json
from mmrt.bench.own_run import OwnRunError, own_run
from mmrt.bench.render import show_report
from mmrt.bench.serve.chat import make_conversations
from mmrt.bench.serve.errors import BenchError
from mmrt.bench.serve.load_options import LoadOptions
from mmrt.bench.serve.planned import plan_requests, plan_stall
from mmrt.bench.serve.plot import PlotError, require_matplotlib
from mmrt.bench.serve.record import Record
from mmrt.bench.serve.report import Report
from mmrt.bench.serve.workload import RequestPlan
from mmrt.runtime.config.runtime_config import RuntimeConfig
from mmrt.runtime.controller.scheduling.policy import Policy
from mmrt.runtime.errors import UserError
from mmrt.shm.errors import ShmError

from .costs import Costs, save_costs
from .devices import num_kv_devices
from .events import NS, to_ns
from .links import Link
from .loads import ClosedLoop, Load, OpenLoop, Senders, Stall
from .options import SimOptions, parse_sim
from .plot import plot_over_time
from .report import Steps, make_report
from .requests import Requests
from .simulation import Simulation, SimulationError, simulated_limits

_PATIENCE = 3  # times server.request_timeout_s
_COLLECT_AFTER = 20_000  # objects; a request leaves some thirty that refer to each other


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. Returns the exit status."""
    options, config, costs, policy, given = parse_sim(sys.argv[1:] if argv is None else argv)
    console = open_console(given.json)
    try:
        if given.validate:
            return _validate(given, config, costs, policy, console)
        began_s = time.process_time()
        if given.plot:
            require_matplotlib()
        num_devices = num_kv_devices(options.layout) if options.link else 1
        simulation, load = run_load(options, config, costs, policy, link=options.link, num_devices=num_devices)
        report = make_report(options, config, costs, simulation, load)
        show_report(console, report)
        _show_speed(console, report, time.process_time() - began_s)
        write_json(given.json, report)
        if given.plot:
            _plot(given.plot, options, costs, simulation)
    except (BenchError, OwnRunError, PlotError, ShmError, SimulationError, UserError, OSError, ValueError) as error:
        print(f"mmrt bench sim: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("mmrt bench sim: interrupted", file=sys.stderr)
        return 130
    return 1 if report.failures else 0


def _validate(given: argparse.Namespace, config: RuntimeConfig, costs: Costs, policy: Policy, console: Console) -> int:
    """Compare with live runs. Returns 1 if a figure is outside its limit."""
    from .profiling import PASS_S, Profiling  # these need an HTTP client, a simulation does not
    from .validate import check_loads, check_model, live_config, run_live, show_validation, simulate_rounds

    more = ["--num-requests", str(given.num_requests)] if given.num_requests else []
    check_loads(given.validate, more)
    with progress(console) as tell:
        if given.profile is None:
            check_model(given.checkpoint, costs)
            live = run_live(live_config(config, given.checkpoint, costs.model.dtype), given.validate, more, tell)
        else:
            measured = live_config(config, given.checkpoint)
            with own_run("profile") as run:
                profiling = Profiling(run, measured, tell)
                live = run_live(measured, given.validate, more, tell, lambda: profiling.take_pass(PASS_S))
            costs = profiling.costs(given.profile.stem)
            save_costs(given.profile, costs)
    costs_name = str(given.profile or given.costs)

    def simulated(arguments: Sequence[str]) -> list[Record]:
        simulation, _ = run_load(parse_sim([*arguments, "--costs", costs_name])[0], config, costs, policy)
        steps = Steps(simulation, costs)
        return [steps.record(record) for record in simulation.gateway.records]

    validation = simulate_rounds(live, costs, more, simulated)
    show_validation(console, validation)
    write_json(given.json, validation)
    return 0 if validation.is_valid else 1


def _show_speed(console: Console, report: Report, cpu_s: float) -> None:
    num_requests = report.groups[0].num_requests
    console.print(f"{num_requests} requests, {report.duration_s:.1f} s simulated in {cpu_s:.1f} s of processor time", style="dim")


def _plot(path: Path, options: SimOptions, costs: Costs, simulation: Simulation) -> None:
    """Write the picture. Raises: OSError; PlotError."""
    steps = Steps(simulation, costs)
    title = f"{options.policy}, simulated with costs {costs.name}" + (
        " (roofline, never measured)" if costs.origin == "roofline" else ""
    )
    plot_over_time(
        path, title, [steps.record(record) for record in simulation.gateway.records], options.slo.tbt_s if options.slo else None
    )


def simulate(options: LoadOptions, config: RuntimeConfig, costs: Costs, policy: Policy | None = None) -> Report:
    """Simulate a load to its end. Raises: as ``run_load``."""
    simulation, load = run_load(options, config, costs, policy)
    return make_report(options, config, costs, simulation, load)


def run_load(
    options: LoadOptions,
    config: RuntimeConfig,
    costs: Costs,
    policy: Policy | None = None,
    *,
    keeps_works: bool = False,
    link: Link | None = None,
    num_devices: int = 1,
    plans: Sequence[RequestPlan] | None = None,
    watch: Callable[[Simulation], object] | None = None,
) -> tuple[Simulation, Load]:
    """Simulate a load to its end. ``keeps_works``: with the works on each request (``Simulation.works``). ``link``: see ``links``.
    ``num_devices``: see ``simulated_limits``. ``plans``: in place of the requests of the options. ``watch`` is called before the first
    event, and may add events of its own.

    Raises: ConfigError; ValueError for a load that the model does not take, or a bad trace; OSError; SimulationError.
    """
    limits = simulated_limits(config, costs, num_devices)
    requests = Requests(costs, options.shapes, config.media)
    plans = plan_requests(options) if plans is None else plans
    requests.check(plans)
    load = make_load(options, plans)
    simulation = Simulation(config, costs, limits, policy, keeps_works=keeps_works, link=link, seed=options.seed)
    if watch is not None:
        watch(simulation)
    gc.collect()
    gc.freeze()
    thresholds = gc.get_threshold()
    gc.set_threshold(_COLLECT_AFTER, *thresholds[1:])
    try:
        run(simulation, load, requests)
    finally:
        gc.set_threshold(*thresholds)
        gc.unfreeze()
    if why := simulation.controller.state.policy_record.set_aside:
        raise SimulationError(f"the policy was {why}: the figures would be those of unified")
    return simulation, load


def run(simulation: Simulation, load: Load, requests: Requests) -> None:
    """Run a load until every request has ended and everything is given back. Raises: SimulationError if that does not come."""
    queue, gateway = simulation.queue, simulation.gateway
    load.begin(Senders(queue, gateway, requests, simulation.has_token))
    limit_ns = to_ns(_PATIENCE * simulation.timeout_s)

    def is_over() -> bool:
        if gateway.num_open and queue.now_ns <= gateway.changed_ns + limit_ns:
            return False  # nearly always
        if load.is_over and simulation.is_idle:
            return True
        if queue.now_ns > gateway.changed_ns + limit_ns and (gateway.num_open or load.is_over):
            still = f"{gateway.num_open} requests are open, {len(simulation.plans)} plans in work"
            raise SimulationError(f"no request has been sent or has ended for {limit_ns / NS:g} s of the simulation: {still}")
        return False

    queue.run(is_over)


def make_load(options: LoadOptions, plans: Sequence[RequestPlan]) -> Load:
    """The load shape of these options."""
    if options.scenario == "stall":
        return Stall(*plan_stall(options, plans))
    if options.scenario == "chat":
        turns = make_conversations(plans, options.num_turns, lambda plan: {})
        return ClosedLoop([conversation.turns for conversation in turns], options.concurrency)
    if options.rate is not None or options.trace is not None:
        return OpenLoop(plans)
    return ClosedLoop([(plan,) for plan in plans], options.concurrency)


if __name__ == "__main__":
    sys.exit(main())
