"""Contents of a video file, found by decoding a single frame of it: frames, rate, size, and the display order of its packets.

``decoding`` calls ``analyse`` and decodes by what it returns.
"""

from contextlib import closing, suppress
from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate, chain, pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
from av.video.frame import PictureType

from . import mpeg4
from .animation import Animation, AnimationDecoder, read_animation
from .container import BrokenData, broken, decoder_of, demux, ffmpeg, has_alpha_beside, open_video
from .errors import MediaError
from .limits import UNLIMITED, MediaLimits, Reader, TimeBudget
from .orientation import orientation_of
from .timing import TOLERANCE, varying_starts

RGBA_BITS = 32

_MAX_FIELD = 0.6  # of the time of a frame: it takes half of it
_MAX_FIRST_FRAME_PACKETS = 2000  # that are decoded in search of a frame
_NUM_PACKETS_MORE = 64  # that are decoded behind those that may give no frame
_MAX_PIXEL_ASPECT = 4
_AVI_TOLERANCE = 2  # frames: AVI numbers packets, and FFmpeg is off by a frame where B-frames begin
_VP8_SHOW_FRAME = 0x10  # in a packet's first byte: its picture is shown, not just a reference


@dataclass(frozen=True)
class PacketIndex:
    """The packets of a video stream in decode order."""

    pts: npt.NDArray[np.int64]  # [packets], unique
    num_bytes: npt.NDArray[np.int64]  # [packets], compressed, at least 1
    is_disposable: npt.NDArray[np.bool_]  # [packets]
    keys: npt.NDArray[np.int64]  # [groups] packet numbers, ascending; the first is 0
    timeline: npt.NDArray[np.int64]  # [num_frames] pts of the frames shown, ascending

    def number_of(self, pts: int, num_bytes: int) -> int:
        """The number of the packet with this time stamp and size; -1 if there is none."""
        (numbers,) = np.nonzero((self.pts == pts) & (self.num_bytes == num_bytes))
        return int(numbers[0]) if len(numbers) else -1


@dataclass(frozen=True)
class VideoInfo:
    """A video as its viewer sees it: its size when upright and of square pixels, frames that are shown.

    Without ``index`` it is decoded in sequence.

    ``starts_s``: when each frame begins, counted from the first, where the rate is not constant; ``fps`` is then the average.
    """

    num_frames: int
    fps: float
    duration_s: float
    height: int
    width: int
    codec: str
    bits_per_pixel: int  # of a decoded frame
    index: PacketIndex | None
    starts_s: tuple[float, ...] | None = None


def analyse(reader: Reader, limits: MediaLimits, budget: TimeBudget = UNLIMITED) -> VideoInfo:
    """Walk the packets and decode one frame, which proves that there is one and shows its true size and orientation.

    Raises: MediaError, 422 for files that are not videos or hold no frame, 400 for limits.
    """
    if (animation := read_animation(reader, limits, budget)) is not None:
        return _animated(animation, reader, limits)
    container, stream = open_video(reader, limits, budget)
    with closing(container):
        if stream.codec_context.width or stream.codec_context.height:  # else no head came at the beginning
            check_frame_size(stream.codec_context.width, stream.codec_context.height, limits)
        walk = _Walk(stream, limits)
        for packet in demux(container, stream, limits, budget):
            walk.add(packet)
        frame = walk.finish()
        if (num_doubtful := walk.num_doubtful(frame)) is not None:
            walk.settle(*_decode_beginning(reader, num_doubtful, limits, budget))
        if walk.num_frames <= 0:
            raise MediaError("no frame of the video can be decoded")
        starts_s, fps, duration_s = _times(stream, walk)
        _check_duration(duration_s, limits)
        height, width = _square_size(frame, walk.pixel_aspect)
        if orientation_of(frame).is_transposed:
            height, width = width, height
        check_frame_size(width, height, limits)
        codec, bits = stream.codec_context.name, frame.format.padded_bits_per_pixel
        return VideoInfo(walk.num_frames, fps, duration_s, height, width, codec, bits, walk.packet_index(), starts_s)


