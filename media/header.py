"""Pixel count of a picture, read from the beginning of its file, and the approximate cost of decoding it. Nothing is decoded here.

Called by the gateway, which is no sandbox: each format is a few fixed offsets or a walk of bounded length. ``image`` decodes, and
refuses pictures larger than stated here.
"""

import mmap
import re

Seen = bytes | mmap.mmap
UNKNOWN_PIXELS = 1 << 24  # assumed where the size is not found

_MAX_SEGMENTS = 4096  # walked in a JPEG: one of 32 MiB has some 500 if they are full
_MAX_BOXES_BYTES = 1 << 16  # in which an AVIF's or HEIC's sizes stand
_PORTABLE = re.compile(rb"P[1-6](?:\s|#[^\n]*\n)++(\d{1,9})(?:\s|#[^\n]*\n)++(\d{1,9})\s")  # PBM, PGM and PPM, with comments
_JPEG_2000 = (b"\0\0\0\x0cjP  \r\n\x87\n", b"\xff\x4f\xff\x51")
_SCAN = b"\xff\xda"
_LOOK_BYTES = 1 << 20
_JPEG_2000_PASSES = 16  # up to 0.4 us for each pixel (measured)
_MAX_WORK = 1 << 62  # what a message holds
_SCANS_PER_PASS = 4  # scans of a JPEG that cost about as much as a pass over all its pixels


def num_pixels(data: Seen) -> int:
    """Pixels of the picture in this file, as its header says; ``UNKNOWN_PIXELS`` where that is not understood."""
    size = _size(data)
    return UNKNOWN_PIXELS if size is None else size[0] * size[1]


def decoding_work(data: Seen) -> int:
    """Approximate cost of decoding the picture, in pixels of one that is decoded in a single pass."""
    passes = 1
    head = data[: len(_JPEG_2000[0])]
    if head.startswith(b"\xff\xd8\xff"):
        passes += _num_scans(data) // _SCANS_PER_PASS
    elif head.startswith(_JPEG_2000):
        passes = _JPEG_2000_PASSES
    return min(passes * num_pixels(data), _MAX_WORK)


def _num_scans(data: Seen) -> int:
    """How often a JPEG says that a scan begins."""
    return sum(data[at : at + _LOOK_BYTES + 1].count(_SCAN) for at in range(0, len(data), _LOOK_BYTES))


def _size(data: Seen) -> tuple[int, int] | None:
    """Width and height."""
    head = data[:30].ljust(30, b"\0")
    if head.startswith(b"\x89PNG\r\n\x1a\n"):
        return int.from_bytes(head[16:20]), int.from_bytes(head[20:24])
    if head.startswith(b"\xff\xd8\xff"):
        return _jpeg_size(data)
    if head.startswith((b"GIF87a", b"GIF89a")):
        return int.from_bytes(head[6:8], "little"), int.from_bytes(head[8:10], "little")
    if head.startswith(b"RIFF") and head[8:12] == b"WEBP":
        return _webp_size(head)
    if head.startswith(b"BM"):
        num_bytes = 2 if int.from_bytes(head[14:18], "little") == 12 else 4
        width, height = (int.from_bytes(head[at : at + num_bytes], "little", signed=num_bytes == 4) for at in (18, 18 + num_bytes))
        return abs(width), abs(height)
    if head.startswith(_JPEG_2000):
        return _jpeg_2000_size(data[:_MAX_BOXES_BYTES])
    if found := _PORTABLE.match(data[:_MAX_BOXES_BYTES]):
        return int(found[1]), int(found[2])
    return _boxed_size(data[:_MAX_BOXES_BYTES]) if head[4:8] == b"ftyp" else None


def _jpeg_size(data: Seen) -> tuple[int, int] | None:
    """Size from the frame header, after any segments before it."""
    at = 2
    for _ in range(_MAX_SEGMENTS):
        at = data.find(b"\xff", at)
        if at < 0 or at + 9 > len(data):
            return None
        marker = data[at + 1]
        if 0xC0 <= marker <= 0xCF and marker not in (0xC4, 0xC8, 0xCC):
            return int.from_bytes(data[at + 7 : at + 9]), int.from_bytes(data[at + 5 : at + 7])
        if marker == 0xFF:
            at += 1
        elif marker < 0xC0 or 0xD0 <= marker <= 0xD9:
            at += 2
        else:
            at += 2 + int.from_bytes(data[at + 2 : at + 4])
    return None


def _jpeg_2000_size(data: bytes) -> tuple[int, int] | None:
    """From the image header of the file, or from the codestream's where there is no file around it."""
    if data.startswith(b"\xff\x4f"):
        right, bottom, left, top = (int.from_bytes(data[at : at + 4]) for at in (8, 12, 16, 20))
        return max(0, right - left), max(0, bottom - top)
    at = data.find(b"ihdr")
    return (int.from_bytes(data[at + 8 : at + 12]), int.from_bytes(data[at + 4 : at + 8])) if at >= 0 else None


def _webp_size(head: bytes) -> tuple[int, int] | None:
    if head[12:16] == b"VP8X":
        return 1 + int.from_bytes(head[24:27], "little"), 1 + int.from_bytes(head[27:30], "little")
    if head[12:16] == b"VP8L":
        bits = int.from_bytes(head[21:25], "little")
        return 1 + (bits & 0x3FFF), 1 + (bits >> 14 & 0x3FFF)
    if head[12:16] == b"VP8 ":
        return int.from_bytes(head[26:28], "little") & 0x3FFF, int.from_bytes(head[28:30], "little") & 0x3FFF
    return None


def _boxed_size(data: bytes) -> tuple[int, int] | None:
    """The largest that the boxes ``ispe`` (ISO 23008-12) name: of the picture, of its tiles and of its thumbnails."""
    sizes = [(int.from_bytes(box[4:8]), int.from_bytes(box[8:12])) for box in data.split(b"ispe", 64)[1:] if len(box) >= 12]
    return max(sizes, key=lambda size: size[0] * size[1], default=None)
