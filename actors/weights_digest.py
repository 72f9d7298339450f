"""Digests of a checkpoint's files of weights, for ``cache.dir``: pages of one checkpoint are never another's, whatever its names, sizes
and times.

Files are read whole once, or by samples where they are very large. Their digests are kept in the directory of pages by what the kernel
tells a file's contents by: device, inode, size, and the times of its last write and change. No program sets the last one.
"""

import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path
from typing import NamedTuple

import msgspec

NAME = "weights.digests"
WHOLE_BYTES = 32 << 30  # of all files: up to that they are read whole, some 10 s with 4 threads
SETTLED_S = 2.0  # a file that has changed since may change again within the same tick of its times: its digest is not kept
_DIGEST_BYTES = 32
_PIECE_BYTES = 64 << 20  # read by one thread
_BLOCK_BYTES = 1 << 20
_SAMPLE_BYTES = 1 << 16  # of each block, where files are not read whole
_MAX_KEPT = 1024
_MAX_FILE_BYTES = 1 << 20


class _Identity(NamedTuple):
    """What tells the contents of a file. ``is_whole``: whether all of it is read."""

    device: int
    inode: int
    num_bytes: int
    written_ns: int
    changed_ns: int
    is_whole: bool


class _Kept(msgspec.Struct, array_like=True):
    """The digest of a file that was read."""

    file: _Identity
    digest: bytes


_decode = msgspec.json.Decoder(list[_Kept]).decode


def weights_digests(files: Sequence[Path], directory: Path, go_on: Callable[[], None] = lambda: None) -> list[bytes]:
    """Return the digest of each file's contents. ``directory``: where digests are kept; nobody else may write there. ``go_on`` is
    called after each piece that is read.

    Raises: OSError, also for a file that changes while it is read; what ``go_on`` raises.
    """
    found = [os.stat(file) for file in files]
    is_whole = sum(status.st_size for status in found) <= WHOLE_BYTES
    kept = {one.file: one.digest for one in _read(directory / NAME)}
    named = [_identity(status, is_whole) for status in found]
    digests: list[bytes] = []
    settled_ns = time.time_ns() - int(SETTLED_S * 1e9)
    for file, name in zip(files, named, strict=True):
        digest = kept.pop(name, None)
        if is_new := digest is None:
            digest = _digest(file, is_whole, go_on)
            if _identity(os.stat(file), is_whole) != name:
                raise OSError(f"{file} changes while it is read")
        assert digest is not None
        digests.append(digest)
        if max(name.written_ns, name.changed_ns) < settled_ns:
            kept[name] = digest  # behind the others: what was used last
            if is_new:  # a start that is broken off goes on from there
                _write(directory / NAME, kept)
    _write(directory / NAME, kept)
    return digests


def _identity(status: os.stat_result, is_whole: bool) -> _Identity:
    return _Identity(status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns, is_whole)


def _digest(file: Path, is_whole: bool, go_on: Callable[[], None]) -> bytes:
    """Return a digest of the digests of a file's pieces, which threads read."""
    descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
    try:
        num_bytes = os.fstat(descriptor).st_size

        is_over = False

        def of_piece(start: int) -> bytes:
            if is_over:
                return b""
            digest = blake2b(digest_size=_DIGEST_BYTES)
            for at in range(start, min(start + _PIECE_BYTES, num_bytes), _BLOCK_BYTES):
                digest.update(os.pread(descriptor, _BLOCK_BYTES if is_whole or at == 0 else _SAMPLE_BYTES, at))
            return digest.digest()

        with ThreadPoolExecutor(max(1, min(8, len(os.sched_getaffinity(0)))), thread_name_prefix="mmrt-digest") as threads:
            whole = blake2b(digest_size=_DIGEST_BYTES)
            try:
                for digest in threads.map(of_piece, range(0, num_bytes, _PIECE_BYTES)):
                    go_on()
                    whole.update(digest)
            finally:
                is_over = True  # pieces that are not begun need not be read
            return whole.digest()
    finally:
        os.close(descriptor)


def _read(path: Path) -> list[_Kept]:
    """Return what is kept; nothing if that cannot be read."""
    with suppress(OSError, ValueError):
        with path.open("rb") as file:
            return _decode(file.read(_MAX_FILE_BYTES))
    return []


def _write(path: Path, kept: dict[_Identity, bytes]) -> None:
    """Keep digests, as far as that is possible."""
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    with suppress(OSError):
        with open(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600), "wb") as file:
            file.write(msgspec.json.encode([_Kept(name, digest) for name, digest in kept.items()][-_MAX_KEPT:]))
        os.replace(part, path)
