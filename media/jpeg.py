"""The decoding work of a JPEG: each scan is a pass over its pixels, and may take a few bytes. Used by image and container."""

import itertools
import re

import numpy as np

from .errors import MediaError
from .limits import MediaLimits, TimeBudget

_SEGMENT_OR_END = re.compile(rb"\xff[\xc0-\xcf\xd8-\xfe]")  # a marker that is followed by a length, or ends the picture
_END = b"\xff\xd9"


def num_scans(jpeg: bytes) -> int:
    """Start-of-scan markers, thumbnails' too. In compressed data a zero follows every 0xFF: there are none by chance."""
    words = (np.frombuffer(jpeg, "<u2", (len(jpeg) - offset) // 2, offset) for offset in (0, 1))
    return sum(int(np.count_nonzero(at_offset == 0xDAFF)) for at_offset in words)


def end_of_picture(jpeg: bytes, start: int, budget: TimeBudget) -> int:
    """The position where libjpeg stops reading from ``start``, after a scan's header: a file may hold anything after its picture.

    Raises: MediaError (400) beyond the time budget.
    """
    for number in itertools.count():
        marker = _SEGMENT_OR_END.search(jpeg, start)
        if marker is None:
            break
        if marker[0] == _END:
            return marker.end()
        if number % 4096 == 0:
            budget.check()
        start = marker.end() + max(2, int.from_bytes(jpeg[marker.end() : marker.end() + 2]))
    return len(jpeg)


def check_scans(num_scans: int, whose: str, limits: MediaLimits) -> None:
    """Raises: MediaError (400) for too many."""
    if num_scans > limits.max_jpeg_scans:
        raise MediaError(f"{whose} of {num_scans} scans exceeds the limit of {limits.max_jpeg_scans}", 400)
