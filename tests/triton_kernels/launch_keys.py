"""Which variants of a kernel launches ask for: Triton's real launch path on a stub driver, where nothing is compiled or run.

``count`` runs a script in a process of its own, without TRITON_INTERPRET. The script imports the wrappers, calls ``record``, then them
with CPU tensors, and prints the number of keys of each kernel as JSON."""

import json
import os
import subprocess
import sys
from collections import defaultdict
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver


class _Driver:
    """As much of a CUDA driver as a launch asks for before it compiles."""

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


def record() -> dict[str, set[str]]:
    """Install the stub. Returns the keys of variants that launches ask for, by kernel; it grows as they do."""
    found: dict[str, set[str]] = defaultdict(set)

    def note(*, key: str, fn: Any, **_: Any) -> bool:
        found[fn.name.rpartition(".")[2]].add(key)
        return True  # do not compile, and so do not launch

    driver.set_active(_Driver())
    triton.knobs.runtime.jit_cache_hook = note
    triton.knobs.runtime.interpret = True  # for the wrappers: they take tensors of the CPU then
    return found


def count(script: str) -> dict[str, int]:
    """Variants by kernel."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, int] = json.loads(done.stdout)
    return found
