"""The report: tables in plain text, JSON, and pictures where matplotlib is installed."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from .device import Facts
from .results import COLUMNS, Ceilings, Judged

_MOST_NAME = 100  # characters of a cell


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """``seconds`` that each section took."""

    facts: Facts
    quick: bool
    ceilings: Ceilings
    rows: Sequence[Judged]
    seconds: Mapping[str, float]

    def count(self, verdict: str) -> int:
        return sum(judged.verdict == verdict for judged in self.rows)

    def to_json(self) -> str:
        fields = {
            "facts": dict(self.facts),
            "quick": self.quick,
            "ceilings": dict(self.ceilings),
            "seconds": dict(self.seconds),
            "rows": [{**asdict(judged.row), **_judgement(judged)} for judged in self.rows],
        }
        return json.dumps(fields, indent=1) + "\n"


def format_report(report: Report) -> str:
    """All that the command prints at its end: facts, a table per section, and what came of it."""
    facts = [f"{name}: {value}" for name, value in report.facts.items()]
    parts = ["\n".join(facts)]
    if report.ceilings:
        ceilings = [f"{value:,.0f} {unit}" for unit, value in report.ceilings.items()]
        parts.append(f"ceilings that shares are of: {', '.join(ceilings)}")
    for section, seconds in report.seconds.items():
        mine = [judged for judged in report.rows if judged.row.section == section]
        first_s = sum(judged.row.first_s or 0.0 for judged in mine)
        title = f"{section}  ({seconds:.0f} s, of which first launches {first_s:.1f} s)"
        parts.append(format_table(title, COLUMNS, [judged.cells() for judged in mine]))
    counts = ", ".join(f"{report.count(verdict)} {verdict}" for verdict in ("ok", "FAILED", "reached", "MISSED"))
    parts.append(f"{sum(report.seconds.values()):.0f} s; {counts}")
    return "\n\n".join(parts)


def format_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """The first and last columns left-aligned, the others right; empty columns are omitted."""
    kept = [index for index in range(len(columns)) if not index or any(row[index] for row in rows)]
    table = [[row[index] for index in kept] for row in [list(columns), *rows]]
    widths = [min(max(len(row[index]) for row in table), _MOST_NAME) for index in range(len(kept))]
    lines = [title]
    for row in table:
        cells = [cell.ljust(width) for cell, width in zip(row[:1], widths[:1], strict=True)]
        middle = list(zip(row, widths, kept, strict=True))[1:]
        cells += [cell.ljust(width) if index == len(columns) - 1 else cell.rjust(width) for cell, width, index in middle]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def write_report(report: Report, path: Path) -> Path:
    """Write JSON, complete at any time: an interrupted bench leaves the last report. Raises: OSError."""
    unfinished = path.with_suffix(".part")
    unfinished.write_text(report.to_json())
    return unfinished.replace(path)


def write_picture(report: Report, path: Path) -> Path:
    """A PNG. Raises: ImportError without matplotlib; OSError."""
    from matplotlib.figure import Figure

    _draw(Figure, report).savefig(path)
    return path


def _judgement(judged: Judged) -> dict[str, Any]:
    return {"share": judged.share, "goal": judged.goal, "goal_unit": judged.goal_unit, "verdict": judged.verdict}


def _draw(figure_class: Any, report: Report) -> Any:
    """Shares of the ceilings as bars, with targets as marks."""
    rows = [judged for judged in report.rows if judged.share is not None]
    figure = figure_class(figsize=(12, 1.5 + 0.24 * len(rows)), layout="constrained")
    axis = figure.subplots()
    colors = ["tab:blue" if judged.row.unit == "GB/s" else "tab:orange" for judged in rows]
    axis.barh(range(len(rows)), [judged.share for judged in rows], color=colors)
    axis.set_yticks(range(len(rows)), [f"{judged.row.section}: {judged.row.case}" for judged in rows], fontsize=7)
    axis.invert_yaxis()
    for number, judged in enumerate(rows):
        if judged.goal is not None and judged.row.rate and judged.goal_unit in (judged.row.unit, "share"):
            share = judged.share if judged.share is not None else 0.0
            goal = judged.goal if judged.goal_unit == "share" else judged.goal / judged.row.rate * share
            axis.plot([goal, goal], [number - 0.4, number + 0.4], color="black")
    axis.axvline(1.0, color="gray", linewidth=0.8)
    axis.set_xlabel("share of the copy (blue) or of the matrix product (orange) measured; black: target")
    axis.set_title(str(report.facts.get("device", "")))
    return figure
