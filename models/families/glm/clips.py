"""Videos of GLM's families: which frames are taken, how large they become, and their times, which are text of the prompt.

The rules are those of transformers' Glm4vVideoProcessor and Glm46VVideoProcessor, and of their Processors. A run's own rate of frames
bounds a model's.
"""

import math
from collections.abc import Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from ....schema.media import ItemShape, SegmentShape
from ...architecture import ModelConfig
from ...checkpoint.json_fields import CheckpointFiles
from ...errors import UnsupportedMediaError
from ...media_config import VisionConfig, VisionRules
from ..qwen2_5 import fields, media

FRAMES = 2  # that a picture counts as where its size is bounded
_BASE = VisionRules(
    min_pixels=112 * 112, max_pixels=28 * 28 * 15000, video_min_pixels=112 * 112, video_max_pixels=28 * 28 * 60000, min_frames=1
)
_EVEN_S = 300.0  # a video of GLM-4.1V that is longer has as many frames as one of this length
_PATCHES_PER_S = {30.0: 3.0, 300.0: 1.0, math.inf: 0.5}  # of GLM-4.6V and GLM-OCR: temporal patches, of videos up to so many seconds
_LONGEST_S = 2400.0  # no more frames of longer videos
_MOST_FRAMES = 640


def parse_even_rules(files: CheckpointFiles, vision: VisionConfig) -> VisionRules:
    """GLM-4.1V's. Raises CheckpointError, also where pictures and videos have colours of their own."""
    _, video, _ = fields.processors(files, video_falls_back=False)
    if (longest := video.number("max_duration", default=_EVEN_S)) != _EVEN_S:
        raise video.error("max_duration", f"is {longest:g}, expected {_EVEN_S:g}")
    fps = video.number("fps", default=2.0)
    return _parse_rules(files, vision, fps, int(_EVEN_S * fps))


def parse_rules(files: CheckpointFiles, vision: VisionConfig) -> VisionRules:
    """GLM-4.6V's and GLM-OCR's, whose rate of frames is in no file. Raises as ``parse_even_rules``."""
    return _parse_rules(files, vision, max(_PATCHES_PER_S.values()) * vision.temporal_patch_size, _MOST_FRAMES)


