"""Limits on the cost of a medium, and the clock that enforces them. Every reader of untrusted bytes in media/ takes both."""

import io
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

from .errors import MediaError, OutOfTime


class Reader(Protocol):
    """The compressed bytes of one item: a seekable binary file, such as a ``PagedReader`` over media pages."""

    def read(self, size: int = -1, /) -> bytes | None: ...
    def seek(self, offset: int, whence: int = 0, /) -> int: ...
    def tell(self) -> int: ...


@dataclass(frozen=True, kw_only=True)
class MediaLimits:
    """Limits of one item; passing one is a ``MediaError`` with status 400 that names the value and the limit."""

    max_pixels: int = 178_956_970  # of an image
    said_pixels: int = -1  # of this image, as read from its header before (``header``); -1: not read
    max_frame_pixels: int = 8192 * 4352  # of one video frame: a decoder keeps some twenty
    max_jpeg_scans: int = 100  # of a progressive image: each costs a pass over its pixels and may take a few bytes
    max_aspect: float = 200.0  # longer side over shorter side, as the models' processors refuse it
    max_video_s: float = 3600.0
    max_audio_s: float = 600.0
    max_packets: int = 500_000  # compressed packets walked per item
    max_animation_frames: int = 36_000  # of a GIF or WebP: an hour of ten a second
    max_streams: int = 64  # of a container
    max_channels: int = 16  # of sound
    max_sample_rate: int = 768_000

    @property
    def codec_options(self) -> dict[str, str]:
        """Options of FFmpeg's video decoders. They count a frame's padding too, so we refuse slightly too large frames by name."""
        return {"max_pixels": str(2 * self.max_frame_pixels + (1 << 20))}


class TimeBudget:
    """Seconds that one item may take over all its plans; counts only inside ``running``."""

    def __init__(self, limit_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._limit_s = limit_s
        self._clock = clock
        self._spent_s = 0.0
        self._since: float | None = None

    @contextmanager
    def running(self) -> Iterator[None]:
        """Count the time of this block."""
        self._since = self._clock()
        try:
            yield
        finally:
            self._spent_s += self._clock() - self._since
            self._since = None

    @property
    def spent_s(self) -> float:
        since = self._since  # read once: threads that decode look while the taker's block ends
        return self._spent_s + (self._clock() - since if since is not None else 0.0)

    @property
    def left_s(self) -> float:
        return self._limit_s - self.spent_s

    def check(self) -> None:
        """Raises OutOfTime, a MediaError (400), when the budget is spent."""
        if self.left_s < 0:
            raise OutOfTime(self._limit_s)


UNLIMITED = TimeBudget(float("inf"))


class GuardedReader(io.RawIOBase):
    """A reader that checks the time budget at every read, so that no parser can walk a file for ever.

    It also bounds the bytes read in all: a container that sends its parser back and forth is refused.
    """

    _MAX_PASSES = 64

    def __init__(self, reader: Reader, budget: TimeBudget) -> None:
        super().__init__()
        self._reader = reader
        self._budget = budget
        reader.seek(0, io.SEEK_END)
        self.num_bytes = reader.tell()
        reader.seek(0)
        self._num_bytes_left = self._MAX_PASSES * (self.num_bytes + (1 << 20))

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def read(self, size: int = -1, /) -> bytes:
        self._budget.check()
        data = self._reader.read(size) or b""
        self._num_bytes_left -= len(data)
        if self._num_bytes_left < 0:
            raise MediaError("the file makes its reader go back and forth without end", 422)
        return data

    def readinto(self, buffer: "memoryview | bytearray", /) -> int:  # type: ignore[override]
        data = self.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        return self._reader.seek(offset, whence)

    def tell(self) -> int:
        return self._reader.tell()
