"""``mmrt plan``: simulate every layout of the stages over devices, and print what each can serve (TI9, TI10)."""

import sys
import time
from collections.abc import Sequence

import msgspec

from mmrt.bench.output import Tell, open_console, progress, write_json
from mmrt.bench.render import show_table
from mmrt.bench.serve.load_options import settings_of
from mmrt.bench.serve.planned import plan_requests
from mmrt.models.config import facts_of, weight_bytes
from mmrt.runtime.autoscale.demand import Demand
from mmrt.runtime.errors import ConfigError

from ..sim.costs import CostsError
from ..sim.requests import Requests
from ..sim.simulation import DEVICE_BYTES, SimulationError
from .candidates import candidates, colocated
from .demand import demand_of
from .grid import Grid
from .heuristic import Division, Memory, capacity, divide
from .measure import Outcome, measure
from .options import PlanOptions, parse_plan
from .pool import workers
from .report import LayoutReport, PlanReport, choose, report_layouts, tables, verdict
from .search import Measure, Search

_START_SHARE = 0.8
_SAMPLE = 2000  # requests of a load that Algorithm 2 looks at
_options: PlanOptions  # of a process that simulates


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. Returns the exit status."""
    argv = sys.argv[1:] if argv is None else argv
    options = parse_plan(argv)
    console = open_console(options.json)
    began_s = time.monotonic()
    try:
        with progress(console) as tell, workers(options.num_workers, _begin, [*argv]) as pool:
            report = plan(options, lambda layout, rate: pool.submit(_measure, layout, rate), tell)
        style = "yellow" if report.origin == "roofline" else "dim"
        console.print(f"objective: {options.objective}", style="dim", highlight=False)
        console.print(f"simulated with costs {options.costs.title}. {report.note}", style=style, soft_wrap=True, highlight=False)
        for table in tables(report):
            show_table(console, *table)
        console.print(verdict(report), soft_wrap=True)
        console.print(f"{_num_loads(report)} loads in {time.monotonic() - began_s:.0f} s", style="dim")
        write_json(options.json, report)
    except (ConfigError, CostsError, SimulationError, OSError, ValueError) as error:
        print(f"mmrt plan: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("mmrt plan: interrupted", file=sys.stderr)
        return 130
    return 0


def _begin(argv: Sequence[str]) -> None:
    global _options
    _options = parse_plan(argv)


def _measure(layout: str, rate: float) -> Outcome:
    return measure(_options, layout, rate, to_the_end=_options.rate is not None)


def plan(options: PlanOptions, measure: Measure, tell: Tell) -> PlanReport:
    """Compare all layouts. Raises: ValueError for a load that the model does not take, a bad trace, or an objective that no layout
    meets; OSError; SimulationError."""
    demand = demand_at(options)
    division = divide(options.num_devices, demand, options.costs, options.objective.slo, memory_of(options))
    names = candidates(options.num_devices)
    capacities = {layout: capacity(layout, demand, division.seconds) for layout in (*names, colocated(options.num_devices))}
    if options.rate is None:
        grid = Grid(options.precision)
        starts = {layout: _start(options, rate) for layout, rate in capacities.items()}
        search = Search(grid, starts, division.layouts, options.target)
        search.run(measure, options.num_workers, tell)
        layouts = report_layouts(grid, search.brackets, search.outcomes, capacities, names)
        chosen = choose(layouts, division.layouts)
        return _report(options, demand, division, layouts, chosen)
    outcomes = _at_rate([*capacities], options.rate, measure, tell)
    layouts = [
        LayoutReport(
            layout=layout,
            is_candidate=layout in names,
            goodput=None,
            fails=None,
            is_exact=False,
            rank=None,
            capacity=capacities[layout],
            outcomes=[outcome],
        )
        for layout, outcome in outcomes.items()
    ]
    return _report(options, demand, division, layouts, None)


def _start(options: PlanOptions, capacity: float) -> float:
    """The rate to begin a search at: a little below that at which the queue at the end takes as long as the objective of TTFT."""
    return _START_SHARE * capacity * (1 + options.objective.slo.ttft_s / (options.target * options.seconds))


def demand_at(options: PlanOptions) -> Demand:
    """Return the work that the load asks of each stage. Raises: ValueError, OSError."""
    requests = Requests(options.costs, options.load.shapes, options.base.media)
    plans = plan_requests(msgspec.structs.replace(options.load, rate=1.0, num_requests=_SAMPLE))
    requests.check(plans)
    return demand_of(plans, requests)


def memory_of(options: PlanOptions) -> Memory:
    """The memory of one of the devices."""
    model, page_tokens = options.costs.model, options.base.memory.kv_page_tokens
    total = DEVICE_BYTES.get(options.costs.device, 0)
    return Memory(
        free_bytes=max(0, total - weight_bytes(model)),
        token_bytes=facts_of(model, page_tokens).kv_page_bytes / page_tokens,
        num_rows=options.base.memory.max_sequences,
    )


def _at_rate(layouts: Sequence[str], rate: float, measure: Measure, tell: Tell) -> dict[str, Outcome]:
    futures = {layout: measure(layout, rate) for layout in layouts}
    outcomes = {}
    for layout, future in futures.items():
        tell(f"{layout}: {rate:.3g} requests/s")
        outcomes[layout] = future.result()
    return outcomes


def _report(
    options: PlanOptions, demand: Demand, division: Division, layouts: list[LayoutReport], chosen: LayoutReport | None
) -> PlanReport:
    costs, load = options.costs, options.load
    return PlanReport(
        origin=costs.origin,
        costs=costs.name,
        note=costs.note,
        policy=options.policy.rpartition("/")[2],
        num_devices=options.num_devices,
        link_bytes_per_s=options.link.bytes_per_s,
        load=load.workload or (load.trace.name if load.trace else load.scenario),
        settings=settings_of(load),
        objective=str(options.objective),
        target=options.target,
        precision=options.precision,
        seconds=options.seconds,
        rate=options.rate,
        demand=demand,
        division=division,
        layouts=layouts,
        chosen=None if chosen is None else chosen.layout,
        chosen_rank=None if chosen is None else chosen.rank,
        best=layouts[0].layout if chosen else None,
    )


def _num_loads(report: PlanReport) -> int:
    return sum(len(one.outcomes) for one in report.layouts)


if __name__ == "__main__":
    sys.exit(main())
