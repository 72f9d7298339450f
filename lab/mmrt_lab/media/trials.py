"""Trials of the benches of this package, each in a process of its own: what ran before it leaves no trace."""

import subprocess
import sys
from collections.abc import Sequence
from typing import TypeVar

import msgspec

from mmrt.bench.serve.errors import BenchError

T = TypeVar("T")
_TIMEOUT_S = 1800.0


def run_apart(module: str, arguments: Sequence[str], result: type[T], name: str) -> T:
    """Run a module of this package in a process of its own, and return the JSON that it prints. ``name``: of the trial, in errors.

    Raises: BenchError.
    """
    command = [sys.executable, "-m", f"{__package__}.{module}", *arguments]
    try:
        done = subprocess.run(command, capture_output=True, timeout=_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        raise BenchError(f"{name} did not end within {_TIMEOUT_S:.0f} s") from None
    if done.returncode:
        lines = done.stderr.decode(errors="replace").strip().splitlines()
        raise BenchError(f"{name} failed: {lines[-1] if lines else f'exit status {done.returncode}'}")
    return msgspec.json.decode(done.stdout.splitlines()[-1], type=result)
