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
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple

from ...shm.confined import own_ids
from ..host.capabilities import KILL, SETGID, SETUID, SYS_ADMIN, drop_capabilities, holds
from ..host.landlock import confine_to_files, libc
from ..host.limits import MAX_STACK_BYTES, NO_CORE_BYTES, lesser, lower_limits
from ..host.seccomp import forbid_system_calls

log = logging.getLogger(__name__)

MAX_OPEN_FILES = 256
MAX_THREADS = 1024

_PR_SET_NO_NEW_PRIVS, _PR_SET_PDEATHSIG = 38, 1
_NEW_USER = 0x10000000
_NEW_PROCESSES = 0x20000000  # of those that are begun from then on: whoever asks for it can begin no thread
_NAMESPACES = 0x40000000 | 0x08000000 | 0x04000000 | 0x00020000  # CLONE_NEWNET, NEWIPC, NEWUTS, NEWNS
_READ_ONLY, _NO_SETUID, _NO_DEVICES, _NO_PROGRAMS, _RECURSIVE, _PRIVATE, _DETACH = 1, 2, 4, 8, 1 << 14, 1 << 18, 2
_statm: int | None = None  # of this process, open: nothing of /proc can be opened later
_has_filter = False
_memory_bytes = 0  # of a process forked in the sandbox, which has no statm: what its item may take


class Forker(NamedTuple):
    """Of a process that enters the sandbox to fork others: the process that has forked it, why that got no namespaces, and why none of
    processes."""

    pid: int
    problem: str
    processes_problem: str


def enter_sandbox(
    *, memory_bytes: int, file_bytes: int, reads_code: bool = False, cuda: bool = False, forker: Forker | None = None
) -> str:
    """Restrict this process: no files, network, other programs or processes, no capabilities, no new privileges, no core, and limits.

    It may take ``memory_bytes`` beyond what it has, and write files that are open up to ``file_bytes``. ``reads_code``: it can still
    read code, and keeps its user id and namespaces. ``cuda``: CUDA can start in it. ``forker``: it can fork, end its children, and make
    pairs of sockets. What this system does not restrict is logged in one line.

    Returns why it gives no namespaces; "" if it does, or none are needed.
    """
    global _statm, _has_filter
    _statm = os.open("/proc/self/statm", os.O_RDONLY | os.O_CLOEXEC)
    num_threads = len(os.listdir("/proc/self/task"))
    if forker is not None:
        problem = forker.problem or _empty_file_system_too()
    else:
        problem = "" if reads_code else _enter_namespaces()
    own_pid = os.getpid() if forker is None else forker.pid  # in a namespace of its own every first process has the same
    measures: dict[str, Callable[[], None]] = {
        "new privileges": _renounce_new_privileges,
        "its user id": lambda: _take_own_id(own_pid) if not reads_code else None,
        "capabilities": drop_capabilities,
        "resources": lambda: _limit_resources(memory_bytes, file_bytes),
        "what it reads and writes": lambda: confine_to_files(() if reads_code else None),
        "system calls": lambda: forbid_system_calls(cuda=cuda, forks=forker is not None),
    }
    missing = []
    for what, measure in measures.items():
        try:
            measure()
        except OSError as error:
            missing.append(f"{what} ({error.strerror})")
    _has_filter = not any(what.startswith("system calls") for what in missing)
    if num_threads > 1:
        missing.append(f"the {num_threads - 1} threads that it has already")
    if missing:
        log.warning("media are decoded with more rights than needed: this system does not restrict %s", ", ".join(missing))
    return problem


def prepare_forker() -> Forker:
    """Give the children of this process, which has one thread and forks its only child then, namespaces of their own.

    Of processes as well, where this system has them: that child is the first in it, and the others end with it.
    """
    problem = processes_problem = ""
    try:
        _unshare(_NEW_PROCESSES)
    except OSError as first:
        processes_problem = first.strerror or str(first)
        try:
            _unshare()
        except OSError as error:
            problem = error.strerror or str(error)
    return Forker(os.getpid(), problem, processes_problem)


def enter_as_child(memory_bytes: int) -> None:
    """In a process that one in the sandbox has forked: give up the right to fork, and what else its parent has. Raises: OSError.

    ``memory_bytes``: what its parent has entered the sandbox with.
    """
    global _statm, _memory_bytes
    if _statm is not None:
        os.close(_statm)
    _statm, _memory_bytes = None, memory_bytes
    _try(libc().prctl(_PR_SET_PDEATHSIG, *map(ctypes.c_ulong, (signal.SIGKILL, 0, 0, 0))))
    if _has_filter:
        forbid_system_calls()


def _enter_namespaces() -> str:
    """Give this process, which has one thread, a network, System V and mounts of its own, and an empty directory alone.

    They protect little that the rest does not, and hold where it has a hole. A user that may not have them gets a namespace of users
    besides, and no right in it. Returns why this system refuses; "" if it does not.
    """
    try:
        _unshare()
    except OSError as error:
        return error.strerror or str(error)
    return _empty_file_system_too()


def _unshare(more: int = 0) -> None:
    """Raises: OSError."""
    if holds(SYS_ADMIN):
        _try(libc().unshare(_NAMESPACES | more))
        return
    with suppress(OSError):  # the sandbox tells
        _take_own_id(os.getpid())
    _try(libc().unshare(_NAMESPACES | _NEW_USER | more))
    _limit_threads()  # those of this user in these namespaces; root's are not counted


def _empty_file_system_too() -> str:
    try:
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
    """Bytes that this process, in the sandbox, may still take by its limits, RLIMIT_DATA and RLIMIT_AS; 0 (unknown) without limits.

    In a child of one in the sandbox: what it might take at its beginning.
    """
    if _statm is None and _memory_bytes:
        return _memory_bytes
    fields = _memory_fields()
    used = {resource.RLIMIT_AS: fields[0], resource.RLIMIT_DATA: fields[5]}
    limits = {kind: resource.getrlimit(kind)[0] for kind in used}
    left = [limit - used[kind] * resource.getpagesize() for kind, limit in limits.items() if limit != resource.RLIM_INFINITY]
    return min(left, default=0)


def _memory_fields() -> list[int]:
    """Sizes in pages, as proc(5) has them."""
    assert _statm is not None, "this process is in no sandbox"
    return [int(field) for field in os.pread(_statm, 256, 0).split()]


def _take_own_id(pid: int) -> None:
    """As root: become a user that owns nothing, and that no other process is, by the number ``pid`` of this one or of the one that has
    forked it. Raises: OSError where the supervisor could not end it."""
    if os.getuid() != 0:
        return
    if not all(map(holds, (KILL, SETGID, SETUID))):
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))
    os.setgroups([])
    for own in own_ids(pid):
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
