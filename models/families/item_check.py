"""Whether the shape of a medium fits itself and the model: it comes from the process that decodes strangers' bytes.

The controller asks before it believes a shape. What it then writes for the other actors (tokens, positions, sizes of rows) follows from
numbers that agree.
"""

import math

from ...schema.media import ItemShape, MediaKind, SegmentShape
from ..architecture import ModelConfig
from .qwen2_5.media import audio_tokens

MAX_VIDEO_S = 1e6  # of the times on the temporal axis


def fault_of(config: ModelConfig, kind: MediaKind, shape: ItemShape) -> str:
    """Return what contradicts what in the shape of an item of this kind; "" for one that the model's rules can give."""
    if shape.kind != kind or kind not in config.media_kinds:
        return f"{shape.kind} in place of {kind}"
    allowed = (kind, "audio") if kind == "video" and config.audio_rules is not None else (kind,)
    for number, segment in enumerate(shape.segments):
        if segment.kind not in allowed:
            return f"segment {number} is {segment.kind}"
        if fault := _fault_of_segment(config, segment):
            return f"segment {number} has {fault}"
    parts = [segment.grid for segment in shape.segments if segment.kind == kind]
    whole = sum(grid[0] for grid in parts), *shape.grid[1:]
    if not parts or whole != shape.grid or {grid[1:] for grid in parts} != {shape.grid[1:]} or (kind == "image" and len(parts) > 1):
        return f"segments of {parts[:4]} in a grid of {shape.grid}"
    if (num_tokens := sum(segment.num_prompt_tokens for segment in shape.segments)) != shape.num_tokens:
        return f"{shape.num_tokens} tokens, and segments of {num_tokens}"
    if not 0 <= shape.grid[0] * shape.second_per_grid_s <= MAX_VIDEO_S:
        return f"{shape.grid[0]} patches of {shape.second_per_grid_s} s"
    return ""


def _fault_of_segment(config: ModelConfig, segment: SegmentShape) -> str:
    texts = config.times
    known = set() if texts is None else {*texts.ids, config.vision_start_token_id, config.vision_end_token_id}
    if not known.issuperset(segment.lead + segment.trail):
        return "other text than the time of a frame"
    t, h, w = segment.grid
    if segment.kind == "audio":
        rules = config.audio_rules
        assert rules is not None
        expected = (t, rules.row_bytes, audio_tokens(t))
        is_grid = (h, w) == (0, 0)
    else:
        vision = config.vision_rules
        assert vision is not None
        num_rows = math.prod(segment.grid)
        expected = (num_rows, vision.row_bytes, num_rows // vision.merge_size**2)
        is_grid = not (h % vision.merge_size or w % vision.merge_size) and (t == 1 or segment.kind == "video")
    found = (segment.num_rows, segment.row_bytes, segment.num_tokens)
    if not is_grid or found != expected or segment.num_tokens < 1:
        return f"{found[0]} rows of {found[1]} bytes and {found[2]} tokens in a grid of {segment.grid}"
    return ""
