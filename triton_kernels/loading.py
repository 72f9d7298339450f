"""Loading of compiled kernels by several threads."""

import threading

from triton.compiler import CompiledKernel


def load_one_at_a_time() -> None:
    """Make one thread load a kernel that two threads launch at once for the first time, before either launches it.

    Triton 3.6 and 3.7 record how to launch it before they have loaded it; the other thread then launches an unloaded kernel.
    """
    lock, find_launcher = threading.Lock(), CompiledKernel.run.fget

    def run(kernel: CompiledKernel) -> object:
        if kernel.function is None:
            with lock:
                return find_launcher(kernel)
        return find_launcher(kernel)

    CompiledKernel.run = property(run)
