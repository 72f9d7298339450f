"""A file of pages that outlives a run: named like the pages of a pool's cache, bounded, and checked before they are believed.

Slots of one size follow a header. A slot holds a page's key, a number that grows with every write, a code over key, number and
contents, and the contents. The code is keyed with a secret: it finds a torn write, another's file and a changed byte alike. When
all slots are taken the oldest page is overwritten; one that is still in use is written again later.
"""

import errno
import fcntl
import os
import struct
from collections.abc import Iterator
from hashlib import blake2b
from pathlib import Path
from typing import Self

from ..schema.page_key import KEY_BYTES

HEADER_BYTES = 4096

_MAGIC = b"mmrtpag1"
_CODE_BYTES = 32
_HEADER = struct.Struct(f"<8sQ{_CODE_BYTES}s")  # magic, page bytes, code
_SLOT = struct.Struct(f"<{KEY_BYTES}sQ{_CODE_BYTES}s")  # key, number, code
_HEAD_BYTES = KEY_BYTES + 8  # of a slot, before the code


class PageFile:
    """The pages of one pool in a file. One process has it open at a time."""

    def __init__(self, fd: int, secret: bytes, page_bytes: int, num_slots: int) -> None:
        """Use ``open``."""
        self.page_bytes = page_bytes
        self.num_slots = num_slots
        self._fd = fd
        self._secret = secret
        self._stride = _SLOT.size + page_bytes
        self._slot_of: dict[bytes, int] = {}  # the page written first comes first
        self._free: list[int] = []
        self._last_number = 0

    @classmethod
    def open(cls, path: Path, secret: bytes, page_bytes: int, max_bytes: int) -> Self:
        """Open or make the file. One that does not fit, or was made with another secret, is emptied.

        Raises: OSError; BlockingIOError if another process has it.
        """
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            file = cls(fd, secret, page_bytes, max(0, max_bytes - HEADER_BYTES) // (_SLOT.size + page_bytes))
            header = _HEADER.pack(_MAGIC, page_bytes, file._code(_MAGIC, page_bytes.to_bytes(8, "little")))
            if os.pread(fd, len(header), 0) != header:
                os.ftruncate(fd, 0)
                os.pwrite(fd, header, 0)
            file._read_slots()
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

    def newest_first(self) -> Iterator[bytes]:
        """Yield the keys of all pages, that written last first."""
        yield from reversed([*self._slot_of])

    def read(self, key: bytes) -> bytes | None:
        """Return a page's contents, or None, and forget it, where the file does not hold what was written. Raises: OSError."""
        slot = self._slot_of[key]
        data = os.pread(self._fd, self._stride, self._offset(slot))
        contents = data[_SLOT.size :]
        if len(data) == self._stride:
            found, _, code = _SLOT.unpack_from(data)
            if found == key and code == self._code(data[:_HEAD_BYTES], contents):
                return contents
        self._free.append(self._slot_of.pop(key))
        os.pwrite(self._fd, bytes(_SLOT.size), self._offset(slot))
        return None

    def write(self, key: bytes, contents: bytes) -> None:
        """Write a page that the file does not have, over the oldest one if it is full. Raises: OSError; then it is not in the file."""
        assert key not in self._slot_of and len(contents) == self.page_bytes
        if not self.num_slots:
            return
        if not self._free:
            self._free.append(self._slot_of.pop(next(iter(self._slot_of))))
        self._last_number += 1
        head = key + self._last_number.to_bytes(8, "little")
        data = head + self._code(head, contents) + contents
        if os.pwrite(self._fd, data, self._offset(self._free[-1])) != len(data):
            raise OSError(errno.ENOSPC, f"a page of {len(data)} bytes was written in part")
        self._slot_of[key] = self._free.pop()

    def _read_slots(self) -> None:
        """Find the keys. Contents are checked when they are read. Of equal keys the last written counts."""
        size = max(0, os.fstat(self._fd).st_size - HEADER_BYTES)
        if size > self.num_slots * self._stride:
            os.ftruncate(self._fd, HEADER_BYTES + self.num_slots * self._stride)
        found = []
        for slot in range(min(size // self._stride, self.num_slots)):
            key, number, _ = _SLOT.unpack(os.pread(self._fd, _SLOT.size, self._offset(slot)))
            if number:
                found.append((number, slot, key))
        for number, slot, key in sorted(found):
            self._slot_of.pop(key, None)
            self._slot_of[key], self._last_number = slot, number
        self._free = sorted({*range(self.num_slots)} - {*self._slot_of.values()}, reverse=True)

    def _offset(self, slot: int) -> int:
        return HEADER_BYTES + slot * self._stride

    def _code(self, *parts: bytes) -> bytes:
        code = blake2b(digest_size=_CODE_BYTES, key=self._secret)
        for part in parts:
            code.update(part)
        return code.digest()