def _parse_rules(files: CheckpointFiles, vision: VisionConfig, fps: float, max_frames: int) -> VisionRules:
    """Of pictures the bounds of the file are those of ``FRAMES`` frames, ours those of one; of videos they are those of all frames."""
    image, video, _ = fields.processors(files, video_falls_back=False)
    rules, size = fields.image_rules(image, vision, _BASE), video.object("size")
    fields.check_steps(video, vision)
    for name, found, usual in (
        ("image_mean", rules.image_mean, _BASE.image_mean),
        ("image_std", rules.image_std, _BASE.image_std),
    ):
        if (of_video := video.colour(name, default=usual)) != found:
            raise video.error(name, f"is {list(of_video)}, but that of pictures is {list(found)}")
    return msgspec.structs.replace(
        rules,
        min_pixels=-(-rules.min_pixels // FRAMES),
        max_pixels=rules.max_pixels // FRAMES,
        video_min_pixels=size.integer("shortest_edge", default=_BASE.video_min_pixels),
        video_max_pixels=size.integer("longest_edge", default=_BASE.video_max_pixels),
        video_resample=fields.resample_of(video),
        fps=fps,
        max_frames=max_frames,
    )


def sample_evenly(config: ModelConfig, total_frames: int, fps: float) -> NDArray[np.int64]:
    """As GLM-4.1V: at the model's rate, up to ``_EVEN_S``; of a longer video as many, evenly spaced."""
    rules, duration_s = _checked(config, total_frames, fps)
    if duration_s <= _EVEN_S:
        taken = np.ceil(np.arange(max(math.floor(duration_s * rules.fps), 1)) * fps / rules.fps)
    elif (count := int(_EVEN_S * rules.fps)) >= total_frames:
        taken = np.arange(total_frames)
    else:
        taken = np.ceil(np.linspace(0, duration_s, count) * fps)
    return _bounded(rules, np.minimum(taken, total_frames - 1).astype(np.int64), total_frames)


def sample_frames(config: ModelConfig, total_frames: int, fps: float) -> NDArray[np.int64]:
    """As GLM-4.6V: the longer a video, the fewer frames a second."""
    rules, duration_s = _checked(config, total_frames, fps)
    counted_s = min(duration_s, _LONGEST_S)
    rate = next(rate for longest_s, rate in _PATCHES_PER_S.items() if counted_s <= longest_s) * rules.temporal_patch_size
    rate = min(rate, rules.fps)
    count = max(min(int(counted_s * rate), _MOST_FRAMES), 1)
    taken = np.empty(0, np.int64) if total_frames < count else _by_time(total_frames, fps, rate, int(duration_s))
    if len(taken) != count:
        first, last = (int(taken[0]), int(taken[-1])) if 0 < len(taken) < count else (0, total_frames - 1)
        taken = np.linspace(first, last, count, dtype=np.int64)
    return _bounded(rules, taken, total_frames)


def _by_time(total_frames: int, fps: float, rate: float, end_s: int) -> NDArray[np.int64]:
    """The first frame that is shown at each instant of a rate, or later; one at least."""
    taken, instant_s, frame_s = list[int](), 0.0, 1 / fps
    while True:
        number = max(math.ceil(instant_s * fps) - 1, taken[-1] + 1 if taken else 0)
        while number < total_frames and number * frame_s < instant_s:
            number += 1
        if number >= total_frames:
            break
        taken.append(number)
        instant_s += 1 / rate
        if instant_s >= end_s:
            break
    return np.array(taken, np.int64)


def _checked(config: ModelConfig, total_frames: int, fps: float) -> tuple[VisionRules, float]:
    """The rules, and the seconds that so many frames are shown. Raises UnsupportedMediaError."""
    rules = media.vision_rules(config, "video")
    if total_frames < 1:
        raise UnsupportedMediaError("video has no frames")
    if not 0 < fps < math.inf:
        raise UnsupportedMediaError(f"video has a frame rate of {fps}")
    return rules, total_frames / fps


def _bounded(rules: VisionRules, taken: NDArray[np.int64], total_frames: int) -> NDArray[np.int64]:
    """Each frame once, as many as a run or a request allows or wants; the last one again where that makes whole temporal patches."""
    taken = np.unique(taken)
    least = min(rules.min_frames, rules.max_frames, total_frames)
    if not least <= len(taken) <= rules.max_frames:
        count = min(max(len(taken), least), rules.max_frames)
        taken = np.linspace(0, total_frames - 1, count).round().astype(np.int64)
    return np.append(taken, [taken[-1]] * (-len(taken) % rules.temporal_patch_size))


def video_item(
    config: ModelConfig, num_frames: int, height: int, width: int, sampled_fps: float, times_s: Sequence[float] = ()
) -> ItemShape:
    """Each temporal patch is a picture of its own, with the tokens of a picture, and behind it the time of its first frame."""
    rules = media.vision_rules(config, "video")
    if num_frames < 1:
        raise UnsupportedMediaError("video has no frames")
    patch, times = rules.temporal_patch_size, list(times_s) or [number / sampled_fps for number in range(num_frames)]
    bounds = rules.video_min_pixels, rules.video_max_pixels
    h, w = media.resize_frames(rules, max(num_frames, patch), (height, width), bounds)
    grid = (1, h // rules.patch_size, w // rules.patch_size)
    picture = media.vision_segment(rules, "video", grid)
    segments = [_timed(config, picture, seconds) for seconds in times[::patch]]
    num_tokens = sum(segment.num_prompt_tokens for segment in segments)
    return ItemShape(kind="video", grid=(len(segments), *grid[1:]), num_tokens=num_tokens, segments=segments)


def _timed(config: ModelConfig, segment: SegmentShape, seconds: float) -> SegmentShape:
    """The segment before ``12.3 seconds``, or ``12`` in GLM-4.1V."""
    assert config.times is not None
    number = f"{seconds:.1f}" if config.times.closing else str(int(seconds))
    return msgspec.structs.replace(
        segment,
        lead=(config.vision_start_token_id,),
        ids=((config.image_token_id, segment.num_tokens),),
        trail=(config.vision_end_token_id, *config.times.text(number)),
    )
