"""Colours, shapes, digits and backgrounds, as masks that are laid over float32 pictures. Used by pictures and clips.

Masks are float32 [h, w], 0 to 1, drawn three times as large and averaged. Colours are ranges of hue, saturation and value that people
call by that name, gaps between them.
"""

import colorsys
import math
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageDraw, ImageFont

from .kinds import Box, chance, pick

Rng = np.random.Generator
Mask = npt.NDArray[np.float32]
Canvas = npt.NDArray[np.float32]
Rgb = tuple[float, float, float]

SHAPES = ("circle", "square", "triangle", "star", "cross", "heart")
_RANGES = {  # hue in degrees, saturation, value
    "red": ((-6, 5), (0.78, 1.0), (0.75, 1.0)),
    "orange": ((25, 37), (0.82, 1.0), (0.92, 1.0)),
    "yellow": ((49, 60), (0.75, 1.0), (0.88, 1.0)),
    "green": ((100, 150), (0.6, 1.0), (0.45, 0.95)),
    "blue": ((212, 240), (0.65, 1.0), (0.6, 1.0)),
    "purple": ((272, 300), (0.55, 1.0), (0.5, 0.9)),
    "white": ((0, 360), (0.0, 0.02), (0.96, 1.0)),
    "black": ((0, 360), (0.0, 0.3), (0.0, 0.08)),
}
COLOURS = tuple(_RANGES)
_OVERSAMPLING = 3
_NEAR_DEGREES = 15.0


def colour_of(rng: Rng, name: str) -> Rgb:
    """A colour of that name, 0 to 255 each."""
    hue, saturation, value = (rng.uniform(*limits) for limits in _RANGES[name])
    red, green, blue = colorsys.hsv_to_rgb(hue / 360 % 1, saturation, value)
    return 255 * red, 255 * green, 255 * blue


def colours_near(colour: Rgb) -> tuple[str, ...]:
    """What somebody may call this colour, of the names that there are: also far from where things are drawn in it."""
    if min(colour) > 215:
        return ("white",)
    if max(colour) < 50:
        return ("black",)
    hue, saturation, _ = colorsys.rgb_to_hsv(*(part / 255 for part in colour))
    if saturation < 0.3:
        return ()
    found = []
    for name, ((low, high), *_) in _RANGES.items():
        beyond = (360 * hue - low + 180) % 360 - 180
        if name not in ("white", "black") and -_NEAR_DEGREES < beyond < high - low + _NEAR_DEGREES:
            found.append(name)
    return tuple(found)


def colour_distance(one: Rgb, other: Rgb) -> float:
    """Roughly as seen: 0 to 765 (https://www.compuphase.com/cmetric.htm)."""
    mean = (one[0] + other[0]) / 2
    red, green, blue = (a - b for a, b in zip(one, other, strict=True))
    return math.sqrt((2 + mean / 256) * red * red + 4 * green * green + (2 + (255 - mean) / 256) * blue * blue)


def contrast(one: Rgb, other: Rgb, brightness: float = 0.0) -> float:
    """Their distance, less what their difference in brightness (0 to 255) lacks of ``brightness``."""
    lacking = brightness - abs(sum(w * (a - b) for w, a, b in zip((0.299, 0.587, 0.114), one, other, strict=True)))
    return colour_distance(one, other) - 4 * max(0.0, lacking)


def background_colours(rng: Rng, colours: list[Rgb], brightness: float, least: float = 190.0) -> tuple[Rgb, Rgb]:
    """Two colours near each other, both with at least this ``contrast`` to all of these, or the best of sixteen."""
    best: tuple[float, tuple[Rgb, Rgb]] = (-1.0, ((0, 0, 0), (0, 0, 0)))
    for attempt in range(16):
        first = _background_colour(rng, attempt)
        second = tuple(float(np.clip(c + rng.uniform(-28, 28), 0, 255)) for c in first)
        pair = (first, (second[0], second[1], second[2]))
        distance = min(contrast(colour, ground, brightness) for colour in colours for ground in pair)
        if distance >= least:
            return pair
        if distance > best[0]:
            best = distance, pair
    return best[1]