def _decode_beginning(reader: Reader, num_doubtful: int, limits: MediaLimits, budget: TimeBudget) -> tuple[int, list[int | None]]:
    """Decode the packets up to the first frame, at least ``num_doubtful``, and some more, as a new decoder does.

    Returns how many they are, and the time stamps of the frames that they give, in the order in which these come out.
    """
    container, stream = open_video(reader, limits, budget)
    context = decoder_of(stream, limits)
    delivered: list[int | None] = []
    num_packets, end = 0, _MAX_FIRST_FRAME_PACKETS
    with closing(container):
        for packet in chain(demux(container, stream, limits, budget), [None]):
            if num_packets >= end:
                packet = None
            budget.check()
            with suppress(BrokenData):
                delivered += [frame.pts for frame in ffmpeg(context.decode, packet)]
            if packet is None:
                break
            num_packets += 1
            if delivered and end == _MAX_FIRST_FRAME_PACKETS:
                end = max(num_packets, num_doubtful) + _NUM_PACKETS_MORE
    return num_packets, delivered


def _animated(animation: Animation, reader: Reader, limits: MediaLimits) -> VideoInfo:
    """Frames are told apart by their numbers: some last no time at all."""
    check_frame_size(animation.width, animation.height, limits)
    num_frames, width, height = len(animation.num_bytes), animation.width, animation.height
    _check_duration(animation.duration_s, limits)
    reader.seek(0)
    with closing(AnimationDecoder(reader.read() or b"", animation.codec, num_frames, (width, height))) as decoder:
        if not decoder.decode(0, is_wanted=True):
            raise MediaError("no frame of the video can be decoded")
    numbers = np.arange(num_frames, dtype=np.int64)
    num_bytes = np.array(animation.num_bytes, dtype=np.int64)
    index = PacketIndex(numbers, num_bytes, np.zeros(num_frames, dtype=np.bool_), numbers[:1], numbers)
    fps = num_frames / animation.duration_s
    *starts_s, end_s = accumulate(animation.durations_s, initial=0.0)
    starts = varying_starts(starts_s, end_s)
    return VideoInfo(num_frames, fps, animation.duration_s, height, width, animation.codec, RGBA_BITS, index, starts)


