"""Videos of Qwen3-VL and its like: which frames are taken, how large they become, and their times, which are text of the prompt.

The rules are those of transformers' Qwen3VLVideoProcessor and Qwen3VLProcessor.
"""

import math
from collections.abc import Iterator, Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from ....schema.media import ItemShape, MediaSpan, SegmentShape
from ...architecture import ModelConfig
from ...checkpoint.json_fields import CheckpointFiles
from ...errors import UnsupportedMediaError
from ...media_config import VisionConfig, VisionRules
from ..qwen2_5 import fields, media

_HALF = (0.5, 0.5, 0.5)  # of videos, where their file has no colours; transformers takes others for pictures
_BASE = VisionRules(video_min_pixels=128 * 32 * 32, video_max_pixels=768 * 32 * 32)
_FRAME_TOKENS = 768  # at most, where a file bounds frames and does not say by how many


def parse_rules(files: CheckpointFiles, vision: VisionConfig) -> VisionRules:
    """Rules of the processors; bounds of videos are those of all frames together. Raises CheckpointError, also where pictures and
    videos have colours of their own."""
    image, video, _ = fields.processors(files, video_falls_back=True)
    rules, size = fields.image_rules(image, vision, _BASE), video.object("size")
    fields.check_steps(video, vision)
    for name, found in (("image_mean", rules.image_mean), ("image_std", rules.image_std)):
        if (of_video := video.colour(name, default=_HALF)) != found:
            raise video.error(name, f"is {list(of_video)}, but that of pictures is {list(found)}")
    is_capped = video.boolean("cap_pixels_per_frame", default=False)
    per_token = (vision.patch_size * vision.merge_size) ** 2
    return msgspec.structs.replace(
        rules,
        video_min_pixels=size.integer("shortest_edge", default=_BASE.video_min_pixels),
        video_max_pixels=size.integer("longest_edge", default=_BASE.video_max_pixels),
        video_frame_pixels=video.integer("max_video_tokens", default=_FRAME_TOKENS) * per_token if is_capped else 0,
        video_resample=fields.resample_of(video),
        **fields.sampling(video),
    )


def sample_frames(config: ModelConfig, total_frames: int, fps: float) -> NDArray[np.int64]:
    """Evenly spaced from the first frame to the last."""
    rules = media.vision_rules(config, "video")
    if total_frames < 1:
        raise UnsupportedMediaError("video has no frames")
    if not 0 < fps < math.inf:
        raise UnsupportedMediaError(f"video has a frame rate of {fps}")
    wanted = min(max(int(total_frames / fps * rules.fps), rules.min_frames), rules.max_frames, total_frames)
    return np.linspace(0, total_frames - 1, wanted).round().astype(np.int64)


def video_item(
    config: ModelConfig, num_frames: int, height: int, width: int, sampled_fps: float, times_s: Sequence[float] = ()
) -> ItemShape:
    """Each temporal patch is a segment between text: the mean time of its first and last frame, and the tokens that enclose it."""
    rules = media.vision_rules(config, "video")
    if num_frames < 1:
        raise UnsupportedMediaError("video has no frames")
    h, w = _clip_size(rules, num_frames, height, width)
    patch, times = rules.temporal_patch_size, list(times_s) or [number / sampled_fps for number in range(num_frames)]
    times += times[-1:] * (-num_frames % patch)
    grid = (1, h // rules.patch_size, w // rules.patch_size)
    picture = media.vision_segment(rules, "video", grid)
    segments = [_timed(config, picture, (times[at] + times[at + patch - 1]) / 2) for at in range(0, len(times), patch)]
    num_tokens = sum(segment.num_prompt_tokens for segment in segments)
    return ItemShape(kind="video", grid=(len(segments), *grid[1:]), num_tokens=num_tokens, segments=segments)


def _clip_size(rules: VisionRules, num_frames: int, height: int, width: int) -> tuple[int, int]:
    """The size of frames. transformers refuses fewer than a temporal patch has."""
    num_frames, most = max(num_frames, rules.temporal_patch_size), rules.video_max_pixels
    if rules.video_frame_pixels:
        share = min(rules.video_frame_pixels, most // num_frames)
        most = max(share, int(rules.video_min_pixels * 1.05)) * num_frames
    return media.resize_frames(rules, num_frames, (height, width), (rules.video_min_pixels, most))


def _timed(config: ModelConfig, segment: SegmentShape, seconds: float) -> SegmentShape:
    """The segment behind ``<12.3 seconds>``."""
    assert config.times is not None
    lead = (*config.times.text(f"{seconds:.1f}"), config.vision_start_token_id)
    return msgspec.structs.replace(segment, lead=lead, trail=(config.vision_end_token_id,))


def frames_of(span: MediaSpan) -> Iterator[MediaSpan]:
    """The segments of a medium, each as one of its own: between them is text."""
    start = span.start
    for segment in span.shape.segments:
        start += len(segment.lead)
        yield MediaSpan(start, ItemShape(segment.kind, segment.grid, segment.num_tokens, [segment]))
        start += segment.num_tokens + len(segment.trail)
