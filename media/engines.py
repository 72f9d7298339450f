"""Engines that decode segments: their interface, decoding on the processor, and the choice between them.

An engine is a slot: a processor core, or one of a GPU's decoding units. It opens decoders, and a decoder is used by one thread at a
time. Called by ``decoding``; ``nvdec`` implements the interface on a GPU.
"""

import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
from av.video.frame import PictureType
from av.video.reformatter import VideoReformatter
from PIL import Image

from .animation import CODECS, AnimationDecoder
from .container import BrokenData, decoder_of, ffmpeg
from .errors import MediaError
from .image import on_white
from .limits import MediaLimits
from .orientation import orientation_of
from .packets import Bitstream, PacketCursor
from .segments import Segment
from .video_info import VideoInfo, check_frame_size

Output = npt.NDArray[Any]
Convert = Callable[[Any, VideoReformatter], Output]
"""What a request makes of each wanted frame, a PyAV frame as decoded. It runs in the threads of several engines at once."""

CPU = "cpu"

_SKIPPING_CODECS = frozenset(("h264", "mpeg1video", "mpeg2video", "mpeg4"))  # the others read skip_frame once, or not at all
_TRUSTING_CODECS = frozenset(("mpeg4", "h263", "flv"))  # decode from any picture on, with grey for missing references
_PICTURES_IN_A_DECODER = 12  # measured: 8 for HEVC, 6 for H.264 with five reference pictures, 4 for VP9
_MAX_WAITING = 8  # decoded frames, for the next that is no B-frame; some encoders make B-frames alone
_PLAIN_BITS = 12  # of a pixel: 8 bits, 4:2:0
_PIXELS_FOR_HARDWARE = {"h264": 1280 * 720, "hevc": 0, "vp9": 0, "av1": 0, "libdav1d": 0}
"""Codec -> pixels of a frame from which a GPU's units are used where there are any. Other codecs and smaller frames stay on the
processor, which is the faster for small H.264 (FC13). The figures are the paper's, not measured here.
"""


class EngineError(Exception):
    """This engine cannot do it: hardware does not support it, or failed. Another kind of engine may do better."""


class FrameNotDelivered(Exception):
    """A group did not give all its wanted frames intact: decoding cannot start at its key frame (intra refresh), or data are broken.

    What decoders make of broken data depends on all that came before, and on their number of threads.
    """


class Decoder(Protocol):
    """Decodes groups of one bitstream, one after another. ``is_sound`` is False once anything went wrong: it is then used no more."""

    reformatter: VideoReformatter
    is_sound: bool

    def decode(self, packet: Any, is_wanted: bool) -> list[Any]:
        """Frames that come out when ``packet`` goes in, as PyAV frames in the order in which they are shown; broken data gives none.

        A frame that is not wanted need not come out, nor be decoded if no other needs it. Raises: EngineError, MediaError.
        """
        ...

    def drain(self) -> list[Any]:
        """The frames still in the decoder."""
        ...

    def may_begin(self, frame: Any) -> bool:
        """True if this first frame of a group confirms the container's key-frame flag: some containers flag every frame."""
        ...

    def reset(self) -> None:
        """Forget everything; the next packet is a key frame."""
        ...

    def close(self) -> None: ...


class Engine(Protocol):
    """A slot that one thread decodes on. Engines of one ``kind`` do the same work in the same way."""

    @property
    def kind(self) -> str: ...

    def open(self, bitstream: Bitstream, num_threads: int = 1) -> Decoder:
        """Open a decoder. ``num_threads``: slots that it may use, where we can choose.

        Raises: EngineError if it cannot decode this, MediaError if nothing can.
        """
        ...

    def close(self) -> None:
        """Release what the engine keeps. Its decoders are already closed."""
        ...


class CpuEngine:
    """A processor core. A decoder is one PyAV codec context; opening it reads the file's head."""

    kind = CPU

    def open(self, bitstream: Bitstream, num_threads: int = 1) -> "CpuDecoder | AnimationDecoder":
        info = bitstream.info
        if info.codec in CODECS:
            return AnimationDecoder(bitstream.read_all(), info.codec, info.num_frames, (info.width, info.height))
        with bitstream.opened() as (_, stream):
            context = decoder_of(stream, bitstream.limits)
            if num_threads > 1:
                context.thread_type, context.thread_count = "AUTO", num_threads
                context.options = {**context.options, "err_detect": "explode"}  # concealment depends on the number of threads
            return CpuDecoder(context)

    def close(self) -> None:
        pass


class CpuDecoder:
    """A PyAV codec context. It releases the GIL while it decodes."""

    def __init__(self, context: Any) -> None:
        self.reformatter = VideoReformatter()
        self.is_sound = True
        self._context = context
        self._can_skip = _can_skip(context)
        self._trusts = context.name in _TRUSTING_CODECS
        self._is_new = True
        self._key_pts: int | None = None  # of the packet that the group begins with, if it is shown

    def decode(self, packet: Any, is_wanted: bool) -> list[Any]:
        if self._is_new:
            self._is_new, self._key_pts = False, None if packet.is_discard else packet.pts
        if self._can_skip:
            self._context.skip_frame = "DEFAULT" if is_wanted else "NONREF"
        return self._decode(packet)

    def drain(self) -> list[Any]:
        return self._decode(None)

    def may_begin(self, frame: Any) -> bool:
        if self._trusts:
            return bool(frame.pict_type == PictureType.I)
        return self._key_pts is None or frame.pts is None or frame.pts <= self._key_pts  # else H.264 recovered later

    def _decode(self, packet: Any) -> list[Any]:
        try:
            frames: list[Any] = ffmpeg(self._context.decode, packet)
        except BrokenData:
            self.is_sound = False
            return []
        return frames

    def reset(self) -> None:
        self._is_new = True
        self._context.flush_buffers()

    def close(self) -> None:
        self._context = None  # its threads end with it


