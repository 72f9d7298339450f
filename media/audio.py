"""Sound of any rate and channel count to one mono waveform, decoded step by step so that a small file cannot fill the memory."""

import math
from collections.abc import Iterator, Sequence
from contextlib import closing
from itertools import groupby
from typing import Any

import av
import numpy as np

from .animation import read_animation
from .container import BrokenData, broken, demux, ffmpeg, open_container, pick_stream, streams_of
from .errors import MediaError
from .limits import UNLIMITED, MediaLimits, Reader, TimeBudget
from .mel import Waveform
from .ogg import links_of
from .resample import resampled

_TRACK, _SILENT = "sound track", "the video has no sound track"
_GAP_S = 0.1  # FFmpeg's aresample fills gaps from here on, too; coarser times are common
_BROKEN = 422
_ROUNDING_S = 1e-6  # of the sum of the lengths of frames
_MAX_AMPLITUDE = 1e6  # of full scale 1; a float file can hold anything, and its square must stay finite


def decode_audio(reader: Reader, sample_rate: int, limits: MediaLimits, budget: TimeBudget = UNLIMITED) -> Waveform:
    """The sound of a file as float32 [num_samples], mono at ``sample_rate``, full scale ±1.

    The first sound track is decoded, in a chained Ogg file those of all links. Channels are averaged here: swresample's own downmix
    gains √2 on stereo (measured). A broken packet is left out.

    Raises: MediaError, 422 for a file without sound or samples, or a broken one, 400 for limits.
    """
    links = links_of(reader, budget)
    sounds: list[Waveform] = []
    for link in links:
        try:
            with closing(open_container(link, "audio", limits, budget)) as container:
                frames = _decoded(container, pick_stream(container, "audio"), "audio", limits, budget)
                sounds.append(_mono(frames, sample_rate, "audio"))
        except MediaError as error:
            if len(links) == 1 or error.status != _BROKEN:
                raise
            if not (sounds and link is links[-1]):  # a recorder may have stopped in its head
                raise MediaError(f"part {len(sounds) + 1} of {len(links)} of the chained Ogg file: {error.message}") from None
        if sum(map(len, sounds)) > sample_rate * limits.max_audio_s:
            raise _too_long("audio", limits)
    return _checked(np.concatenate(sounds), "audio")


def decode_sound_track(reader: Reader, sample_rate: int, limits: MediaLimits, budget: TimeBudget = UNLIMITED) -> Waveform:
    """The sound of a video, as ``decode_audio``, starting at the time of the video's first frame.

    Earlier sound is cut off. Silence fills the time before sound that begins later, and any gap in the file's times.
    Times are the container's, including edit lists and the codec's delay. Overlapping sound is kept whole.

    Raises: MediaError as ``decode_audio``; 422 for a video without sound.
    """
    if read_animation(reader, limits, budget) is not None:
        raise MediaError(_SILENT)
    with closing(open_container(reader, "video", limits, budget)) as container:
        if not container.streams.audio:
            raise MediaError(_SILENT)
        origin_s = _start_s(streams_of(container, "video"))
        frames = _decoded(container, pick_stream(container, "audio"), _TRACK, limits, budget)
        pieces = [np.zeros(0, dtype=np.float32)]
        num = 0
        for time_s, stretch in _stretches(frames):
            budget.check()
            start = num if time_s is None or origin_s is None else round(sample_rate * (time_s - origin_s))
            if start > sample_rate * limits.max_audio_s:
                raise _too_long(_TRACK, limits)
            waveform = _mono(stretch, sample_rate, _TRACK)[max(0, -start) :]
            pieces += [np.zeros(max(0, start - num), dtype=np.float32), waveform]
            num = max(num, start) + len(waveform)
    if num > sample_rate * limits.max_audio_s:
        raise _too_long(_TRACK, limits)
    return _checked(np.concatenate(pieces), _TRACK)


