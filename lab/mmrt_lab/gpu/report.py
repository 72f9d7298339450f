"""The report: tables in plain text, and JSON."""

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


def _judgement(judged: Judged) -> dict[str, Any]:
    return {"share": judged.share, "goal": judged.goal, "goal_unit": judged.goal_unit, "verdict": judged.verdict}
