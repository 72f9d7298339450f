"""Sound of any rate and channel count to one mono waveform, decoded step by step so that a small file cannot fill the memory."""

from collections.abc import Iterator
from contextlib import closing
from itertools import groupby
from typing import Any

import av
import numpy as np

from .container import BrokenData, broken, demux, ffmpeg, open_container, pick_stream
from .errors import MediaError
from .limits import UNLIMITED, MediaLimits, Reader, TimeBudget
from .mel import Waveform

_MAX_AMPLITUDE = 1e6  # of full scale 1; a float file can hold anything, and its square must stay finite


def decode_audio(reader: Reader, sample_rate: int, limits: MediaLimits, budget: TimeBudget = UNLIMITED) -> Waveform:
    """The first sound track as float32 [num_samples], mono at ``sample_rate``, full scale ±1.

    Channels are resampled one by one and then averaged, as librosa does: swresample's own downmix gains √2 on stereo (measured).
    A broken packet is left out.

    Raises: MediaError, 422 for what holds no sound, is broken or has no samples, 400 for limits.
    """
    with closing(open_container(reader, "audio", limits, budget)) as container:
        stream = pick_stream(container, "audio")
        mono = [samples.mean(axis=1, dtype=np.float32) for samples in _resampled(container, stream, sample_rate, limits, budget)]
    waveform = np.concatenate(mono) if mono else np.zeros(0, dtype=np.float32)
    if not len(waveform):
        raise MediaError("the audio has no samples")
    if not np.abs(waveform).max() <= _MAX_AMPLITUDE:  # also false for NaN
        raise MediaError("the audio holds samples that are not numbers, or out of range")
    return waveform


def _resampled(container: Any, stream: Any, sample_rate: int, limits: MediaLimits, budget: TimeBudget) -> Iterator[Waveform]:
    """Pieces float32 [samples, channels] at ``sample_rate``. Format changes in mid-stream start a new resampler.

    Samples are asked for interleaved: PyAV reads past the plane pointers of planar frames of eight channels or more, and crashes.
    """
    for (_, _, num_channels, _), frames in groupby(_decoded(container, stream, limits, budget), _format):
        resampler: Any = None
        for frame in _with_end(frames):
            if resampler is None:
                resampler = av.AudioResampler(format="flt", layout=frame.layout, rate=sample_rate)
            if frame is not None:
                frame.pts = None
            try:
                pieces = ffmpeg(resampler.resample, frame)
            except BrokenData:
                raise broken("audio") from None
            for piece in pieces:
                yield piece.to_ndarray().reshape(-1, num_channels)


def _format(frame: Any) -> tuple[str, str, int, int]:
    return frame.format.name, frame.layout.name, frame.layout.nb_channels, frame.sample_rate


def _decoded(container: Any, stream: Any, limits: MediaLimits, budget: TimeBudget) -> Iterator[Any]:
    """Frames as they are decoded, within the limits. Raises: MediaError."""
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
                raise MediaError(f"audio of {frame.layout.nb_channels} channels exceeds the limit of {limits.max_channels}", 400)
            if not 1000 <= frame.sample_rate <= limits.max_sample_rate:
                raise MediaError(f"audio of {frame.sample_rate} Hz is outside the limits of 1000 to {limits.max_sample_rate} Hz", 400)
            duration_s += frame.samples / frame.sample_rate
            if duration_s > limits.max_audio_s:
                raise MediaError(f"the audio is longer than the limit of {limits.max_audio_s:g} s", 400)
            yield frame
    if num_failed and not num_decoded:
        raise broken("audio")


def _with_end(items: Iterator[Any]) -> Iterator[Any]:
    yield from items
    yield None  # what drains decoders and resamplers
