"""Open media of the video actor: the result of analysis, and the rows of any segment. One class per kind.

Opening an item does all that can fail early, so that bad media are refused before a response begins: images and sound are decoded
whole (a resized picture and a spectrogram are small), for a video the packets are walked and one frame is decoded.
"""

import io
from collections.abc import Callable, Iterator
from dataclasses import replace as replaced
from functools import partial
from itertools import chain
from typing import Any, NamedTuple, Protocol, Self

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from ...media import header
from ...media.audio import decode_audio, decode_sound_track
from ...media.decoding import DecodingPool, analyse_bitstream
from ...media.dispatch import Request
from ...media.engines import upright_rgb
from ...media.errors import MediaError, MediaMemoryError, OutOfTime
from ...media.frames import FrameList, read_frames
from ...media.image import JpegDecoder, decode_image
from ...media.limits import MediaLimits, Reader, TimeBudget
from ...media.mel import Waveform, spectrogram
from ...media.preprocess import patch_rows, resize, temporal_rows
from ...media.rules import Resample
from ...media.timing import sampled, sampled_fps, times_s
from ...media.views import Views
from ...models.architecture import ModelConfig
from ...models.families.registry import family_of
from ...models.media_config import VisionRules
from ...runtime.config.sections import MAX_FPS, MIN_FPS
from ...schema.media import ItemShape, MediaKind, MediaOptions, View
from ..host.media_rules import image_of_share

_INDEX_BYTES = 64  # for each packet of a video: where it is, and when its frame is shown
KEPT_BYTES = 32 << 20  # of frames at their target size that came as pictures: those of a video with more are decoded twice


class OpenItem(Protocol):
    """An analysed item: ``item`` is its shape."""

    item: ItemShape

    @property
    def num_bytes(self) -> int:
        """The approximate memory that it takes now."""
        ...

    def rows(self, segment: int) -> Iterator[NDArray[Any]]:
        """The rows of one segment, in order, in pieces [num_rows, ...]. Raises MediaError."""
        ...

    def close(self) -> None: ...


class OpenImage:
    """A picture at its target sizes."""

    def __init__(
        self,
        reader: Reader,
        config: ModelConfig,
        limits: MediaLimits,
        budget: TimeBudget,
        jpeg_decoder: JpegDecoder | None = None,
        token_share: float = 1.0,
    ) -> None:
        assert config.vision_rules is not None
        self._rules = config.vision_rules
        frame = decode_image(reader, limits, budget, jpeg_decoder)
        height, width = frame.shape[:2]
        self.item = image_of_share(config, height, width, token_share)
        _, h, w = self.item.grid
        whole = View(((h * self._rules.patch_size, w * self._rules.patch_size),))
        self._views = [segment.views or (whole,) for segment in self.item.segments]
        self._pixels = Views(frame, chain(*self._views), self._rules.resample)
        self.num_bytes = self._pixels.num_bytes

    def rows(self, segment: int) -> Iterator[NDArray[Any]]:
        for view in self._views[segment]:
            planes = self._pixels.planes(view)
            yield patch_rows(np.broadcast_to(planes, (self._rules.temporal_patch_size, *planes.shape)), self._rules)

    def close(self) -> None:
        pass


class Target(NamedTuple):
    """The size of a video's frames in whole patches, the side of a tile, if that is what they are resized to before, and the filter."""

    height: int
    width: int
    tile: int
    resample: Resample

    @classmethod
    def of(cls, rules: VisionRules, item: ItemShape) -> Self:
        return cls(item.grid[1] * rules.patch_size, item.grid[2] * rules.patch_size, rules.tile, rules.video_resample)

    def planes(self, frame: NDArray[Any]) -> NDArray[Any]:
        """uint8 [3, height, width] of a frame uint8 [*, *, 3]."""
        planes = resize(frame, self.tile or self.height, self.tile or self.width, self.resample)
        return np.ascontiguousarray(planes[:, : self.height, : self.width])


