"""Opening video and audio containers with PyAV, restricted to allow-lists of formats and codecs. Used by video_info, packets and audio.

FFmpeg never gets a name or an address, only a Python reader: playlist formats are off the list and no protocol is allowed, so that
a file cannot make it open another (an ffconcat text did, see tests).
"""

import re
from collections.abc import Callable, Iterator
from typing import Any, Literal, ParamSpec, TypeVar

import av
import av.error
import av.logging
import av.stream
import av.subtitles.stream  # or ``av.open`` imports it when the first file comes

from . import mpeg4
from .encryption import check_not_encrypted
from .errors import MediaError, MediaMemoryError
from .formats import PICTURES_IN_MP4, describe, refuse
from .jpeg import check_scans, num_scans
from .limits import GuardedReader, MediaLimits, Reader, TimeBudget

av.logging.set_level(None)

_VIDEO_FORMATS = "mov,matroska,avi,mpegts,mpeg,mpegvideo,m4v,h264,hevc,obu,ivf,flv,ogg"
_AUDIO_FORMATS = "wav,aiff,caf,mp3,flac,ogg,aac,ac3,eac3,mov,matroska,mpegts"
_VIDEO_CODECS = frozenset(
    "h264 hevc vp8 vp9 av1 libdav1d libvpx libvpx-vp9 mpeg1video mpeg2video mpeg4 h263 mjpeg theora prores ffv1 flv".split()
)
_AUDIO_CODECS = frozenset(
    (
        "mp3 mp3float mp2 mp2float flac opus libopus vorbis libvorbis aac aac_fixed alac ac3 ac3_fixed eac3 "
        "adpcm_ima_wav adpcm_ima_qt adpcm_ms"
    ).split()
)
# FFmpeg tries the decoders of all streams already when it opens a file that is probed.
_TRIED_CODECS = ",".join(sorted(_VIDEO_CODECS | _AUDIO_CODECS | {name for name in av.codecs_available if name.startswith("pcm_")}))
# First bytes of these formats, and the codecs whose head and packets say all that we ask. H.264 in Matroska may be that of an
# AVI, without time stamps for frames that are out of order.
_MOV_OR_MATROSKA = re.compile(rb".{4}(ftyp|moov|mdat|wide|free)|\x1aE\xdf\xa3", re.DOTALL)
_WEB_CODECS = frozenset(("vp8", "libvpx", "vp9", "libvpx-vp9", "av1", "libdav1d"))
_ALPHA_DECODERS = {"vp8": "libvpx", "libvpx": "libvpx", "vp9": "libvpx-vp9", "libvpx-vp9": "libvpx-vp9"}
_SELF_EXPLAINED = {"mov": _WEB_CODECS | {"h264", "hevc"}, "matroska": _WEB_CODECS}
_ACCEPTED = {
    "video": "MP4, MOV, WebM, Matroska, AVI, MPEG, MPEG-TS with H.264, HEVC, VP8, VP9, AV1, MPEG-2, MPEG-4, animated GIF, WebP, AVIF",
    "audio": "WAV, AIFF, CAF, MP3, FLAC, Ogg, Opus, M4A, AAC, AC-3, WebM",
}

# Names and comments of a file need not be text. PyAV 19 reads past those that are not; 18 must be told to.
_ANY_METADATA = {"metadata_errors": "ignore"} if int(av.__version__.partition(".")[0]) < 19 else {}

BROKEN = (av.error.FFmpegError, IndexError, ValueError)

P = ParamSpec("P")
R = TypeVar("R")


class BrokenData(Exception):
    """FFmpeg was given invalid data."""


