"""Kernels that several threads launch for the first time at once."""

import threading
import time

import pytest
from triton.compiler import CompiledKernel

from mmrt.triton_kernels.loading import load_one_at_a_time


def test_nobody_launches_before_it_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """With Triton's own property, and a loader that takes its time where Triton's calls the driver."""

    def load(kernel: CompiledKernel) -> None:
        loads.append(threading.current_thread().name)
        kernel._run = "launcher"
        time.sleep(0.05)
        kernel.module, kernel.function = "module", "function"

    def launch() -> None:
        barrier.wait()
        launched.append((kernel.run, kernel.function))

    monkeypatch.setattr(CompiledKernel, "_init_handles", load)
    monkeypatch.setattr(CompiledKernel, "run", CompiledKernel.run)  # put back at the end
    load_one_at_a_time()
    loads: list[str] = []
    launched: list[tuple[object, object]] = []
    kernel = CompiledKernel.__new__(CompiledKernel)
    kernel._run = kernel.module = kernel.function = None
    barrier = threading.Barrier(4)
    threads = [threading.Thread(target=launch) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(loads) == 1 and launched == [("launcher", "function")] * 4