def _can_skip(context: Any) -> bool:
    """True if FFmpeg can skip pictures that no other needs. In HEVC those are unreferenced in their own sub-layer only: with several,
    higher ones may need them.
    """
    if context.name == "hevc":
        return _num_sub_layers(context.extradata or b"") == 1
    return context.name in _SKIPPING_CODECS


def _num_sub_layers(hevc_head: bytes) -> int:
    """Temporal sub-layers; 0 if the head does not say."""
    if hevc_head[:1] == b"\1":  # as in MP4 and Matroska
        return hevc_head[21] >> 3 & 7 if len(hevc_head) > 21 else 0
    sps = hevc_head.partition(b"\0\0\1\x42\1")[2]
    return (sps[0] >> 1 & 7) + 1 if sps else 0


def cpu_engines() -> list[Engine]:
    """One engine for each processor that this process may use."""
    return [CpuEngine() for _ in os.sched_getaffinity(0)]


def decoder_bytes(info: VideoInfo) -> int:
    """Approximate bytes of a decoder of this video: reference pictures and those not yet shown."""
    return _PICTURES_IN_A_DECODER * info.height * info.width * info.bits_per_pixel // 8


def choose_kind(info: VideoInfo, kinds: list[str]) -> str:
    """Choose an available kind of engine for this video. Files without an index and deep colours go to the processor."""
    hardware = [kind for kind in kinds if kind != CPU]
    is_plain = info.index is not None and info.bits_per_pixel == _PLAIN_BITS
    suits_hardware = is_plain and info.height * info.width >= _PIXELS_FOR_HARDWARE.get(info.codec, 1 << 62)
    return hardware[0] if hardware and (suits_hardware or CPU not in kinds) else CPU


def decode_segment(decoder: Decoder, cursor: PacketCursor, segment: Segment) -> Iterator[tuple[int, Any]]:
    """(position among the wanted, frame) in ascending order: Algorithm 1's inner loop, frames matched by time stamp (FC3).

    B-frames wait for the picture behind them, which they may refer to: if that is broken, they are not what they should be.

    Raises: FrameNotDelivered, before any frame that decoding in sequence would give otherwise; EngineError, MediaError.
    """
    for group in segment.groups:
        due = group.start
        is_first = True
        position_of = {pts: group.start + offset for offset, pts in enumerate(group.pts)}
        waiting: deque[tuple[int, Any]] = deque()
        for frame in _frames(decoder, cursor.packets(group)):
            if is_first and group.first > 0 and not decoder.may_begin(frame):
                raise FrameNotDelivered
            if not decoder.is_sound or frame.is_corrupt:
                raise FrameNotDelivered
            is_first = False
            position = position_of.get(frame.pts, -1)
            if position > due:
                raise FrameNotDelivered
            if position == due:
                waiting.append((position, frame))
                due += 1
            num_waiting = _MAX_WAITING if frame.pict_type == PictureType.B else 0
            while len(waiting) > num_waiting:
                yield waiting.popleft()
            if due == group.stop and not waiting:
                break
        if due < group.stop or not decoder.is_sound:
            raise FrameNotDelivered
        yield from waiting
        cursor.forget(group)
        decoder.reset()


def decode_in_full(decoder: Decoder, cursor: PacketCursor, segment: Segment) -> Iterator[tuple[int, Any]]:
    """As ``decode_segment``, of all packets from the first on. A frame that does not come out is the one shown before it.

    Frames before the first that comes out are left out.
    """
    (group,) = segment.groups
    due = group.start
    shown: Any = None
    for frame in chain(_frames(decoder, cursor.packets(group)), [None]):
        while due < group.stop and (frame is None or (frame.pts is not None and group.pts[due - group.start] < frame.pts)):
            if shown is not None:
                yield due, shown
            due += 1
        if due == group.stop:
            break
        shown = shown if frame.pts is None else frame
    cursor.forget(group)
    decoder.reset()


def decode_in_sequence(decoder: Decoder, cursor: PacketCursor, segment: Segment, wanted: Sequence[int]) -> Iterator[tuple[int, Any]]:
    """As ``decode_segment``, for a file without an index: frames are counted as they come out. ``wanted`` are their indices."""
    (group,) = segment.groups
    positions = {wanted[position]: position for position in range(group.start, group.stop)}
    for num_out, frame in enumerate(_frames(decoder, cursor.packets(group))):
        if num_out in positions:
            yield positions[num_out], frame
            if num_out == wanted[-1]:
                break
    cursor.forget(group)
    decoder.reset()


def _frames(decoder: Decoder, packets: Iterator[tuple[Any, bool]]) -> Iterator[Any]:
    for packet, is_wanted in packets:
        yield from decoder.decode(packet, is_wanted)
    yield from decoder.drain()


def upright_rgb(limits: MediaLimits) -> Convert:
    """RGB uint8 [height, width, 3], turned and mirrored as the file asks, on white.

    Raises: MediaError for sizes beyond the limits and unusable formats.
    """

    def convert(frame: Any, reformatter: VideoReformatter) -> Output:
        check_frame_size(frame.width, frame.height, limits)
        has_alpha = any(component.is_alpha for component in frame.format.components)
        try:
            pixels = ffmpeg(reformatter.reformat, frame, format="rgba" if has_alpha else "rgb24", threads=1).to_ndarray()
        except BrokenData:
            raise MediaError(f"video frames of format {frame.format.name} are not supported") from None
        rgb = np.asarray(on_white(Image.fromarray(pixels)) if has_alpha else pixels, np.uint8)
        return orientation_of(frame).upright(rgb)

    return convert
