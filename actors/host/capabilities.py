"""Capabilities of root, for the processes that meet strangers' bytes: they give them up before they begin."""

import ctypes
import os

from .landlock import libc

KILL, SETGID, SETUID, SYS_ADMIN = 5, 6, 7, 21
_VERSION_3 = 0x20080522


def holds(capability: int) -> bool:
    """Return whether this thread has a capability of the first 32. Raises: OSError."""
    header, data = _header(), (ctypes.c_uint32 * 6)()
    _check(libc().capget(header, data))
    return bool(data[0] >> capability & 1)


def drop_capabilities() -> None:
    """Drop root's capabilities, of this thread and of those that it will begin; other users have none. Raises: OSError."""
    _check(libc().capset(_header(), (ctypes.c_uint32 * 6)()))


def _header() -> "ctypes.Array[ctypes.c_uint32]":
    return (ctypes.c_uint32 * 2)(_VERSION_3, 0)


def _check(status: int) -> None:
    if status < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
