"""Slices of pictures, and frames of videos, as MiniCPM-V takes them (pure). The rules are those of transformers'
MiniCPMV4_6ImageProcessor, MiniCPMV4_6VideoProcessor and their processor.
"""

import math
from collections.abc import Sequence
from typing import Literal

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from ....schema.media import ItemShape, SegmentShape, View
from ...architecture import ModelConfig
from ...checkpoint.json_fields import CheckpointFiles, JsonObject
from ...errors import UnsupportedMediaError
from ...media_config import VisionConfig, VisionRules
from ..qwen2_5 import fields, media
from ..vit import parse_steps

_MOST_SLICES, _MOST_FRAMES = 64, 4096
_COLOUR = (0.5, 0.5, 0.5)  # where the file does not say

Size = tuple[int, int]


def parse_rules(files: CheckpointFiles, vision: VisionConfig) -> VisionRules:
    """Raises CheckpointError."""
    image, video, _ = fields.processors(files, video_falls_back=False)
    side = image.integer("scale_resolution", default=448, most=4096)
    token = (vision.patch_size * vision.merge_size) ** 2
    rules = VisionRules(
        patch_size=vision.patch_size,
        temporal_patch_size=1,
        merge_size=vision.merge_size,
        min_pixels=token,
        max_pixels=_most_slices(image) * side**2,
        video_min_pixels=token,
        video_max_pixels=side**2,
        fps=1.0,
        min_frames=1,
        max_frames=_most_frames(video),
        slice_side=side,
        image_mean=image.colour("image_mean", default=_COLOUR),
        image_std=image.colour("image_std", default=_COLOUR),
    )
    for processor in (image, video) if rules.max_frames else (image,):
        _expect_rules(processor, rules)
    return rules


def _most_slices(processor: JsonObject) -> int:
    return processor.integer("max_slice_nums", default=9, most=_MOST_SLICES) if processor.boolean("slice_mode", default=True) else 1


def _most_frames(video: JsonObject) -> int:
    """Of a video. 0, and the model takes none, where frames are cut into slices or stacked, which is not supported."""
    is_plain = _most_slices(video) == 1 and video.integer("stack_frames", default=1) == 1
    return video.integer("max_num_frames", default=128, most=_MOST_FRAMES) if is_plain else 0


def _expect_rules(processor: JsonObject, rules: VisionRules) -> None:
    """Raise CheckpointError for a processor with other patches, sides or colours."""
    parse_steps(processor, "bicubic")
    processor.text("downsample_mode", default="16x", choices=("16x",))
    if (patch := processor.integer("patch_size", default=14)) != rules.patch_size:
        raise processor.error("patch_size", f"is {patch}, but the vision tower has {rules.patch_size}")
    if (side := processor.integer("scale_resolution", default=448)) != rules.slice_side:
        raise processor.error("scale_resolution", f"is {side}, but that of pictures is {rules.slice_side}")
    for name, colour in (("image_mean", rules.image_mean), ("image_std", rules.image_std)):
        if (found := processor.colour(name, default=_COLOUR)) != colour:
            raise processor.error(name, f"is {list(found)}, but that of pictures is {list(colour)}")


def image_item(config: ModelConfig, height: int, width: int) -> ItemShape:
    """All of it, then its slices, row by row. A small picture has none."""
    rules = media.vision_rules(config, "image")
    if min(height, width) < 1:
        raise UnsupportedMediaError(f"picture of {width}x{height} pixels is empty")
    opening, closing, before, behind, line_end = config.item_text_ids
    whole = _segment(rules, "image", _fitted(rules, height, width))
    segments = [replace(whole, lead=(opening,), trail=(closing,), views=(View((_fitted(rules, height, width),)),))]
    if (grid := _grid(rules, height, width)) is not None:
        num_rows, num_columns = grid
        h, w = _fitted(rules, _multiple(height, num_rows) / num_rows, _multiple(width, num_columns) / num_columns)
        for row in range(num_rows):
            for column in range(num_columns):
                ends_row = column == num_columns - 1 and row < num_rows - 1
                views = (View(((h * num_rows, w * num_columns),), (column * w, row * h, w, h)),)
                trail = (behind, line_end) if ends_row else (behind,)
                segments.append(replace(_segment(rules, "image", (h, w)), lead=(before,), trail=trail, views=views))
    return _item("image", segments)


