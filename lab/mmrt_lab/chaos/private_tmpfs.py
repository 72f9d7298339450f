"""A private file system for the storm, so that filling it does not fill the machine's.

A tmpfs in a private mount namespace: no other process sees it, and the kernel removes it with the storm's last process, however
that ends. Needs root, or a kernel that lets users make user namespaces; without either the storm goes without ENOSPC. Linux only,
through libc, since Python 3.11 has neither call. Must be entered before any thread is started.
"""

import ctypes
import os
from pathlib import Path

_CLONE_NEWNS, _CLONE_NEWUSER = 0x20000, 0x10000000
_MS_NOSUID, _MS_NODEV, _MS_REMOUNT, _MS_REC, _MS_PRIVATE = 2, 4, 32, 1 << 14, 1 << 18
_MNT_DETACH = 2
_BALLAST = "ballast"


class PrivateTmpfs:
    """A mounted tmpfs at ``path``. ``fill`` leaves nothing free, ``free`` gives it back."""

    def __init__(self, path: Path) -> None:
        """Use ``enter``."""
        self.path = path

    def limit(self, spare_bytes: int) -> None:
        """Make the file system no larger than what is in it and this much more. Raises: OSError."""
        space = os.statvfs(self.path)
        used = (space.f_blocks - space.f_bfree) * space.f_frsize
        _mount(self.path, _MS_REMOUNT | _MS_NOSUID | _MS_NODEV, f"size={used + spare_bytes},mode=700")

    def fill(self) -> None:
        """Leave no free block."""
        space = os.statvfs(self.path)
        fd = os.open(self.path / _BALLAST, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(fd, os.fstat(fd).st_size, max(1, space.f_bavail * space.f_frsize))
        except OSError:
            pass  # another process took the last block: it is full
        finally:
            os.close(fd)

    def free(self) -> None:
        (self.path / _BALLAST).unlink(missing_ok=True)

    def close(self) -> None:
        """Unmount it, with its contents."""
        _call("umount2", os.fsencode(self.path), _MNT_DETACH)


def enter(path: Path, num_bytes: int) -> PrivateTmpfs:
    """Leave the machine's mount namespace and mount a tmpfs of this size at ``path``, an empty directory. Raises: OSError."""
    uid, gid = os.getuid(), os.getgid()
    if uid == 0:
        _call("unshare", _CLONE_NEWNS)
    else:
        _call("unshare", _CLONE_NEWNS | _CLONE_NEWUSER)
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"{uid} {uid} 1")
        Path("/proc/self/gid_map").write_text(f"{gid} {gid} 1")
    _call("mount", b"none", b"/", None, _MS_REC | _MS_PRIVATE, None)
    _mount(path, _MS_NOSUID | _MS_NODEV, f"size={num_bytes},mode=700")
    return PrivateTmpfs(path)


def _mount(path: Path, flags: int, data: str) -> None:
    _call("mount", b"tmpfs", os.fsencode(path), b"tmpfs", flags, data.encode())


def _call(name: str, *arguments: object) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if getattr(libc, name)(*arguments) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")
