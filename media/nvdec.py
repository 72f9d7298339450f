"""Decoding on the video units of NVIDIA GPUs through PyNvVideoCodec: every unit of every visible GPU is an engine (FC1).

**This has never run on a GPU.** It is written against PyNvVideoCodec 2.2's published bindings; the tests put a decoder on the processor
in their place. Import it only where CUDA is: it needs torch and, to be of use, PyNvVideoCodec, whose import fails with RuntimeError
where libnvcuvid or libnvidia-encode is missing (in containers: NVIDIA_DRIVER_CAPABILITIES must name ``video``).

What decoders put out is defined to the bit, so the units give the same pictures as the processor; conversion to RGB is not defined, so
it is done on the processor here, too, and only for wanted frames: a picture is brought to host memory as the planes that FFmpeg's
decoder would have made. Video that would differ is refused with EngineError, and the processor decodes it: interlaced video (the
binding deinterlaces), rotated or mirrored video (PyNvVideoCodec does not say so), more than 8 bits or other chroma than 4:2:0 (PyAV
cannot tell its converter where such chroma samples lie), sizes that the unit's capabilities exclude. On Hopper that is all of AV1, and
H.264 beyond 4096 pixels. Formats are taken from PyAV, since PyNvVideoCodec's own demuxer reports 8 bits and 4:2:0 for all of H.264.

Called by the video actor of a run on CUDA.
"""

import ctypes
import importlib
import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import av
import numpy as np
import numpy.typing as npt
import torch
from av.bitstream import BitStreamFilterContext
from av.video.reformatter import VideoReformatter
from torch.utils.dlpack import from_dlpack

from .container import BrokenData, decoder_of, demux, ffmpeg
from .engines import EngineError
from .orientation import AS_STORED, orientation_of
from .packets import Bitstream

log = logging.getLogger(__name__)

NVDEC = "nvdec"

_CODECS = {"h264": "H264", "hevc": "HEVC", "vp9": "VP9", "av1": "AV1", "libdav1d": "AV1"}  # PyAV's name -> member of cudaVideoCodec
_FILTERS = {"h264": "h264_mp4toannexb", "hevc": "hevc_mp4toannexb"}
_PARAMETER_SETS: dict[str, tuple[Callable[[int], int], tuple[int, ...]]] = {
    "h264": (lambda first: first & 31, (7, 8)),
    "hevc": (lambda first: first >> 1 & 63, (32, 33, 34)),
}  # how a unit's first byte tells its type, and the types
_PIXEL_FORMATS = ("yuv420p", "yuvj420p")
_START_CODE = b"\0\0\1"

Key = tuple[str, str, int, int]  # codec, pixel format, width, height

_opening = threading.Lock()  # the driver opens one session at a time (FC9)


def load() -> Any | None:
    """The module PyNvVideoCodec, or None where it cannot be used."""
    try:
        return importlib.import_module("PyNvVideoCodec")
    except (ImportError, RuntimeError, OSError) as error:
        log.info("no decoding on the GPU: %s", error)
        return None


def nvdec_engines() -> list["NvdecEngine"]:
    """One engine for each decoding unit of each visible GPU; none where they cannot be used. The number of units is queried."""
    library = load()
    if library is None or not torch.cuda.is_available():
        return []
    engines = []
    try:
        for gpu in range(torch.cuda.device_count()):
            units = library.GetDecoderCaps(gpuid=gpu).get("num_decoder_engines", 0)
            engines += [NvdecEngine(library, gpu) for _ in range(units)]
    except Exception as error:  # the binding raises its own kinds
        log.warning("no decoding on the GPU: %s", error)
        return []
    return engines


@contextmanager
def on_gpu(gpu: int, stream: Any) -> Iterator[None]:
    """Make the GPU's primary context current in this thread, as sessions need it, and torch's work go to the stream."""
    with torch.cuda.device(gpu), torch.cuda.stream(stream):
        yield


