"""A file of pages that outlives a run: named like the pages of a pool's cache, bounded, and checked before they are believed.

Behind a header lie groups of slots: a block with their heads, then their contents. So a file can grow and be cut. A head holds the
page's key, its worth, and a code over key and contents. The code is keyed with a secret: it finds a torn write, another's page and a
changed byte alike. When all slots are taken, the page of least worth is overwritten: one that was kept longer ago, and of those kept
together the one deepest in its prompt, which is of no use without the others.

One process writes (``PageFile``). Others read at any time (``PageFileReader``): a head is emptied before its contents are overwritten,
and written after them.
"""

import errno
import fcntl
import os
import stat
import struct
from collections.abc import Iterable
from hashlib import blake2b
from pathlib import Path
from typing import Self

import numpy as np

from ..schema.page_key import KEY_BYTES

_BLOCK_BYTES = 4096
_MAGIC = b"mmrtpag3"
_CODE_BYTES = 32
_HEADER = struct.Struct(f"<8sQ{_CODE_BYTES}s")  # magic, page bytes, code
_HEAD = struct.Struct(f"<{KEY_BYTES}sQ{_CODE_BYTES}s")  # key, worth (0: an empty slot), code
_HEADS = np.dtype([("key", f"V{KEY_BYTES}"), ("worth", "<u8"), ("code", f"V{_CODE_BYTES}")])
_DEPTHS = 1 << 32  # worth is round * _DEPTHS - depth
_MAX_WORTH = 1 << 62  # higher ones are nobody's
_GROUP = _BLOCK_BYTES // _HEAD.size  # slots