def ffmpeg(call: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """Call into PyAV. Raises: BrokenData; MediaMemoryError; MediaError as the reader raises it."""
    try:
        return call(*args, **kwargs)
    except MediaError:
        raise
    except MemoryError:
        raise MediaMemoryError from None
    except BROKEN:
        raise BrokenData from None


def broken(kind: str) -> MediaError:
    return MediaError(f"the {kind} is broken: its data cannot be read")


def open_video(reader: Reader, limits: MediaLimits, budget: TimeBudget) -> tuple[Any, Any]:
    """An open container, which the caller closes, and its video stream.

    FFmpeg probes a file that it opens, in case its head does not say what is in it: it decodes a picture or more (13 ms for H.264 at
    720p, 26 ms for VP9). Files whose head is sufficient are not probed.

    Raises: MediaError as ``open_container`` and ``pick_stream`` do.
    """
    if describe(reader) in PICTURES_IN_MP4:
        raise refuse(reader, "video", _ACCEPTED["video"])
    is_probed = _MOV_OR_MATROSKA.match(reader.read(8) or b"") is None
    container = open_container(reader, "video", limits, budget, is_probed)
    if not is_probed and not _is_self_explained(container):
        container.close()
        container = open_container(reader, "video", limits, budget)
    try:
        return container, pick_stream(container, "video")
    except MediaError:
        container.close()
        raise


def _is_self_explained(container: Any) -> bool:
    """H.264 need not say how far its frames are out of order: then FFmpeg takes it from the head, if that has a table of all times."""
    codecs = _SELF_EXPLAINED.get(container.format.name.partition(",")[0], frozenset())
    for stream in streams_of(container, "video")[:1]:
        context, codec = stream.codec_context, _codec(stream)
        is_ordered = codec != "h264" or (stream.frames and context.has_b_frames)
        return bool(codec in codecs and is_ordered and context.width and context.height and stream.average_rate)
    return False


def open_container(
    reader: Reader, kind: Literal["video", "audio"], limits: MediaLimits, budget: TimeBudget, is_probed: bool = True
) -> Any:
    """An open PyAV container over the reader's bytes; the caller closes it. ``is_probed``: FFmpeg may try decoders to learn more.

    Raises: MediaError, 422 for a file that is empty, broken, encrypted, or of a kind or format not on the list, 400 for limits.
    """
    guarded = GuardedReader(reader, budget)
    if guarded.num_bytes == 0:
        raise MediaError(f"the {kind} is empty (0 bytes)")
    check_not_encrypted(reader, kind, budget)
    options = {
        "format_whitelist": _VIDEO_FORMATS if kind == "video" else _AUDIO_FORMATS,
        "protocol_whitelist": "none",
        "codec_whitelist": _TRIED_CODECS if is_probed else "none",
        **limits.codec_options,
    }
    try:
        container = ffmpeg(av.open, guarded, mode="r", options=options, **_ANY_METADATA)
    except BrokenData:
        raise refuse(reader, kind, _ACCEPTED[kind]) from None
    if (num_streams := len(container.streams)) > limits.max_streams:
        container.close()
        raise MediaError(f"the file of {num_streams} streams exceeds the limit of {limits.max_streams}", 400)
    return container


def streams_of(container: Any, kind: Literal["video", "audio"]) -> list[Any]:
    """All streams of this kind that are not cover pictures; of videos those first that the file plays by default."""
    if kind == "audio":
        return [*container.streams.audio]
    videos = [stream for stream in container.streams.video if not stream.disposition & av.stream.Disposition.attached_pic]
    return sorted(videos, key=lambda stream: not stream.disposition & av.stream.Disposition.default)


def pick_stream(container: Any, kind: Literal["video", "audio"]) -> Any:
    """The first stream of this kind, as ``streams_of`` has them; all others are discarded by the demuxer.

    Raises: MediaError (422) when there is none, or its codec is not on the list.
    """
    streams = streams_of(container, kind)
    if not streams:
        other = "; it holds sound: send it as input_audio or audio_url" if container.streams.audio else ""
        raise MediaError(f"the file holds no {kind} stream{other if kind == 'video' else ''}")
    stream = streams[0]
    name = _codec(stream)
    allowed = name in _VIDEO_CODECS if kind == "video" else name in _AUDIO_CODECS or name.startswith("pcm_")
    if not allowed:
        raise MediaError(f"the {kind} codec {name} is not supported (supported: {_ACCEPTED[kind]})")
    for unwanted in container.streams:
        if unwanted.index != stream.index:
            unwanted.discard = av.stream.Discard.all
    stream.codec_context.thread_count = 1
    return stream


def can_seek(container: Any) -> bool:
    """True if the container says where its key frames are, and a packet does not depend on those read before it."""
    return container.format.name.partition(",")[0] in _SELF_EXPLAINED


def has_alpha_beside(stream: Any) -> bool:
    """True if the stream holds pictures of transparency beside those of colour, as WebM has them: key frames need not be the same."""
    return _codec(stream) in _ALPHA_DECODERS and stream.metadata.get("alpha_mode") == "1"


def decoder_of(stream: Any, limits: MediaLimits) -> Any:
    """The stream's codec context, not yet open. FFmpeg's own decoders of VP8 and VP9 drop transparency, libvpx's do not."""
    context = stream.codec_context
    if has_alpha_beside(stream):
        context = av.CodecContext.create(_ALPHA_DECODERS[_codec(stream)], "r")
        context.thread_count = 1
    context.options = limits.codec_options
    return context


def check_animation(num_frames: int, limits: MediaLimits) -> None:
    """Raises: MediaError (400) for more frames than an animation may have, counted so far."""
    if num_frames > limits.max_animation_frames:
        raise MediaError(f"the animation has more than {limits.max_animation_frames} frames", 400)


def _codec(stream: Any) -> str:
    return stream.codec_context.name if stream.codec_context is not None else "unknown"


def demux(container: Any, stream: Any, limits: MediaLimits, budget: TimeBudget) -> Iterator[Any]:
    """The stream's packets in file order, those of a packed MPEG-4 bitstream unpacked. A container that breaks off yields what came
    before.

    Raises: MediaError (400) beyond ``limits.max_packets`` or the time budget, or for a JPEG of too many scans.
    """
    is_jpeg = _codec(stream) == "mjpeg"
    num_packets = 0
    packets = container.demux(stream)
    if _codec(stream) == mpeg4.CODEC:
        packets = mpeg4.unpacked(stream, packets)
    while True:
        try:
            packet = ffmpeg(next, packets, None)
        except BrokenData:
            return
        if packet is None:
            return
        if not packet.size:
            continue
        num_packets += 1
        if num_packets > limits.max_packets:
            raise MediaError(f"the file has more than {limits.max_packets} packets", 400)
        if num_packets % 64 == 0:
            budget.check()
        if is_jpeg:
            check_scans(num_scans(bytes(packet)), "a picture of the video", limits)
        yield packet