def _segment(rules: VisionRules, kind: Literal["image", "video"], size: Size) -> SegmentShape:
    height, width = size
    return media.vision_segment(rules, kind, (1, height // rules.patch_size, width // rules.patch_size))


def _item(kind: Literal["image", "video"], segments: list[SegmentShape]) -> ItemShape:
    num_tokens = sum(segment.num_prompt_tokens for segment in segments)
    return ItemShape(kind, (len(segments), *segments[0].grid[1:]), num_tokens, segments)


def sample_frames(config: ModelConfig, total_frames: int, fps: float) -> NDArray[np.int64]:
    """One of each second where ``VisionRules.fps`` is 1, each once; of a long video as many as are taken, evenly from those that are
    shown each tenth of a second."""
    rules = media.vision_rules(config, "video")
    if total_frames < 1:
        raise UnsupportedMediaError("video has no frames")
    if not 0 < fps < math.inf:
        raise UnsupportedMediaError(f"video has a frame rate of {fps}")
    duration = total_frames / fps
    if duration * rules.fps > rules.max_frames:
        times = [round(number * 0.1, 1) for number in range(int(duration / 0.1))]
        if len(times) > rules.max_frames:
            times = [times[at] for at in np.linspace(0, len(times) - 1, rules.max_frames, dtype=int)]
    else:
        times = [number / rules.fps for number in range(math.ceil(duration * rules.fps))]
    return np.array(list(dict.fromkeys(min(int(time * fps), total_frames - 1) for time in times)), np.int64)


def video_item(
    config: ModelConfig, num_frames: int, height: int, width: int, sampled_fps: float, times_s: Sequence[float] = ()
) -> ItemShape:
    """Each frame is a picture without slices."""
    rules = media.vision_rules(config, "video")
    if num_frames < 1 or min(height, width) < 1:
        raise UnsupportedMediaError(f"video of {num_frames} frames of {width}x{height} pixels is empty")
    opening, closing, *_ = config.item_text_ids
    frame = replace(_segment(rules, "video", _fitted(rules, height, width)), lead=(opening,), trail=(closing,))
    return _item("video", [frame] * num_frames)


def _grid(rules: VisionRules, height: int, width: int) -> Size | None:
    """Rows and columns of slices: nearly as many as hold the picture's pixels, nearest to its ratio of sides. None: it is not cut."""
    most = max(rules.max_pixels // rules.slice_side**2, 1)
    count = min(math.ceil(width * height / rules.slice_side**2), most)
    if count <= 1:
        return None
    ratio, best, least = math.log(width / height), (1, 1), math.inf
    for number in (count - 1, count, count + 1):
        if number == 1 or number > most:
            continue
        for num_rows in range(1, number + 1):
            if number % num_rows == 0:
                distance = abs(ratio - math.log(number // num_rows / num_rows))
                if distance < least or (distance == least and num_rows > best[0]):
                    best, least = (num_rows, number // num_rows), distance
    return best


def _fitted(rules: VisionRules, height: float, width: float) -> Size:
    """Height and width in whole tokens, of about as many pixels as a slice has, also of a smaller picture."""
    ratio, token = width / height, rules.patch_size * rules.merge_size
    fitted = int(rules.slice_side / math.sqrt(ratio))
    return _multiple(fitted, token), _multiple(int(fitted * ratio), token)


def _multiple(length: float, unit: int) -> int:
    return max(round(length / unit) * unit, unit)
