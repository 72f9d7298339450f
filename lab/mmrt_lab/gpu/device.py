"""Facts about the device and the software on it. Reads; never changes a setting."""

import datetime
import platform
import subprocess
from collections.abc import Callable, Mapping
from typing import Any

import torch

Facts = Mapping[str, str | int | float]


def read_facts() -> Facts:
    """Facts about the first visible CUDA device. An unavailable fact gives the reason."""

    def properties() -> Any:
        return torch.cuda.get_device_properties(0)

    readers: dict[str, Callable[[], str | int | float]] = {
        "device": lambda: properties().name,
        "compute capability": lambda: f"{properties().major}.{properties().minor}",
        "multiprocessors": lambda: properties().multi_processor_count,
        "memory, GiB": lambda: round(properties().total_memory / 2**30, 1),
        "L2 cache, MiB": lambda: round(properties().L2_cache_size / 2**20, 1),
        "driver": _driver,
        "torch": lambda: torch.__version__,
        "CUDA of torch": lambda: torch.version.cuda or "none",
        "triton": _triton,
        "python": platform.python_version,
        "machine": platform.platform,
        "date": lambda: datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }
    return {name: _fact(reader) for name, reader in readers.items()}


def _fact(reader: Callable[[], str | int | float]) -> str | int | float:
    try:
        return reader()
    except Exception as error:
        return f"unknown: {type(error).__name__}"


def _driver() -> str:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    return done.stdout.splitlines()[0].strip()


def _triton() -> str:
    import triton

    return str(triton.__version__)
