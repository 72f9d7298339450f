"""Animated GIF, WebP and AVIF as videos: Pillow decodes them, the latter two with libwebp and libavif. (FFmpeg decodes no WebP, and no
alpha of AVIF.)

Frames, times and sizes of a WebP are in the headers of its chunks (developers.google.com/speed/webp/docs/riff_container), those of
AVIF in its tables; ``gif`` reads a GIF.

A frame changes a part of the picture before it, so all of them are decoded in order, by one engine. Where a picture
is transparent it is laid on white, as a still is. Loops are not repeated. Called by ``video_info``, ``packets`` and ``engines``.
"""

import io
from collections.abc import Iterator
from contextlib import closing
from typing import Any, NamedTuple, Protocol

import av
import numpy as np
import numpy.typing as npt
from av.video.reformatter import VideoReformatter
from PIL import AvifImagePlugin, Image, WebPImagePlugin

from .container import broken, check_animation, demux, open_container, streams_of
from .errors import MediaError, MediaMemoryError
from .formats import AVIF, GIF, describe
from .gif import GifPictures, read_gif
from .image import BROKEN_IMAGE, on_white
from .limits import UNLIMITED, GuardedReader, MediaLimits, Reader, TimeBudget

_PILLOW = {"webp": WebPImagePlugin.WebPImageFile.format, "avif": AvifImagePlugin.AvifImageFile.format}
_GIF = "gif"
CODECS = frozenset((_GIF, *_PILLOW))
"""What ``VideoInfo.codec`` says of an animation."""

_ANIMATED = 0x02  # among the flags of VP8X
_TOO_SHORT_MS, _INSTEAD_MS = 10, 100  # browsers show frames too short to see for this long


class Animation(NamedTuple):
    """The facts that the file states. The lists have an entry for each frame."""

    codec: str
    width: int
    height: int
    durations_ms: list[float]
    num_bytes: list[int]

    @property
    def durations_s(self) -> list[float]:
        """How long each frame is shown."""
        return [(ms if ms > _TOO_SHORT_MS else _INSTEAD_MS) / 1000 for ms in self.durations_ms]

    @property
    def duration_s(self) -> float:
        return sum(ms if ms > _TOO_SHORT_MS else _INSTEAD_MS for ms in self.durations_ms) / 1000


def read_animation(reader: Reader, limits: MediaLimits, budget: TimeBudget) -> Animation | None:
    """The animation in these bytes; None if they are anything else.

    Raises: MediaError, 422 for an animation that is cut off, 400 for more chunks than ``limits.max_packets`` or more frames than
    ``limits.max_animation_frames``.
    """
    found = describe(reader)
    if found == AVIF:
        return _read_avif(reader, limits, budget)
    if found == GIF:
        gif = read_gif(reader.read() or b"", limits, budget)
        durations_ms = [frame.duration_ms for frame in gif.frames]
        return Animation(_GIF, gif.width, gif.height, durations_ms, [frame.pixels[1] - frame.pixels[0] for frame in gif.frames])
    return _read_webp(GuardedReader(reader, budget), limits)


def _read_avif(reader: Reader, limits: MediaLimits, budget: TimeBudget) -> Animation | None:
    """FFmpeg shows the still picture, the track of an animation and their alpha as videos. The track has the more frames."""
    with closing(open_container(reader, "video", limits, budget, is_probed=False)) as container:
        track = max(streams_of(container, "video"), key=lambda stream: stream.frames, default=None)
        if track is None or track.frames < 2:
            return None
        packets = []
        for packet in demux(container, track, limits, budget):
            packets.append((packet.duration or 0, packet.size))
            check_animation(len(packets), limits)
        durations_ms = [float(1000 * duration * track.time_base) for duration, _ in packets]
        context = track.codec_context
        return Animation("avif", context.width, context.height, durations_ms, [size for _, size in packets])


