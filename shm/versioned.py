"""A blob that one process replaces and others read, atomically: two slots, and a word that names the valid one.

Part of the sequence table (a row's state) and of the status board. The writer fills the slot that the word does not name, then
publishes the word; a writer killed at any point leaves the old blob.
"""

import struct
import zlib

from .fence import fence
from .segment import LINE_BYTES, Segment

# The word that vouches for the slot, length, crc32 of the blob that begins with the version: a reader that was stopped between the word
# and the rest must not take what the next but one write put there, and has not published yet.
_HEAD = struct.Struct("=QII")
_READ_ATTEMPTS = 1000


class VersionedBlob:
    """``word`` = tag << 32 | version; slot ``version & 1`` holds the blob. A reader of another tag sees nothing."""

    @staticmethod
    def slot_bytes(max_bytes: int) -> int:
        """Bytes of one slot for blobs of up to ``max_bytes``; a blob takes two."""
        return -(-(_HEAD.size + max_bytes) // LINE_BYTES) * LINE_BYTES

    def __init__(self, segment: Segment, word: int, offset: int, max_bytes: int) -> None:
        """``word``: index of the published word in ``segment.words``; ``offset``: where the two slots lie, in bytes."""
        self._segment = segment
        self._word = word
        self._offset = offset
        self._max_bytes = max_bytes
        self._stride = self.slot_bytes(max_bytes)

    def write(self, tag: int, blob: bytes) -> None:
        """Replace the blob. ``tag`` < 2**32. Raises: ValueError if the blob is longer than the limit."""
        if len(blob) > self._max_bytes:
            raise ValueError(f"a blob of {len(blob)} bytes for {self._segment.path.name!r} exceeds {self._max_bytes}")
        version = (self._segment.words[self._word] + 1) & 0xFFFFFFFF
        word = tag << 32 | version
        start = self._offset + (version & 1) * self._stride
        payload = start + _HEAD.size
        self._segment.buf[payload : payload + len(blob)] = blob
        _HEAD.pack_into(self._segment.buf, start, word, len(blob), zlib.crc32(blob, version))
        fence()
        self._segment.words[self._word] = word

    def read(self, tag: int) -> bytes | None:
        """The blob last written under ``tag``, or None. Never blocks on a writer, alive or dead."""
        for _ in range(_READ_ATTEMPTS):
            word = self._segment.words[self._word]
            if word == 0 or word >> 32 != tag:
                return None
            fence()
            start = self._offset + (word & 1) * self._stride
            owner, length, crc = _HEAD.unpack_from(self._segment.buf, start)
            if owner == word and length <= self._max_bytes:
                payload = start + _HEAD.size
                blob = bytes(self._segment.buf[payload : payload + length])
                if zlib.crc32(blob, word & 0xFFFFFFFF) == crc:
                    return blob
        return None
