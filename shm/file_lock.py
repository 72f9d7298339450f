"""flock(2) on files that may be removed and made anew meanwhile. Beneath the run directory and the role locks.

A lock belongs to an open file description: the kernel gives it up when the last descriptor of it is closed, so with its process,
however that dies, unless a forked child has a copy.
"""

import fcntl
import os
from pathlib import Path

SHARED = fcntl.LOCK_SH
EXCLUSIVE = fcntl.LOCK_EX


def open_lock(path: Path, create: bool = True) -> int:
    """Open a lock file (mode 0600, closed on exec); the caller closes it. One that is not to be made is opened for reading alone,
    which is enough for a lock. Raises: FileNotFoundError unless ``create``."""
    flags = (os.O_RDWR | os.O_CREAT if create else os.O_RDONLY) | os.O_CLOEXEC | os.O_NOFOLLOW
    return os.open(path, flags, 0o600)


def try_lock(fd: int, mode: int) -> bool:
    """Take a lock, or convert the held one, without waiting. After False none is held."""
    try:
        fcntl.flock(fd, mode | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def wait_for_lock(fd: int, mode: int) -> None:
    """Take a lock, however long it takes."""
    fcntl.flock(fd, mode)


def unlock(fd: int) -> None:
    """Release a lock, even if a forked child has a copy of the descriptor."""
    fcntl.flock(fd, fcntl.LOCK_UN)


def is_current(fd: int, path: Path) -> bool:
    """Return whether a file's name still leads to this open file: another process may have removed it between open and lock."""
    try:
        named = os.stat(path, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return os.path.samestat(named, os.fstat(fd))


def holders(path: Path) -> tuple[int, ...]:
    """The processes that took a lock on the file, after /proc/locks; empty where the kernel does not tell."""
    try:
        status = path.stat()
        lines = Path("/proc/locks").read_text().splitlines()
    except OSError:
        return ()
    device = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}:{status.st_ino}"
    held = (line.split() for line in lines if "->" not in line)  # an arrow: it only waits
    return tuple(sorted({int(lock[4]) for lock in held if lock[1] == "FLOCK" and lock[5] == device and int(lock[4]) > 0}))
