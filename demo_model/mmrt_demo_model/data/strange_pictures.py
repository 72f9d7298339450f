"""Pictures of what the demo model's world does not have: textures, scenes and things with light and shade, and strange_sheets.py.

``KINDS`` are for training, ``HELD_OUT`` for the exam alone. Each draws a canvas float32 [height, width, 3] of 0 to 255.
"""

import math
from collections.abc import Callable

import numpy as np
from PIL import Image, ImageDraw, ImageFilter

from .drawing import Canvas, Rng, pixels
from .kinds import Pixels, chance, pick
from .strange_sheets import code, handwriting, page, plot, screen
from .textures import as_canvas, coloured, drawn, field, mixed, muted, texture

Draw = Callable[[Rng, int, int], Canvas]


def _leaves(rng: Rng, height: int, width: int) -> Canvas:
    """Things before things, of all sizes, until nothing is seen behind them."""
    canvas = texture(rng, height, width)
    for _ in range(int(rng.integers(40, 120))):
        radius = min(height, width) * min(0.5, 0.04 * rng.random() ** -0.7)
        x, y = rng.uniform(0, width), rng.uniform(0, height)
        image = Image.new("L", (width, height))
        draw = ImageDraw.Draw(image)
        turns = np.sort(rng.uniform(0, 2 * math.pi, int(rng.integers(3, 14))))
        draw.polygon([(x + radius * rng.uniform(0.6, 1.2) * math.cos(t), y + radius * math.sin(t)) for t in turns], fill=255)
        box = image.getbbox()
        if box is None or box[2] - box[0] < 3 or box[3] - box[1] < 3:
            continue
        mask = np.asarray(image.crop(box), np.float32) / np.float32(255)
        part = canvas[box[1] : box[3], box[0] : box[2]]
        part += (coloured(rng, field(rng, box[3] - box[1], box[2] - box[0], 1.2), 2) - part) * mask[..., None]
    return canvas


def _landscape(rng: Rng, height: int, width: int) -> Canvas:
    """A sky, and ridges before one another."""
    sky = np.linspace(0, 1, height, dtype=np.float32)[:, None] * np.ones((1, width), np.float32)
    canvas = coloured(rng, np.clip(sky + (field(rng, height, width, 1.8, 3.0) - 0.5) * np.float32(rng.uniform(0, 0.8)), 0, 1), 3)
    rows = np.arange(height, dtype=np.float32)[:, None]
    level = rng.uniform(0.25, 0.6)
    while level < 1:
        line = height * (level + rng.uniform(0.02, 0.25) * (field(rng, 8, width, rng.uniform(1.0, 2.0))[0] - np.float32(0.5)))
        canvas = mixed(canvas, texture(rng, height, width), np.clip(rows - line[None], 0, 1))
        level += rng.uniform(0.1, 0.4)
    return canvas


def _lit(rng: Rng, height: int, width: int) -> Canvas:
    """One to five round things with light and shade on a plain ground, or on one that is out of focus."""
    canvas = coloured(rng, field(rng, height, width, rng.uniform(1.5, 3)), int(rng.integers(2, 5)))
    if chance(rng, 0.3):
        canvas = np.array(muted(rng), np.float32) + canvas * np.float32(0.1)
    ys, xs = np.mgrid[0:height, 0:width].astype(np.float32)
    light = rng.normal(size=3)
    light /= np.linalg.norm(light)
    for _ in range(int(rng.integers(1, 6))):
        across, down = (rng.uniform(0.1, 0.45) * min(height, width) for _ in range(2))
        x, y = (xs - rng.uniform(0, width)) / np.float32(across), (ys - rng.uniform(0, height)) / np.float32(down)
        bumps = (field(rng, height, width, 1.5) - np.float32(0.5)) * np.float32(rng.uniform(0, 0.7))
        lobes = 1 + pick(rng, (0.0, 0.0, 0.25)) * np.cos(int(rng.integers(2, 8)) * np.arctan2(y, x) + rng.uniform(0, 6.28))
        depth = 1 - (x**2 + y**2) / lobes.astype(np.float32) ** 2 + bumps
        z = np.sqrt(np.clip(depth, 0, None))
        shade = np.clip(0.35 + 0.65 * np.abs(x * light[0] + y * light[1] + z * abs(light[2])), 0, 1.2).astype(np.float32)
        skin = texture(rng, height, width) if chance(rng, 0.5) else np.full((height, width, 3), rng.uniform(0, 255, 3), np.float32)
        canvas = mixed(canvas, skin * shade[..., None], np.clip(depth * 12, 0, 1).astype(np.float32))
    return canvas


