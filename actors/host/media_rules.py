"""The rules by which one medium becomes patches: the model's, narrowed by the run's configuration and the request's options.

Pure. The gateway refuses what lies outside ``option_ranges``; the video process applies ``for_medium``.
"""

from typing import NamedTuple

from msgspec.structs import replace

from ...models.architecture import ModelConfig
from ...models.families.registry import family_of
from ...models.media_config import VisionRules
from ...runtime.config.sections import MIN_FPS, MediaSection
from ...schema.media import ItemShape, MediaKind, MediaOptions


class Range(NamedTuple):
    """The range that a request may ask for, both ends included."""

    least: float
    most: float


SHARES = Range(0.05, 1.0)


def for_run(model: ModelConfig, media: MediaSection) -> ModelConfig:
    """The model's rules with the frame rate of the run's configuration, and its limit of frames."""
    rules = model.vision_rules
    if rules is None:
        return model
    return replace(model, vision_rules=replace(rules, fps=media.fps, max_frames=min(rules.max_frames, media.max_frames)))


def for_medium(model: ModelConfig, options: MediaOptions) -> ModelConfig:
    """The run's rules with one medium's options; no option raises a medium's greatest cost.

    A lower bound gives way to an upper one below it: otherwise a medium under ``max_pixels`` would be enlarged beyond it. Of a video
    ``token_share`` takes frames; of a picture ``image_of_share`` takes pixels, once its size is known.
    """
    rules = model.vision_rules
    if rules is None:
        return model
    fps = rules.fps if options.fps is None else min(rules.fps, options.fps)
    min_frames = _lower(rules.min_frames, options.min_frames, rules.max_frames, options.max_frames)
    max_frames = _least(rules.max_frames, options.max_frames)
    if (share := options.known_share) < 1:
        fps = max(MIN_FPS, fps * share)
        min_frames = max(1, round(min_frames * share))
        max_frames = max(min(max_frames, rules.temporal_patch_size), round(max_frames * share))
    narrowed = replace(
        rules,
        grids=() if options.is_among_others and rules.cuts_alone else rules.grids,
        fps=fps,
        min_frames=min_frames,
        max_frames=max_frames,
        min_pixels=_lower(rules.min_pixels, options.min_pixels, rules.max_pixels, options.max_pixels),
        max_pixels=_least(rules.max_pixels, options.max_pixels),
        video_min_pixels=_lower(rules.video_min_pixels, options.min_pixels, rules.video_max_pixels, options.max_pixels),
        video_max_pixels=_least(rules.video_max_pixels, options.max_pixels),
    )
    return replace(model, vision_rules=narrowed)


def image_of_share(model: ModelConfig, height: int, width: int, share: float) -> ItemShape:
    """Return the shape of a picture of this size with at most this share of the tokens that it would have, by fewer pixels (VL9): as
    many tiles as have that, or as few as the family cuts; of a family that fills its bounds with all pictures the share of these."""
    item = family_of(model).image_item(model, height, width)
    rules = model.vision_rules
    if share >= 1 or rules is None:
        return item
    count, rows, columns = item.grid
    token = (rules.patch_size * rules.merge_size) ** 2

    def bounded(most: int) -> ItemShape:
        fewer = replace(rules, max_pixels=most, min_pixels=min(rules.min_pixels, token))  # nothing is enlarged, not even to the share
        return family_of(model).image_item(replace(model, vision_rules=fewer), height, width)

    side = rules.tile or rules.slice_side
    if not side:
        whole = rules.max_pixels if _fills_bounds(model, rules) else rows * columns * rules.patch_size**2
        return bounded(max(token, int(whole * share)))
    items = [bounded(number * side**2) for number in range(1, max(count, 2))]
    within = [each for each in items if each.num_tokens <= share * item.num_tokens]
    return max(within, key=_num_tokens) if within else min(items, key=_num_tokens)


def _fills_bounds(model: ModelConfig, rules: VisionRules) -> bool:
    """Return whether a picture of one token's pixels is enlarged to more than half of ``max_pixels``, as Gemma 4's are."""
    side = rules.patch_size * rules.merge_size
    _, rows, columns = family_of(model).image_item(model, side, side).grid
    return 2 * rows * columns * rules.patch_size**2 > rules.max_pixels


def _num_tokens(item: ItemShape) -> int:
    return item.num_tokens


def share_under(waiting_s: float, objective_s: float) -> float:
    """Return the share of its tokens that a medium gets under load (VL9), a power of two, so that caches know it again. ``waiting_s``:
    of encoding and prefill that wait before it. ``objective_s``: of the time to its first token."""
    for share, patience in ((1.0, 0.5), (0.5, 1.0)):
        if waiting_s <= patience * objective_s:
            return share
    return 0.25


def _lower(mine: int, asked: int | None, *upper: int | None) -> int:
    """The lower bound: the one asked for, else the run's; above no upper bound."""
    return _least(mine if asked is None else asked, *upper)


def _least(*numbers: int | None) -> int:
    return min(number for number in numbers if number is not None)


def option_ranges(rules: VisionRules) -> dict[MediaKind, dict[str, Range]]:
    """By kind of medium: the numeric options, each from its least meaningful value to the limit of the run's rules. Pictures that all
    have as many tokens have no ``token_share``."""
    are_alike = rules.tile > 0 and len(rules.grids) < 2 and not rules.longest_edge
    token = (rules.patch_size * rules.merge_size) ** 2

    def upto(most: float, least: float) -> Range:
        return Range(min(least, most), most)

    return {
        "image": {
            "min_pixels": upto(rules.max_pixels, token),
            "max_pixels": upto(rules.max_pixels, token),
            **({} if are_alike else {"token_share": SHARES}),
        },
        "video": {
            "fps": upto(rules.fps, MIN_FPS),
            "min_frames": upto(rules.max_frames, 1),
            "max_frames": upto(rules.max_frames, rules.temporal_patch_size),
            "min_pixels": upto(rules.video_max_pixels, token),
            "max_pixels": upto(rules.video_max_pixels, token),
            "token_share": SHARES,
        },
        "audio": {},
    }
