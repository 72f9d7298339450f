"""How MiniCPM-V cuts pictures into slices (pure). The rules are those of transformers' MiniCPMV4_6ImageProcessor and its processor."""

import math

from msgspec.structs import replace

from ....schema.media import ItemShape, SegmentShape, View
from ...architecture import ModelConfig
from ...checkpoint.json_fields import CheckpointFiles
from ...errors import UnsupportedMediaError
from ...media_config import VisionConfig, VisionRules
from ..qwen2_5 import fields, media
from ..vit import parse_steps

_MOST_SLICES = 64

Size = tuple[int, int]


def parse_rules(files: CheckpointFiles, vision: VisionConfig) -> VisionRules:
    """Raises CheckpointError."""
    image, _, _ = fields.processors(files, video_falls_back=False)
    parse_steps(image, "bicubic")
    image.text("downsample_mode", default="16x", choices=("16x",))
    if (patch := image.integer("patch_size", default=14)) != vision.patch_size:
        raise image.error("patch_size", f"is {patch}, but the vision tower has {vision.patch_size}")
    side = image.integer("scale_resolution", default=448, most=4096)
    most = image.integer("max_slice_nums", default=9, most=_MOST_SLICES) if image.boolean("slice_mode", default=True) else 1
    return VisionRules(
        patch_size=patch,
        temporal_patch_size=1,
        merge_size=vision.merge_size,
        min_pixels=(patch * vision.merge_size) ** 2,
        max_pixels=most * side**2,
        max_frames=0,
        slice_side=side,
        image_mean=image.colour("image_mean", default=(0.5, 0.5, 0.5)),
        image_std=image.colour("image_std", default=(0.5, 0.5, 0.5)),
    )


def image_item(config: ModelConfig, height: int, width: int) -> ItemShape:
    """All of it, then its slices, row by row. A small picture has none."""
    rules = media.vision_rules(config, "image")
    if min(height, width) < 1:
        raise UnsupportedMediaError(f"picture of {width}x{height} pixels is empty")
    opening, closing, before, behind, line_end = config.item_text_ids
    segments = [replace(_segment(rules, View((_fitted(rules, height, width),))), lead=(opening,), trail=(closing,))]
    if (grid := _grid(rules, height, width)) is not None:
        num_rows, num_columns = grid
        h, w = _fitted(rules, _multiple(height, num_rows) / num_rows, _multiple(width, num_columns) / num_columns)
        for row in range(num_rows):
            for column in range(num_columns):
                ends_row = column == num_columns - 1 and row < num_rows - 1
                view = View(((h * num_rows, w * num_columns),), (column * w, row * h, w, h))
                trail = (behind, line_end) if ends_row else (behind,)
                segments.append(replace(_segment(rules, view), lead=(before,), trail=trail))
    num_tokens = sum(segment.num_prompt_tokens for segment in segments)
    return ItemShape("image", (len(segments), *segments[0].grid[1:]), num_tokens, segments)


def _segment(rules: VisionRules, view: View) -> SegmentShape:
    height, width = view.size
    segment = media.vision_segment(rules, "image", (1, height // rules.patch_size, width // rules.patch_size))
    return replace(segment, views=(view,))


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
