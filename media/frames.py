"""A video whose frames come as pictures, as one medium: its rate, the length of each picture, then the pictures themselves.

The gateway packs them, without a look into any; the video actor takes them apart. The form is ours alone: the gateway refuses bytes of
clients that begin like it, since it checks the number and the rate of frames as it packs them.
"""

import struct
from collections.abc import Sequence
from typing import NamedTuple

from .errors import MediaError
from .limits import Reader

MAGIC = b"mmrt frames\0\0\0\0\0"
_HEAD = struct.Struct("<dI")
_LENGTH = struct.Struct("<Q")
MAX_FRAMES = 1 << 16


class FrameList(NamedTuple):
    """``rate``: frames a second. ``places``: of each picture, where it begins and its length."""

    rate: float
    places: tuple[tuple[int, int], ...]

    def picture(self, reader: Reader, number: int) -> bytes:
        """Return the bytes of a picture."""
        start, length = self.places[number]
        reader.seek(start)
        return reader.read(length) or b""


def is_packed(data: bytes) -> bool:
    """Return whether bytes begin as such a medium does."""
    return data.startswith(MAGIC)


def frames_head(lengths: Sequence[int], rate: float) -> bytes:
    """Return what stands before the pictures in one medium, of these lengths, ``rate`` of which a second were taken."""
    return b"".join((MAGIC, _HEAD.pack(rate, len(lengths)), *map(_LENGTH.pack, lengths)))


def pack_frames(pictures: Sequence[bytes], rate: float) -> bytes:
    """Return one medium of these pictures."""
    return b"".join((frames_head(list(map(len, pictures)), rate), *pictures))


def read_frames(reader: Reader) -> FrameList | None:
    """Return where the pictures are; None for any other medium. Raises: MediaError for one that is cut off."""
    reader.seek(0, 2)
    num_bytes = reader.tell()
    reader.seek(0)
    head = reader.read(len(MAGIC) + _HEAD.size) or b""
    reader.seek(0)
    if len(head) < len(MAGIC) + _HEAD.size or not head.startswith(MAGIC):
        return None
    rate, count = _HEAD.unpack_from(head, len(MAGIC))
    if not 0 < rate < float("inf") or not 0 < count <= MAX_FRAMES:
        raise MediaError("the list of frames is broken")
    reader.seek(len(head))
    table = reader.read(count * _LENGTH.size) or b""
    reader.seek(0)
    start = len(head) + count * _LENGTH.size
    places: list[tuple[int, int]] = []
    for (length,) in _LENGTH.iter_unpack(table[: len(table) // _LENGTH.size * _LENGTH.size]):
        places.append((start, length))
        start += length
    if len(places) != count or start != num_bytes:
        raise MediaError("the list of frames is broken")
    return FrameList(rate, tuple(places))
