"""The control groups that this process is in, of both versions, as far as they are visible from here."""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple


class Group(NamedTuple):
    """A group that limits this process. ``version`` 1 and 2 name their files differently."""

    version: int
    directory: Path


def groups_above(controller: str, proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> Iterator[Group]:
    """Yield this process's group of a controller ("memory", "cpu") and each one above it, the root last. They may lack files."""
    memberships = proc / "self" / "cgroup"
    for line in memberships.read_text().splitlines() if memberships.exists() else ():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        version, root = (1, cgroups / controller) if controllers else (2, cgroups)
        group = root / path.lstrip("/")
        for directory in (group, *group.parents):
            yield Group(version, directory)
            if directory == root:
                break
