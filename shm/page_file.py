"""A file of pages that outlives a run: named like the pages of a pool's cache, bounded, and checked before they are believed.

Behind a header lie the heads of all slots, then their contents. A head holds the page's key, a number that orders the pages, and a
code over key and contents. The code is keyed with a secret: it finds a torn write, another's page and a changed byte alike. When all
slots are taken, the page with the lowest number is overwritten.
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

from ..schema.page_key import KEY_BYTES

_BLOCK_BYTES = 4096
_MAGIC = b"mmrtpag2"
_CODE_BYTES = 32
_HEADER = struct.Struct(f"<8sQQ{_CODE_BYTES}s")  # magic, page bytes, slots, code
_HEAD = struct.Struct(f"<{KEY_BYTES}sQ{_CODE_BYTES}s")  # key, number (0: an empty slot), code
_MAX_NUMBER = 1 << 62  # higher ones are nobody's


class PageFile:
    """The pages of one pool in a file. One process has it open at a time."""

    def __init__(self, fd: int, secret: bytes, page_bytes: int, num_slots: int) -> None:
        """Use ``open``."""
        self.page_bytes = page_bytes
        self.num_slots = num_slots
        self.was_foreign = False  # it was another's, or of another shape, and has been emptied
        self._fd = fd
        self._secret = secret
        self._slot_of: dict[bytes, int] = {}  # in the order of their numbers
        self._free: list[int] = []
        self._num_used = 0  # slots that have ever held a page are below
        self._last_number = 0

    @classmethod
    def open(cls, path: Path, secret: bytes, page_bytes: int, max_bytes: int) -> Self:
        """Open or make the file. One that does not fit, or was made with another secret, is emptied.

        Raises: OSError; PermissionError if others own it or may read it; BlockingIOError if another process has it.
        """
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            found = os.fstat(fd)
            if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
                raise PermissionError(errno.EPERM, f"{path} must be a file of this user that no other can read")
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            file = cls(fd, secret, page_bytes, max(0, max_bytes - 2 * _BLOCK_BYTES) // (_HEAD.size + page_bytes))
            shape = _MAGIC + page_bytes.to_bytes(8, "little") + file.num_slots.to_bytes(8, "little")
            header = shape + file._code(shape)
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
        """Return the keys of all pages, the one to be overwritten last at the end."""
        return [*self._slot_of]

    def read(self, key: bytes) -> bytes | None:
        """Return a page's contents, or None, and forget it, where the file does not hold what was written. Raises: OSError."""
        slot = self._slot_of[key]
        contents = os.pread(self._fd, self.page_bytes, self._place(slot))
        head = os.pread(self._fd, _HEAD.size, self._head(slot))
        if len(head) == _HEAD.size and head[:KEY_BYTES] == key and head[-_CODE_BYTES:] == self._code(key, contents):
            return contents
        self._free.append(self._slot_of.pop(key))
        os.pwrite(self._fd, bytes(_HEAD.size), self._head(slot))
        return None

    def write(self, key: bytes, contents: bytes) -> None:
        """Write a page that the file does not have, over the first one if it is full. Raises: OSError; then it is not in the file."""
        assert key not in self._slot_of and len(contents) == self.page_bytes
        if not self.num_slots:
            return
        if not self._free and self._num_used == self.num_slots:
            self._free.append(self._slot_of.pop(next(iter(self._slot_of))))
        if not self._free:
            self._free.append(self._num_used)
            self._num_used += 1
        slot = self._free[-1]
        self._write(contents, self._place(slot))
        self._last_number += 1
        self._write(_HEAD.pack(key, self._last_number, self._code(key, contents)), self._head(slot))
        self._slot_of[key] = self._free.pop()

    def keep(self, keys: Iterable[bytes]) -> None:
        """Make these pages the last ones to be overwritten, in the order that they have among themselves. Raises: OSError."""
        wanted = {*keys}
        for key in [key for key in self._slot_of if key in wanted]:
            slot = self._slot_of.pop(key)
            self._last_number += 1
            self._write(self._last_number.to_bytes(8, "little"), self._head(slot) + KEY_BYTES)
            self._slot_of[key] = slot

    def _write(self, data: bytes, offset: int) -> None:
        if os.pwrite(self._fd, data, offset) != len(data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def _read_heads(self) -> None:
        """Find the keys. Contents are checked when they are read. Of equal keys the one with the highest number counts."""
        heads = os.pread(self._fd, self.num_slots * _HEAD.size, self._head(0))
        found = []
        for slot in range(len(heads) // _HEAD.size):
            key, number, _ = _HEAD.unpack_from(heads, slot * _HEAD.size)
            if 0 < number < _MAX_NUMBER:
                found.append((number, slot, key))
        for number, slot, key in sorted(found):
            self._slot_of.pop(key, None)
            self._slot_of[key], self._last_number = slot, number
        self._num_used = max(self._slot_of.values(), default=-1) + 1
        self._free = sorted({*range(self._num_used)} - {*self._slot_of.values()}, reverse=True)

    def _head(self, slot: int) -> int:
        """Return the offset of a slot's head."""
        return _BLOCK_BYTES + slot * _HEAD.size

    def _place(self, slot: int) -> int:
        """Return the offset of a slot's contents."""
        heads_end = -(-self._head(self.num_slots) // _BLOCK_BYTES) * _BLOCK_BYTES
        return heads_end + slot * self.page_bytes

    def _code(self, *parts: bytes) -> bytes:
        code = blake2b(digest_size=_CODE_BYTES, key=self._secret)
        for part in parts:
            code.update(part)
        return code.digest()


def lock_is_free(path: Path) -> bool:
    """Return whether no process has this file open as a ``PageFile``."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(fd)
    return True
