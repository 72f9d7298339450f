"""The planner's figures: of each layout, of Algorithm 2's choice, and their ranks; as JSON and as tables of text (pure)."""

from collections.abc import Mapping, Sequence
from typing import Literal

import msgspec

from mmrt.actors.gateway.watching.own_load import FULL
from mmrt.runtime.autoscale.demand import Demand

from ..goodput.tables import Table
from ..sim.endpoint import gateways_needed
from .grid import Bracket, Grid
from .heuristic import Division
from .measure import Outcome

FORMAT_VERSION = 1


class LayoutReport(msgspec.Struct, frozen=True, kw_only=True):
    """``is_candidate``: it is one of Algorithm 2's space. ``goodput``: requests per second; None where it was not searched for.
    ``fails``: the lowest rate that failed. ``is_exact``: no rate of the grid lies between the two. ``rank``: among the candidates, 1
    and the number of those with a higher goodput; equal ones share it."""

    layout: str
    is_candidate: bool
    goodput: float | None
    fails: float | None
    is_exact: bool
    rank: int | None
    capacity: float
    outcomes: list[Outcome]

    @property
    def at_goodput(self) -> Outcome | None:
        """The load at the goodput; where none was searched for, the only load."""
        return next((one for one in self.outcomes if self.goodput in (None, one.rate)), None)

    @property
    def missed(self) -> str:
        """The objective that is missed first above the goodput."""
        return next((one.missed for one in self.outcomes if one.rate == self.fails), "")


class PlanReport(msgspec.Struct, frozen=True, kw_only=True):
    """``rate``: at which all were measured; None if goodputs were searched for. ``chosen``: Algorithm 2's choice, of its three
    ``division.layouts`` that with the highest goodput. ``settings``: of the load."""

    format_version: int = FORMAT_VERSION
    origin: Literal["measured", "roofline"]
    costs: str
    note: str
    policy: str
    num_devices: int
    link_bytes_per_s: float
    load: str
    settings: dict[str, str | int | float | bool | None]
    objective: str
    target: float
    precision: float
    seconds: float
    rate: float | None
    demand: Demand
    division: Division
    layouts: list[LayoutReport]
    chosen: str | None
    chosen_rank: int | None
    best: str | None

    @property
    def num_candidates(self) -> int:
        return sum(one.is_candidate for one in self.layouts)


def report_layouts(
    grid: Grid,
    brackets: Mapping[str, Bracket],
    outcomes: Mapping[str, Mapping[int, Outcome]],
    capacities: Mapping[str, float],
    candidates: Sequence[str],
) -> list[LayoutReport]:
    """The layouts by goodput, the highest first."""
    passes = {layout: float("-inf") if bracket.passes is None else bracket.passes for layout, bracket in brackets.items()}

    def report(layout: str) -> LayoutReport:
        bracket = brackets[layout]
        rank = 1 + sum(passes[other] > passes[layout] for other in candidates)
        return LayoutReport(
            layout=layout,
            is_candidate=layout in candidates,
            goodput=0.0 if bracket.passes is None else grid.rate(bracket.passes),
            fails=None if bracket.fails is None else grid.rate(bracket.fails),
            is_exact=bracket.next(1) is None,
            rank=rank if layout in candidates else None,
            capacity=capacities[layout],
            outcomes=[outcome for _, outcome in sorted(outcomes[layout].items())],
        )

    return [report(layout) for layout in sorted(brackets, key=lambda layout: (-passes[layout], [*brackets].index(layout)))]


def choose(layouts: Sequence[LayoutReport], chosen_from: Sequence[str]) -> LayoutReport:
    """Algorithm 2's lines 17 to 23: the one of these with the highest goodput."""
    return max((one for one in layouts if one.layout in chosen_from), key=lambda one: one.goodput or 0.0)


