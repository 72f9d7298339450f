"""Pictures of ``bench serve`` and ``bench video``. Called by these.

matplotlib comes with ``mmrt[test]``; only this module imports it, and only when a picture is asked for.
"""

from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .record import Record
from .report import percentile
from .stall import STREAM_GROUP, StallRun
from .trace_stages import STAGE_OF, StageSlice


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
    _save(figure, path)


def plot_over_time(path: Path, title: str, records: Sequence[Record], objective_s: float | None = None) -> None:
    """Write a picture of each second of a load: its longest time between tokens and their P99, beside ``objective_s``, and the requests
    that came.

    Raises: PlotError if matplotlib is missing or does not know the format.
    """
    figure = require_matplotlib()(figsize=(9, 4.5), layout="constrained")
    figure.suptitle(title, fontsize=10)
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
    begin_s = min((record.scheduled_s for record in records), default=0.0)
    seconds: dict[int, list[float]] = defaultdict(list)
    for record in records:
        for time_s, tbt_s in record.timed_tbts():
            seconds[int(time_s - begin_s)].append(1000 * tbt_s)
    times = sorted(seconds)
    above.plot(times, [max(seconds[at_s]) for at_s in times], ".", color="tab:grey", markersize=3, label="longest TBT of a second")
    above.plot(times, [percentile(sorted(seconds[at_s]), 99) for at_s in times], drawstyle="steps-post", label="P99 of TBT")
    if objective_s is not None:
        above.axhline(1000 * objective_s, color="black", linewidth=0.8, linestyle="--", label="objective")
    above.set_ylabel("ms")
    above.set_ylim(bottom=0)
    above.legend(fontsize=8)
    came = Counter(int(record.scheduled_s - begin_s) for record in records)
    below.bar(list(came), list(came.values()), width=1.0, align="edge")
    below.set_ylabel("requests")
    below.set_xlabel("s")
    for axis in (above, below):
        axis.grid(alpha=0.3)
    _save(figure, path)


def plot_stages(path: Path, title: str, slices: Sequence[StageSlice], ttft_s: float) -> None:
    """Write a picture of what each stage did for one request, and when.

    Raises: PlotError if matplotlib is missing or does not know the format.
    """
    figure = require_matplotlib()(figsize=(12, 2.6), layout="constrained")
    figure.suptitle(title)
    axis = figure.subplots()
    stages = list(dict.fromkeys(STAGE_OF.values()))
    for row, stage in enumerate(stages):
        spans = [(one.begin_s, one.end_s - one.begin_s) for one in slices if one.stage == stage]
        axis.broken_barh(spans, (len(stages) - row - 0.85, 0.7), facecolor=f"C{row}", edgecolor="white", linewidth=0.4)
    axis.set_yticks([len(stages) - row - 0.5 for row in range(len(stages))], stages)
    axis.axvline(ttft_s, color="black", linewidth=0.8)
    axis.set_xlim(left=0)
    axis.set_xlabel("s since the request was sent; the line is the first token")
    axis.grid(axis="x", alpha=0.3)
    _save(figure, path)


def _save(figure: Any, path: Path) -> None:
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