def _background_colour(rng: Rng, attempt: int) -> Rgb:
    kind = rng.random() if attempt < 8 else 0.0
    if kind < 0.6:  # white, black, greys
        grey = pick(rng, (255.0, 255.0, 0.0, rng.uniform(0, 255), rng.uniform(100, 200)))
        return grey, grey, grey
    if kind < 0.8:  # pale
        red, green, blue = colorsys.hsv_to_rgb(rng.random(), rng.uniform(0.05, 0.3), rng.uniform(0.75, 1))
    elif kind < 0.92:  # dark
        red, green, blue = colorsys.hsv_to_rgb(rng.random(), rng.uniform(0.3, 0.9), rng.uniform(0.1, 0.35))
    else:  # full
        red, green, blue = colorsys.hsv_to_rgb(rng.random(), rng.uniform(0.4, 0.9), rng.uniform(0.5, 1))
    return 255 * red, 255 * green, 255 * blue


def background(rng: Rng, width: int, height: int, colours: tuple[Rgb, Rgb]) -> Canvas:
    """Plain, gradient, noise or stripes. float32 [height, width, 3]."""
    first, second = (np.array(colour, np.float32) for colour in colours)
    kind = pick(rng, ("plain", "plain", "gradient", "noise", "stripes"))
    if kind == "plain":
        return np.full((height, width, 3), first, np.float32)
    if kind == "noise":
        weight: Mask = rng.integers(0, 256, (height, width), np.uint8).astype(np.float32) / np.float32(255)
    else:
        angle = rng.uniform(0, 2 * math.pi)
        along = np.add.outer(
            np.linspace(0, math.sin(angle), height, dtype=np.float32), np.linspace(0, math.cos(angle), width, dtype=np.float32)
        )
        if kind == "gradient":
            weight = (along - along.min()) / np.float32(max(float(np.ptp(along)), 1e-3))
        else:
            weight = (along * rng.uniform(3, 9) % 1 < 0.5).astype(np.float32)
    canvas: Canvas = first + (second - first) * weight[:, :, None]
    return canvas


def _polygon(shape: str, angle: float) -> list[tuple[float, float]]:
    """Corners around 0, at most 1 away."""
    if shape == "square":
        corners = [(-0.71, -0.71), (0.71, -0.71), (0.71, 0.71), (-0.71, 0.71)]
    elif shape == "triangle":
        corners = [(0.0, -0.9), (0.87, 0.6), (-0.87, 0.6)]
    elif shape == "star":
        turns = [math.pi * (k / 5 - 0.5) for k in range(10)]
        corners = [(r * math.cos(t), r * math.sin(t)) for t, r in zip(turns, [1.0, 0.42] * 5, strict=True)]
    elif shape == "cross":
        a, b = 0.3, 0.9
        corners = [(-a, -b), (a, -b), (a, -a), (b, -a), (b, a), (a, a), (a, b), (-a, b), (-a, a), (-b, a), (-b, -a), (-a, -a)]
    else:
        turns = [2 * math.pi * k / 48 for k in range(48)]
        corners = [
            (0.94 * math.sin(t) ** 3, -(13 * math.cos(t) - 5 * math.cos(2 * t) - 2 * math.cos(3 * t) - math.cos(4 * t) + 2) / 17 + 0.05)
            for t in turns
        ]
    cosine, sine = math.cos(angle), math.sin(angle)
    return [(x * cosine - y * sine, x * sine + y * cosine) for x, y in corners]


