"""Activity of a run's stages, read from a trace (``mmrt trace``). Pure; called by ``video``."""

from collections.abc import Sequence
from typing import Any

import msgspec

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
