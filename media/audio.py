"""Sound of any rate and channel count to one mono waveform, decoded step by step so that a small file cannot fill the memory."""

from collections.abc import Iterator
from contextlib import closing
from typing import Any

import av
import numpy as np

from .container import BROKEN, broken, demux, open_container, pick_stream
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
        mono = [_mix(planes) for planes in _resampled(container, stream, sample_rate, limits, budget)]
    waveform = np.concatenate(mono) if mono else np.zeros(0, dtype=np.float32)
    if not len(waveform):
        raise MediaError("the audio has no samples")
    if not np.abs(waveform).max() <= _MAX_AMPLITUDE:  # also false for NaN
        raise MediaError("the audio holds samples that are not numbers, or out of range")
    return waveform


def _mix(planes: Waveform) -> Waveform:
    mono: Waveform = planes[0] if len(planes) == 1 else planes.mean(axis=0, dtype=np.float32)
    return mono


def _resampled(container: Any, stream: Any, sample_rate: int, limits: MediaLimits, budget: TimeBudget) -> Iterator[Waveform]:
    """Pieces float32 [channels, samples] at ``sample_rate``. Format changes in mid-stream start a new resampler."""
    resampler: Any = None
    source = None
    for frame in _decoded(container, stream, limits, budget):
        if source != (frame.format.name, frame.layout.name, frame.layout.nb_channels, frame.sample_rate):
            if resampler is not None:
                yield from (piece.to_ndarray() for piece in resampler.resample(None))
            source = (frame.format.name, frame.layout.name, frame.layout.nb_channels, frame.sample_rate)
            resampler = av.AudioResampler(format="fltp", layout=frame.layout, rate=sample_rate)
        frame.pts = None
        try:
            pieces = resampler.resample(frame)
        except BROKEN:
            raise broken("audio") from None
        yield from (piece.to_ndarray() for piece in pieces)
    if resampler is not None:
        yield from (piece.to_ndarray() for piece in resampler.resample(None))


def _decoded(container: Any, stream: Any, limits: MediaLimits, budget: TimeBudget) -> Iterator[Any]:
    """Frames as they are decoded, within the limits. Raises: MediaError."""
    duration_s = 0.0
    num_failed = num_decoded = 0
    context = stream.codec_context
    for packet in _with_end(demux(container, stream, limits, budget)):
        try:
            frames = context.decode(packet)
        except MediaError:
            raise
        except BROKEN:
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


def _with_end(packets: Iterator[Any]) -> Iterator[Any]:
    yield from packets
    yield None