def _read_webp(guarded: GuardedReader, limits: MediaLimits) -> Animation | None:
    head = guarded.read(30)
    if head[:4] != b"RIFF" or head[8:16] != b"WEBPVP8X" or len(head) < 30 or not head[20] & _ANIMATED:
        return None
    end = 8 + int.from_bytes(head[4:8], "little")
    if end > guarded.num_bytes:
        raise broken("video")
    animation = Animation("webp", _uint24(head, 24) + 1, _uint24(head, 27) + 1, [], [])
    for num_chunks, (name, size, body) in enumerate(_chunks(guarded, 12, end)):
        if num_chunks >= limits.max_packets:
            raise MediaError(f"the file has more than {limits.max_packets} packets", 400)
        if name == b"ANMF":
            if len(body) < 16:
                raise broken("video")
            animation.durations_ms.append(_uint24(body, 12))
            animation.num_bytes.append(size)
            check_animation(len(animation.num_bytes), limits)
    if not animation.num_bytes:
        raise MediaError("the video has no frames")
    return animation


def _chunks(reader: GuardedReader, start: int, end: int) -> Iterator[tuple[bytes, int, bytes]]:
    """(name, size, first bytes of its body) of each chunk. Raises: MediaError (422) for one that is cut off."""
    while start + 8 <= end:
        reader.seek(start)
        head = reader.read(24)
        size = int.from_bytes(head[4:8], "little")
        if start + 8 + size > end:
            raise broken("video")
        yield head[:4], size, head[8 : 8 + size]
        start += 8 + size + size % 2


def _uint24(data: bytes, offset: int) -> int:
    return int.from_bytes(data[offset : offset + 3], "little")


class _Pictures(Protocol):
    """The pictures of an animation, which come in order at the least cost."""

    num_frames: int
    size: tuple[int, int]  # width and height

    def go_to(self, number: int) -> None:
        """Compose this picture. Raises: ``BROKEN_IMAGE``, MemoryError."""
        ...

    def pixels(self) -> npt.NDArray[np.uint8]:
        """It, RGB [height, width, 3], on white."""
        ...

    def close(self) -> None: ...


class _PillowPictures:
    """Those of libwebp or libavif. Pillow keeps a copy of the file."""

    def __init__(self, data: bytes, format: str) -> None:
        self._image = Image.open(io.BytesIO(data), formats=(format,))
        self.num_frames = getattr(self._image, "n_frames", 0)
        self.size = self._image.size

    def go_to(self, number: int) -> None:
        self._image.seek(number)
        self._image.load()

    def pixels(self) -> npt.NDArray[np.uint8]:
        return np.array(on_white(self._image))

    def close(self) -> None:
        self._image.close()


def _pictures(data: bytes, codec: str) -> _Pictures:
    """Raises: ``BROKEN_IMAGE``, MemoryError."""
    return GifPictures(data, read_gif(data, MediaLimits(), UNLIMITED)) if codec == _GIF else _PillowPictures(data, _PILLOW[codec])


class AnimationDecoder:
    """A decoder (see ``engines``) whose packets are the numbers of frames."""

    def __init__(self, data: bytes, codec: str, num_frames: int, size: tuple[int, int]) -> None:
        """``size``: width and height. Raises: MediaError (422) if the file has others, or is no animation at all."""
        self.reformatter = VideoReformatter()
        self.is_sound = True
        try:
            self._pictures = _pictures(data, codec)
        except MemoryError:
            raise MediaMemoryError from None
        except BROKEN_IMAGE:
            raise broken("video") from None
        if (self._pictures.num_frames, self._pictures.size) != (num_frames, size):
            raise broken("video")

    def decode(self, packet: Any, is_wanted: bool) -> list[Any]:
        if not self.is_sound:
            return []
        try:
            self._pictures.go_to(packet)
            if not is_wanted:
                return []
            frame: Any = av.VideoFrame.from_ndarray(self._pictures.pixels(), format="rgb24")
        except MemoryError:
            raise MediaMemoryError from None
        except BROKEN_IMAGE:
            self.is_sound = False  # Pillow would begin anew, with the first frame for whichever is asked for
            return []
        frame.pts = packet
        return [frame]

    def drain(self) -> list[Any]:
        return []

    def may_begin(self, frame: Any) -> bool:
        return True

    def reset(self) -> None:
        pass

    def close(self) -> None:
        self._pictures.close()