class NvdecEngine:
    """One decoding unit's worth of work; the driver chooses the unit.

    A session takes some 300 ms to open, so the last one that ended well is kept for the next video of the same format and size.
    """

    kind = NVDEC

    def __init__(self, library: Any, gpu: int) -> None:
        self._library = library
        self._gpu = gpu
        self._kept: tuple[Key, _Session] | None = None

    def open(self, bitstream: Bitstream, num_threads: int = 1) -> "NvdecDecoder":
        stream = _Stream(bitstream)
        self._check_capabilities(stream)
        session = self._take(stream.key) or self._new_session(stream)
        return NvdecDecoder(self, stream, session)

    def _check_capabilities(self, stream: "_Stream") -> None:
        codec, pixel_format, width, height = stream.key
        chroma = getattr(self._library.cudaVideoChromaFormat, "420")
        codec_id = getattr(self._library.cudaVideoCodec, _CODECS[codec])
        caps = self._library.GetDecoderCaps(gpuid=self._gpu, codec=codec_id, chromaformat=chroma, bitdepth=8)
        macroblocks = -(-width // 16) * -(-height // 16)
        fits = caps["width_min"] <= width <= caps["width_max"] and caps["height_min"] <= height <= caps["height_max"]
        if not caps["supported"] or not fits or macroblocks > caps["mb_num_max"]:
            raise EngineError(f"{codec} of {width}x{height}, {pixel_format} is beyond this GPU")

    def _take(self, key: Key) -> "_Session | None":
        kept, self._kept = self._kept, None
        return kept[1] if kept is not None and kept[0] == key else None

    def _new_session(self, stream: "_Stream") -> "_Session":
        codec, _, width, height = stream.key
        with _opening:
            return _Session(self._library, self._gpu, getattr(self._library.cudaVideoCodec, _CODECS[codec]), width, height)

    def keep(self, key: Key, session: "_Session") -> None:
        """Keep a session for reuse. Any thread calls it when it closes a decoder."""
        self._kept = key, session

    def close(self) -> None:
        self._kept = None


class _Stream:
    """Facts about a bitstream that a session needs, read from its first packets."""

    def __init__(self, bitstream: Bitstream) -> None:
        if bitstream.info.index is None:
            raise EngineError("frames cannot be told apart without time stamps")
        if bitstream.info.codec not in _CODECS:
            raise EngineError(f"{bitstream.info.codec} is not for these units")
        with bitstream.opened() as (container, stream):
            name = _FILTERS.get(bitstream.info.codec)
            self._filter = BitStreamFilterContext(name, stream) if name is not None else None
            packets = demux(container, stream, bitstream.limits, bitstream.budget)
            frame, first = _first_frame(decoder_of(stream, bitstream.limits), packets)
        if frame.format.name not in _PIXEL_FORMATS or frame.width % 2 or frame.height % 2:
            raise EngineError(f"{frame.format.name} of {frame.width}x{frame.height} is not for these units")
        if frame.interlaced_frame or orientation_of(frame) != AS_STORED:
            raise EngineError("interlaced, rotated or mirrored video is not for these units")
        self.key: Key = (bitstream.info.codec, frame.format.name, frame.width, frame.height)
        self.colorspace, self.color_range = frame.colorspace, frame.color_range
        self._parameter_sets = parameter_sets(bitstream.info.codec, self._filtered(first))

    def bytes_of(self, packet: Any, is_first: bool) -> bytes:
        """The packet as the units read it, with start codes; ahead of the first one the parameter sets, which a later key frame may
        lack.
        """
        data = self._filtered(packet)
        return self._parameter_sets + data if is_first else data

    def _filtered(self, packet: Any) -> bytes:
        if self._filter is None:
            return bytes(packet)
        copy = av.Packet(bytes(packet))  # the filter takes its packet's bytes away, and another engine may need them
        copy.pts, copy.dts, copy.is_keyframe = packet.pts, packet.dts, packet.is_keyframe
        try:
            return b"".join(bytes(filtered) for filtered in ffmpeg(self._filter.filter, copy))
        except BrokenData:
            return b""


def _first_frame(context: Any, packets: Iterator[Any]) -> tuple[Any, Any]:
    """The first frame, decoded on the processor, and the first packet."""
    first = None
    for packet in packets:
        first = packet if first is None else first
        try:
            frames = ffmpeg(context.decode, packet)
        except BrokenData:
            continue
        if frames:
            return frames[0], first
    raise EngineError("no frame at the start of the video")


def parameter_sets(codec: str, data: bytes) -> bytes:
    """The units of a packet with start codes that say how to decode the others (SPS, PPS, VPS), each with a start code of its own."""
    if codec not in _PARAMETER_SETS:
        return b""
    type_of, types = _PARAMETER_SETS[codec]
    units = (unit.rstrip(b"\0") for unit in data.split(_START_CODE)[1:])
    return b"".join(b"\0" + _START_CODE + unit for unit in units if unit and type_of(unit[0]) in types)


class _Session:
    """A decoder of the library, and the CUDA stream that it works on."""

    def __init__(self, library: Any, gpu: int, codec: Any, width: int, height: int) -> None:
        self._library = library
        self._gpu = gpu
        try:
            self._stream = new_stream(gpu)
            with on_gpu(gpu, self._stream):
                self._decoder = library.CreateDecoder(
                    gpuid=gpu,
                    codec=codec,
                    cudastream=self._stream.cuda_stream,
                    usedevicememory=True,
                    maxwidth=width,
                    maxheight=height,
                    outputColorType=library.OutputColorType.NATIVE,
                )
        except Exception as error:
            raise EngineError(f"no session on GPU {gpu}: {error}") from error

    def decode(self, data: bytes, pts: int, wanted: set[int]) -> list[tuple[int, torch.Tensor]]:
        """(pts, NV12 uint8 [height * 3 / 2, width] on the host) of wanted frames. No data: what is still inside."""
        packet = self._library.PacketData()
        buffer = ctypes.create_string_buffer(data, len(data)) if data else None  # must outlive the call
        if buffer is not None:
            packet.bsl_data, packet.bsl, packet.pts = ctypes.addressof(buffer), len(data), pts
        try:
            with on_gpu(self._gpu, self._stream):
                frames = self._decoder.Decode(packet)
                # The frames are the session's until the next call: wanted ones are copied now.
                return [(frame.getPTS(), from_dlpack(frame).cpu()) for frame in frames if frame.getPTS() in wanted]
        except Exception as error:
            raise EngineError(f"GPU {self._gpu}: {error}") from error


def new_stream(gpu: int) -> Any:
    """A CUDA stream."""
    return torch.cuda.Stream(device=gpu)  # type: ignore[no-untyped-call]


class NvdecDecoder:
    """One bitstream on one session. On any error the session is discarded: a failed one can spoil later output."""

    def __init__(self, engine: NvdecEngine, stream: _Stream, session: _Session) -> None:
        self.reformatter = VideoReformatter()
        self.is_sound = True
        self._engine = engine
        self._stream = stream
        self._session = session
        self._wanted: set[int] = set()
        self._is_first = True

    def decode(self, packet: Any, is_wanted: bool) -> list[Any]:
        if is_wanted:
            self._wanted.add(packet.pts)
        data = self._stream.bytes_of(packet, self._is_first)
        self._is_first = False
        return self._decode(data, packet.pts) if data else []

    def drain(self) -> list[Any]:
        return self._decode(b"", 0)

    def may_begin(self, frame: Any) -> bool:
        return True

    def reset(self) -> None:
        self._wanted.clear()
        self.drain()
        self._is_first = True

    def close(self) -> None:
        if self.is_sound:
            self._engine.keep(self._stream.key, self._session)

    def _decode(self, data: bytes, pts: int) -> list[Any]:
        try:
            surfaces = self._session.decode(data, pts, self._wanted)
        except EngineError:
            self.is_sound = False
            raise
        return [self._frame(pts, surface) for pts, surface in surfaces]

    def _frame(self, pts: int, surface: torch.Tensor) -> Any:
        self._wanted.discard(pts)
        _, pixel_format, _, _ = self._stream.key
        frame = av.VideoFrame.from_ndarray(planar(surface), format=pixel_format)
        frame.pts, frame.colorspace, frame.color_range = pts, self._stream.colorspace, self._stream.color_range
        return frame


def planar(surface: torch.Tensor) -> npt.NDArray[np.uint8]:
    """NV12 [height * 3 / 2, width], on the host -> the same with all of U before V, instead of in turns."""
    pixels: npt.NDArray[np.uint8] = surface.numpy()
    height = pixels.shape[0] * 2 // 3
    chroma = pixels[height:].reshape(-1, 2)
    return np.concatenate([pixels[:height].reshape(-1), chroma[:, 0], chroma[:, 1]]).reshape(pixels.shape)
