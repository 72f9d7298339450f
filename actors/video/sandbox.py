"""The sandbox that the video actor enters before it reads any media: an attacker who takes it over through a decoder gains little.

Nothing here can be undone, and all later threads inherit it. Still allowed: using the files, mappings and connections that there are,
and accepting more of these. What is mapped stays so; no mapping can be made to reach further into its file, and no file that it is of
can be cut. A process that needs code later, as CUDA's driver and a debugger do, can read programs, libraries and the kernel's files.
"""

import ctypes
import errno
import logging
import os
import resource
import time
from collections.abc import Callable
from contextlib import suppress

from ...shm.confined import own_ids
from ..host.capabilities import KILL, SETGID, SETUID, SYS_ADMIN, drop_capabilities, holds
from ..host.landlock import confine_to_files, libc
from ..host.limits import MAX_STACK_BYTES, NO_CORE_BYTES, lesser, lower_limits
from ..host.seccomp import forbid_system_calls

log = logging.getLogger(__name__)

MAX_OPEN_FILES = 256
MAX_THREADS = 1024

_PR_SET_NO_NEW_PRIVS = 38
_NEW_USER = 0x10000000
_NAMESPACES = 0x40000000 | 0x08000000 | 0x04000000 | 0x00020000  # CLONE_NEWNET, NEWIPC, NEWUTS, NEWNS
_READ_ONLY, _NO_SETUID, _NO_DEVICES, _NO_PROGRAMS, _RECURSIVE, _PRIVATE, _DETACH = 1, 2, 4, 8, 1 << 14, 1 << 18, 2
_statm: int | None = None  # of this process, open: nothing of /proc can be opened later


def enter_sandbox(*, memory_bytes: int, file_bytes: int, reads_code: bool = False, cuda: bool = False) -> str:
    """Restrict this process: no files, network, other programs or processes, no capabilities, no new privileges, no core, and limits.

    It may take ``memory_bytes`` beyond what it has, and write files that are open up to ``file_bytes``. ``reads_code``: it can still
    read code, and keeps its user id and namespaces. ``cuda``: CUDA can start in it. What this system does not restrict is logged in one
    line. Returns why it gives no namespaces; "" if it does, or none are needed.
    """
    global _statm
    _statm = os.open("/proc/self/statm", os.O_RDONLY | os.O_CLOEXEC)
    num_threads = len(os.listdir("/proc/self/task"))
    problem = "" if reads_code else _enter_namespaces()
    measures: dict[str, Callable[[], None]] = {
        "new privileges": _renounce_new_privileges,
        "its user id": _take_own_id if not reads_code else lambda: None,
        "capabilities": drop_capabilities,
        "resources": lambda: _limit_resources(memory_bytes, file_bytes),
        "what it reads and writes": lambda: confine_to_files(() if reads_code else None),
        "system calls": lambda: forbid_system_calls(cuda=cuda),
    }
    missing = []
    for what, measure in measures.items():
        try:
            measure()
        except OSError as error:
            missing.append(f"{what} ({error.strerror})")
    if num_threads > 1:
        missing.append(f"the {num_threads - 1} threads that it has already")
    if missing:
        log.warning("media are decoded with more rights than needed: this system does not restrict %s", ", ".join(missing))
    return problem


def _enter_namespaces() -> str:
    """Give this process, which has one thread, a network, System V and mounts of its own, and an empty directory alone.

    They protect little that the rest does not, and hold where it has a hole. A user that may not have them gets a namespace of users
    besides, and no right in it. Returns why this system refuses; "" if it does not.
    """
    try:
        if holds(SYS_ADMIN):
            _try(libc().unshare(_NAMESPACES))
        else:
            with suppress(OSError):  # the sandbox tells
                _take_own_id()
            _try(libc().unshare(_NAMESPACES | _NEW_USER))
            _limit_threads()  # those of this user in these namespaces; root's are not counted
        _empty_file_system()
    except OSError as error:
        return error.strerror or str(error)
    return ""


def allow_cpu_time(seconds: float) -> None:
    """Let this process compute for ``seconds`` from now on, rounded up; then the kernel ends it by SIGXCPU.

    The kernel counts from a process's beginning, so a process that lives for long moves its limit before each piece of work.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    soft = int(time.process_time() + seconds) + 1
    resource.setrlimit(resource.RLIMIT_CPU, (lesser(soft, hard), hard))


def memory_left() -> int:
    """Bytes that this process, in the sandbox, may still take by its limits, RLIMIT_DATA and RLIMIT_AS; 0 (unknown) without limits."""
    fields = _memory_fields()
    used = {resource.RLIMIT_AS: fields[0], resource.RLIMIT_DATA: fields[5]}
    limits = {kind: resource.getrlimit(kind)[0] for kind in used}
    left = [limit - used[kind] * resource.getpagesize() for kind, limit in limits.items() if limit != resource.RLIM_INFINITY]
    return min(left, default=0)


def _memory_fields() -> list[int]:
    """Sizes in pages, as proc(5) has them."""
    assert _statm is not None, "this process is in no sandbox"
    return [int(field) for field in os.pread(_statm, 256, 0).split()]


def _take_own_id() -> None:
    """As root: become a user that owns nothing, and that no other process is. Raises: OSError where the supervisor could not end it."""
    if os.getuid() != 0:
        return
    if not all(map(holds, (KILL, SETGID, SETUID))):
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))
    os.setgroups([])
    for own in own_ids(os.getpid()):
        try:
            os.setresgid(own, own, own)
            os.setresuid(own, own, own)
        except OSError as error:
            refusal = error  # it is none of this container's ids
        else:
            _limit_threads()
            return
    raise refusal


def _empty_file_system() -> None:
    """Put an empty directory in the place of all file systems, which go. For a process with mounts of its own."""
    c = libc()
    _try(c.mount(b"none", b"/", None, ctypes.c_ulong(_RECURSIVE | _PRIVATE), None))
    flags = ctypes.c_ulong(_READ_ONLY | _NO_SETUID | _NO_DEVICES | _NO_PROGRAMS)
    _try(c.mount(b"none", b"/proc", b"tmpfs", flags, b"size=4k,nr_inodes=1,mode=555"))
    os.chdir("/proc")
    _try(c.pivot_root(b".", b"."))
    _try(c.umount2(b".", _DETACH))
    os.chdir("/")


def _limit_threads() -> None:
    lower_limits({resource.RLIMIT_NPROC: MAX_THREADS})


def _try(status: int) -> None:
    """Raises: OSError if a call has failed."""
    if status < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def _renounce_new_privileges() -> None:
    _try(libc().prctl(_PR_SET_NO_NEW_PRIVS, *map(ctypes.c_ulong, (1, 0, 0, 0))))


def _limit_resources(memory_bytes: int, file_bytes: int) -> None:
    """RLIMIT_DATA counts private memory alone, unlike RLIMIT_AS neither the pools nor what libraries reserve and never touch.

    The filter prevents new processes; where this user or these namespaces are its own, its threads have a limit.
    """
    data_pages = _memory_fields()[5]
    limits = {
        resource.RLIMIT_CORE: NO_CORE_BYTES,
        resource.RLIMIT_STACK: MAX_STACK_BYTES,
        resource.RLIMIT_NOFILE: MAX_OPEN_FILES,
        resource.RLIMIT_FSIZE: file_bytes,
        resource.RLIMIT_DATA: data_pages * resource.getpagesize() + memory_bytes,
    }
    lower_limits(limits)
