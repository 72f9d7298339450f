"""Where a process that computes keeps its kernels on disk, and finds those of earlier processes."""

from ...cpu_kernels.kernel_files import keep_in
from ...runtime.environment import read_environment


def keep_kernels() -> None:
    """Keep kernels in the user's cache directory. Call it before a model is opened: each kernel would take 0.2 s to make."""
    keep_in(read_environment().cache_home / "kernels")
