"""Activity of a run's stages, read from a trace (``mmrt trace``), and its picture. Called by ``video``."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from mmrt.bench.serve.plot import require_matplotlib, save

STAGE_OF = {"analyse": "video", "preprocess": "video", "encode": "encoder", "prefill": "prefill"}
"""Name of a slice -> the process that does it."""


class StageSlice(msgspec.Struct, frozen=True, array_like=True):
    """A plan that was worked on, in seconds."""

    stage: str
    name: str
    begin_s: float
    end_s: float


def stage_slices(trace: dict[str, Any], begin_s: float, end_s: float) -> list[StageSlice]:
    """All plans done between two moments of CLOCK_MONOTONIC, in order, in seconds since the first."""
    found = []
    for event in trace["traceEvents"]:
        if event["ph"] == "X" and event["name"] in STAGE_OF:
            at_s = event["ts"] / 1e6
            if begin_s <= at_s <= end_s:
                name = event["name"]
                found.append(StageSlice(STAGE_OF[name], name, at_s - begin_s, at_s + event["dur"] / 1e6 - begin_s))
    return sorted(found, key=lambda one: one.begin_s)


def overlap_s(slices: Sequence[StageSlice]) -> float:
    """Seconds in which at least two stages were at work. Slices of one stage do not overlap."""
    edges = sorted([(one.begin_s, 1) for one in slices] + [(one.end_s, -1) for one in slices])
    total, running, since_s = 0.0, 0, 0.0
    for at_s, change in edges:
        if running >= 2:
            total += at_s - since_s
        running, since_s = running + change, at_s
    return total


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
    save(figure, path)