class _Walk:
    """Facts collected by one pass over the packets."""

    def __init__(self, stream: Any, limits: MediaLimits) -> None:
        self._stream = stream
        self._context = decoder_of(stream, limits)
        self._has_alpha_beside = has_alpha_beside(stream)
        self._frame: Any = None
        self._pts: list[int | None] = []
        self._num_bytes: list[int] = []
        self._keys: list[int] = []
        self._disposable: list[bool] = []
        self._hidden: list[bool] = []
        self._last: tuple[int, int] | None = None  # time stamp and duration of the frame that is shown last
        self._is_vp8 = self._context.name in ("vp8", "libvpx")
        self._num_time_bits: int | None = None  # of MPEG-4's pictures
        self._max_field_ticks = _max_field_ticks(stream)
        self._is_field: list[bool] = []
        self._changes_head = False
        self._num_tried = 0
        self._undelivered: frozenset[int] = frozenset()  # time stamps
        self._num_undelivered = 0
        self._is_out_of_order = False

    def add(self, packet: Any) -> None:
        if packet.is_keyframe:
            self._keys.append(len(self._pts))
        if self._frame is None and len(self._pts) < _MAX_FIRST_FRAME_PACKETS:
            self._try(packet)
            self._num_tried += 1
        self._pts.append(packet.pts)
        self._num_bytes.append(packet.size)
        self._disposable.append(packet.is_disposable)
        is_hidden = packet.is_discard or not self._is_shown(packet)
        self._hidden.append(is_hidden)
        if not is_hidden and packet.pts is not None and (self._last is None or packet.pts > self._last[0]):
            self._last = packet.pts, packet.duration or 0
        self._is_field.append(not is_hidden and 0 < (packet.duration or 0) <= self._max_field_ticks)
        self._changes_head = self._changes_head or packet.has_sidedata("new_extradata")

    def _is_shown(self, packet: Any) -> bool:
        """True if the packet's head says that it holds a shown picture."""
        if self._is_vp8:
            return bool(bytes(packet)[0] & _VP8_SHOW_FRAME)
        if self._context.name != mpeg4.CODEC:
            return True
        data = bytes(packet)
        if not self._num_time_bits:
            self._num_time_bits = mpeg4.num_time_bits((self._context.extradata or b"", data))
        return not self._num_time_bits or mpeg4.is_coded(data, self._num_time_bits)

    def finish(self) -> Any:
        """The first frame."""
        if not self._pts:
            raise MediaError("the video has no frames")
        if self._frame is None:
            self._frame = self._decode(None)
        if self._frame is None:
            raise MediaError("no frame of the video can be decoded")
        if not self._num_shown(len(self._pts)):
            raise MediaError("the video shows no frame: its edit list hides all of them")
        return self._frame

    def _try(self, packet: Any) -> None:
        """Feed it. The first key frame is asked for at once, without those that a decoder waits for to put frames in order."""
        self._frame = self._decode(packet)
        if self._frame is None and packet.is_keyframe and len(self._keys) == 1:
            self._frame = self._decode(None)
            self._context.flush_buffers()
            if self._frame is None:
                self._frame = self._decode(packet)

    def _decode(self, packet: Any) -> Any:
        try:
            return next(iter(ffmpeg(self._context.decode, packet)), None)
        except BrokenData:
            return None

    @property
    def _are_fields_apart(self) -> bool:
        """True if fields are coded apart: where FFmpeg cuts H.264 itself, they are two packets. One of them may have no time stamp."""
        return True in self._is_field and (None in self._pts or bool(self._frame is not None and self._frame.interlaced_frame))

    def _num_shown(self, num_packets: int) -> int:
        """Frames of the first packets."""
        num_fields = sum(self._is_field[:num_packets]) if self._are_fields_apart else 0
        return self._hidden[:num_packets].count(False) - num_fields // 2

    @property
    def pixel_aspect(self) -> Fraction | None:
        """Width over height of a pixel. FFmpeg relates a track's size to its last head, which need not be the first frame's."""
        of_track = None if self._changes_head else self._stream.sample_aspect_ratio
        aspect: Fraction | None = of_track or self._context.sample_aspect_ratio
        return aspect

    @property
    def last_ticks(self) -> int:
        """The duration that the packet of the last frame states; 0 if it states none. FFmpeg guesses those of MPEG-TS and FLV."""
        return self._last[1] if self._last is not None else 0

    @property
    def num_frames(self) -> int:
        """Known number of frames that the decoder delivers."""
        return self._num_shown(len(self._pts)) - self._num_undelivered

    def num_doubtful(self, first_frame: Any) -> int | None:
        """The least number of packets whose pictures may give no frame; None if all give one.

        A picture before the first key frame, in decode order or in time, may lack pictures that it refers to. Decoders
        then differ: H.264 waits for a point of recovery, HEVC leaves out skipped leading pictures (RASL), MPEG-2 and MPEG-4 leave
        out B-frames, and MPEG-4 makes grey of the others. What the container calls a key frame need not be one.
        """
        first = self._keys[0] if self._keys else 0
        end = self._keys[1] if len(self._keys) > 1 else len(self._pts)  # behind it time may begin anew
        shown = enumerate(zip(self._pts[:end], self._hidden[:end], strict=True))
        leading = [number for number, (pts, hidden) in shown if number > first and not hidden and _is_before(pts, self._pts[first])]
        tells_order = self.packet_index() is not None or not self._context.has_b_frames
        begins_with_key = self._keys[:1] == [0] and self._num_tried == 1 and first_frame.pict_type == PictureType.I
        if begins_with_key and not leading and tells_order:
            return None
        return max([first, *leading]) + 1

    def settle(self, num_packets: int, delivered: list[int | None]) -> None:
        """The first packets give frames of these time stamps, in this order."""
        self._num_undelivered = self._num_shown(num_packets) - len(delivered)
        known = [pts for pts in delivered if pts is not None]
        self._is_out_of_order = len(known) < len(delivered) or any(a >= b for a, b in pairwise(known))
        self._undelivered = frozenset(pts for pts in self._pts[:num_packets] if pts is not None) - set(known)

    @property
    def _groups(self) -> list[int]:
        """The packets that groups of pictures begin with."""
        if self._has_alpha_beside:
            return [0]
        return self._keys if self._keys[:1] == [0] else [0, *self._keys]

    def shown_pts(self) -> list[int]:
        """Time stamps of the frames that are shown, ascending. Empty if any is missing, or key frames are out of order: where files
        were put together, time begins anew.
        """
        shown = [pts for pts, hidden in zip(self._pts, self._hidden, strict=True) if not hidden and pts is not None]
        begins = [pts for group in self._groups if (pts := self._pts[group]) is not None]
        if len(shown) < self._hidden.count(False) or any(a >= b for a, b in pairwise(begins)):
            return []
        return sorted(set(shown) - self._undelivered) if self._undelivered else sorted(shown)

    def packet_index(self) -> PacketIndex | None:
        """None where no key frame is known, time stamps do not tell frames apart or are not those of the frames, or one packet brings
        parameter sets that all others after it need.
        """
        timeline = self.shown_pts()
        if not self._keys or not timeline or None in self._pts or len(set(self._pts)) < len(self._pts):
            return None
        if self._changes_head or self._is_out_of_order or self._are_fields_apart or len(timeline) != self.num_frames:
            return None
        pts = np.array(self._pts, dtype=np.int64)
        if len(pts) > 1 and np.all(np.diff(pts) > 0) and self._context.has_b_frames:
            return None  # AVI has no time stamps of its own: packets are numbered as they lie, whatever order frames come out in
        if self._context.name == mpeg4.CODEC and self._context.has_b_frames and True in self._hidden:
            return None  # FFmpeg takes what is not coded for P-frames when it computes the time stamps that AVI lacks
        num_bytes = np.array(self._num_bytes, dtype=np.int64)
        is_disposable = np.array(self._disposable, dtype=np.bool_) & (not self._has_alpha_beside)
        return PacketIndex(pts, num_bytes, is_disposable, np.array(self._groups, dtype=np.int64), np.array(timeline, dtype=np.int64))


