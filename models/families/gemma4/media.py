"""Media of Gemma 4: sizes within a budget of tokens, frames, and text around them, as transformers' Gemma4Processor makes them."""

import math
from collections.abc import Sequence

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from ....schema.media import ItemShape, MediaKind, SegmentShape
from ...architecture import ModelConfig
from ...errors import UnsupportedMediaError
from ...media_config import VisionRules
from ..qwen2_5 import media
from .towers_config import SUBSAMPLING

MOST_RAW = 750  # rows of samples in a segment: rows do not see each other
BUDGETS = (70, 140, 280, 560, 1120)  # tokens of a picture at most; models were trained on these


def image_item(config: ModelConfig, height: int, width: int) -> ItemShape:
    """A picture between two tokens."""
    rules = media.vision_rules(config, "image")
    picture = _framed(config, _segment(rules, "image", height, width, rules.max_pixels))
    return ItemShape("image", picture.grid, picture.num_prompt_tokens, [picture])


def sample_frames(config: ModelConfig, total_frames: int, fps: float) -> NDArray[np.int64]:
    """So many of equal distance, or all. transformers refuses videos with fewer."""
    rules = media.vision_rules(config, "video")
    if total_frames < 1:
        raise UnsupportedMediaError("video has no frames")
    if not 0 < fps < math.inf:
        raise UnsupportedMediaError(f"video has a frame rate of {fps}")
    wanted = min(max(int(total_frames / fps * rules.fps), rules.min_frames, 1), rules.max_frames, total_frames)
    return np.arange(wanted, dtype=np.int64) * total_frames // wanted


def video_item(
    config: ModelConfig, num_frames: int, height: int, width: int, sampled_fps: float, times_s: Sequence[float] = ()
) -> ItemShape:
    """Each frame is a picture behind its time, as ``01:30``; between them are spaces."""
    rules, times = media.vision_rules(config, "video"), config.times
    if num_frames < 1:
        raise UnsupportedMediaError("video has no frames")
    assert times is not None
    frame = _framed(config, _segment(rules, "video", height, width, rules.video_max_pixels))
    segments = list[SegmentShape]()
    for seconds in times_s or [number / sampled_fps for number in range(num_frames)]:
        time = times.text(f"{int(seconds // 60):02d}.{int(seconds % 60):02d}")
        segments.append(replace(frame, lead=(*(times.closing if segments else ()), *time, *frame.lead)))
    num_tokens = sum(segment.num_prompt_tokens for segment in segments)
    return ItemShape("video", (len(segments), *frame.grid[1:]), num_tokens, segments)


def _segment(rules: VisionRules, kind: MediaKind, height: int, width: int, max_pixels: int) -> SegmentShape:
    """A picture of the largest size that has the aspect ratio and no more tokens than the budget within ``max_pixels``."""
    if min(height, width) < 1:
        raise UnsupportedMediaError(f"picture of {width}x{height} pixels is empty")
    side = rules.patch_size * rules.merge_size
    budget = max((each for each in BUDGETS if each * side**2 <= max_pixels), default=BUDGETS[0])
    factor = math.sqrt(budget * side**2 / (height * width))
    rows, columns = math.floor(factor * height / side), math.floor(factor * width / side)
    rows, columns = rows or 1, columns if rows else min(width // height, budget)
    rows, columns = (rows, columns) if columns else (min(height // width, budget), 1)
    grid = (1, rows * rules.merge_size, columns * rules.merge_size)
    return media.vision_segment(rules, kind, grid)


def _framed(config: ModelConfig, segment: SegmentShape) -> SegmentShape:
    return replace(segment, lead=(config.vision_start_token_id,), trail=(config.vision_end_token_id,))


def audio_item(config: ModelConfig, num_frames: int) -> ItemShape:
    """A clip between two tokens. One behind ``max_s`` is refused, of which transformers would drop the rest."""
    rules = config.audio_rules
    if rules is None:
        raise UnsupportedMediaError("this model takes no audio")
    if num_frames < 1:
        raise UnsupportedMediaError(f"audio is too short: at least {1 + rules.window // 2} samples are needed")
    if rules.max_s and num_frames > (most := rules.num_frames(int(rules.max_s * rules.sample_rate))):
        told = f"audio of {num_frames} mel frames is longer than the {most} of {rules.max_s:g} s that this model hears at once"
        raise UnsupportedMediaError(told)
    most, per_token = (MOST_RAW, 1) if not rules.n_fft else (num_frames, SUBSAMPLING)
    parts = [min(most, num_frames - at) for at in range(0, num_frames, most)]
    segments = [SegmentShape("audio", (n, 0, 0), n, rules.row_bytes, -(-n // per_token)) for n in parts]
    segments[0] = replace(segments[0], lead=(config.audio_start_token_id,))
    segments[-1] = replace(segments[-1], trail=(config.audio_end_token_id,))
    return ItemShape("audio", (num_frames, 0, 0), sum(part.num_prompt_tokens for part in segments), segments)
