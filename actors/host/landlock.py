"""Landlock: a process keeps the files that it names, or none. For the processes that meet strangers' bytes."""

import ctypes
import errno
import os
import sys
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

# Landlock: rights over files, as bits; its system calls have the same numbers on all machines.
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_VERSION, _PATH_BENEATH = 1, 1
_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR = (1 << bit for bit in range(4))
_MAKE_OR_REMOVE = sum(1 << bit for bit in range(4, 13))  # names: of files and directories, sockets, symbolic links
_REFER, _TRUNCATE = 1 << 13, 1 << 14  # since versions 2 and 3
_BIND_TCP, _CONNECT_TCP = 1 << 0, 1 << 1  # since version 4
_ABSTRACT_SOCKETS, _SIGNALS = 1 << 0, 1 << 1  # of others; since version 6


class _Handled(ctypes.Structure):
    """The restricted rights. A kernel that knows only some of them accepts them where the rest is zero."""

    _fields_ = (("files", ctypes.c_uint64), ("network", ctypes.c_uint64), ("scoped", ctypes.c_uint64))


class _PathBeneath(ctypes.Structure):
    _pack_ = 1
    _fields_ = (("rights", ctypes.c_uint64), ("directory_fd", ctypes.c_int32))


def confine_to_files(readable: Iterable[Path] | None, *, has_network: bool = False) -> None:
    """Forbid executing programs and writing files; allow reading ``readable`` and code, and using /dev/null and GPUs. None: nothing.

    This process then reads no memory, environment or descriptors (/proc) of processes that are less confined, and uses no TCP unless it
    ``has_network``. All threads that begin later are as confined. Raises: OSError where the system has no Landlock.
    """
    version = system_call(_CREATE_RULESET, None, 0, _VERSION)
    writing = _WRITE_FILE | (_TRUNCATE if version >= 3 else 0)
    handled = _Handled(
        files=writing | _READ_FILE | _READ_DIR | _EXECUTE | _MAKE_OR_REMOVE | (_REFER if version >= 2 else 0),
        network=_BIND_TCP | _CONNECT_TCP if version >= 4 and not has_network else 0,
        scoped=_ABSTRACT_SOCKETS | _SIGNALS if version >= 6 else 0,
    )
    ruleset = system_call(_CREATE_RULESET, ctypes.byref(handled), ctypes.sizeof(handled), 0)
    try:
        if readable is not None:
            for device in (Path(os.devnull), *Path("/dev").glob("nvidia*")):
                _allow(ruleset, device, _READ_FILE | writing)
            for place in [*map(Path, [*_CODE, *_code(), *_KERNEL]), *readable]:
                with suppress(OSError):  # a path that cannot be opened now cannot be read later
                    _allow(ruleset, place, _READ_FILE | (_READ_DIR if place.is_dir() else 0), kept=str(place) in _KERNEL)
        system_call(_RESTRICT_SELF, ruleset, 0)
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
        system_call(_ADD_RULE, ruleset, _PATH_BENEATH, ctypes.byref(_PathBeneath(rights, fd)), 0)
    finally:
        if not kept:
            os.close(fd)


def libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def system_call(number: int, *arguments: object) -> int:
    """Make a system call by its number. Raises: OSError."""
    call = libc().syscall
    call.restype = ctypes.c_long
    words = [ctypes.c_long(argument) if isinstance(argument, int) else argument for argument in arguments]
    return check(call(ctypes.c_long(number), *words))


def check(status: int) -> int:
    """Return what a call has returned. Raises: OSError if that is below 0."""
    if status < 0:
        number = ctypes.get_errno()
        raise OSError(number, errno.errorcode.get(number, str(number)) + ": " + os.strerror(number))
    return status
