"""Whether the shape of a medium fits itself and the model: it comes from the process that decodes strangers' bytes.

The controller asks before it believes a shape. What it then writes for the other actors (tokens, positions, sizes of rows) follows from
numbers that agree.
"""

import math
from collections.abc import Iterator

from msgspec.structs import replace

from ...schema.media import ItemShape, MediaKind, SegmentShape
from ..architecture import ModelConfig
from ..errors import UnsupportedMediaError
from ..media_config import VisionRules
from .registry import family_of

MAX_VIDEO_S = 1e6  # of the times on the temporal axis
MAX_SOUND_FRAMES = 1 << 16  # of a segment


def fault_of(config: ModelConfig, kind: MediaKind, shape: ItemShape) -> str:
    """Return what contradicts what in the shape of an item of this kind; "" for one that the model's rules can give."""
    if shape.kind != kind or kind not in config.media_kinds:
        return f"{shape.kind} in place of {kind}"
    allowed = (kind, "audio") if kind == "video" and config.audio_rules is not None else (kind,)
    texts, made = _texts(config), dict[tuple[int, ...], list[SegmentShape]]()
    for number, segment in enumerate(shape.segments):
        if segment.kind not in allowed:
            return f"segment {number} is {segment.kind}"
        if fault := _fault_of_segment(config, segment, texts) or _fault_of_details(config, shape, number, made):
            return f"segment {number} has {fault}"
    parts = [segment.grid for segment in shape.segments if segment.kind == kind]
    whole = sum(grid[0] for grid in parts), *shape.grid[1:]
    is_cut = kind != "image" or len(parts) == 1 or all(segment.views for segment in shape.segments)
    # Slices have a size of their own; positions, which count from the item's, do not know it.
    alike = parts[:1] if kind == "image" and config.vision_rules is not None and config.vision_rules.slice_side else parts
    if not parts or whole != shape.grid or {grid[1:] for grid in alike} != {shape.grid[1:]} or not is_cut:
        return f"segments of {parts[:4]} in a grid of {shape.grid}"
    if (num_tokens := sum(segment.num_prompt_tokens for segment in shape.segments)) != shape.num_tokens:
        return f"{shape.num_tokens} tokens, and segments of {num_tokens}"
    if not 0 <= shape.grid[0] * shape.second_per_grid_s <= MAX_VIDEO_S:
        return f"{shape.grid[0]} patches of {shape.second_per_grid_s} s"
    if any(segment.kind == "audio" and segment.details for segment in shape.segments) and not _are_runs(config, shape):
        return "runs of sound that no such video has"
    return ""


def _are_runs(config: ModelConfig, shape: ItemShape) -> bool:
    """Return whether a video and its sound track take turns as its family has them."""
    rules, sounds = config.vision_rules, [segment for segment in shape.segments if segment.kind == "audio"]
    first, *_ = sounds[-1].details or (0,)  # frame of the last window
    num_frames = first + sounds[-1].num_rows
    # Before an item of such a size is made.
    if rules is None or shape.grid[0] > rules.max_frames or num_frames > sum(segment.num_rows for segment in sounds):
        return False
    try:
        family, sound = family_of(config), family_of(config).audio_item(config, num_frames)
        if sound.num_tokens != sum(segment.num_tokens for segment in sounds):
            return False
        video = replace(shape, num_tokens=shape.num_tokens - sound.num_tokens)
        return family.video_with_sound(config, video, sound).segments == shape.segments
    except UnsupportedMediaError:
        return False


def _fault_of_segment(config: ModelConfig, segment: SegmentShape, texts: set[int]) -> str:
    if not texts.issuperset(segment.lead + segment.trail):
        return "other text around it than its family writes"
    if segment.ids and (fault := _fault_of_ids(config, segment, texts)):
        return fault
    placeholders = {config.placeholder_id(kind) for kind in config.media_kinds}
    num_text = sum(count for id, count in segment.ids if id not in placeholders)
    t, h, w = segment.grid
    if segment.kind == "audio":
        rows, row_bytes, most = _expected_of_sound(config, t)
        expected = (rows, row_bytes, min(segment.num_tokens, most) if segment.details else most)
        is_grid = (h, w) == (0, 0) and not segment.views
    else:
        vision = config.vision_rules
        assert vision is not None
        num_rows = math.prod(segment.grid)
        # of a segment with details the family knows how many
        num_tokens = segment.num_tokens if segment.details else num_rows // vision.merge_size**2 + num_text
        expected = (num_rows, vision.row_bytes, num_tokens)
        side = vision.tile // vision.patch_size  # all that a tower for tiles takes
        is_size = (h, w) == (side, side) if side else not (h % vision.merge_size or w % vision.merge_size)
        is_grid = is_size and _are_views(vision, segment)
    found = (segment.num_rows, segment.row_bytes, segment.num_tokens)
    if not is_grid or found != expected or segment.num_tokens < 1:
        return f"{found[0]} rows of {found[1]} bytes and {found[2]} tokens in a grid of {segment.grid}, of {len(segment.views)} views"
    return ""