class OpenVideo:
    """A video and, once rows are asked for, the request that decodes it. ``ahead``: all engines work ahead of the segment asked for."""

    def __init__(
        self, reader: Reader, config: ModelConfig, limits: MediaLimits, budget: TimeBudget, pool: DecodingPool, ahead: bool = True
    ) -> None:
        assert config.vision_rules is not None
        self._rules = config.vision_rules
        self._ahead = ahead
        self._pool = pool
        family = family_of(config)
        self._bitstream = analyse_bitstream(reader, limits, budget)
        info = self._bitstream.info
        self._wanted = sampled(info, partial(family.sample_frames, config))
        fps = sampled_fps(info, len(self._wanted))
        self.item = family.video_item(config, len(self._wanted), info.height, info.width, fps, times_s(info, self._wanted))
        self._target = Target.of(self._rules, self.item)
        self._upright = upright_rgb(limits)
        self._request: Request | None = None
        self._position = 0

    @property
    def num_bytes(self) -> int:
        """Little until it is decoded: an item that is only analysed evicts no decoded one."""
        info = self._bitstream.info
        return _INDEX_BYTES * info.num_frames + (self._pool.max_bytes(info) if self._request is not None else 0)

    def rows(self, segment: int) -> Iterator[NDArray[Any]]:
        temporal = self._rules.temporal_patch_size
        first = temporal * sum(part.grid[0] for part in self.item.segments[:segment] if part.kind == "video")
        count = min(temporal * self.item.segments[segment].grid[0], len(self._wanted) - first)
        yield from temporal_rows(self._planes(first, count), self._rules)

    def _planes(self, first: int, count: int) -> Iterator[NDArray[Any]]:
        """Frames of the target size; continues where the last call stopped, or starts anew."""
        if self._request is None or first != self._position or not self._ahead:
            self.close()
            wanted = self._wanted[first:] if self._ahead else self._wanted[first : first + count]
            temporal = self._rules.temporal_patch_size
            self._request = self._pool.add_decoding_request(self._bitstream, wanted, self._resized, temporal)
            self._position = first
        for _ in range(count):
            planes = self._pool.get_decoding_output(self._request)
            assert planes is not None
            self._position += 1
            yield planes

    def _resized(self, frame: Any, reformatter: Any) -> NDArray[Any]:
        return self._target.planes(self._upright(frame, reformatter))

    def close(self) -> None:
        if self._request is not None:
            self._pool.cancel(self._request)
            self._request = None


class OpenFrames:
    """A video whose frames came as pictures, at their target size, or to be decoded again where these take much memory."""

    def __init__(
        self,
        frames: FrameList,
        reader: Reader,
        config: ModelConfig,
        limits: MediaLimits,
        budget: TimeBudget,
        jpeg_decoder: JpegDecoder | None = None,
        token_share: float = 1.0,
    ) -> None:
        assert config.vision_rules is not None
        self._frames, self._reader, self._limits, self._budget, self._jpeg_decoder = frames, reader, limits, budget, jpeg_decoder
        count, rules = len(frames.places), config.vision_rules
        if not MIN_FPS <= frames.rate <= MAX_FPS:
            raise MediaError(f"the rate of frames is {frames.rate:g} a second, allowed are {MIN_FPS:g} to {MAX_FPS:g}", 400)
        if count > (most := min(rules.max_frames, max(rules.temporal_patch_size, round(count * token_share)))):
            few = replace(rules, fps=frames.rate, max_frames=most, min_frames=min(rules.min_frames, most))
            sampled = replace(config, vision_rules=few)
            self._wanted = family_of(config).sample_frames(sampled, count, frames.rate).tolist()
        else:
            self._wanted = list(range(count))
        rate = len(self._wanted) / count * frames.rate
        self._rules = replace(rules, fps=rate)
        first = self._decode(0)
        height, width = self._size = first.shape[:2]
        config = replace(config, vision_rules=self._rules)
        times = [number / frames.rate for number in self._wanted]
        self.item = family_of(config).video_item(config, len(self._wanted), height, width, rate, times)
        self._target = Target.of(rules, self.item)
        are_kept = 3 * self._target.height * self._target.width * len(self._wanted) <= KEPT_BYTES
        self._kept: list[NDArray[Any]] = []
        for position in range(len(self._wanted)):
            planes = self._target.planes(first if position == 0 else self._decode(position))
            self._kept += [planes] if are_kept else []
        self.num_bytes = sum(planes.nbytes for planes in self._kept)

    def rows(self, segment: int) -> Iterator[NDArray[Any]]:
        temporal = self._rules.temporal_patch_size
        first = temporal * sum(part.grid[0] for part in self.item.segments[:segment])
        count = min(temporal * self.item.segments[segment].grid[0], len(self._wanted) - first)
        places = range(first, first + count)
        planes = (self._kept[at] if self._kept else self._target.planes(self._decode(at)) for at in places)
        yield from temporal_rows(planes, self._rules)

    def _decode(self, position: int) -> NDArray[Any]:
        """Return the pixels of a wanted frame. Raises: MediaError, which names it."""
        number = self._wanted[position]
        picture = self._frames.picture(self._reader, number)
        limits = replaced(self._limits, max_pixels=self._limits.max_frame_pixels, said_pixels=header.num_pixels(picture))
        try:
            frame = decode_image(io.BytesIO(picture), limits, self._budget, self._jpeg_decoder)
        except (MediaMemoryError, OutOfTime):
            raise
        except MediaError as error:
            raise MediaError(f"frame {number + 1}: {error.message}", error.status) from None
        if position and frame.shape[:2] != self._size:
            here, there = (f"{width}x{height}" for height, width in (frame.shape[:2], self._size))
            raise MediaError(f"frame {number + 1} is {here}, the first is {there}: all frames of a video have one size", 400)
        return frame

    def close(self) -> None:
        pass