def tables(report: PlanReport) -> list[Table]:
    """The layouts, and how Algorithm 2 divides the devices."""
    title = f"{report.num_devices} devices, {report.load}: {report.objective} for {report.target:.0%} of the requests"
    if report.rate is None:
        columns = ["layout", "rank", "req/s", "fails at", "misses", "of best", "TTFT P90", "TBT mean", "TBT P99", "gateways"]
        layouts = Table(title, columns, [_goodput_row(report, one) for one in report.layouts])
    else:
        columns = ["layout", "attained", "TTFT mean", "TTFT P90", "TBT mean", "TBT P99", "gateways"]
        layouts = Table(f"{title}, {report.rate:g} requests/s", columns, [_rate_row(one) for one in report.layouts])
    return [layouts, _division_table(report)]


def _goodput_row(report: PlanReport, one: LayoutReport) -> list[str]:
    best = report.layouts[0].goodput or 0.0
    point = one.at_goodput
    marks = " *" if one.layout == report.chosen else ""
    return [
        one.layout + marks,
        "" if one.rank is None else str(one.rank),
        f"{one.goodput:.3g}",
        "" if one.fails is None else f"{one.fails:.3g}",
        one.missed,
        f"{(one.goodput or 0.0) / best:.0%}" if best else "",
        *(_ms(value) for value in ((point.ttft_p90_s, point.tbt_mean_s, point.tbt_p99_s) if point else (None,) * 3)),
        _gateways(point),
    ]


def _rate_row(one: LayoutReport) -> list[str]:
    (point,) = one.outcomes
    times = point.ttft_mean_s, point.ttft_p90_s, point.tbt_mean_s, point.tbt_p99_s
    return [one.layout, f"{point.attainment:.1%}", *map(_ms, times), _gateways(point)]


def _gateways(point: Outcome | None) -> str:
    """Return how many the load needs."""
    return "" if point is None or point.gateways_busy is None else str(gateways_needed(point.gateways_busy))


def _division_table(report: PlanReport) -> Table:
    division, count = report.division, report.demand.num_requests
    total = sum(division.seconds.values())
    rows = [
        [
            name,
            f"{1000 * division.seconds[letter] / count:.2f}",
            f"{division.budgets[letter]} {unit}",
            f"{report.num_devices * division.seconds[letter] / total:.2f}",
            str(division.shares[letter]),
        ]
        for letter, name, unit in (("E", "encode", "rows"), ("P", "prefill", "tokens"), ("D", "decode", "sequences"))
    ]
    return Table(f"Algorithm 2: {', '.join(division.layouts)}", ["stage", "ms a request", "batch", "devices", "rounded"], rows)


def verdict(report: PlanReport) -> str:
    """The best layout, and the rank of Algorithm 2's choice, in words."""
    if report.best is None or report.chosen is None:
        return ""
    best, chosen = (next(one for one in report.layouts if one.layout == name) for name in (report.best, report.chosen))
    if not best.goodput:
        return "no layout meets the objective at any rate"
    point, short = best.at_goodput, ""
    if point is not None and point.num_requests < 0.99 * best.goodput * report.seconds:
        short = (
            f"\nthe trace has {point.num_requests} requests: above {point.num_requests / report.seconds:.3g} requests/s "
            f"they come for less than {report.seconds:g} s, and goodputs are too high"
        )
    ties = sum(one.rank == chosen.rank for one in report.layouts) - 1
    shared = f", shared with {ties} others" if ties > 1 else ", shared with another" if ties else ""
    return (
        f"best: {best.layout}, {best.goodput:.3g} requests/s. Algorithm 2 chooses {chosen.layout} (*): {chosen.goodput:.3g}, "
        f"rank {chosen.rank} of {report.num_candidates}{shared}{short}{_endpoint(best)}"
    )


def _endpoint(best: LayoutReport) -> str:
    """Say from which rate on one gateway is the limit of a layout, if it is below the goodput."""
    point = best.at_goodput
    if point is None or (busy := point.gateways_busy or 0.0) <= FULL:
        return ""
    needed, rate = gateways_needed(busy), FULL * point.rate / busy
    return (
        f'\nthe endpoint is the limit of {best.layout} with one gateway, from {rate:.3g} requests/s on: actors.layout = "{needed}G+…"'
    )


def _ms(seconds: float | None) -> str:
    return "" if seconds is None else f"{1e3 * seconds:.1f}" if seconds < 1 else f"{1e3 * seconds:.0f}"
