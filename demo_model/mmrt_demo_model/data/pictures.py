"""Pictures of one thing, of several things, of printed digits, and crowds."""

import itertools
import math
from dataclasses import dataclass

from .degrade import degrade_picture
from .drawing import (
    COLOURS,
    DIGIT_STYLES,
    SHAPES,
    Mask,
    Rgb,
    Rng,
    background,
    background_colours,
    colour_of,
    colours_near,
    draw_digits,
    lay,
    pixels,
    shape_mask,
    upright_angle,
)
from .kinds import SHARES, Box, Mix, Picture, Placed, chance, pick

SIZES = {"small": (0.13, 0.24), "middle": (0.28, 0.38), "big": (0.48, 0.78)}  # of the shorter side
TINY = (0.075, 0.11)
LEAST_PIXELS = 13
LEAST_SHARE = 0.085  # of the side of a square that is as large as the picture: models see pictures at a fixed area
_GAP = 0.05  # how far from the border of a third of the picture the middle of a thing stays
_ROWS, _COLUMNS = ("top", "", "bottom"), ("left", "", "right")


def picture_size(rng: Rng) -> tuple[int, int]:
    """Width, height: mostly 112 to 280 pixels on the shorter side, up to twice as much on the longer, never above 640."""
    short = int(rng.integers(112, 281)) if chance(rng, 0.85) else int(rng.integers(80, 401))
    long = min(640, round(short * pick(rng, (1.0, 4 / 3, 1.5, rng.uniform(1, 2)))))
    return (long, short) if chance(rng, 0.6) else (short, long)


@dataclass(slots=True)
class _Thing:
    shape: str
    colour: str
    rgb: Rgb
    mask: Mask
    left: int
    top: int
    digits: tuple[Box, ...] = ()  # in the mask


def _draw(
    rng: Rng, width: int, height: int, things: list[_Thing], degraded: bool, gentle: bool = False, brightness: float = 15.0
) -> Picture:
    colours = [thing.rgb for thing in things]
    grounds = background_colours(rng, colours, brightness)
    canvas = background(rng, width, height, grounds)
    placed = []
    for thing in things:
        lay(canvas, thing.mask, thing.left, thing.top, thing.rgb)
        right, bottom = thing.left + thing.mask.shape[1], thing.top + thing.mask.shape[0]
        box = (thing.left / width, thing.top / height, right / width, bottom / height)
        digits = tuple(
            ((thing.left + x0) / width, (thing.top + y0) / height, (thing.left + x1) / width, (thing.top + y1) / height)
            for x0, y0, x1, y1 in thing.digits
        )
        placed.append(Placed(thing.shape, thing.colour, box, digits))
    detail = min(min(thing.mask.shape) for thing in things)
    ground = tuple(name for colour in grounds for name in colours_near(colour))
    return Picture(degrade_picture(rng, canvas, detail, colours, gentle) if degraded else pixels(canvas), tuple(placed), ground)


def _thing(rng: Rng, shape: str, colour: str, size: int) -> _Thing:
    return _Thing(shape, colour, colour_of(rng, colour), shape_mask(shape, size, upright_angle(rng, shape)), 0, 0)


def _pixels_of(rng: Rng, width: int, height: int, size: str, tiny: bool) -> int:
    low, high = TINY if tiny else SIZES[size]
    return _at_least(width, height, rng.uniform(low, high) * min(width, height))


def _at_least(width: int, height: int, size: float) -> int:
    """The size in pixels, or the least that is still seen in such a picture."""
    return max(LEAST_PIXELS, round(LEAST_SHARE * math.sqrt(width * height)), round(size))


def single(rng: Rng, degraded: bool, extent: tuple[int, int], size: str = "", shape: str = "", colour: str = "") -> tuple[Picture, str]:
    """One thing, in the middle of one of nine fields, and its size. extent: width, height of the picture."""
    width, height = extent
    tiny = degraded and not size and chance(rng, 0.2)
    if not size:
        size = "small" if tiny else pick(rng, ("small", "middle", "big"))
    thing = _thing(rng, shape or pick(rng, SHAPES), colour or pick(rng, COLOURS), _pixels_of(rng, width, height, size, tiny))
    row, column = (int(field) for field in rng.integers(0, 3, 2))
    tall, wide = thing.mask.shape
    thing.left = _place(rng, width, wide, column)
    thing.top = _place(rng, height, tall, row)
    return _draw(rng, width, height, [thing], degraded, gentle=tiny), size


