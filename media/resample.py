"""Mono sound from one sample rate to another, piece by piece. Called by ``audio``.

swresample does it, with a longer filter than its default: aliases and images lie 99 dB and more below the sound (soxr, which
librosa takes: 130 dB; the default: 9 dB just above half the rate), and up to 0.456 of the lower rate nothing is lost (at 16 kHz:
7.3 kHz). FFmpeg's soxr engine is not built into PyAV's wheels.

torchaudio is not used where it is installed either: from 2.9 on its decoding is TorchCodec's (its documentation says so), which is
FFmpeg again, and a second resampler would give other samples on machines that have it.
"""

import math
from collections.abc import Iterable
from typing import Any

import av
import numpy as np

from .container import ffmpeg
from .mel import Waveform

_TAPS = 160  # of the filter, at the rate that it cuts off at
_CUTOFF = 0.955  # of half the lower rate: the middle of what falls off, so that all of it lies below half the rate
_FILTER = {"filter_size": _TAPS, "filter_type": "kaiser", "kaiser_beta": 10}
_MAX_PHASE_BITS = 10  # of the filter; a ratio of rates that takes more phases is interpolated between them, to -105 dB


def resampled(pieces: Iterable[Waveform], rate: int, target: int) -> Waveform:
    """Pieces float32 [*] of a sound at ``rate`` Hz -> float32 [ceil(num_samples * target / rate)] at ``target`` Hz, as librosa counts.

    However the sound is cut, the result is the same. Silence precedes and follows it. Raises: BrokenData.
    """
    if rate == target:
        return np.concatenate([np.zeros(0, dtype=np.float32), *pieces])
    if rate > target:
        return _converted(pieces, rate, target, _CUTOFF)
    # Upwards swresample cuts off at half the rate itself, and leaves images just above it.
    return _converted([_converted(pieces, rate, 2 * target, _CUTOFF)], 2 * target, target, _CUTOFF * rate / target)


def _converted(pieces: Iterable[Waveform], rate: int, target: int, cutoff: float) -> Waveform:
    """``cutoff``: of half the target, where that is lower than the rate."""
    step = rate // math.gcd(rate, target)  # samples of which the result has a whole number
    reach = math.ceil(_TAPS * max(1.0, rate / (target * cutoff)))  # twice as far as the filter does
    num_before = step * -(-reach // step)
    phase_bits = min(_MAX_PHASE_BITS, (target // math.gcd(rate, target) - 1).bit_length())
    options = {**_FILTER, "cutoff": cutoff, "phase_shift": phase_bits}
    resampler = av.AudioResampler(format="flt", layout="mono", rate=target, options=options)
    num_samples = 0
    results: list[Waveform] = []

    def push(piece: Waveform | None) -> None:
        frame: Any = None
        if piece is not None:
            frame = av.AudioFrame.from_ndarray(piece[None], format="flt", layout="mono")
            frame.sample_rate = rate
        results.extend(result.to_ndarray()[0] for result in ffmpeg(resampler.resample, frame))

    push(np.zeros(num_before, dtype=np.float32))
    for piece in pieces:
        if len(piece):
            num_samples += len(piece)
            push(piece)
    push(np.zeros(reach, dtype=np.float32))
    push(None)
    start = num_before * target // rate
    waveform: Waveform = np.concatenate(results)[start : start - (-num_samples * target // rate)]
    return waveform