class OpenAudio:
    """The spectrogram of a clip."""

    def __init__(
        self,
        reader: Reader,
        config: ModelConfig,
        limits: MediaLimits,
        budget: TimeBudget,
        decode: Callable[[Reader, int, MediaLimits, TimeBudget], Waveform] = decode_audio,
    ) -> None:
        assert config.audio_rules is not None
        waveform = decode(reader, config.audio_rules.sample_rate, limits, budget)
        self.item = family_of(config).audio_item(config, config.audio_rules.num_frames(len(waveform)))
        self._mel = spectrogram(config.audio_rules, waveform)
        self.num_bytes = self._mel.nbytes

    def rows(self, segment: int) -> Iterator[NDArray[Any]]:
        part = self.item.segments[segment]
        first = part.details[0] if part.details else sum(one.num_rows for one in self.item.segments[:segment] if one.kind == "audio")
        yield self._mel[first : first + part.num_rows]

    def close(self) -> None:
        pass


class OpenVideoWithSound:
    """A video and its sound track. Each has the rows of its own kind of segment."""

    def __init__(
        self, reader: Reader, config: ModelConfig, limits: MediaLimits, budget: TimeBudget, pool: DecodingPool, ahead: bool = True
    ) -> None:
        video = OpenVideo(reader, config, limits, budget, pool, ahead)
        sound = OpenAudio(reader, config, limits, budget, decode_sound_track)
        self.item = video.item = sound.item = family_of(config).video_with_sound(config, video.item, sound.item)
        self._parts: dict[MediaKind, OpenItem] = {"video": video, "audio": sound}

    @property
    def num_bytes(self) -> int:
        return sum(part.num_bytes for part in self._parts.values())

    def rows(self, segment: int) -> Iterator[NDArray[Any]]:
        return self._parts[self.item.segments[segment].kind].rows(segment)

    def close(self) -> None:
        for part in self._parts.values():
            part.close()


def open_item(
    kind: MediaKind,
    reader: Reader,
    config: ModelConfig,
    limits: MediaLimits,
    budget: TimeBudget,
    pool: DecodingPool,
    options: MediaOptions = MediaOptions(),  # noqa: B008
    ahead: bool = True,
    jpeg_decoder: JpegDecoder | None = None,
) -> OpenItem:
    """Analyse an item by the rules of ``config``, which ``for_medium`` has made of the same ``options``. The pool decodes videos,
    ``ahead`` of what is asked for, the decoder those JPEGs that it takes.

    Raises: MediaError, or UnsupportedMediaError if the model cannot take it.
    """
    kinds: tuple[MediaKind, ...] = ("video", "audio") if options.use_audio_in_video else (kind,)
    for needed in kinds:
        if needed not in config.media_kinds:
            raise MediaError(f"this model takes no {needed}", 400)
    match kind:
        case "image":
            return OpenImage(reader, config, limits, budget, jpeg_decoder, options.known_share)
        case "audio":
            return OpenAudio(reader, config, limits, budget)
        case "video" if (frames := read_frames(reader)) is not None:
            return OpenFrames(frames, reader, config, limits, budget, jpeg_decoder, options.known_share)
        case "video" if options.use_audio_in_video:
            return OpenVideoWithSound(reader, config, limits, budget, pool, ahead)
        case "video":
            return OpenVideo(reader, config, limits, budget, pool, ahead)
