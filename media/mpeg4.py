"""MPEG-4 part 2 as stored in AVI (ISO/IEC 14496-2, 6.2): packed bitstreams, and pictures that are not coded. Called by ``container``
and ``video_info``.
"""

import re
from collections.abc import Iterable, Iterator
from typing import Any

from av.bitstream import BitStreamFilterContext

CODEC = "mpeg4"

_FILTER = "mpeg4_unpack_bframes"
_PACKED = re.compile(rb"\x00\x00\x01\xb2DivX\d+(b|Build)\d+p")  # as FFmpeg's decoder recognises it, in the user data
_LAYER = re.compile(rb"\x00\x00\x01[\x20-\x2f](.{1,40})", re.DOTALL)
_PICTURE = b"\0\0\1\xb6"
_EXTENDED_ASPECT = 15
_GREY_SHAPE = 3


def unpacked(stream: Any, packets: Iterator[Any]) -> Iterator[Any]:
    """The packets of an MPEG-4 stream, each with one picture.

    A packed bitstream holds a P-frame and a B-frame in one packet, and a packet too small for a picture later on. FFmpeg's filter takes
    the B-frame there. The time stamps that come with the packets are those of other pictures, so they are taken away.
    """
    unpack = None
    if _PACKED.search(stream.codec_context.extradata or b""):
        unpack = BitStreamFilterContext(_FILTER, stream)
    for packet in packets:
        if unpack is None and _PACKED.search(bytes(packet)):
            unpack = BitStreamFilterContext(_FILTER, stream)
        if unpack is None:
            yield packet
            continue
        for picture in unpack.filter(packet) if packet.size else ():
            picture.pts = picture.dts = None
            yield picture


def num_time_bits(heads: Iterable[bytes]) -> int | None:
    """Bits of a picture's time in the header of its layer, which is in one of these; None if it is not, or broken."""
    for head in heads:
        if (layer := _LAYER.search(head)) is not None:
            try:
                return _num_time_bits(_Bits(layer[1]))
            except EOFError:
                return None
    return None


def is_coded(packet: bytes, num_time_bits: int) -> bool:
    """True if the packet holds a picture that a decoder delivers, not just a repeat of the one before (N-VOP)."""
    at = packet.find(_PICTURE)
    if at < 0:
        return False
    bits = _Bits(packet[at + len(_PICTURE) : at + len(_PICTURE) + 40])
    try:
        bits.take(2)  # its type
        while bits.take(1):  # seconds
            pass
        bits.take(1 + num_time_bits + 1)
        return bool(bits.take(1))
    except EOFError:
        return True


class _Bits:
    def __init__(self, data: bytes) -> None:
        self._bits = "".join(f"{byte:08b}" for byte in data)
        self._at = 0

    def take(self, count: int) -> int:
        """The next bits as a number. Raises: EOFError."""
        bits = self._bits[self._at : self._at + count]
        if len(bits) < count:
            raise EOFError
        self._at += count
        return int(bits, 2)


def _num_time_bits(layer: _Bits) -> int:
    """Raises: EOFError."""
    layer.take(1 + 8)
    version = layer.take(4 + 3) >> 3 if layer.take(1) else 1
    if layer.take(4) == _EXTENDED_ASPECT:
        layer.take(16)
    if layer.take(1):  # control parameters
        layer.take(2 + 1)
        if layer.take(1):
            layer.take(79)
    if layer.take(2) == _GREY_SHAPE and version != 1:
        layer.take(4)
    layer.take(1)
    return max((layer.take(16) - 1).bit_length(), 1)
