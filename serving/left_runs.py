"""Runs that a front has started, found by their directories: they go on without it."""

from pathlib import Path

from ..runtime.errors import RunError
from ..runtime.process.run import read_run_info
from ..shm.errors import ShmError
from ..shm.run_directory import RunDirectory


def runs_beside(front: Path) -> list[Path]:
    """Return the directories of the live runs that a front in this directory has started."""
    return [path for path in sorted(front.parent.glob(f"{front.name}.*")) if _is_of_front(path)]


def _is_of_front(path: Path) -> bool:
    try:
        if not RunDirectory.is_alive(path):
            return False
        with RunDirectory.attach(path) as run:
            return bool(read_run_info(run).front)
    except (ShmError, RunError):
        return False