class PageFile:
    """The pages of one pool in a file. One process has it open for writing at a time."""

    def __init__(self, fd: int, secret: bytes, page_bytes: int, num_slots: int) -> None:
        """Use ``open``."""
        self.page_bytes = page_bytes
        self.num_slots = num_slots
        self.was_foreign = False  # it was another's, or of another shape, and has been emptied
        self._fd = fd
        self._secret = secret
        self._slot_of: dict[bytes, int] = {}
        self._worth_of: dict[bytes, int] = {}
        self._victims: list[bytes] = []  # keys to overwrite, the last one first; some may be gone or worth more by now
        self._free: list[int] = []
        self._num_used = 0  # slots that have ever held a page are below
        self._round = 1  # of runs and of calls of ``keep``

    @classmethod
    def open(cls, path: Path, secret: bytes, page_bytes: int, max_bytes: int) -> Self:
        """Open or make the file. One of other pages, or made with another secret, is emptied; one that is too large keeps the pages of
        most worth.

        Raises: OSError; PermissionError if others own it or may read it; BlockingIOError if another process has it.
        """
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            found = os.fstat(fd)
            if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
                raise PermissionError(errno.EPERM, f"{path} must be a file of this user that no other can read")
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not os.path.exists(path) or os.stat(path).st_ino != found.st_ino:
                raise BlockingIOError(errno.EAGAIN, f"{path} has just been removed")
            os.utime(fd)  # files used longest ago are removed
            file = cls(fd, secret, page_bytes, _num_slots(max_bytes, page_bytes))
            header = _header(secret, page_bytes)
            if os.pread(fd, len(header), 0) != header:
                file.was_foreign = found.st_size > 0
                os.ftruncate(fd, 0)
                os.pwrite(fd, header, 0)
            file._read_heads()
        except BaseException:
            os.close(fd)
            raise
        return file

    def close(self) -> None:
        os.close(self._fd)

    def __len__(self) -> int:
        return len(self._slot_of)

    def __contains__(self, key: bytes) -> bool:
        return key in self._slot_of

    def keys(self) -> list[bytes]:
        """Return the keys of all pages, those of most worth last."""
        return sorted(self._worth_of, key=self._worth_of.__getitem__)

    def depth_of(self, key: bytes) -> int:
        """Return the place of a page in its prompt."""
        return -self._worth_of[key] % _DEPTHS

    def read(self, key: bytes) -> bytes | None:
        """Return a page's contents, or None, and forget it, where the file does not hold what was written. Raises: OSError."""
        contents, head = _read(self._fd, self._slot_of[key], self.page_bytes)
        if head != (key, _code(self._secret, key, contents)):
            self._forget(key)
            return None
        return contents

    def write(self, key: bytes, contents: bytes, depth: int = 0) -> None:
        """Write a page that the file does not have, over the one of least worth if it is full. Raises: OSError, without having it."""
        assert key not in self._slot_of and len(contents) == self.page_bytes
        if not self.num_slots:
            return
        if not self._free and self._num_used == self.num_slots:
            self._forget(self._least())
        if not self._free:
            self._free.append(self._num_used)
            self._num_used += 1
        self._put(key, contents, self._round * _DEPTHS - min(depth, _DEPTHS - 1))

    def keep(self, keys: Iterable[bytes]) -> None:
        """Make these pages worth more than all others. Raises: OSError."""
        wanted = self._slot_of.keys() & {*keys}
        latest = {key for key, worth in self._worth_of.items() if worth > (self._round - 1) * _DEPTHS}
        if not latest <= wanted:
            self._round += 1
            latest = set()
        for key in wanted - latest:
            worth = self._round * _DEPTHS - self.depth_of(key)
            self._write(worth.to_bytes(8, "little"), _head(self._slot_of[key], self.page_bytes) + KEY_BYTES)
            self._worth_of[key] = worth
        if wanted - latest:
            self._victims = []

    def _least(self) -> bytes:
        """Return the key of the page of least worth, but for pages written since the others were compared."""
        while self._victims and self._victims[-1] not in self._slot_of:
            self._victims.pop()
        if not self._victims:
            self._victims = self.keys()[::-1]
        return self._victims.pop()

    def _put(self, key: bytes, contents: bytes, worth: int) -> None:
        """Write a page into a free slot."""
        slot = self._free[-1]
        self._write(contents, _place(slot, self.page_bytes))
        self._write(_HEAD.pack(key, worth, _code(self._secret, key, contents)), _head(slot, self.page_bytes))
        self._slot_of[key], self._worth_of[key] = self._free.pop(), worth

    def _forget(self, key: bytes) -> None:
        slot = self._slot_of[key]
        self._write(bytes(_HEAD.size), _head(slot, self.page_bytes))
        del self._slot_of[key], self._worth_of[key]
        if slot < self.num_slots:
            self._free.append(slot)

    def _write(self, data: bytes, offset: int) -> None:
        if os.pwrite(self._fd, data, offset) != len(data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def _read_heads(self) -> None:
        """Find the keys. Contents are checked when they are read. Of equal keys the one of most worth counts."""
        for worth, slot, key in _heads(self._fd, self.page_bytes):
            self._slot_of[key], self._worth_of[key] = slot, worth
            self._round = -(-worth // _DEPTHS) + 1  # pages of this run are worth more than those of the last
        slots = {*self._slot_of.values()}
        self._num_used = min(self.num_slots, max(slots, default=-1) + 1)
        self._free = sorted({*range(self._num_used)} - slots, reverse=True)
        if os.fstat(self._fd).st_size > (end := bytes_of_slots(self.num_slots, self.page_bytes)):
            self._shrink()
            os.ftruncate(self._fd, end)

    def _shrink(self) -> None:
        """Move the pages behind the last slot into slots of pages of less worth."""
        keys = self.keys()
        kept = keys[max(0, len(keys) - self.num_slots) :]
        for key in keys[: len(keys) - len(kept)]:
            self._forget(key)
        for key in [key for key in kept if self._slot_of[key] >= self.num_slots]:
            worth = self._worth_of[key]
            if (contents := self.read(key)) is not None:
                self._forget(key)
                self._put(key, contents, worth)


class PageFileReader:
    """The pages of a file that another process writes."""

    def __init__(self, fd: int, secret: bytes, page_bytes: int) -> None:
        """Use ``open``."""
        self._fd = fd
        self._secret = secret
        self._page_bytes = page_bytes

    @classmethod
    def open(cls, path: Path, secret: bytes, page_bytes: int) -> Self:
        """Open a file that ``PageFile.open`` has made. Raises: OSError; ValueError if it is another's, or has other pages."""
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            if os.pread(fd, _HEADER.size, 0) != _header(secret, page_bytes):
                raise ValueError(f"{path} has not the pages of this run")
        except BaseException:
            os.close(fd)
            raise
        return cls(fd, secret, page_bytes)

    def close(self) -> None:
        os.close(self._fd)

    def written_ns(self) -> int:
        """Return when the file was last written, by its own clock."""
        return os.fstat(self._fd).st_mtime_ns

    def slots(self) -> dict[bytes, int]:
        """Return the pages' slots by their keys, as their heads say: no contents are read. Raises: OSError."""
        return {key: slot for _, slot, key in _heads(self._fd, self._page_bytes)}

    def read(self, key: bytes, slot: int) -> bytes | None:
        """Return a page's contents; None if the slot has another page by now. Raises: OSError; ValueError if it is damaged."""
        contents, (found, code) = _read(self._fd, slot, self._page_bytes)
        if found != key:
            return None
        if code != _code(self._secret, key, contents):
            raise ValueError(f"the page in slot {slot} is not as it was written")
        return contents


def _header(secret: bytes, page_bytes: int) -> bytes:
    shape = _MAGIC + page_bytes.to_bytes(8, "little")
    return shape + _code(secret, shape)


def _group(slot: int, page_bytes: int) -> int:
    """Return the offset of a slot's group: the block with its heads."""
    return _BLOCK_BYTES + slot // _GROUP * (_BLOCK_BYTES + _GROUP * page_bytes)


def _head(slot: int, page_bytes: int) -> int:
    """Return the offset of a slot's head."""
    return _group(slot, page_bytes) + slot % _GROUP * _HEAD.size


def _place(slot: int, page_bytes: int) -> int:
    """Return the offset of a slot's contents."""
    return _group(slot, page_bytes) + _BLOCK_BYTES + slot % _GROUP * page_bytes


def bytes_of_slots(num_slots: int, page_bytes: int) -> int:
    """Return the size of a file whose slots are all taken, in bytes: their pages and heads."""
    return _place(num_slots - 1, page_bytes) + page_bytes if num_slots else _BLOCK_BYTES


def _num_slots(max_bytes: int, page_bytes: int) -> int:
    """Return how many slots a file of this size has."""
    num_groups, rest = divmod(max(0, max_bytes - _BLOCK_BYTES), _BLOCK_BYTES + _GROUP * page_bytes)
    return num_groups * _GROUP + max(0, rest - _BLOCK_BYTES) // page_bytes


def _heads(fd: int, page_bytes: int) -> list[tuple[int, int, bytes]]:
    """Return (worth, slot, key) of all slots in use, those of least worth first."""
    num_groups = -(-(os.fstat(fd).st_size - _BLOCK_BYTES) // (_BLOCK_BYTES + _GROUP * page_bytes))
    blocks = [os.pread(fd, _BLOCK_BYTES, _group(group * _GROUP, page_bytes)).ljust(_BLOCK_BYTES, b"\0") for group in range(num_groups)]
    heads = np.frombuffer(b"".join([block[: _GROUP * _HEAD.size] for block in blocks]), _HEADS)
    slots = np.flatnonzero((heads["worth"] > 0) & (heads["worth"] < _MAX_WORTH))
    slots = slots[np.argsort(heads["worth"][slots], kind="stable")]
    return list(zip(heads["worth"][slots].tolist(), slots.tolist(), heads["key"][slots].tolist(), strict=True))


def _read(fd: int, slot: int, page_bytes: int) -> tuple[bytes, tuple[bytes, bytes]]:
    """Return the contents of a slot, and then, from its head, the key and the code of these contents."""
    contents = os.pread(fd, page_bytes, _place(slot, page_bytes))
    head = os.pread(fd, _HEAD.size, _head(slot, page_bytes))
    return contents, (head[:KEY_BYTES], head[-_CODE_BYTES:])


def _code(secret: bytes, *parts: bytes) -> bytes:
    code = blake2b(digest_size=_CODE_BYTES, key=secret)
    for part in parts:
        code.update(part)
    return code.digest()


def remove_unused(path: Path) -> bool:
    """Remove a page file unless a process has it open. Returns whether it is gone. Raises: OSError."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        path.unlink()  # while it is locked: who opens it now finds that it is gone
    except BlockingIOError:
        return False
    finally:
        os.close(fd)
    return True