def _strokes(rng: Rng, height: int, width: int) -> Canvas:
    """Hair, grass or scratches: many short lines that follow one another."""
    image, draw = drawn(texture(rng, height, width))
    way = field(rng, height, width, 2.0) * np.float32(2 * math.pi * rng.uniform(0.3, 1.5))
    length = rng.uniform(0.03, 0.2) * min(height, width)
    colours = [muted(rng) for _ in range(6)]
    for _ in range(int(rng.integers(200, 700))):
        x, y = int(rng.integers(width)), int(rng.integers(height))
        turn = float(way[y, x])
        draw.line(
            (x, y, x + length * math.cos(turn), y + length * math.sin(turn)), fill=pick(rng, colours), width=int(rng.integers(1, 4))
        )
    return as_canvas(image)


def _room(rng: Rng, height: int, width: int) -> Canvas:
    """Walls and boxes with panes, each with a texture and shade of its own."""
    canvas = _landscape(rng, height, width) if chance(rng, 0.5) else texture(rng, height, width)
    for _ in range(int(rng.integers(3, 10))):
        x, w = int(rng.integers(-width // 4, width)), int(rng.uniform(0.1, 0.5) * width)
        y, h = int(rng.uniform(0, 0.7) * height), int(rng.uniform(0.2, 0.9) * height)
        left, right, bottom = max(0, x), min(width, x + w), min(height, y + h)
        if right - left < 8 or bottom - y < 8:
            continue
        wall = texture(rng, bottom - y, right - left)
        wall *= np.linspace(rng.uniform(0.5, 1), rng.uniform(0.5, 1), right - left, dtype=np.float32)[None, :, None]
        if chance(rng, 0.6):
            step = int(rng.integers(6, 24))
            panes = (np.arange(bottom - y) % step < step * 0.6)[:, None] & (np.arange(right - left) % step < step * 0.5)[None]
            wall[panes] = wall[panes] * np.float32(0.4) + np.float32(rng.uniform(0, 120))
        canvas[y:bottom, left:right] = wall
    return canvas


def _collage(rng: Rng, height: int, width: int) -> Canvas:
    x, y = int(rng.uniform(0.3, 0.7) * width), int(rng.uniform(0.3, 0.7) * height)
    top, bottom = (
        np.concatenate([pick(rng, _SINGLE)(rng, rows, columns) for columns in (x, width - x)], axis=1) for rows in (y, height - y)
    )
    return np.concatenate([top, bottom])


def _marble(rng: Rng, height: int, width: int) -> Canvas:
    along = np.add.outer(np.linspace(0, rng.uniform(2, 20), height), np.linspace(0, rng.uniform(2, 20), width))
    veins = 0.5 + 0.5 * np.sin(along + rng.uniform(4, 14) * field(rng, height, width, 1.6))
    return coloured(rng, veins.astype(np.float32), 5)


def _cells(rng: Rng, height: int, width: int) -> Canvas:
    """What lies nearest to each of many points, with a border between."""
    num = int(rng.integers(25, 120))
    points = rng.uniform(0, 1, (num, 2)) * (height, width)
    ys, xs = np.mgrid[0:height, 0:width]
    distance = np.sqrt((ys[..., None] - points[:, 0]) ** 2 + (xs[..., None] - points[:, 1]) ** 2)
    nearest = np.partition(distance, 1, axis=-1)
    colours = np.array([muted(rng) for _ in range(num)], np.float32)
    border = np.clip((nearest[..., 1] - nearest[..., 0]) / rng.uniform(2, 8), 0, 1).astype(np.float32)
    canvas: Canvas = colours[distance.argmin(-1)] * border[..., None]
    return canvas


def _relief(rng: Rng, height: int, width: int) -> Canvas:
    """Mountains from above, with the light from one side."""
    ground = field(rng, height, width, rng.uniform(1.6, 2.2))
    dy, dx = (np.gradient(ground, axis=axis) for axis in (0, 1))
    turn = rng.uniform(0, 2 * math.pi)
    shade = np.clip(0.6 + rng.uniform(8, 20) * (dx * math.cos(turn) + dy * math.sin(turn)), 0.1, 1.3).astype(np.float32)
    canvas: Canvas = coloured(rng, ground, 5) * shade[..., None]
    return canvas


def _julia(rng: Rng, height: int, width: int) -> Canvas:
    ys, xs = np.mgrid[-1.2 : 1.2 : height * 1j, -1.5 : 1.5 : width * 1j]
    z = xs + 1j * ys
    turn = rng.uniform(0, 2 * math.pi)
    c = 0.7885 * complex(math.cos(turn), math.sin(turn))
    steps = np.zeros((height, width), np.float32)
    for _ in range(40):
        inside = np.abs(z) < 4
        z = np.where(inside, z * z + c, z)
        steps += inside
    return coloured(rng, np.sqrt(steps / 40), 6)


def _bricks(rng: Rng, height: int, width: int) -> Canvas:
    rows = int(rng.integers(5, 16))
    tall, wide = height / rows, height / rows * rng.uniform(1.5, 3)
    ys, xs = np.mgrid[0:height, 0:width].astype(np.float32)
    row = ys // tall
    x = xs + (row % 2) * wide / 2
    joint = (ys % tall < 0.12 * tall) | (x % wide < 0.12 * tall)
    tint = rng.uniform(0.7, 1.2, (rows + 2, 64)).astype(np.float32)[row.astype(int), np.minimum((x // wide).astype(int), 63)]
    wall = np.array(muted(rng), np.float32) * tint[..., None] + (texture(rng, height, width) - np.float32(127)) * np.float32(0.4)
    return mixed(wall, texture(rng, height, width), joint.astype(np.float32))


_SINGLE: tuple[Draw, ...] = (texture, _leaves, _landscape, _lit, page, screen, plot, code, _strokes, _room)
KINDS: tuple[Draw, ...] = (*_SINGLE, _leaves, _landscape, _lit, _lit, _room, _collage)
HELD_OUT: tuple[Draw, ...] = (_marble, _cells, _relief, _julia, _bricks, handwriting)


def strange_pixels(rng: Rng, width: int, height: int, draw: Draw) -> Pixels:
    """A picture of a kind, as a camera may have taken it. uint8 [height, width, 3]."""
    canvas = np.clip(draw(rng, height, width), 0, 255)
    if chance(rng, 0.15):
        canvas = np.repeat(canvas.mean(-1, keepdims=True), 3, axis=-1)
    if chance(rng, 0.4):
        canvas = np.float32(255) * (canvas / np.float32(255)) ** np.float32(rng.uniform(0.6, 1.6))
    if chance(rng, 0.35):
        blur = ImageFilter.GaussianBlur(rng.uniform(0.5, 0.015 * min(width, height)))
        canvas = as_canvas(Image.fromarray(pixels(canvas)).filter(blur))
    if chance(rng, 0.3):
        canvas = canvas + rng.normal(0, rng.uniform(2, 10), (height, width, 1)).astype(np.float32)
    return pixels(canvas)
