"""Pictures of ``bench serve``. Called by it; the lab has its own, which begin and end here.

matplotlib comes with ``mmrt[test]``; only this module imports it, and only when a picture is asked for.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .record import Record
from .stall import STREAM_GROUP, StallRun


class PlotError(Exception):
    """No picture can be made."""


def require_matplotlib() -> Any:
    """matplotlib's Figure class. Raises: PlotError, saying what to install."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise PlotError("a plot needs matplotlib: pip install matplotlib") from None
    return Figure


def plot_run(path: Path, title: str, records: Sequence[Record], stall: StallRun | None = None) -> None:
    """Write a picture (format by suffix): cumulative TTFT, TBT and E2E by group; for ``stall`` the TBTs over time.

    Raises: PlotError if matplotlib is missing or does not know the format.
    """
    figure = require_matplotlib()(figsize=(12, 7.5 if stall else 4), layout="constrained")
    figure.suptitle(title)
    axes = figure.subplots(2 if stall else 1, 3, squeeze=False)
    groups = sorted({record.group for record in records})
    good = [record for record in records if record.error is None]
    for group in groups:
        mine = [record for record in good if record.group == group]
        _cumulative(axes[0][0], [r.ttft_s for r in mine if r.ttft_s is not None], group)
        _cumulative(axes[0][1], [tbt_s for r in mine for tbt_s in r.tbts_s], group)
        _cumulative(axes[0][2], [r.e2e_s for r in mine if r.is_success], group)
    for axis, name in zip(axes[0], ("TTFT, s", "TBT, s", "E2E, s"), strict=True):
        axis.set_xlabel(name)
        axis.set_ylim(0, 1)
        axis.grid(alpha=0.3)
        if axis.lines:
            axis.legend()
    if stall:
        wide = axes[1][0].get_gridspec()
        for axis in axes[1]:
            axis.remove()
        _timeline(figure.add_subplot(wide[1, :]), stall)
    save(figure, path)


def save(figure: Any, path: Path) -> None:
    """Write a picture, format by suffix. Raises: PlotError where that is not known."""
    try:
        figure.savefig(path)
    except ValueError as error:
        raise PlotError(f"cannot write {path}: {error}") from None


def _cumulative(axis: Any, values: Sequence[float], label: str) -> None:
    ordered = sorted(values)
    if ordered:
        axis.plot(ordered, [(number + 1) / len(ordered) for number in range(len(ordered))], label=label, drawstyle="steps-post")


def _timeline(axis: Any, stall: StallRun) -> None:
    """Each stream's times between tokens, with the time from arrival to first token of each fresh request shaded."""
    origin_s = stall.alone[0]
    for record in stall.fresh:
        first_s = record.chunks[0].time_s if record.chunks else record.end_s
        axis.axvspan(record.sent_s - origin_s, first_s - origin_s, color="tab:orange", alpha=0.15, linewidth=0)
    points = [point for record in stall.streams if record.group == STREAM_GROUP for point in record.timed_tbts()]
    axis.plot([time_s - origin_s for time_s, _ in points], [tbt_s * 1000 for _, tbt_s in points], ".", markersize=2)
    axis.axvline(stall.alone[1] - origin_s, color="black", linewidth=0.8)
    axis.set_xlabel("s; shaded: a fresh request waits for its first token")
    axis.set_ylabel("TBT of the text streams, ms")
    axis.grid(alpha=0.3)
