"""The judge's report: on the terminal, as a picture, and as a page that needs nothing else."""

import base64
import html
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console

from mmrt.bench.output import write_json
from mmrt.bench.render import show_environment, show_table
from mmrt.bench.serve.plot import require_matplotlib
from mmrt.bench.serve.report import Distribution
from mmrt.runtime.observe.breakdown import PARTS

from .report import GoodputReport, Point, SystemReport
from .tables import Table, at_rate, middle_point, tables, title

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 72rem; padding: 0 1rem; color: #222 }
h1 { font-size: 1.3rem } h2 { font-size: 1rem; margin-top: 2rem } img { width: 100% } p.origin { color: #555 } p.warning { color: #a50 }
table { border-collapse: collapse; font-size: 0.85rem }
td, th { padding: 0.15rem 0.7rem; text-align: right; border-bottom: 1px solid #ddd }
td:first-child, th:first-child { text-align: left }
"""


def show_goodput(console: Console, report: GoodputReport) -> None:
    """Print the tables."""
    style = "yellow" if report.origin == "roofline" else "dim"
    console.print(f"{report.source}. {report.note}", style=style, soft_wrap=True, highlight=False)
    if report.environment is not None:
        show_environment(console, report.environment)
    for table in tables(report):
        show_table(console, *table)


def write_goodput(out: Path, report: GoodputReport) -> None:
    """Write ``report.json``, ``goodput.png`` and ``index.html`` into a directory. Raises: OSError; PlotError without matplotlib."""
    picture = draw(report)
    out.mkdir(parents=True, exist_ok=True)
    write_json(out / "report.json", report)
    (out / "goodput.png").write_bytes(picture)
    (out / "index.html").write_text(page(report, picture))


def page(report: GoodputReport, picture: bytes) -> str:
    """An HTML page with the picture in it."""
    heading, kind = html.escape(title(report)), "warning" if report.origin == "roofline" else "origin"
    image = base64.b64encode(picture).decode()
    machine = report.environment
    where = "" if machine is None else f" {machine.cpu}, {machine.date}, load {machine.load_average[0]:.1f}."
    settings = ", ".join(f"{key} {value}" for key, value in report.settings.items() if value not in (None, ""))
    return (
        f'<!doctype html>\n<html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">\n'
        f"<title>{heading}</title>\n<style>{_STYLE}</style>\n<h1>{heading}</h1>\n"
        f'<p class="{kind}">{html.escape(f"{report.source}. {report.note}{where}")}</p>\n'
        f'<img alt="{heading}" src="data:image/png;base64,{image}">\n'
        f"{''.join(map(_table, tables(report)))}<h2>settings</h2>\n<p>{html.escape(settings)}</p>\n</html>\n"
    )


def _table(table: Table) -> str:
    head = "".join(f"<th>{html.escape(name)}</th>" for name in table.columns)
    rows = "".join(f"<tr>{''.join(f'<td>{html.escape(cell)}</td>' for cell in row)}</tr>\n" for row in table.rows)
    return f"<h2>{html.escape(table.title)}</h2>\n<table><tr>{head}</tr>\n{rows}</table>\n"


def draw(report: GoodputReport) -> bytes:
    """The curves and the parts, in PNG. Raises: PlotError without matplotlib."""
    figure = require_matplotlib()(figsize=(13, 7.5), layout="constrained")
    figure.suptitle(f"{title(report)}\n{report.source}", fontsize=10)
    axes = figure.subplots(2, 3)
    _per_load(axes[0][0], report, lambda point: point.attainment, "attainment")
    if report.has_rate:
        axes[0][0].axhline(report.target, color="grey", linewidth=0.8, linestyle="--")
    axes[0][0].set_ylim(0, 1.03)
    _over_scale(axes[0][1], report)
    _per_load(axes[0][2], report, lambda point: point.output_tokens_per_s, "tokens out per s")
    _per_load(axes[1][0], report, lambda point: _of(point.ttft, "p90"), "TTFT P90, s", report.slo_ttft_s)
    _per_load(axes[1][1], report, lambda point: _of(point.tbt, "p99"), "TBT P99, s", report.slo_tbt_s)
    _parts(axes[1][2], report)
    data = io.BytesIO()
    figure.savefig(data, format="png", dpi=110)
    return data.getvalue()


def _of(values: Distribution | None, name: str) -> float:
    return float("nan") if values is None else float(getattr(values, name))


def _per_load(axis: Any, report: GoodputReport, value: Callable[[Point], float], name: str, objective: float | None = None) -> None:
    """Curves over rate; bars for loads without one."""
    for system in report.systems:
        if report.has_rate:
            axis.plot([point.rate for point in system.points], list(map(value, system.points)), ".-", label=system.name)
        else:
            axis.bar([system.name], list(map(value, system.points)), label=system.name)
    if objective is not None:
        axis.axhline(objective, color="grey", linewidth=0.8, linestyle="--")
    if objective is not None and report.has_rate:
        axis.set_yscale("log", subs=(2, 5))
        axis.yaxis.set_major_formatter("{x:g}")
        axis.yaxis.set_minor_formatter("{x:g}")
    axis.set_ylabel(name)
    axis.grid(alpha=0.3)
    if report.has_rate:
        axis.set_xlabel("requests per s")
        axis.legend(fontsize=8)


def _over_scale(axis: Any, report: GoodputReport) -> None:
    for system in report.systems:
        point = middle_point(report, system)
        scales, shares = zip(*point.by_scale, strict=True)
        axis.plot(scales, shares, ".-", label=at_rate(system, point))
    axis.set_xlabel("objective times")
    axis.set_ylabel("attainment")
    axis.set_ylim(0, 1.03)
    axis.grid(alpha=0.3)
    axis.legend(fontsize=8)


def _parts(axis: Any, report: GoodputReport) -> None:
    """Stacked bars of the mean parts (TI22)."""
    shown: list[tuple[SystemReport, Point]] = [(system, middle_point(report, system)) for system in report.systems]
    shown = [(system, point) for system, point in shown if point.breakdown]
    below = [0.0] * len(shown)
    for number, (field, name) in enumerate(PARTS.items()):
        heights = [point.breakdown[field].mean for _, point in shown]
        axis.bar(range(len(shown)), heights, bottom=below, label=name, color=f"C{number}")
        below = [low + height for low, height in zip(below, heights, strict=True)]
    axis.set_xticks(range(len(shown)), [at_rate(system, point, "\n") for system, point in shown], fontsize=8)
    axis.set_ylabel("mean latency, s")
    axis.set_ylim(0, 1.4 * max(below, default=1.0))  # room for the legend
    axis.legend(fontsize=7, ncols=2, loc="upper left")
