"""Facts about the machine and the code that a figure was measured with. Called by every bench; written into every JSON report."""

import datetime
import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path

import msgspec

from ..cpu_kernels.processor import processor_name

PACKAGES = ("torch", "transformers", "pyzmq", "aiohttp", "uvloop", "numpy", "msgspec", "av")


class Environment(msgspec.Struct, frozen=True, kw_only=True):
    """``commit`` is None outside a git checkout, and ends in ``+`` when tracked files are modified."""

    date: str
    cpu: str
    num_cpus: int  # that this process may use
    memory_gib: float
    kernel: str
    python: str
    mmrt: str
    commit: str | None
    packages: dict[str, str]
    load_average: tuple[float, float, float]


def read_environment() -> Environment:
    """Look at everything once, about 20 ms."""
    return Environment(
        date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        cpu=processor_name(),
        num_cpus=len(os.sched_getaffinity(0)),
        memory_gib=round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        kernel=platform.release(),
        python=platform.python_version(),
        mmrt=_version("mmrt"),
        commit=_commit(Path(__file__).parent.parent),
        packages={name: _version(name) for name in PACKAGES},
        load_average=os.getloadavg(),
    )


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "absent"


def _commit(directory: Path) -> str | None:
    if not (directory / ".git").exists():
        return None
    commit = _git(directory, "rev-parse", "--short=12", "HEAD")
    if commit is None:
        return None
    return commit + "+" if _git(directory, "status", "--porcelain", "--untracked-files=no") else commit


def _git(directory: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(["git", "-C", str(directory), *arguments], capture_output=True, text=True, timeout=5)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
