"""Results that a section hands to the command, and their judgement: rows, ceilings, targets, shares, verdicts. Pure."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Literal

Ceilings = Mapping[str, float]
"""What the device reached, by unit: GB/s of a copy on the device (read and written), TFLOP/s of a bfloat16 matrix product."""

REFERENCE_DEVICE = "H200"
REFERENCE_CEILINGS: Ceilings = {"GB/s": 4300.0, "TFLOP/s": 790.0}
"""Of the device that targets are written for. Rates and times elsewhere are measured by that device's own ceilings."""


@dataclass(frozen=True, slots=True)
class Target:
    """``of`` a row's rate, of its time in microseconds, or of its share of the ceiling; at most ``goal`` for a time, else at least."""

    goal: float
    of: Literal["rate", "time", "share"]


TARGETS: Mapping[str, Target] = {
    "decode": Target(3600.0, "rate"),
    "decode, 8 bits": Target(3100.0, "rate"),
    "decode, 8 bits over 16": Target(1.7, "rate"),
    "decode, one row": Target(18.0, "time"),
    "extend": Target(430.0, "rate"),
    "vision": Target(300.0, "rate"),
    "traffic": Target(3400.0, "rate"),
    "sampling": Target(200.0, "time"),
    "step, one row": Target(1 / 1.25, "share"),
    "step, 64 rows": Target(1 / 1.4, "share"),
    "prefill": Target(0.6, "share"),
    "video, all units over one": Target(5.0, "rate"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One check or measurement. ``unit`` of ``rate``: GB/s, TFLOP/s, or x for a ratio. ``target``: a key of ``TARGETS``, or nothing.

    ``difference``: the largest from the reference, in checks. ``first_s``: by how much the first launch took longer: compilation.
    """

    section: str = ""
    case: str = ""
    time_us: float | None = None
    rate: float | None = None
    unit: str = ""
    target: str = ""
    first_s: float | None = None
    difference: float | None = None
    note: str = ""
    failed: bool = False

    def to_json(self) -> str:
        """One line."""
        return json.dumps(asdict(self))


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """``share`` of the ceiling of the row's unit. ``goal``: the target on this device, in ``goal_unit``."""

    row: Row
    share: float | None = None
    goal: float | None = None
    goal_unit: str = ""
    verdict: Literal["ok", "FAILED", "reached", "MISSED", ""] = ""

    def cells(self) -> list[str]:
        """For the table: case, time, rate, share, goal, verdict, first launch, and what there is to say."""
        row = self.row
        difference = "" if row.difference is None or row.failed else f"differs by {row.difference:.1e}"
        return [
            row.case,
            "" if row.time_us is None else f"{row.time_us:,.1f} us",
            "" if row.rate is None else f"{row.rate:,.4g} {row.unit}",
            "" if self.share is None else f"{self.share:.1%}",
            "" if self.goal is None else f"{self.goal:.1%}" if self.goal_unit == "share" else f"{self.goal:,.4g} {self.goal_unit}",
            self.verdict,
            "" if row.first_s is None else f"{row.first_s:.1f} s",
            ", ".join(text for text in (difference, row.note) if text),
        ]


COLUMNS = ("", "time", "rate", "share", "target", "", "first launch", "")


def find_ceilings(rows: Iterable[Row], section: str) -> dict[str, float]:
    """The best rates of a section, by unit."""
    found: dict[str, float] = {}
    for row in rows:
        if row.section == section and row.rate is not None and not row.failed:
            found[row.unit] = max(found.get(row.unit, 0.0), row.rate)
    return found


def judge(row: Row, ceilings: Ceilings, device: str) -> Judged:
    """``device``: its name. Without the ceiling that a share or a scaled target needs, there is none."""
    share = row.rate / ceilings[row.unit] if row.rate is not None and ceilings.get(row.unit) else None
    if row.failed:
        return Judged(row=row, share=share, verdict="FAILED")
    if not row.target:
        return Judged(row=row, share=share, verdict="ok" if row.difference is not None else "")
    target = TARGETS[row.target]
    value = {"rate": row.rate, "time": row.time_us, "share": share}[target.of]
    goal_unit = {"rate": row.unit, "time": "us", "share": "share"}[target.of]
    goal = _scaled(target, row.unit, ceilings, device)
    if value is None or goal is None:
        return Judged(row=row, share=share, goal=goal, goal_unit=goal_unit)
    is_reached = value <= goal if target.of == "time" else value >= goal
    return Judged(row=row, share=share, goal=goal, goal_unit=goal_unit, verdict="reached" if is_reached else "MISSED")


def _scaled(target: Target, unit: str, ceilings: Ceilings, device: str) -> float | None:
    unit = "GB/s" if target.of == "time" else unit
    if target.of == "share" or unit not in REFERENCE_CEILINGS or REFERENCE_DEVICE in device:
        return target.goal
    if not ceilings.get(unit):
        return None
    factor = ceilings[unit] / REFERENCE_CEILINGS[unit]
    return target.goal / factor if target.of == "time" else target.goal * factor