def shape_mask(shape: str, size: int, angle: float) -> Mask:
    """[h, w], the longer of them ``size``: the shape fills the mask."""
    if shape == "circle":
        corners = [(math.cos(math.pi * k / 24), math.sin(math.pi * k / 24)) for k in range(48)]
    else:
        corners = _polygon(shape, angle)
    left, top = min(x for x, _ in corners), min(y for _, y in corners)
    extent = max(max(x for x, _ in corners) - left, max(y for _, y in corners) - top)
    scale = size * _OVERSAMPLING / extent
    points = [((x - left) * scale, (y - top) * scale) for x, y in corners]
    width, height = (-(-int(max(values)) // _OVERSAMPLING) for values in zip(*points, strict=True))
    image = Image.new("L", (width * _OVERSAMPLING, height * _OVERSAMPLING))
    ImageDraw.Draw(image).polygon(points, fill=255)
    return np.asarray(image.reduce(_OVERSAMPLING), np.float32) / np.float32(255)


def upright_angle(rng: Rng, shape: str) -> float:
    """A tilt at which the shape is still called by its name."""
    return 0.0 if chance(rng, 0.4) else rng.uniform(-0.3, 0.3)


_BITMAPS = {
    "0": "01110 10001 10011 10101 11001 10001 01110",
    "1": "00100 01100 00100 00100 00100 00100 01110",
    "2": "01110 10001 00001 00010 00100 01000 11111",
    "3": "11111 00010 00100 00010 00001 10001 01110",
    "4": "00010 00110 01010 10010 11111 00010 00010",
    "5": "11111 10000 11110 00001 00001 10001 01110",
    "6": "00110 01000 10000 11110 10001 10001 01110",
    "7": "11111 00001 00010 00100 01000 01000 01000",
    "8": "01110 10001 10001 01110 10001 10001 01110",
    "9": "01110 10001 10001 01111 00001 00010 01100",
}
_SEGMENTS = dict(
    zip("0123456789", ("abcdef", "bc", "abged", "abgcd", "fgbc", "afgcd", "afgedc", "abc", "abcdefg", "abcdfg"), strict=True)
)
DIGIT_STYLES = ("font", "font", "bold", "bitmap", "segments")


@lru_cache(maxsize=64)
def _font(size: int) -> ImageFont.FreeTypeFont:
    font = ImageFont.load_default(size)
    assert isinstance(font, ImageFont.FreeTypeFont)
    return font


class Digits(NamedTuple):
    """A run of digits as a mask [h, w], and the box of each: x0, y0, x1, y1 in pixels of the mask."""

    mask: Mask
    boxes: tuple[Box, ...]


def draw_digits(text: str, height: int, style: str, gap: float, angle: float) -> Digits:
    """Digits that are ``height`` pixels high. gap: between digits, in heights; angle in degrees."""
    if style in ("font", "bold"):
        image, spans = _typeset(text, height * 2, gap, bold=style == "bold")
    else:
        cells = [_bitmap_digit(digit) if style == "bitmap" else _segment_digit(digit, height) for digit in text]
        space = max(1, round((0.05 + gap) * cells[0].shape[0]))
        row = np.zeros((cells[0].shape[0], sum(c.shape[1] for c in cells) + space * (len(cells) - 1)), np.uint8)
        left = 0
        spans = []
        for cell in cells:
            row[:, left : left + cell.shape[1]] = cell
            inked = np.flatnonzero(cell.any(0))
            spans.append((left + float(inked[0]), left + float(inked[-1]) + 1))
            left += cell.shape[1] + space
        image = Image.fromarray(row)
        scale = 2 * height / image.height
        spans = [(scale * begin, scale * end) for begin, end in spans]
        resample = Image.Resampling.NEAREST if style == "bitmap" else Image.Resampling.BILINEAR
        image = image.resize((max(2, round(image.width * scale)), 2 * height), resample)
    level = image.size
    if angle:
        image = image.rotate(angle, Image.Resampling.BILINEAR, expand=True)
    box = image.getbbox()
    assert box is not None
    boxes = tuple(_turned(span, level, image.size, angle, box[:2]) for span in spans)
    image = image.crop((box[0], box[1], box[2] + (box[2] - box[0]) % 2, box[3] + (box[3] - box[1]) % 2))
    return Digits(np.asarray(image.reduce(2), np.float32) / np.float32(255), boxes)


def _turned(span: tuple[float, float], level: tuple[int, int], turned: tuple[int, int], angle: float, corner: tuple[int, int]) -> Box:
    """Where a digit of the level line is after the line was turned about its middle, cropped at ``corner`` and halved in size."""
    width, height = span[1] - span[0], level[1]
    along = (span[0] + span[1] - level[0]) / 2
    x = turned[0] / 2 + along * math.cos(math.radians(angle)) - corner[0]
    y = turned[1] / 2 - along * math.sin(math.radians(angle)) - corner[1]
    return (x - width / 2) / 2, (y - height / 2) / 2, (x + width / 2) / 2, (y + height / 2) / 2


def _typeset(text: str, height: int, gap: float, bold: bool) -> tuple[Image.Image, list[tuple[float, float]]]:
    """The line, and where each digit begins and ends in it."""
    font = _font(max(8, round(height / 0.71 / 4) * 4))
    stroke = max(1, height // 22) if bold else 0
    boxes = [font.getbbox(digit, stroke_width=stroke) for digit in text]
    space = round((0.06 + gap) * height)
    top, bottom = min(b[1] for b in boxes), max(b[3] for b in boxes)
    width = sum(b[2] - b[0] for b in boxes) + space * (len(text) - 1)
    image = Image.new("L", (math.ceil(width), math.ceil(bottom - top)))
    draw = ImageDraw.Draw(image)
    left = 0.0
    spans = []
    for digit, box in zip(text, boxes, strict=True):
        draw.text((left - box[0], -top), digit, 255, font, stroke_width=stroke)
        begin, end = int(left), math.ceil(left + box[2] - box[0])
        inked = image.crop((begin, 0, end, image.height)).getbbox()
        assert inked is not None
        spans.append((float(begin + inked[0]), float(begin + inked[2])))
        left += box[2] - box[0] + space
    return image, spans


def _bitmap_digit(digit: str) -> npt.NDArray[np.uint8]:
    rows = [[255 * (pixel == "1") for pixel in row] for row in _BITMAPS[digit].split()]
    return np.array(rows, np.uint8)


def _segment_digit(digit: str, height: int) -> npt.NDArray[np.uint8]:
    """Seven segments, at twice the height."""
    rows, columns = 2 * height, max(6, round(1.1 * height))
    bar = max(2, round(0.22 * height))
    middle = (rows - bar) // 2
    areas = {
        "a": (slice(0, bar), slice(0, columns)),
        "b": (slice(0, middle + bar), slice(columns - bar, columns)),
        "c": (slice(middle, rows), slice(columns - bar, columns)),
        "d": (slice(rows - bar, rows), slice(0, columns)),
        "e": (slice(middle, rows), slice(0, bar)),
        "f": (slice(0, middle + bar), slice(0, bar)),
        "g": (slice(middle, middle + bar), slice(0, columns)),
    }
    cell = np.zeros((rows, columns), np.uint8)
    for segment in _SEGMENTS[digit]:
        cell[areas[segment]] = 255
    return cell


def lay(canvas: Canvas, mask: Mask, left: int, top: int, colour: Rgb) -> None:
    """Colour the canvas where the mask is, in place. What stands out is cut off."""
    height, width = canvas.shape[:2]
    x0, y0, x1, y1 = max(left, 0), max(top, 0), min(left + mask.shape[1], width), min(top + mask.shape[0], height)
    if x0 >= x1 or y0 >= y1:
        return
    part = canvas[y0:y1, x0:x1]
    part += (np.array(colour, np.float32) - part) * mask[y0 - top : y1 - top, x0 - left : x1 - left, None]


def pixels(canvas: Canvas) -> npt.NDArray[np.uint8]:
    """Rounded to uint8."""
    rounded: npt.NDArray[np.uint8] = np.clip(canvas + np.float32(0.5), 0, 255).astype(np.uint8)
    return rounded
