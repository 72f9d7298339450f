"""Media as the video actor holds them open: what analysis found, and the rows of any segment. One class per kind.

Opening an item does whatever can fail early, so that bad media are refused before a response begins: images and sound are decoded
whole (a resized picture and a spectrogram are small), of a video the packets are walked and one frame is decoded.
"""

from collections.abc import Callable, Iterator
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ..media.audio import decode_audio
from ..media.errors import MediaError
from ..media.image import decode_image
from ..media.limits import MediaLimits, Reader, TimeBudget
from ..media.mel import LogMel
from ..media.preprocess import patch_rows, resize, video_rows
from ..media.video import VideoDecoder
from ..media.video_info import analyse
from ..models.config import Item, ModelConfig, family_of

_FRAMES_IN_A_DECODER = 24  # reference and reordered pictures, roughly, for the cache's accounts


class OpenItem(Protocol):
    """An item that has been analysed: ``item`` is its shape, ``num_bytes`` about what holding it costs."""

    item: Item
    num_bytes: int

    def rows(self, segment: int) -> Iterator[NDArray[Any]]:
        """The rows of one segment, in order, in pieces [num_rows, ...]. Raises MediaError."""
        ...

    def close(self) -> None: ...


class OpenImage:
    """A picture at its target size."""

    def __init__(self, reader: Reader, config: ModelConfig, limits: MediaLimits, budget: TimeBudget) -> None:
        assert config.vision_rules is not None
        self._rules = config.vision_rules
        frame = decode_image(reader, limits, budget)
        self.item = family_of(config).image_item(config, *frame.shape[:2])
        _, h, w = self.item.grid
        self._planes = np.ascontiguousarray(resize(frame, h * self._rules.patch_size, w * self._rules.patch_size))
        self.num_bytes = self._planes.nbytes

    def rows(self, segment: int) -> Iterator[NDArray[Any]]:
        num_frames = self._rules.temporal_patch_size
        yield patch_rows(np.broadcast_to(self._planes, (num_frames, *self._planes.shape)), self._rules)

    def close(self) -> None:
        pass


class OpenVideo:
    """A video and the decoder that stands where the last segment ended."""

    def __init__(self, reader: Reader, config: ModelConfig, limits: MediaLimits, budget: TimeBudget) -> None:
        assert config.vision_rules is not None
        self._rules = config.vision_rules
        family = family_of(config)
        info = analyse(reader, limits, budget)
        wanted = family.sample_frames(config, info.num_frames, info.fps).tolist()
        self._num_wanted = len(wanted)
        sampled_fps = len(wanted) / info.num_frames * info.fps
        self.item = family.video_item(config, len(wanted), info.height, info.width, sampled_fps)
        self._decoder = VideoDecoder(reader, info, wanted, limits, budget)
        self.num_bytes = info.height * info.width * 3 // 2 * _FRAMES_IN_A_DECODER

    def rows(self, segment: int) -> Iterator[NDArray[Any]]:
        patch, temporal = self._rules.patch_size, self._rules.temporal_patch_size
        first = temporal * sum(part.grid[0] for part in self.item.segments[:segment])
        num_patches, h, w = self.item.segments[segment].grid
        count = min(temporal * num_patches, self._num_wanted - first)
        yield from video_rows(self._decoder.frames(first, count), h * patch, w * patch, self._rules)

    def close(self) -> None:
        self._decoder.close()


class OpenAudio:
    """The spectrogram of a clip."""

    def __init__(self, reader: Reader, config: ModelConfig, limits: MediaLimits, budget: TimeBudget) -> None:
        assert config.audio_rules is not None
        waveform = decode_audio(reader, config.audio_rules.sample_rate, limits, budget)
        self.item = family_of(config).audio_item(config, config.audio_rules.num_frames(len(waveform)))
        self._mel = LogMel(config.audio_rules)(waveform)
        self.num_bytes = self._mel.nbytes

    def rows(self, segment: int) -> Iterator[NDArray[Any]]:
        first = sum(part.num_rows for part in self.item.segments[:segment])
        yield self._mel[first : first + self.item.segments[segment].num_rows]

    def close(self) -> None:
        pass


def open_item(kind: str, reader: Reader, config: ModelConfig, limits: MediaLimits, budget: TimeBudget) -> OpenItem:
    """Analyse an item. Raises MediaError, or UnsupportedMediaError if the model cannot take it."""
    if kind not in config.media_kinds:
        raise MediaError(f"this model takes no {kind}", 400)
    kinds: dict[str, Callable[[Reader, ModelConfig, MediaLimits, TimeBudget], OpenItem]]
    kinds = {"image": OpenImage, "video": OpenVideo, "audio": OpenAudio}
    return kinds[kind](reader, config, limits, budget)
