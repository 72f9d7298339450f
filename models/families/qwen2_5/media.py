"""Media rules shared by Qwen's families: grids, sampled frames, segments, and the walk over a prompt's positions.

The rules are those of transformers' Qwen2VLImageProcessor, Qwen2VLVideoProcessor and WhisperFeatureExtractor.
"""

import math
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from ....schema.media import ItemShape, MediaKind, MediaSpan, SegmentShape
from ...architecture import ModelConfig
from ...errors import UnsupportedMediaError
from ...media_config import AudioRules, VisionRules

MAX_SEGMENT_PATCHES = 512  # patch rows per video segment, unless one temporal patch has more: 128 tokens, half the least prefill plan
MAX_SEGMENT_MEL_FRAMES = 3000
MEL_FRAMES_PER_TOKEN = 4
MAX_ASPECT_RATIO = 200


def smart_resize(height: int, width: int, factor: int, min_pixels: int, max_pixels: int) -> tuple[int, int]:
    """The size to resize to: multiples of ``factor``, area within the limits, aspect ratio kept as well as that allows.

    Raises UnsupportedMediaError for an empty picture or an aspect ratio above 200.
    """
    if min(height, width) < 1:
        raise UnsupportedMediaError(f"picture of {width}x{height} pixels is empty")
    return _fit(height, width, factor, (min_pixels, max_pixels))


def resize_frames(rules: VisionRules, num_frames: int, size: tuple[int, int], bounds: tuple[int, int]) -> tuple[int, int]:
    """As ``smart_resize``, with bounds of the area of all frames together; small ones are first enlarged to a token's side."""
    height, width = size
    if min(size) < 1:
        raise UnsupportedMediaError(f"picture of {width}x{height} pixels is empty")
    patch, factor = rules.temporal_patch_size, rules.patch_size * rules.merge_size
    if min(size) < factor:
        scale = max(factor / height, factor / width)
        height, width = int(height * scale), int(width * scale)
    return _fit(height, width, factor, bounds, num_frames, round(num_frames / patch) * patch)


def _fit(height: int, width: int, factor: int, bounds: tuple[int, int], num_frames: int = 1, num_whole: int = 1) -> tuple[int, int]:
    """``num_whole``: frames that count where sizes are multiples of ``factor``."""
    ratio = max(height, width) / min(height, width)
    if ratio > MAX_ASPECT_RATIO:
        raise UnsupportedMediaError(f"aspect ratio of {width}x{height} is {ratio:.0f}, above the limit of {MAX_ASPECT_RATIO}")
    h_bar, w_bar = round(height / factor) * factor, round(width / factor) * factor
    least, most = bounds
    if num_whole * h_bar * w_bar > most:
        beta = math.sqrt(num_frames * height * width / most)
        h_bar = max(factor, math.floor(height / beta / factor) * factor)
        w_bar = max(factor, math.floor(width / beta / factor) * factor)
    elif num_whole * h_bar * w_bar < least:
        beta = math.sqrt(least / (num_frames * height * width))
        h_bar = math.ceil(height * beta / factor) * factor
        w_bar = math.ceil(width * beta / factor) * factor
    return h_bar, w_bar


def vision_rules(config: ModelConfig, kind: MediaKind) -> VisionRules:
    """The model's vision rules. Raises UnsupportedMediaError if it takes no media of this kind."""
    rules = config.vision_rules
    if rules is None or (kind == "video" and not rules.max_frames):
        raise UnsupportedMediaError(f"this model takes no {kind}")
    return rules


def image_item(config: ModelConfig, height: int, width: int) -> ItemShape:
    rules = vision_rules(config, "image")
    factor = rules.patch_size * rules.merge_size
    return image_item_of(rules, smart_resize(height, width, factor, rules.min_pixels, rules.max_pixels))


