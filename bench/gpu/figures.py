"""Figures that ``serve`` reports, with their targets, and a picture of them. Pure except for the picture's file."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from ..serve.plot import require_matplotlib

_AT_MOST = ("s", "times")  # units of which less is better


class Figure(msgspec.Struct, frozen=True, kw_only=True):
    """One number of a section, or why there is none: a failure, where ``in_time``.

    ``target``: at most, of seconds and of times as long; at least, of a share.
    """

    section: str
    case: str
    value: float | None = None
    unit: str = ""
    target: float | None = None
    note: str = ""
    in_time: bool = True

    @property
    def verdict(self) -> str:
        if self.value is None:
            return "FAILED" if self.in_time else ""
        if self.target is None:
            return ""
        return "reached" if (self.value <= self.target if self.unit in _AT_MOST else self.value >= self.target) else "MISSED"

    def cells(self) -> list[str]:
        value = "" if self.value is None else f"{self.value:,.4g} {self.unit}"
        target = "" if self.target is None else f"{self.target:g}"
        return [f"{self.section}: {self.case}", value, target, self.verdict, self.note]


def write_picture(path: Path, title: str, figures: Sequence[Figure]) -> None:
    """Bars of all figures, a panel for each unit, with targets as marks. Raises: PlotError without matplotlib; OSError."""
    figure_class = require_matplotlib()
    units: dict[str, list[Figure]] = {}
    for figure in figures:
        if figure.value is not None:
            units.setdefault(figure.unit, []).append(figure)
    heights = [len(shown) + 2 for shown in units.values()] or [1]
    picture = figure_class(figsize=(11, 1 + 0.24 * sum(heights)), layout="constrained")
    picture.suptitle(title)
    axes = picture.subplots(len(heights), 1, squeeze=False, height_ratios=heights)
    for axis, (unit, shown) in zip(axes[:, 0], units.items(), strict=False):
        _draw(axis, unit, shown)
    picture.savefig(path)


def _draw(axis: Any, unit: str, shown: Sequence[Figure]) -> None:
    places = range(len(shown))
    axis.barh(places, [figure.value for figure in shown])
    axis.set_yticks(places, [f"{figure.section}: {figure.case}" for figure in shown], fontsize=7)
    axis.invert_yaxis()
    axis.set_xlabel(unit)
    for place, figure in zip(places, shown, strict=True):
        if figure.target is not None:
            axis.plot([figure.target] * 2, [place - 0.4, place + 0.4], color="black")
