"""Runs that a front has started, found by their directories: they go on without it."""

import glob
from pathlib import Path

from ..runtime.errors import RunError
from ..runtime.process.run import read_run_info
from ..shm.errors import ShmError
from ..shm.run_directory import RunDirectory


def mark_of(front: str, digest: str) -> str:
    """Return what ``run.json`` says of a run that the front of this name has started, with a configuration of this digest."""
    return f"{front}/{digest}"


def runs_beside(front: Path) -> list[Path]:
    """Return the directories of the live runs that a front in this directory has started."""
    return [path for path in sorted(front.parent.glob(f"{glob.escape(front.name)}.*")) if _is_of_front(path, front.name)]


def _is_of_front(path: Path, front: str) -> bool:
    try:
        if not RunDirectory.is_alive(path):
            return False
        with RunDirectory.attach(path) as run:
            return read_run_info(run).front.startswith(mark_of(front, ""))  # "a.b.model" may be of "a", or of "a.b"
    except (ShmError, RunError):
        return False
