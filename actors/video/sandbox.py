"""The sandbox that the video actor enters before it reads any media: an attacker who takes it over through a decoder gains little.

Nothing here can be undone, and all later threads inherit it. Still allowed: reading programs, libraries and the kernel's files, and
what the caller names; using the connections that there are, and accepting more. What is mapped already stays so; no mapping can be
made to reach further into its file, and no file that it is of can be cut.
"""

import ctypes
import errno
import logging
import os
import resource
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

from .seccomp import forbid_system_calls

log = logging.getLogger(__name__)

MAX_OPEN_FILES = 256
# Less than any core has, so that no file is made; and other than 0 it keeps the kernel from piping a core to a program, too.
NO_CORE_BYTES = 1

MAX_THREADS = 1024

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
        "what it reads and writes": lambda: _confine_to_files(readable, writable),
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
    if _libc().unshare(_NAMESPACES) != 0:
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
    _check(_libc().prctl(_PR_SET_NO_NEW_PRIVS, *map(ctypes.c_ulong, (1, 0, 0, 0))))


def _drop_capabilities() -> None:
    """Drop root's capabilities; other users have none."""
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION_3, 0)
    _check(_libc().capset(header, (ctypes.c_uint32 * 6)()))


def _limit_resources(memory_bytes: int, file_bytes: int) -> None:
    """RLIMIT_DATA counts private memory alone, unlike RLIMIT_AS neither the pools nor what libraries reserve and never touch.

    The filter prevents new processes; ``enter_namespaces`` limits threads.
    """
    data_pages = int(Path("/proc/self/statm").read_text().split()[5])
    limits = {
        resource.RLIMIT_CORE: NO_CORE_BYTES,
        resource.RLIMIT_NOFILE: MAX_OPEN_FILES,
        resource.RLIMIT_FSIZE: file_bytes,
        resource.RLIMIT_DATA: data_pages * resource.getpagesize() + memory_bytes,
    }
    for kind, limit in limits.items():
        lowered = _lesser(limit, resource.getrlimit(kind)[1])
        resource.setrlimit(kind, (lowered, lowered))


def _lesser(limit: int, hard: int) -> int:
    return limit if hard == resource.RLIM_INFINITY else min(limit, hard)


# Landlock: rights over files, as bits; its system calls have the same numbers on all machines.
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_VERSION, _PATH_BENEATH = 1, 1
_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR, _REMOVE_DIR, _REMOVE_FILE = (1 << bit for bit in range(6))
_MAKE_DIR, _MAKE_REG = 1 << 7, 1 << 8
_MAKE_OTHERS = _REMOVE_DIR | _MAKE_DIR | 1 << 6 | 1 << 9 | 1 << 10 | 1 << 11 | 1 << 12  # devices, sockets, pipes, symbolic links
_REFER, _TRUNCATE = 1 << 13, 1 << 14  # since versions 2 and 3
_BIND_TCP, _CONNECT_TCP = 1 << 0, 1 << 1  # since version 4
_ABSTRACT_SOCKETS, _SIGNALS = 1 << 0, 1 << 1  # of others; since version 6


class _Handled(ctypes.Structure):
    """The restricted rights. A kernel that knows only some of them accepts them where the rest is zero."""

    _fields_ = (("files", ctypes.c_uint64), ("network", ctypes.c_uint64), ("scoped", ctypes.c_uint64))


class _PathBeneath(ctypes.Structure):
    _pack_ = 1
    _fields_ = (("rights", ctypes.c_uint64), ("directory_fd", ctypes.c_int32))