def _place(rng: Rng, extent: int, length: int, field: int) -> int:
    """Where a thing of this length begins, its middle well within the field, or as near to it as the picture's edge allows."""
    middle = rng.uniform(field / 3 + (_GAP if field else 0), (field + 1) / 3 - (_GAP if field < 2 else 0)) * extent
    edge = min(round(0.02 * extent), (extent - length) // 2)
    return max(edge, min(extent - length - edge, round(middle - length / 2)))


def position_name(thing: Placed) -> str:
    """'top left', 'centre', …; empty when the middle of the thing is near a border between fields."""
    fields = []
    for middle in thing.centre:
        if min(abs(middle - 1 / 3), abs(middle - 2 / 3)) < 0.8 * _GAP:
            return ""
        fields.append(int(middle * 3))
    return f"{_ROWS[fields[1]]} {_COLUMNS[fields[0]]}".strip() or "centre"


def several(rng: Rng, degraded: bool, number: int = 0, mixes: tuple[Mix, ...] = SHARES.mixes) -> Picture:
    """Two to five things that do not touch, or ``number`` of them."""
    width, height = picture_size(rng)
    number = number or int(rng.integers(2, 6))
    mix = pick(rng, mixes)
    shapes = [pick(rng, SHAPES) for _ in range(1 if mix == "same" else 2)] if mix != "mixed" else list(SHAPES)
    colours = [pick(rng, COLOURS) for _ in range(1 if mix == "same" else 2)] if mix != "mixed" else list(COLOURS)
    tiny = degraded and chance(rng, 0.2)
    largest = {1: 0.45, 2: 0.45, 3: 0.42, 4: 0.4, 5: 0.33}[number]
    things: list[_Thing] = []
    boxes: list[tuple[int, int, int, int]] = []
    alike = rng.uniform(0.15, largest)
    same_size = chance(rng, 0.5)
    while len(things) < number:
        share = rng.uniform(0.09, 0.12) if tiny else alike if same_size else rng.uniform(0.15, largest)
        for _ in range(40):
            size = _at_least(width, height, share * min(width, height))
            thing = _thing(rng, pick(rng, shapes), pick(rng, colours), size)
            tall, wide = thing.mask.shape
            gap = max(3, round(0.035 * min(width, height)))
            thing.left, thing.top = int(rng.integers(0, width - wide + 1)), int(rng.integers(0, height - tall + 1))
            box = (thing.left - gap, thing.top - gap, thing.left + wide + gap, thing.top + tall + gap)
            if all(box[2] <= b[0] or b[2] <= box[0] or box[3] <= b[1] or b[3] <= box[1] for b in boxes):
                things.append(thing)
                boxes.append((thing.left, thing.top, thing.left + wide, thing.top + tall))
                break
            share *= 0.97
    return _draw(rng, width, height, things, degraded, gentle=tiny)


def digits(rng: Rng, degraded: bool) -> Picture:
    """One to four digits in a row, 18 % of the picture's height or more."""
    text = "".join(str(digit) for digit in rng.integers(0, 10, int(rng.integers(1, 5))))
    width, height = picture_size(rng)
    style, gap, angle = pick(rng, DIGIT_STYLES), rng.uniform(0.02, 0.16), 0.0 if chance(rng, 0.4) else rng.uniform(-9, 9)
    if height > width and len(text) > 2:
        width, height = height, width
    tiny = degraded and chance(rng, 0.3)
    share = rng.uniform(0.18, 0.26) if tiny else rng.uniform(0.2, 0.7)
    size = max(15, round(share * height))
    mask, boxes = draw_digits(text, size, style, gap, angle)
    widest, highest = 0.85 * width, 0.9 * height
    while mask.shape[1] > widest or mask.shape[0] > highest:
        size = min(size - 1, int(size * min(widest / mask.shape[1], highest / mask.shape[0])))
        mask, boxes = draw_digits(text, size, style, gap, angle)
    colour = pick(rng, COLOURS) if chance(rng, 0.6) else pick(rng, ("black", "white"))
    left, top = (
        int(rng.integers(edge, max(edge + 1, room - edge)))
        for edge, room in ((round(0.02 * width), width - mask.shape[1]), (round(0.02 * height), height - mask.shape[0]))
    )
    number = _Thing(text, colour, colour_of(rng, colour), mask, left, top, boxes)
    return _draw(rng, width, height, [number], degraded, gentle=tiny, brightness=50.0)


def crowd(rng: Rng, degraded: bool) -> Picture:
    """Six to fifteen things and numbers in rows: too many to ask about, and much to learn to see from."""
    width, height = picture_size(rng)
    rows = int(rng.integers(2, 4))
    columns = max(3, min(5, round(rows * width / height)))
    wide, tall = width / columns, height / rows
    colours = [pick(rng, COLOURS) for _ in range(3)]
    things = []
    for row, column in itertools.product(range(rows), range(columns)):
        size = _at_least(width, height, rng.uniform(0.4, 0.85) * min(wide, tall))
        colour = pick(rng, colours)
        if chance(rng, 0.4):
            thing = _thing(rng, pick(rng, SHAPES), colour, size)
        else:
            text = "".join(str(digit) for digit in rng.integers(0, 10, int(rng.integers(1, 3))))
            size = max(15, size)
            mask, boxes = draw_digits(text, size, pick(rng, DIGIT_STYLES), rng.uniform(0.02, 0.16), rng.uniform(-9, 9))
            if mask.shape[1] > 0.95 * wide:
                text = text[0]
                mask, boxes = draw_digits(text, size, pick(rng, DIGIT_STYLES), 0.02, rng.uniform(-9, 9))
            thing = _Thing(text, colour, colour_of(rng, colour), mask, 0, 0, boxes)
        high, across = thing.mask.shape
        thing.left = round(column * wide + rng.uniform(0, max(0.0, wide - across)))
        thing.top = round(row * tall + rng.uniform(0, max(0.0, tall - high)))
        things.append(thing)
    return _draw(rng, width, height, things, degraded, gentle=True)
