"""The machine's memory that a run may take: free memory, within the limits of control groups and of the run directory's file system.

Read by ``mmrt up`` and by the memory actor, before anything is allocated.
"""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from .control_groups import groups_above

_FILES = {
    1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    2: ("memory.max", "memory.current", "inactive_file"),
}
_UNLIMITED_BYTES = 1 << 60  # cgroup v1 writes a number near 2^63 where there is no limit


class HostRoom(NamedTuple):
    """Bytes that can be taken now: ``memory_bytes`` without swapping or an out-of-memory kill, ``shared_bytes`` as files of the run."""

    memory_bytes: int
    shared_bytes: int

    @property
    def num_bytes(self) -> int:
        """Bytes that shared memory can take."""
        return min(self)


def read_host_room(run: Path, proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> HostRoom:
    """Read the room for a run in the directory ``run``, which need not exist yet."""
    lines = (line.partition(":") for line in (proc / "meminfo").read_text().splitlines())
    available = next(int(value.split()[0]) * 1024 for name, _, value in lines if name == "MemAvailable")
    place = next(path for path in (run, *run.parents) if path.exists())
    return HostRoom(min([available, *_left_in_groups(proc, cgroups)]), shutil.disk_usage(place).free)


def _left_in_groups(proc: Path, cgroups: Path) -> Iterator[int]:
    """Yield what this process's memory cgroup and each one above it have left. Files that nobody uses lately are given up first."""
    for version, directory in groups_above("memory", proc, cgroups):
        limit_name, usage_name, cache_name = _FILES[version]
        try:
            limit, usage = (int((directory / name).read_text()) for name in (limit_name, usage_name))
            stat = dict(line.split() for line in (directory / "memory.stat").read_text().splitlines())
        except (OSError, ValueError):
            continue  # not here, or "max"
        if limit < _UNLIMITED_BYTES:
            yield max(0, limit - usage + int(stat.get(cache_name, 0)))
