"""How InternVL cuts pictures into tiles and takes frames of videos (pure, but for ``sample_frames``, which uses torch).

The rules are those of transformers' GotOcr2ImageProcessor, InternVLVideoProcessor and InternVLProcessor.
"""

import math
from collections.abc import Sequence

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

_MOST_TILES = 64
_MAX_FRAMES = 64  # of a video, where the file does not say how many are taken


def parse_rules(files: CheckpointFiles, vision: VisionConfig) -> VisionRules:
    """Raises CheckpointError, also where pictures and videos have colours of their own."""
    nested = files.optional("processor_config.json") or JsonObject({}, "defaults")
    image, video, _ = fields.processors(files, video_falls_back=False)
    tile = vision.position_side * vision.patch_size
    num_tokens, base = (vision.position_side // vision.merge_size) ** 2, VisionRules()
    if (found := nested.integer("image_seq_length", default=num_tokens)) != num_tokens:
        raise nested.error("image_seq_length", f"is {found}, but a tile has {num_tokens} tokens")
    for processor in (image, video):
        parse_steps(processor, "bicubic")
        size = processor.object("size")
        for name in ("height", "width"):
            if (length := size.integer(name, default=tile)) != tile:
                raise size.error(name, f"is {length}, but the vision tower's image_size is {tile}")
    mean, std = (image.colour(name, default=usual) for name, usual in (("image_mean", base.image_mean), ("image_std", base.image_std)))
    for name, of_image, usual in (("image_mean", mean, base.image_mean), ("image_std", std, base.image_std)):
        if (of_video := video.colour(name, default=usual)) != of_image:
            raise video.error(name, f"is {list(of_video)}, but that of pictures is {list(of_image)}")
    if not video.boolean("initial_shift", default=True):
        raise video.error("initial_shift", "is false; only frames from the middle of their parts of a video are supported")
    least, most = image.integer("min_patches", default=1, most=_MOST_TILES), image.integer("max_patches", default=12, most=_MOST_TILES)
    if most < least:
        raise image.error("max_patches", f"is {most}, expected at least min_patches, {least}")
    num_frames = video.integer("num_frames", default=0, least=0)
    return VisionRules(
        patch_size=vision.patch_size,
        temporal_patch_size=1,
        merge_size=vision.merge_size,
        min_pixels=least * tile**2,
        max_pixels=most * tile**2,
        video_min_pixels=tile**2,
        video_max_pixels=tile**2,
        fps=video.number("fps", default=base.fps),
        min_frames=num_frames or 1,
        max_frames=num_frames or _MAX_FRAMES,
        image_mean=mean,
        image_std=std,
        tile=tile,
        grids=_grids(tile, most),
    )


def _grids(tile: int, most: int) -> tuple[tuple[int, int], ...]:
    """Heights and widths of so many tiles at most, the fewest first."""
    pairs = [(rows, columns) for columns in range(1, most + 1) for rows in range(1, most + 1) if rows * columns <= most]
    return tuple((rows * tile, columns * tile) for rows, columns in sorted(pairs, key=lambda pair: pair[0] * pair[1]))


def image_item(config: ModelConfig, height: int, width: int) -> ItemShape:
    """Its tiles, row by row, then all of it at a tile's size. One tile is shown alone."""
    rules = media.vision_rules(config, "image")
    if min(height, width) < 1:
        raise UnsupportedMediaError(f"picture of {width}x{height} pixels is empty")
    tile, grid = rules.tile, _nearest(rules, height, width)
    places = [(x, y) for y in range(0, grid[0], tile) for x in range(0, grid[1], tile)]
    views = [View((grid,), (x, y, tile, tile)) for x, y in places]
    whole = View(((tile, tile),))
    segments = [_tile(config, "image", view) for view in ([*views, whole] if len(views) > 1 else [whole])]
    segments[0] = replace(segments[0], lead=(config.vision_start_token_id,))
    segments[-1] = replace(segments[-1], trail=(config.vision_end_token_id,))
    return _item("image", segments)


def _nearest(rules: VisionRules, height: int, width: int) -> tuple[int, int]:
    """The grid that is nearest to the picture in its ratio of sides; of several the largest that the picture fills by half."""
    grids = [grid for grid in rules.grids if rules.min_pixels <= grid[0] * grid[1] <= rules.max_pixels]
    best, least = (rules.tile, rules.tile), math.inf
    for grid in grids:
        distance = abs(width / height - grid[1] / grid[0])
        if distance < least or (distance == least and height * width > 0.5 * grid[0] * grid[1]):
            best, least = grid, distance
    return best


def _tile(config: ModelConfig, kind: str, view: View | None) -> SegmentShape:
    rules = media.vision_rules(config, "image")
    side = rules.tile // rules.patch_size
    segment = media.vision_segment(rules, "image" if kind == "image" else "video", (1, side, side))
    return replace(segment, views=(view,)) if view is not None else replace(segment, ids=((config.image_token_id, segment.num_tokens),))


def _item(kind: str, segments: list[SegmentShape]) -> ItemShape:
    num_tokens = sum(segment.num_prompt_tokens for segment in segments)
    return ItemShape("image" if kind == "image" else "video", (len(segments), *segments[0].grid[1:]), num_tokens, segments)


def sample_frames(config: ModelConfig, total_frames: int, fps: float) -> NDArray[np.int64]:
    """The middle ones of as many equal parts as frames are taken; all of a shorter video."""
    rules = media.vision_rules(config, "video")
    if total_frames < 1:
        raise UnsupportedMediaError("video has no frames")
    if not 0 < fps < math.inf:
        raise UnsupportedMediaError(f"video has a frame rate of {fps}")
    wanted = min(max(int(total_frames / fps * rules.fps), rules.min_frames), rules.max_frames, total_frames)
    import torch  # its arange rounds in its own way

    step = total_frames / wanted
    return torch.arange(step / 2, total_frames, step).int().numpy().astype(np.int64)[:wanted]


def video_item(
    config: ModelConfig, num_frames: int, height: int, width: int, sampled_fps: float, times_s: Sequence[float] = ()
) -> ItemShape:
    """Each frame is a tile behind its number."""
    media.vision_rules(config, "video")
    assert config.times is not None
    if num_frames < 1:
        raise UnsupportedMediaError("video has no frames")
    frame = _tile(config, "video", None)
    end = (config.vision_end_token_id, *config.item_text_ids)
    segments = [
        replace(frame, lead=(*config.times.text(str(number)), config.vision_start_token_id), trail=end)
        for number in range(1, num_frames + 1)
    ]
    segments[-1] = replace(segments[-1], trail=end[:1])
    return _item("video", segments)
