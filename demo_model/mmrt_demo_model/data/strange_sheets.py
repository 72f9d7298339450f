"""Strange pictures that somebody wrote or printed: pages, screens, plots, codes; handwriting for the exam."""

import string

import numpy as np
from PIL import Image, ImageFont

from .drawing import Canvas, Rng
from .kinds import chance, pick
from .textures import as_canvas, drawn, field, mixed, muted, texture

_LETTERS = string.ascii_letters + string.punctuation


def _words(rng: Rng, most: int) -> str:
    return " ".join("".join(pick(rng, _LETTERS) for _ in range(int(rng.integers(1, 10)))) for _ in range(most))


def page(rng: Rng, height: int, width: int) -> Canvas:
    """Lines of text, dark on light or light on dark."""
    paper, ink = rng.uniform(215, 255), rng.uniform(0, 90)
    if chance(rng, 0.25):
        paper, ink = ink, paper
    image, draw = drawn(np.full((height, width, 3), paper, np.float32))
    top = rng.uniform(0, 0.1) * height
    body = int(rng.integers(8, 22))
    while top < height:
        size = body * (2 if chance(rng, 0.08) else 1)
        left = rng.uniform(0.02, 0.1) * width
        draw.text((left, top), _words(rng, int(rng.integers(2, 14))), (int(ink),) * 3, ImageFont.load_default(size))
        top += size * rng.uniform(1.1, 1.5) * (2 if chance(rng, 0.12) else 1)
    return as_canvas(image)


def screen(rng: Rng, height: int, width: int) -> Canvas:
    """Windows with bars, buttons and text."""
    image, draw = drawn(texture(rng, height, width) if chance(rng, 0.5) else np.full((height, width, 3), muted(rng), np.float32))
    for _ in range(int(rng.integers(1, 5))):
        x, y = (int(rng.uniform(-0.1, 0.5) * side) for side in (width, height))
        right, bottom = x + int(rng.uniform(0.4, 1) * width), y + int(rng.uniform(0.4, 1) * height)
        draw.rectangle((x, y, right, bottom), fill=pick(rng, ((255, 255, 255), (40, 40, 44), muted(rng))), outline=muted(rng))
        draw.rectangle((x, y, right, y + 14), fill=muted(rng))
        for line in range(y + 18, bottom - 12, int(rng.integers(13, 24))):
            if chance(rng, 0.2):
                draw.rounded_rectangle((x + 6, line, x + 6 + int(rng.integers(10, 60)), line + 11), 3, fill=muted(rng))
            else:
                draw.text(
                    (x + 6, line), _words(rng, int(rng.integers(1, 6))), muted(rng), ImageFont.load_default(int(rng.integers(8, 13)))
                )
    return as_canvas(image)


def plot(rng: Rng, height: int, width: int) -> Canvas:
    """Axes with curves, bars or points."""
    image, draw = drawn(np.full((height, width, 3), pick(rng, (255.0, 240.0, 30.0)), np.float32))
    x0, y0, x1, y1 = 0.12 * width, 0.06 * height, 0.95 * width, 0.88 * height
    ink = muted(rng)
    for tick in np.linspace(0, 1, int(rng.integers(4, 9))).tolist():
        draw.line((x0, y0 + tick * (y1 - y0), x1, y0 + tick * (y1 - y0)), fill=(200, 200, 200))
        draw.text((1, y0 + tick * (y1 - y0) - 5), f"{tick * 10:.1f}", ink, ImageFont.load_default(9))
        draw.text((x0 + tick * (x1 - x0) - 5, y1 + 3), f"{tick * 50:.0f}", ink, ImageFont.load_default(9))
    draw.rectangle((x0, y0, x1, y1), outline=ink)
    kind = pick(rng, ("curves", "bars", "points"))
    for _ in range(int(rng.integers(1, 5))):
        colour = muted(rng)
        values = y1 - (y1 - y0) * field(rng, 8, 60, rng.uniform(0.8, 2))[0]
        at = np.linspace(x0, x1, 60)
        if kind == "curves":
            draw.line([*zip(at.tolist(), values.tolist(), strict=True)], fill=colour, width=int(rng.integers(1, 4)))
        for x, y in zip(at[::5].tolist(), values[::5].tolist(), strict=True):
            if kind == "bars":
                draw.rectangle((x, min(y, y1), x + (x1 - x0) / 16, y1), fill=colour)
            elif kind == "points":
                draw.ellipse((x - 2, y - 2, x + 2, y + 2), fill=colour)
    return as_canvas(image)


def code(rng: Rng, height: int, width: int) -> Canvas:
    """Modules of a square code, bars, or squares of a board."""
    kind = pick(rng, ("square", "bars", "board"))
    num = int(rng.integers(21, 38)) if kind != "board" else int(rng.integers(4, 10))
    bits = rng.random((num, num)) < 0.5
    if kind == "bars":
        bits = np.repeat(rng.random((1, 2 * num)) < 0.5, 2 * num, axis=0)
    elif kind == "board":
        bits = np.indices((num, num)).sum(0) % 2 == 0
    else:
        for row, column in ((0, 0), (0, num - 7), (num - 7, 0)):
            eye = np.pad(np.pad(np.ones((3, 3), np.bool_), 1), 1, constant_values=True)
            bits[row : row + 7, column : column + 7] = eye
    margin = 0 if chance(rng, 0.3) else 2
    small = Image.fromarray(np.pad(~bits, margin, constant_values=True).astype(np.uint8) * 255)
    weight = np.asarray(small.resize((width, height), Image.Resampling.NEAREST), np.float32) / np.float32(255)
    light, dark = (np.full((height, width, 3), level, np.float32) for level in (rng.uniform(190, 255), rng.uniform(0, 70)))
    return mixed(dark, light, weight)


def handwriting(rng: Rng, height: int, width: int) -> Canvas:
    image, draw = drawn(texture(rng, height, width) * np.float32(0.15) + np.float32(210))
    line = rng.uniform(0.06, 0.12) * height
    ink = pick(rng, ((20, 20, 30), (20, 30, 140), (90, 40, 20)))
    for top in np.arange(line, height, line * 1.6).tolist():
        at = np.linspace(0.05 * width, rng.uniform(0.5, 0.95) * width, 240)
        loops = np.cumsum(rng.normal(0, 0.6, 240))
        x, y = at + line * 0.35 * np.sin(loops * 1.3 + at / line * 5), top + line * 0.4 * np.sin(loops + at / line * 9)
        draw.line([*zip(x.tolist(), y.tolist(), strict=True)], fill=ink, width=2)
    return as_canvas(image)
