"""The share of the processors that others had while a phase was measured, by the system's counters."""

import os
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from mmrt.runtime.supervisor.processes import cpu_seconds

_STAT = Path("/proc/stat")
_TICKS = os.sysconf("SC_CLK_TCK")


class ProcessorUse(NamedTuple):
    """Seconds of processor time so far: ``busy_s`` of all work on the processors that this process may use, without interrupts, and
    what their hypervisor gave to others; ``own_s`` of some processes."""

    busy_s: float
    own_s: float


def read_use(pids: Iterable[int]) -> ProcessorUse:
    """Read the counters. ``pids``: the processes whose work is our own; those that are gone count nothing."""
    names = {f"cpu{number}" for number in os.sched_getaffinity(0)}
    ticks = 0
    for line in _STAT.read_text().splitlines():
        name, *numbers = line.split()
        if name in names:
            user, nice, system, _, _, _, _, stolen, *_ = map(int, numbers)
            ticks += user + nice + system + stolen
    return ProcessorUse(ticks / _TICKS, sum(cpu_seconds(pid) or 0.0 for pid in pids))


def share_of_others(before: ProcessorUse, after: ProcessorUse, seconds: float) -> float:
    """The share of the processors' time that others had between the two, ``seconds`` apart."""
    others_s = after.busy_s - before.busy_s - (after.own_s - before.own_s)
    return max(0.0, others_s) / (seconds * len(os.sched_getaffinity(0)))
