"""When the frames of a video are shown, and which of them a sampling takes. Pure; called by ``video_info`` and the video actor.

Models sample by frame number: frame k of a constant rate is shown at k / rate. Where rates vary that says nothing of time, so their
samples are counted in ticks there, and each sample is the frame that is shown at its tick.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

Numbers = npt.NDArray[np.int64]

TOLERANCE = 0.4  # of a frame, that a frame of a constant rate may be early or late: time stamps are rounded, and cameras are uneven
_TICKS_PER_S = 10_000
_ROUNDING_S = 0.01  # of a duration: 3.999 s, in milliseconds of Matroska, give as many samples as 4 s
_INTO_TICK = 1.5  # samplings round down to ticks in float32: what should be a frame's first instant may be the tick before


class Timed(Protocol):
    """The times of a video's frames; ``VideoInfo`` fits."""

    @property
    def num_frames(self) -> int: ...
    @property
    def fps(self) -> float: ...
    @property
    def duration_s(self) -> float: ...
    @property
    def starts_s(self) -> tuple[float, ...] | None: ...


def varying_starts(starts_s: Sequence[float], end_s: float, tolerance: float = TOLERANCE) -> tuple[float, ...] | None:
    """When each frame begins, counted from the first; None if they come at a constant rate.

    ``starts_s`` ascend; ``end_s``: of the last frame; ``tolerance``: frames that one may be off its place.
    """
    starts = np.asarray(starts_s, dtype=np.float64)
    starts -= starts[0]
    frame_s = (end_s - starts_s[0]) / len(starts)
    if np.abs(starts - frame_s * np.arange(len(starts))).max() <= tolerance * frame_s:
        return None
    return tuple(starts.tolist())


def sampled(video: Timed, sample: Callable[[int, float], Numbers]) -> list[int]:
    """The frames that are shown at the instants of a sampling, ascending; a long one more than once.

    ``sample``: (number of frames, frames per second) -> the frames that it takes of a video of a constant rate.
    """
    if video.starts_s is None:
        frames: list[int] = sample(video.num_frames, video.fps).tolist()
        return frames
    num_ticks = max(1, round(video.duration_s / _ROUNDING_S)) * round(_ROUNDING_S * _TICKS_PER_S)
    ticks = sample(num_ticks, _TICKS_PER_S)
    shown = np.searchsorted(video.starts_s, (ticks + _INTO_TICK) / _TICKS_PER_S, side="right") - 1
    numbers: list[int] = shown.tolist()
    return numbers


def sampled_fps(video: Timed, num_samples: int) -> float:
    """Samples per second that so many are of the whole video."""
    return num_samples / video.num_frames * video.fps


def times_s(video: Timed, frames: Sequence[int]) -> list[float]:
    """When each of these frames is shown, from the first frame of the video on."""
    if video.starts_s is None:
        return [number / video.fps for number in frames]
    return [video.starts_s[number] for number in frames]
