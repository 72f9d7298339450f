"""Resources of a run at a quiet point: processes, descriptors, threads, files, pages, memory; and their growth.

``storm`` calls it whenever nothing is under way. Two differing counts of the same run show a leak or a loss.
"""

import contextlib
import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from mmrt.bench.processes import GRAMMARS, OTHER, SUPERVISOR, ZYGOTE, descendants
from mmrt.runtime.stage_table import ALL_ACTORS
from mmrt.runtime.supervisor.processes import anonymous_bytes

from .inject import until
from .run_view import RunView

_LONG_LIVED = (SUPERVISOR, ZYGOTE)
# Opened by a process on first use; counts of two generations of an actor may differ by that much.
_FD_SLACK = 2
# What the supervisor notes of the last death of each; lock, recorder and socket of one that has left, for the next of that name.
_STAYING = frozenset(f"{actor}.{suffix}" for actor in ALL_ACTORS for suffix in ("exit", "lock", "bus"))
_RECORDERS = frozenset(f"flight-{actor}" for actor in ALL_ACTORS)
MAX_GROWTH_PER_HOUR, LEAST_GROWTH_PER_HOUR = 0.05, 2.0  # of a soak: a share of the median, and a number of things
_THREAD_SLACK = 4  # executor threads of asyncio and media decoders come with work


class Count(msgspec.Struct, frozen=True, kw_only=True):
    """One count. ``fds`` and ``threads`` by process; ``files`` are names in the run directory without what changes in them."""

    processes: dict[str, int]
    fds: dict[str, int]
    threads: dict[str, int]
    files: list[str]
    pages_used: dict[str, int]
    rows_used: int
    requests: int
    plans: int
    shm_bytes: int
    own_bytes: dict[str, int]  # anonymous memory: shared mappings count by who else is on the machine


def count(view: RunView, with_memory: bool = False) -> Count:
    """Count everything now. ``with_memory``: also how much each process has."""
    pids = descendants(view.supervisor_pid)
    stats = view.stats()
    return Count(
        processes=dict(Counter(pids.values())),
        fds={name: num_fds(pid) for pid, name in pids.items()},
        threads={name: _num_entries(f"/proc/{pid}/task") for pid, name in pids.items()},
        files=sorted(map(_plain_name, os.listdir(view.path))),
        pages_used={name: pool.used for name, pool in stats.pools.items()},
        rows_used=view.num_rows_in_use(),
        requests=stats.waiting + stats.preparing + stats.running,
        plans=stats.plans,
        shm_bytes=sum(entry.stat().st_blocks * 512 for entry in view.path.iterdir() if not entry.name.startswith(".")),
        own_bytes={name: anonymous_bytes(pid) or 0 for pid, name in pids.items()} if with_memory else {},
    )


async def first_count(view: RunView, timeout_s: float) -> Count:
    """Count the undisturbed run, without the programs that a library starts for a moment: later counts would lack them.

    One that is there for ``timeout_s`` belongs to the run.
    """
    found: list[Count] = []

    def is_ours() -> bool:
        found[:] = [count(view)]
        return OTHER not in found[0].processes

    await until(is_ours, timeout_s)
    return found[0]


def is_settled(view: RunView) -> bool:
    """True if nothing is under way: no request, row, plan or page is in use."""
    stats = view.stats()
    in_use = stats.waiting + stats.preparing + stats.running + view.num_rows_in_use() + stats.plans
    return not in_use and not any(pool.used for pool in stats.pools.values())


def compare(now: Count, before: Count) -> list[str]:
    """Surplus and missing resources, compared with the count of the undisturbed run."""
    problems = [f"{used} pages of pool {name} are in use" for name, used in now.pages_used.items() if used]
    if now.rows_used or now.requests or now.plans:
        problems.append(f"{now.rows_used} rows, {now.requests} requests and {now.plans} plans are in use")
    has, had = ({name: number for name, number in one.processes.items() if name != GRAMMARS} for one in (now, before))
    if has != had or now.processes.get(GRAMMARS, 0) > 1:  # a gateway starts that one with its first grammar
        problems.append(f"processes are {now.processes}, at first they were {before.processes}")
    surplus = set(now.files) - set(before.files) - _STAYING
    recorders = {name for name in surplus if name.rpartition(".")[0] in _RECORDERS}  # the gateway keeps them open for traces
    for what, slack in (("fds", _FD_SLACK + len(recorders)), ("threads", _THREAD_SLACK)):
        now_by: Mapping[str, int] = getattr(now, what)
        before_by: Mapping[str, int] = getattr(before, what)
        for name, number in now_by.items():
            if number > before_by.get(name, 0) + slack:
                problems.append(f"{name} has {number} {what}, at first it had {before_by.get(name, 0)}")
    if surplus - recorders:
        problems.append(f"the run directory has {', '.join(sorted(surplus - recorders))}, which it had not at first")
    if missing := set(before.files) - set(now.files):
        problems.append(f"the run directory has lost {', '.join(sorted(missing))}")
    return problems


def slope_problems(counts: Sequence[tuple[float, Count]]) -> list[str]:
    """Return what grows in a soak, of (seconds, count): where even the lower end of the Theil-Sen slope is above the bound."""
    if len(counts) < 4:
        return []
    series: dict[str, list[float]] = {
        "descriptors": [sum(one.fds.values()) for _, one in counts],
        "threads": [sum(one.threads.values()) for _, one in counts],
        "pages": [sum(one.pages_used.values()) for _, one in counts],
        "bytes in the run directory": [one.shm_bytes for _, one in counts],
        "bytes of memory": [sum(one.own_bytes.values()) for _, one in counts],
    }
    for name in _LONG_LIVED:
        series[f"bytes of memory of {name}"] = [one.own_bytes.get(name, 0) for _, one in counts]
    times_h = np.array([when_s for when_s, _ in counts]) / 3600
    problems = []
    for what, values in series.items():
        slope, least = theil_sen(times_h, np.array(values, float))
        middle = float(np.median(values))
        bound = max(MAX_GROWTH_PER_HOUR * middle, LEAST_GROWTH_PER_HOUR)
        if least > bound:
            problems.append(f"{what} grow by {slope:.6g} an hour ({least:.6g} at least), {bound:.6g} are allowed (median {middle:.6g})")
    return problems


def theil_sen(times: NDArray[np.float64], values: NDArray[np.float64]) -> tuple[float, float]:
    """Return the median of the slopes between all pairs, and the lower end of its interval of 95 % (Sen 1968): few outliers, such as a
    process that starts just then, change neither."""
    first, second = np.triu_indices(len(values), 1)
    slopes = np.sort((values[second] - values[first]) / (times[second] - times[first]))
    num = len(values)
    reach = 1.96 * np.sqrt(num * (num - 1) * (2 * num + 5) / 18)  # of Kendall's sum, if there is no slope
    return float(np.median(slopes)), float(slopes[max(0, round((len(slopes) - reach) / 2) - 1)])


def num_fds(pid: int) -> int:
    """Open descriptors, without log files: those are opened with the first line of an actor, and stay."""
    number = 0
    try:
        for entry in os.scandir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):  # closed in the meantime
                number += not os.readlink(entry.path).endswith(".log")
    except OSError:
        return 0
    return number


def _num_entries(path: str) -> int:
    try:
        return len(os.listdir(path))
    except OSError:
        return 0


def _plain_name(name: str) -> str:
    """Temporary names carry a pid."""
    return re.sub(r"\d+$", "N", name) if name.startswith(".") else Path(name).name