def _texts(config: ModelConfig) -> set[int]:
    """The ids that text of items is made of."""
    times = config.times
    return {*config.item_text_ids, *(() if times is None else (*times.ids, config.vision_start_token_id, config.vision_end_token_id))}


def _fault_of_ids(config: ModelConfig, segment: SegmentShape, texts: set[int]) -> str:
    known = texts | {config.placeholder_id(kind) for kind in config.media_kinds}
    if unknown := [id for id, _ in segment.ids if id not in known]:
        return f"a token {unknown[0]} that its family does not write"
    if min(count for _, count in segment.ids) < 1 or sum(count for _, count in segment.ids) != segment.num_tokens:
        return f"runs of {[count for _, count in segment.ids][:4]} ids for {segment.num_tokens} tokens"
    return ""


def _are_views(vision: VisionRules, segment: SegmentShape) -> bool:
    """Return whether the views of a segment are as many and as large as its grid says."""
    t, h, w = segment.grid
    if not segment.views:
        return t == 1 or segment.kind == "video"
    size = (h * vision.patch_size, w * vision.patch_size)
    return segment.kind == "image" and t == len(segment.views) and all(view.sizes and view.size == size for view in segment.views)


def _fault_of_details(config: ModelConfig, shape: ItemShape, number: int, made: dict[tuple[int, ...], list[SegmentShape]]) -> str:
    """A segment with details is the one that its family makes of a picture, or of so many frames, of the size that they begin with.
    ``made``: the segments of videos of sizes that were asked for before."""
    segment = shape.segments[number]
    if not segment.details or (segment.kind == "audio" and shape.kind == "video"):  # ``_are_runs`` judges the latter
        return ""
    if segment.kind == "video" and len(segment.details) >= 2:
        if segment.details[:2] not in made:
            made[segment.details[:2]] = _video_segments(config, shape.grid[0], *segment.details[:2])
        if made[segment.details[:2]][number : number + 1] == [segment]:
            return ""
    if segment.kind == "image" and len(segment.details) >= 2:
        for rules in _possible_rules(config, segment):
            try:
                if family_of(config).image_item(rules, *segment.details[:2]).segments[number : number + 1] == [segment]:
                    return ""
            except UnsupportedMediaError:
                pass
    return f"details of {segment.details[:4]} that no such segment has"


def _video_segments(config: ModelConfig, count: int, height: int, width: int) -> list[SegmentShape]:
    """Those of a video of ``count`` temporal patches; none if the model takes no such video."""
    rules = config.vision_rules
    assert rules is not None
    if not 0 < count * rules.temporal_patch_size <= rules.max_frames:
        return []
    try:
        return family_of(config).video_item(config, count * rules.temporal_patch_size, height, width, rules.fps).segments
    except UnsupportedMediaError:
        return []


def _possible_rules(config: ModelConfig, segment: SegmentShape) -> Iterator[ModelConfig]:
    """The model's rules, those of a picture among others, and those of a picture whose bounds of pixels let it have as many tiles as it
    has, besides the one that shows all of it."""
    yield config
    if config.vision_rules is not None and config.vision_rules.cuts_alone:
        yield replace(config, vision_rules=replace(config.vision_rules, grids=()))
    if (rules := config.vision_rules) is not None and rules.tile:
        area = (segment.grid[0] - 1) * rules.tile**2
        yield replace(config, vision_rules=replace(rules, min_pixels=area, max_pixels=area))


def _expected_of_sound(config: ModelConfig, num_frames: int) -> tuple[int, int, int]:
    """Rows, bytes of each, and tokens of so many mel frames; zeros where there is no such segment."""
    if num_frames > MAX_SOUND_FRAMES:
        return 0, 0, 0
    try:
        parts = family_of(config).audio_item(config, num_frames).segments
    except UnsupportedMediaError:
        return 0, 0, 0
    return sum(part.num_rows for part in parts), parts[0].row_bytes, sum(part.num_tokens for part in parts)
