"""Files that others could have put in the place of ours: pipes that would be waited for, devices, links, and files without end."""

import errno
import os
import stat
from pathlib import Path


def open_regular(path: Path) -> int:
    """Open a regular file for reading, closed on exec, without waiting. Links are followed.

    Raises: OSError; EINVAL for what is no regular file.
    """
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(errno.EINVAL, f"{path} is not a regular file")
    return fd


def read_regular(path: Path, max_bytes: int) -> bytes:
    """Read a regular file, up to so many bytes. Raises: OSError, as ``open_regular``."""
    with open(open_regular(path), "rb") as file:
        return file.read(max_bytes)