def _confine_to_files(readable: Iterable[Path], writable: Iterable[Path]) -> None:
    """Forbid executing programs; allow writing only in ``writable``, /dev/null and GPUs, and reading ``readable`` and code besides.

    Landlock keeps the memory, environment and descriptors of processes that are not so confined (/proc) from this one, too.
    """
    version = _syscall(_CREATE_RULESET, None, 0, _VERSION)
    writing = _WRITE_FILE | _REMOVE_FILE | _MAKE_REG | (_TRUNCATE if version >= 3 else 0)
    handled = _Handled(
        files=writing | _READ_FILE | _READ_DIR | _EXECUTE | _MAKE_OTHERS | (_REFER if version >= 2 else 0),
        network=_BIND_TCP | _CONNECT_TCP if version >= 4 else 0,
        scoped=_ABSTRACT_SOCKETS | _SIGNALS if version >= 6 else 0,
    )
    ruleset = _syscall(_CREATE_RULESET, ctypes.byref(handled), ctypes.sizeof(handled), 0)
    try:
        for device in (Path(os.devnull), *Path("/dev").glob("nvidia*")):
            _allow(ruleset, device, _READ_FILE | writing & (_WRITE_FILE | _TRUNCATE))
        for place in [*map(Path, [*_CODE, *_code(), *_KERNEL]), *readable]:
            with suppress(OSError):  # a path that cannot be opened now cannot be read later
                _allow(ruleset, place, _READ_FILE | (_READ_DIR if place.is_dir() else 0), kept=str(place) in _KERNEL)
        for directory in writable:
            if directory.is_dir():  # a user without a home has no logs
                _allow(ruleset, directory, writing | _READ_FILE | _READ_DIR)
        _syscall(_RESTRICT_SELF, ruleset, 0)
    finally:
        os.close(ruleset)


_CODE = (
    "/usr", "/lib", "/lib32", "/lib64", "/nix/store", "/gnu/store", "/etc/ld.so.cache", "/etc/localtime", "/etc/nsswitch.conf",
    "/etc/passwd", "/dev/zero", "/dev/random", "/dev/urandom",
)  # fmt: skip
_KERNEL = (
    "/sys", "/proc/self", "/proc/cpuinfo", "/proc/devices", "/proc/driver", "/proc/filesystems", "/proc/locks", "/proc/meminfo",
    "/proc/modules", "/proc/stat", "/proc/sys", "/proc/vmstat",
)  # fmt: skip
_PACKAGE = __name__.partition(".")[0]


def _code() -> set[str]:
    """The places of modules and libraries to load later, besides ``_CODE``.

    All of Python's path, so a home directory on it becomes readable; and the real places of loaded files, since a path may be
    full of symbolic links, or stand for places that are not on it. Of this package, which may be a checkout, the packages in it.
    """
    own = Path(__file__).parents[2]
    places = {sys.prefix, sys.base_prefix, sys.exec_prefix}
    places |= {str(place) for place in own.iterdir() if place.suffix == ".py" or (place / "__init__.py").is_file()}
    places |= set(filter(os.path.isabs, [*sys.path, *os.environ.get("LD_LIBRARY_PATH", "").split(os.pathsep)]))
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if "." not in name and name not in (_PACKAGE, "__main__") and isinstance(file, str):
            places.add(os.path.dirname(os.path.realpath(file)))
    return places


def _allow(ruleset: int, path: Path, rights: int, *, kept: bool = False) -> None:
    """``kept``: the file stays open. A rule is for an inode, and /proc makes new ones for files that are not open."""
    fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        _syscall(_ADD_RULE, ruleset, _PATH_BENEATH, ctypes.byref(_PathBeneath(rights, fd)), 0)
    finally:
        if not kept:
            os.close(fd)


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _syscall(number: int, *arguments: object) -> int:
    call = _libc().syscall
    call.restype = ctypes.c_long
    words = [ctypes.c_long(argument) if isinstance(argument, int) else argument for argument in arguments]
    return _check(call(ctypes.c_long(number), *words))


def _check(status: int) -> int:
    if status < 0:
        number = ctypes.get_errno()
        raise OSError(number, errno.errorcode.get(number, str(number)) + ": " + os.strerror(number))
    return status
