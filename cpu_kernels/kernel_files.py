"""Kernels' code, and what was tried of them (``choices``), kept from process to process: ``$XDG_CACHE_HOME/mmrt/kernels``. A file is
replaced when its kernel changes.

The code runs as it lies there: nothing is taken from, or put into, a directory that others can write, and no file of theirs is taken.
"""

import errno
import fcntl
import logging
import os
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from hashlib import blake2b
from pathlib import Path

from ..shm.regular_file import open_regular
from .object_code import Image

log = logging.getLogger(__name__)

MAKE_S = 5.0  # how long a process waits for another one that makes the same kernel
_LOOK_S = 0.005
_LOCK = "making"  # the file's name
_FLOCK = struct.Struct("hh4xqqi4x")  # struct flock
CHOICE = ".choice"  # ends the names of files of ``choices``
_MAX_BYTES = 1 << 20
_DIGEST_BYTES = 32
_ENTRY = struct.Struct("<Q")

_directory: Path | None = None
_refused: set[Path] = set()


def keep_in(directory: Path) -> None:
    """Keep the kernels of this process in a directory, which need not exist. Without it none are kept."""
    global _directory
    _directory = directory


def load(name: str, key: bytes) -> Image | None:
    """The image that was saved with this key; None where there is none, where it is damaged, and where somebody else may write it."""
    body = read(name, key)
    return None if body is None else Image(body[_ENTRY.size :], *_ENTRY.unpack_from(body))


def save(name: str, key: bytes, image: Image) -> None:
    """Write a file, whole or not at all. Where that is impossible, each process makes its kernels."""
    write(name, key, _ENTRY.pack(image.entry) + image.code)


def read(name: str, key: bytes | None) -> bytes | None:
    """As ``load``, of what ``write`` wrote. With None for a key it is not checked with which one that was, nor that it is whole."""
    if _directory is None or not _is_ours(_directory):
        return None
    path = _directory / name
    try:
        with open(open_regular(path), "rb") as file:
            status = os.fstat(file.fileno())
            if status.st_uid != os.geteuid() or status.st_mode & 0o022:
                log.warning("%s is ignored: others than this user may write it", path)
                return None
            data = file.read(_MAX_BYTES)
    except OSError:
        return None
    digest, body = data[:_DIGEST_BYTES], data[_DIGEST_BYTES:]
    return body if key is None or digest == _digest(name, key, body) else None


def write(name: str, key: bytes, body: bytes) -> None:
    """As ``save``, of any bytes."""
    if _directory is None:
        return
    if _DIGEST_BYTES + len(body) > _MAX_BYTES:
        log.debug("%s has %d bytes and is not kept", name, len(body))
        return
    path = _directory / name
    part = path.with_suffix(f".{threading.get_native_id()}.part")
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not _is_ours(_directory):
            return
        part.unlink(missing_ok=True)
        descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        with open(descriptor, "wb") as file:
            file.write(_digest(name, key, body) + body)
        os.replace(part, path)
    except OSError as error:
        log.debug("%s is not written: %s", path, error.strerror)
        with suppress(OSError):
            part.unlink(missing_ok=True)


@contextmanager
def alone(name: str) -> Iterator[None]:
    """Let one process at a time make the file. Another one may have made it meanwhile, so look again.

    Who has waited for ``MAKE_S`` goes on beside the other, which may be stopped; where no lock can be had, nobody waits.
    """
    descriptor = _open_lock()
    try:
        if descriptor is not None:
            _lock(descriptor, name)
        yield
    finally:
        if descriptor is not None:
            os.close(descriptor)


def _open_lock() -> int | None:
    if _directory is None:
        return None
    try:
        _directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        return os.open(_directory / _LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600) if _is_ours(_directory) else None
    except OSError:
        return None


def _lock(descriptor: int, name: str) -> None:
    """Lock a byte of the file, its own for each name (mostly), as long as it is open."""
    at = int.from_bytes(blake2b(name.encode(), digest_size=4).digest())
    byte = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, at, 1, 0)
    end_s = time.monotonic() + MAKE_S
    while True:
        try:
            fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, byte)
            return
        except OSError as error:
            if error.errno not in (errno.EAGAIN, errno.EACCES) or time.monotonic() > end_s:
                return
        time.sleep(_LOOK_S)


def choices() -> dict[str, str]:
    """What was tried on this machine, and what was found (``choices``), also what a change has made old."""
    paths = sorted(_directory.glob(f"*{CHOICE}")) if _directory is not None else []
    found = {path.stem: read(path.name, None) for path in paths}
    return {name: body.decode("ascii", "replace") for name, body in found.items() if body is not None}


def _is_ours(directory: Path) -> bool:
    """Return whether only this user can put files there; if not, say so once."""
    try:
        status = directory.stat()
    except OSError:
        return False
    is_ours = status.st_uid == os.geteuid() and not status.st_mode & 0o022
    if not is_ours and directory not in _refused:
        _refused.add(directory)
        log.warning("kernels are made anew: %s must belong to this user, and be writable by no other (chmod 700)", directory)
    return is_ours


def _digest(name: str, key: bytes, body: bytes) -> bytes:
    return blake2b(name.encode() + body, key=key, digest_size=_DIGEST_BYTES).digest()