def _is_before(pts: int | None, other: int | None) -> bool:
    return pts is not None and other is not None and pts < other


def _max_field_ticks(stream: Any) -> float:
    """The longest duration of a single-field packet, in units of the time base; 0 where there are none, or their time is not known."""
    rate = stream.codec_context.framerate or stream.guessed_rate or stream.average_rate
    if stream.codec_context.name != "h264" or not rate or not stream.time_base:
        return 0.0
    return _MAX_FIELD / float(rate * stream.time_base)


def _times(stream: Any, walk: _Walk) -> tuple[tuple[float, ...] | None, float, float]:
    """(start of each frame, None if they come at a constant rate; frames per second; seconds).

    A constant rate is the file's average, as transformers' PyAV backend takes it, if time stamps agree.
    """
    fps = float(stream.average_rate or stream.guessed_rate or 25)
    shown = walk.shown_pts()
    if len(shown) > 1 and shown[-1] > shown[0] and stream.time_base:
        ticks, per_s = stream.time_base.numerator, stream.time_base.denominator
        starts_s = [pts * ticks / per_s for pts in shown]
        frame_s = (starts_s[-1] - starts_s[0]) / (len(shown) - 1)
        end_s = starts_s[-1] + max(float(walk.last_ticks * stream.time_base), float(np.median(np.diff(starts_s))))
        tolerance = _AVI_TOLERANCE if stream.container.format.name == "avi" else TOLERANCE
        starts = varying_starts(starts_s, end_s, tolerance) if len(shown) == walk.num_frames else None
        if starts is not None:
            return starts, len(starts) / (end_s - starts_s[0]), end_s - starts_s[0]
        if not 0.8 / frame_s <= fps <= 1.25 / frame_s:
            fps = 1 / frame_s
    return None, fps, walk.num_frames / fps


def _square_size(frame: Any, pixel_aspect: Fraction | None) -> tuple[int, int]:
    """Height and width of square pixels: the shorter side of a pixel is stretched, as players do it. Odd statements are ignored."""
    if not pixel_aspect or not 1 / _MAX_PIXEL_ASPECT <= pixel_aspect <= _MAX_PIXEL_ASPECT:
        return frame.height, frame.width
    return round(frame.height / min(1, pixel_aspect)), round(frame.width * max(1, pixel_aspect))


def _check_duration(duration_s: float, limits: MediaLimits) -> None:
    if duration_s > limits.max_video_s:
        raise MediaError(f"the video takes {duration_s:.1f} s, longer than the limit of {limits.max_video_s:g} s", 400)


def check_frame_size(width: int, height: int, limits: MediaLimits) -> None:
    if width <= 0 or height <= 0:
        raise broken("video")
    if width * height > limits.max_frame_pixels:
        raise MediaError(f"video frames of {width}x{height} exceed the limit of {limits.max_frame_pixels} pixels", 400)
    if max(width, height) > limits.max_aspect * min(width, height):
        raise MediaError(f"video frames of {width}x{height} exceed the aspect ratio limit of {limits.max_aspect:g}:1", 400)
