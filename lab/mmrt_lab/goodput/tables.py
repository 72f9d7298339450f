"""The judge's figures as tables of text (pure), for the terminal and for the page."""

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from statistics import median
from typing import NamedTuple

from mmrt.runtime.observe.breakdown import PARTS

from .report import SCALES, GoodputReport, Point, SystemReport

Row = list[str]

_OF_RATES = ("req/s", "goodput", "fails at", "area")  # columns that a load without a rate does not have
_OF_STALL = ("alone", "factor")


class Table(NamedTuple):
    """The first column is names, the others are numbers."""

    title: str
    columns: Row
    rows: list[Row]


def tables(report: GoodputReport) -> Iterator[Table]:
    """Goodput, each load, attainment over the objective's scale, and latency in parts."""
    for table in _tables(report):
        left_out = [*([] if report.has_rate else _OF_RATES), *([] if report.has_kills else ["kills"])]
        yield _without(table, [*left_out, *([] if report.load == "stall" else _OF_STALL)])


def _without(table: Table, left_out: Collection[str]) -> Table:
    kept = [number for number, name in enumerate(table.columns) if name not in left_out]
    return Table(table.title, [table.columns[number] for number in kept], [[row[number] for number in kept] for row in table.rows])


def _tables(report: GoodputReport) -> Iterator[Table]:
    yield Table(title(report), ["system", "policy", "layout", "goodput", "fails at", "area"], list(map(_system, report.systems)))
    loads = [(system, point) for system in report.systems for point in system.points]
    columns = ["system", "req/s", "attained", "attained/s", "tok in/s", "tok out/s", "failed", "kills"]
    yield Table("each load", columns, [_load(system, point) for system, point in loads])
    columns = ["system", "req/s", "TTFT mean", "P50", "P90", "TBT mean", "P50", "P99", *_OF_STALL, "E2E mean"]
    what = "; TBT: of the streams while media come; alone: its mean before" if report.load == "stall" else ""
    yield Table(f"latency, ms{what}", columns, [_latency(system, point) for system, point in loads])
    if any(len(point.rounds) > 1 for _, point in loads):
        columns = ["system", "req/s", "attained", "TTFT P90, ms", "TBT P99, ms"]
        yield Table(f"rounds alone: lowest, median, highest{what}", columns, [_spread(system, point) for system, point in loads])
    if any(len(point.by_group) > 1 for _, point in loads):
        columns = ["system", "req/s", "kind", "requests", "cut", "attained", "mean", "P50", "P90", "P99"]
        yield Table("by kind; TTFT in ms", columns, [row for system, point in loads for row in _groups(system, point)])
    shown = [(system, point) for system in report.systems for point in shown_points(report, system)]
    columns = ["system", "req/s", *(f"{scale:g}" for scale in SCALES)]
    yield Table("attainment of the objective times", columns, [_scales(system, point) for system, point in shown])
    if any(middle_point(report, system).breakdown for system in report.systems):
        yield _parts(report)


def title(report: GoodputReport) -> str:
    """Load and objective in words."""
    if not report.has_rate:
        return f"{report.load}: {report.objective}"
    return f"{report.load}: requests/s with {report.objective} for {report.target:.0%} of the requests"


def shown_points(report: GoodputReport, system: SystemReport) -> Sequence[Point]:
    """The loads at the rates that were asked for; without such, the one at the goodput. All that have no rate."""
    if not report.has_rate:
        return system.points
    shared = [point for point in system.points if point.rate in report.rates]
    return shared or [point for point in system.points if point.rate == system.goodput] or system.points[:1]


def middle_point(report: GoodputReport, system: SystemReport) -> Point:
    """The one in the middle of these."""
    points = shown_points(report, system)
    return points[len(points) // 2]


def at_rate(system: SystemReport, point: Point, between: str = " ") -> str:
    """The system's name, and the rate if the load has one."""
    return system.name if point.rate is None else f"{system.name}{between}{point.rate:.3g}/s"


def goodput_text(system: SystemReport) -> str:
    """The goodput; "at least" where no rate failed."""
    if system.goodput is None:
        return ""
    return f"{'' if system.fails is not None else 'at least '}{system.goodput:.3g}"


def _system(system: SystemReport) -> Row:
    fails = "" if system.fails is None else f"{system.fails:.3g}"
    area = "" if system.area is None else f"{system.area:.3f}"
    return [system.name, system.policy, system.layout, goodput_text(system), fails, area]


def _load(system: SystemReport, point: Point) -> Row:
    rates = point.attained_requests_per_s, point.input_tokens_per_s, point.output_tokens_per_s
    failed = sum(point.failures.values())
    return [
        system.name,
        _rate(point),
        f"{point.attainment:.1%}",
        f"{rates[0]:.3g}",
        *(f"{r:.0f}" for r in rates[1:]),
        str(failed),
        str(point.num_kills),
    ]


def _latency(system: SystemReport, point: Point) -> Row:
    ttft, tbt, e2e = point.ttft, point.tbt, point.e2e
    times = [
        *(("", "", "") if ttft is None else map(_ms, (ttft.mean, ttft.p50, ttft.p90))),
        *(("", "", "") if tbt is None else map(_ms, (tbt.mean, tbt.p50, tbt.p99))),
        "" if point.tbt_alone is None else _ms(point.tbt_alone.mean),
        "" if point.degradation is None else f"{point.degradation:.2f}",
        "" if e2e is None else _ms(e2e.mean),
    ]
    return [system.name, _rate(point), *times]


def _spread(system: SystemReport, point: Point) -> Row:
    def span(values: Iterable[float | None], text: Callable[[float], str]) -> str:
        known = [value for value in values if value is not None]
        return ", ".join(map(text, (min(known), median(known), max(known)))) if known else ""

    rounds = point.rounds
    return [
        system.name,
        _rate(point),
        span((one.attainment for one in rounds), "{:.1%}".format),
        span((one.ttft_p90 for one in rounds), _ms),
        span((one.tbt_p99 for one in rounds), _ms),
    ]


def _groups(system: SystemReport, point: Point) -> Iterator[Row]:
    for name, group in point.by_group.items():
        ttft = group.ttft
        times = ("", "", "", "") if ttft is None else map(_ms, (ttft.mean, ttft.p50, ttft.p90, ttft.p99))
        attained = "" if group.attainment is None else f"{group.attainment:.1%}"
        yield [system.name, _rate(point), name, str(group.num_requests), str(group.num_cut), attained, *times]


def _rate(point: Point) -> str:
    return "" if point.rate is None else f"{point.rate:.3g}"


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.1f}" if seconds < 1 else f"{1e3 * seconds:.0f}"


def _scales(system: SystemReport, point: Point) -> Row:
    return [system.name, _rate(point), *(f"{share:.0%}" for _, share in point.by_scale)]


def _parts(report: GoodputReport) -> Table:
    """A part in each row."""
    points = [middle_point(report, system) for system in report.systems]
    columns = ["part", *(at_rate(system, point) for system, point in zip(report.systems, points, strict=True))]
    means = [{field: part.mean for field, part in point.breakdown.items()} for point in points]
    rows = [[name, *(_ms(mean.get(field, 0.0)) for mean in means)] for field, name in PARTS.items()]
    rows.append(["sum", *(_ms(sum(mean.values())) for mean in means)])
    rows.append(["E2E", *("" if point.e2e is None else _ms(point.e2e.mean) for point in points)])
    return Table("latency in parts, mean ms", columns, rows)
