"""The picture of a simulated load."""

from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path

from mmrt.bench.serve.plot import require_matplotlib, save
from mmrt.bench.serve.record import Record
from mmrt.bench.serve.report import percentile


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
    save(figure, path)