def _stretches(frames: Iterator[Any]) -> Iterator[tuple[float | None, Iterator[Any]]]:
    """Frames that follow each other without a gap, and the start time of the first, in seconds; None if that is not known."""
    starts_s: list[float | None] = []
    end_s = -math.inf  # as the frames' samples say: many small gaps add up

    def number(frame: Any) -> int:
        nonlocal end_s
        # NaN is PyAV's for frames without a time base.
        time_s = frame.time if frame.time is not None and math.isfinite(frame.time) else None
        if not starts_s or (time_s is not None and time_s - end_s > _GAP_S):
            starts_s.append(time_s)
            end_s = -math.inf if time_s is None else time_s
        end_s += frame.samples / frame.sample_rate
        return len(starts_s) - 1

    for at, stretch in groupby(frames, number):
        yield starts_s[at], stretch


def _start_s(streams: Sequence[Any]) -> float | None:
    """Start time of the first stream, by its own clock; None if unknown."""
    stream = streams[0] if streams else None
    return float(stream.start_time * stream.time_base) if stream is not None and stream.start_time is not None else None


def _checked(waveform: Waveform, name: str) -> Waveform:
    if not len(waveform):
        raise MediaError(f"the {name} has no samples")
    if not np.abs(waveform).max() <= _MAX_AMPLITUDE:  # also false for NaN
        raise MediaError(f"the {name} holds samples that are not numbers, or out of range")
    return waveform


def _too_long(name: str, limits: MediaLimits) -> MediaError:
    return MediaError(f"the {name} is longer than the limit of {limits.max_audio_s:g} s", 400)


def _mono(frames: Iterator[Any], sample_rate: int, name: str) -> Waveform:
    """The sound of frames at ``sample_rate``; where their rate changes, a new one begins. Raises: MediaError (422)."""
    try:
        pieces = groupby(_averaged(frames), lambda piece: piece[0])
        sounds = [resampled((samples for _, samples in group), rate, sample_rate) for rate, group in pieces]
    except BrokenData:
        raise broken(name) from None
    return np.concatenate([np.zeros(0, dtype=np.float32), *sounds])


def _averaged(decoded: Iterator[Any]) -> Iterator[tuple[int, Waveform]]:
    """(rate, float32 [samples]) of each frame: the mean of its channels. Raises: BrokenData.

    Samples are asked for interleaved: PyAV reads past the plane pointers of planar frames of eight channels or more, and crashes.
    """
    for (_, _, num_channels, rate), frames in groupby(decoded, _format):
        converter: Any = None
        for frame in frames:
            converter = converter or av.AudioResampler(format="flt", layout=frame.layout, rate=rate)
            frame.pts = None
            for piece in ffmpeg(converter.resample, frame):
                yield rate, piece.to_ndarray().reshape(-1, num_channels).mean(axis=1, dtype=np.float32)


def _format(frame: Any) -> tuple[str, str, int, int]:
    return frame.format.name, frame.layout.name, frame.layout.nb_channels, frame.sample_rate


def _decoded(container: Any, stream: Any, name: str, limits: MediaLimits, budget: TimeBudget) -> Iterator[Any]:
    """Frames as they are decoded, within the limits. ``name``: what errors call the sound. Raises: MediaError."""
    duration_s = 0.0
    num_failed = num_decoded = 0
    context = stream.codec_context
    for packet in _with_end(demux(container, stream, limits, budget)):
        try:
            frames = ffmpeg(context.decode, packet)
        except BrokenData:
            num_failed += 1
            continue
        for frame in frames:
            num_decoded += 1
            if not 1 <= frame.layout.nb_channels <= limits.max_channels:
                raise MediaError(f"{name} of {frame.layout.nb_channels} channels exceeds the limit of {limits.max_channels}", 400)
            if not 1000 <= frame.sample_rate <= limits.max_sample_rate:
                raise MediaError(f"{name} of {frame.sample_rate} Hz is outside the limits of 1000 to {limits.max_sample_rate} Hz", 400)
            duration_s += frame.samples / frame.sample_rate
            if duration_s > limits.max_audio_s + _ROUNDING_S:
                raise _too_long(name, limits)
            yield frame
    if num_failed and not num_decoded:
        raise broken(name)


def _with_end(items: Iterator[Any]) -> Iterator[Any]:
    yield from items
    yield None  # what drains decoders and resamplers
