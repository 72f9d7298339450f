"""CUDA's multi-process service for a measurement: a daemon of its own, where the machine has one."""

import os
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from mmrt.bench.serve.errors import BenchError

MPS_CONTROL = "nvidia-cuda-mps-control"
_TIMEOUT_S = 30.0


@contextmanager
def multi_process_service() -> Iterator[dict[str, str]]:
    """A daemon of its own, while it lasts; what its clients need in their environment. Raises: BenchError if it does not start."""
    with tempfile.TemporaryDirectory(prefix="mmrt-mps-", ignore_cleanup_errors=True) as home, tempfile.TemporaryFile("w+") as said:
        own = {"CUDA_MPS_PIPE_DIRECTORY": home, "CUDA_MPS_LOG_DIRECTORY": home}
        control = partial(subprocess.run, env={**os.environ, **own}, text=True, stdout=said, stderr=said, timeout=_TIMEOUT_S)
        started = control([MPS_CONTROL, "-d"], input="")
        if started.returncode != 0:
            said.seek(0)
            raise BenchError(f"{MPS_CONTROL} ended with status {started.returncode}: {said.read().strip()}")
        try:
            yield own
        finally:
            control([MPS_CONTROL], input="quit\n")