def image_item_of(rules: VisionRules, size: tuple[int, int]) -> ItemShape:
    """A picture that is resized to this height and width."""
    grid = (1, size[0] // rules.patch_size, size[1] // rules.patch_size)
    segment = vision_segment(rules, "image", grid)
    return ItemShape(kind="image", grid=grid, num_tokens=segment.num_tokens, segments=[segment])


def sample_frames(config: ModelConfig, total_frames: int, fps: float) -> NDArray[np.int64]:
    rules = vision_rules(config, "video")
    if total_frames < 1:
        raise UnsupportedMediaError("video has no frames")
    if not 0 < fps < math.inf:
        raise UnsupportedMediaError(f"video has a frame rate of {fps}")
    patch = rules.temporal_patch_size
    most = math.floor(min(rules.max_frames, total_frames) / patch) * patch
    wanted = min(max(total_frames / fps * rules.fps, rules.min_frames), most, total_frames)
    wanted = max(1, math.floor(wanted / patch)) * patch  # for fewer, transformers divides by zero
    if wanted > total_frames:
        return np.arange(total_frames, dtype=np.int64)
    # torch.arange rounds in its own way, so transformers' frames come from it alone. 60 frames, 26 wanted: 27 come out, the last of
    # them frame 60, and transformers raises IndexError. It is left out here.
    import torch

    indices = torch.arange(0, total_frames, total_frames / wanted).int().numpy().astype(np.int64)
    return indices[indices < total_frames]


def video_grid(rules: VisionRules, num_frames: int, height: int, width: int) -> tuple[int, int, int]:
    """(t, h, w) in patches of ``num_frames`` sampled frames; an incomplete last temporal patch repeats the last frame."""
    if num_frames < 1:
        raise UnsupportedMediaError("video has no frames")
    factor = rules.patch_size * rules.merge_size
    max_pixels = rules.video_max_pixels
    if rules.video_total_pixels:
        share = rules.video_total_pixels * rules.temporal_patch_size // num_frames
        max_pixels = min(max_pixels, max(share, int(rules.video_min_pixels * 1.05)))
    h, w = smart_resize(height, width, factor, rules.video_min_pixels, max_pixels)
    return -(-num_frames // rules.temporal_patch_size), h // rules.patch_size, w // rules.patch_size


def video_item_of(rules: VisionRules, grid: tuple[int, int, int], second_per_grid_s: float) -> ItemShape:
    """A video of this grid."""
    segments = video_segments(rules, grid)
    num_tokens = sum(segment.num_tokens for segment in segments)
    return ItemShape(kind="video", grid=grid, num_tokens=num_tokens, segments=segments, second_per_grid_s=second_per_grid_s)


def video_segments(rules: VisionRules, grid: tuple[int, int, int]) -> list[SegmentShape]:
    """Frames in segments of whole temporal patches: attention never crosses a temporal patch (FC5)."""
    t, h, w = grid
    per_segment = max(1, MAX_SEGMENT_PATCHES // (h * w))
    return [vision_segment(rules, "video", (min(per_segment, t - at), h, w)) for at in range(0, t, per_segment)]


def vision_segment(rules: VisionRules, kind: MediaKind, grid: tuple[int, int, int]) -> SegmentShape:
    """A picture, or whole temporal patches of a video."""
    num_rows = math.prod(grid)
    num_tokens = num_rows // rules.merge_size**2
    return SegmentShape(kind=kind, grid=grid, num_rows=num_rows, row_bytes=rules.row_bytes, num_tokens=num_tokens)


def audio_tokens(num_frames: int) -> int:
    """Tokens of ``num_frames`` mel frames: a stride-2 convolution, then pairs averaged."""
    return (((num_frames - 1) // 2 + 1) - 2) // 2 + 1


def audio_item(config: ModelConfig, num_frames: int) -> ItemShape:
    rules = config.audio_rules
    if rules is None:
        raise UnsupportedMediaError("this model takes no audio")
    if num_frames < 1 or audio_tokens(num_frames) < 1:
        raise UnsupportedMediaError(f"audio of {max(num_frames, 0)} mel frames is too short, at least 3 are needed")
    unit = audio_unit(rules)
    segments = audio_segments(rules, num_frames, max(1, MAX_SEGMENT_MEL_FRAMES // unit) * unit)
    return ItemShape(kind="audio", grid=(num_frames, 0, 0), num_tokens=audio_tokens(num_frames), segments=segments)


def audio_unit(rules: AudioRules) -> int:
    """A clip may be cut at multiples of so many mel frames: no convolution, averaged pair or attention crosses such a border."""
    return math.lcm(rules.window_frames, MEL_FRAMES_PER_TOKEN)


def audio_segments(rules: AudioRules, num_frames: int, per_segment: int) -> list[SegmentShape]:
    """Sound in segments of ``per_segment`` mel frames, a multiple of ``audio_unit``.

    A tail of one or two frames yields no token and stays with the segment before it.
    """
    lengths = [min(per_segment, num_frames - at) for at in range(0, num_frames, per_segment)]
    if len(lengths) > 1 and audio_tokens(lengths[-1]) < 1:
        lengths[-2:] = [lengths[-2] + lengths[-1]]
    return [SegmentShape("audio", (n, 0, 0), num_rows=n, row_bytes=rules.row_bytes, num_tokens=audio_tokens(n)) for n in lengths]


# ----------------------------------------------------------------------------------------------------------- positions


def fill_positions(
    num_tokens: int,
    spans: Sequence[MediaSpan],
    merge_size: int,
    temporal: Callable[[ItemShape], NDArray[np.int64]],
    advance: Callable[[ItemShape, NDArray[np.int64]], int],
    shares_fences: bool = True,
) -> tuple[NDArray[np.int64], int]:
    """Walk over a prompt. ``temporal(item)`` gives one temporal offset per temporal patch, ``advance(item, temporal)`` how far
    the position moves over a medium. Text and audio move by one per token on all axes.

    A video and its sound track begin at the same position. With ``shares_fences`` the tokens that open and close the sound stand where
    their neighbours outside, which open and close the video, stand already.
    """
    positions = np.empty((3, num_tokens), np.int64)
    index = position = 0
    for span in spans:
        if span.shape.kind == "audio":
            continue
        parts = span.shape.segments
        is_sound = np.repeat([part.kind == "audio" for part in parts], [part.num_tokens for part in parts])
        num_fences = int(shares_fences and is_sound.any())
        positions[:, index : span.start] = np.arange(position, position + span.start - index)
        positions[:, span.start - num_fences : span.start] -= 1
        position += span.start - index - num_fences
        offsets = temporal(span.shape)
        index = span.start + span.shape.num_tokens
        target = positions[:, span.start : index]
        target[:, ~is_sound] = _grid_positions(offsets, span.shape.grid, merge_size) + position
        target[:, is_sound] = np.arange(np.count_nonzero(is_sound)) + position
        position += advance(span.shape, offsets)
        positions[:, index : index + num_fences] = position
        index += num_fences
    positions[:, index:] = np.arange(position, position + num_tokens - index)
    return positions, int(positions.max()) + 1 - num_tokens if num_tokens else 0


def _grid_positions(offsets: NDArray[np.int64], grid: tuple[int, int, int], merge_size: int) -> NDArray[np.int64]:
    """int64 [3, num_tokens]: the temporal offset, row and column of each token of a picture or video."""
    h, w = grid[1] // merge_size, grid[2] // merge_size
    axes = offsets[:, None, None], np.arange(h)[:, None], np.arange(w)
    return np.stack([np.broadcast_to(axis, (len(offsets), h, w)) for axis in axes]).reshape(3, -1)
