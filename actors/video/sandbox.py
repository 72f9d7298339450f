"""The sandbox that the video actor enters before it reads any media: an attacker who takes it over through a decoder gains little.

Nothing here can be undone, and all later threads inherit it. Still allowed: reading programs, libraries and the kernel's files, and
what the caller names; using the connections that there are, and accepting more. What is mapped already stays so; no mapping can be
made to reach further into its file, and no file that it is of can be cut.
"""

import ctypes
import logging
import os
import resource
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from ..host.landlock import check, confine_to_files, libc
from .seccomp import forbid_system_calls

log = logging.getLogger(__name__)

MAX_OPEN_FILES = 256
# Less than any core has, so that no file is made; and other than 0 it keeps the kernel from piping a core to a program, too.
NO_CORE_BYTES = 1

MAX_THREADS = 1024
MAX_STACK_BYTES = 8 << 20  # of the first thread, which grows; no other limit counts it

_PR_SET_NO_NEW_PRIVS = 38
_NAMESPACES = 0x10000000 | 0x40000000 | 0x08000000 | 0x04000000 | 0x00020000  # CLONE_NEWUSER, NEWNET, NEWIPC, NEWUTS, NEWNS
_CAPABILITY_VERSION_3 = 0x20080522


def enter_sandbox(
    *, memory_bytes: int, file_bytes: int, readable: Iterable[Path] = (), writable: Iterable[Path] = (), cuda: bool = False
) -> None:
    """Restrict this process: no network, no other programs or processes, no capabilities, no new privileges, no core, and limits.

    It may make, write and remove files in the directories ``writable`` alone, and of ``file_bytes`` at most; of other files it may
    open code and ``readable`` (files and directories) alone, for reading. It may take ``memory_bytes`` beyond what it has. ``cuda``:
    CUDA can start in it. What this system does not restrict is logged in one line.
    """
    measures: dict[str, Callable[[], None]] = {
        "new privileges": _renounce_new_privileges,
        "capabilities": _drop_capabilities,
        "resources": lambda: _limit_resources(memory_bytes, file_bytes),
        "what it reads and writes": lambda: confine_to_files(readable, writable),
        "system calls": lambda: forbid_system_calls(cuda=cuda),
    }
    missing = []
    for what, measure in measures.items():
        try:
            measure()
        except OSError as error:
            missing.append(f"{what} ({error.strerror})")
    if (num_threads := len(os.listdir("/proc/self/task"))) > 1:
        missing.append(f"the {num_threads - 1} threads that it has already")
    if missing:
        log.warning("media are decoded with more rights than needed: this system does not restrict %s", ", ".join(missing))


def enter_namespaces() -> str:
    """Give this process, which has one thread, a user, network, System V and mounts of its own; and then its threads have a limit.

    They protect nothing that the sandbox does not, and hold where it has a hole. Returns why this system refuses; "" if it does not.
    """
    if libc().unshare(_NAMESPACES) != 0:
        return os.strerror(ctypes.get_errno())
    lowered = _lesser(MAX_THREADS, resource.getrlimit(resource.RLIMIT_NPROC)[1])
    resource.setrlimit(resource.RLIMIT_NPROC, (lowered, lowered))  # it counts those of this user in these namespaces; root has none
    return ""


def allow_cpu_time(seconds: float) -> None:
    """Let this process compute for ``seconds`` from now on, rounded up; then the kernel ends it by SIGXCPU.

    The kernel counts from a process's beginning, so a process that lives for long moves its limit before each piece of work.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    soft = int(time.process_time() + seconds) + 1
    resource.setrlimit(resource.RLIMIT_CPU, (_lesser(soft, hard), hard))


def memory_left() -> int:
    """Bytes that this process may still take by its limits, RLIMIT_DATA and RLIMIT_AS; 0 (unknown) without limits."""
    fields = Path("/proc/self/statm").read_text().split()
    used = {resource.RLIMIT_AS: int(fields[0]), resource.RLIMIT_DATA: int(fields[5])}
    limits = {kind: resource.getrlimit(kind)[0] for kind in used}
    left = [limit - used[kind] * resource.getpagesize() for kind, limit in limits.items() if limit != resource.RLIM_INFINITY]
    return min(left, default=0)


def _renounce_new_privileges() -> None:
    check(libc().prctl(_PR_SET_NO_NEW_PRIVS, *map(ctypes.c_ulong, (1, 0, 0, 0))))


def _drop_capabilities() -> None:
    """Drop root's capabilities; other users have none."""
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION_3, 0)
    check(libc().capset(header, (ctypes.c_uint32 * 6)()))


def _limit_resources(memory_bytes: int, file_bytes: int) -> None:
    """RLIMIT_DATA counts private memory alone, unlike RLIMIT_AS neither the pools nor what libraries reserve and never touch.

    The filter prevents new processes; ``enter_namespaces`` limits threads.
    """
    data_pages = int(Path("/proc/self/statm").read_text().split()[5])
    limits = {
        resource.RLIMIT_CORE: NO_CORE_BYTES,
        resource.RLIMIT_STACK: MAX_STACK_BYTES,
        resource.RLIMIT_NOFILE: MAX_OPEN_FILES,
        resource.RLIMIT_FSIZE: file_bytes,
        resource.RLIMIT_DATA: data_pages * resource.getpagesize() + memory_bytes,
    }
    for kind, limit in limits.items():
        lowered = _lesser(limit, resource.getrlimit(kind)[1])
        resource.setrlimit(kind, (lowered, lowered))


def _lesser(limit: int, hard: int) -> int:
    return limit if hard == resource.RLIM_INFINITY else min(limit, hard)
