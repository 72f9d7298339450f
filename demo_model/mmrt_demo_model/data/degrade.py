"""What makes pictures and sounds hard but decidable: noise, low contrast, heavy JPEG, blur, lines; hum, hiss, a quiet recording."""

import io
import math

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageDraw, ImageFilter

from .drawing import Canvas, Rgb, Rng, colour_distance, pixels
from .kinds import SOUND_RATE, Pixels, chance, pick

_WAYS = ("noise", "contrast", "jpeg", "blur", "lines")


def degrade_picture(rng: Rng, canvas: Canvas, detail: float, colours: list[Rgb], gentle: bool = False) -> Pixels:
    """One or two of the ways. uint8 [H, W, 3].

    detail: pixels of the smallest thing's shorter side; colours: of the things, before; gentle: one way, weakly.
    """
    ways = [pick(rng, _WAYS)]
    if not gentle and chance(rng, 0.35):
        ways += [way for way in [pick(rng, _WAYS)] if way not in ways]
    strength = 0.5 if gentle else 1.0 if len(ways) == 1 else 0.75
    if "lines" in ways:
        canvas = _lines(rng, canvas, detail, strength, colours)
    if "contrast" in ways:
        canvas = _low_contrast(rng, canvas, strength)
    if "blur" in ways:
        radius = rng.uniform(0.03, 0.07) * detail * strength
        canvas = np.asarray(Image.fromarray(pixels(canvas)).filter(ImageFilter.GaussianBlur(radius)), np.float32)
    if "noise" in ways:
        canvas = canvas + noise(rng, canvas.shape[:2], rng.uniform(16, 36) * strength * min(1.0, detail / 30))
    if "jpeg" in ways:
        buffer = io.BytesIO()
        quality = int(rng.integers(12, 25)) + int(30 * (1 - strength)) + (20 if detail < 30 else 0)
        Image.fromarray(pixels(canvas)).save(buffer, "JPEG", quality=quality)
        return np.asarray(Image.open(buffer))
    return pixels(canvas)


def noise(rng: Rng, shape: tuple[int, ...], sigma: float) -> npt.NDArray[np.float32]:
    """float32 [H, W, 1] or, in colour, [H, W, 3]: about normal."""
    full = (*shape, 3 if chance(rng, 0.5) else 1)
    total = rng.integers(0, 256, full, np.uint8).astype(np.float32)
    total += rng.integers(0, 256, full, np.uint8)
    scaled: npt.NDArray[np.float32] = (total - np.float32(255)) * np.float32(sigma / 104.5)
    return scaled


def _low_contrast(rng: Rng, canvas: Canvas, strength: float) -> Canvas:
    factor = 1 - strength * rng.uniform(0.35, 0.58)
    level = rng.uniform(105, 138)
    return level + (canvas - np.float32(127)) * np.float32(factor)


def _lines(rng: Rng, canvas: Canvas, detail: float, strength: float, colours: list[Rgb]) -> Canvas:
    """Thin lines in a grey that is unlike the things."""
    image = Image.fromarray(pixels(canvas))
    draw = ImageDraw.Draw(image)
    width = max(1, round(min(0.08 * detail, 0.025 * min(image.size)) * strength))
    greys = [int(grey) for grey in rng.integers(0, 256, 8)]
    grey = max(greys, key=lambda grey: min(200.0, *(colour_distance((grey, grey, grey), colour) for colour in colours)))
    for _ in range(int(rng.integers(3, 8))):
        ends = [(int(rng.integers(image.width)), int(rng.integers(image.height))) for _ in range(2)]
        draw.line(ends, fill=(grey, grey, grey), width=width)
    return np.asarray(image, np.float32)


def degrade_sound(rng: Rng, pcm: npt.NDArray[np.float32], is_noise: bool) -> npt.NDArray[np.float32]:
    """Hiss and hum behind what is heard, or a quiet recording. is_noise: what is heard is noise itself, which stays alone."""
    time_s = np.arange(len(pcm), dtype=np.float32) / SOUND_RATE
    loudness = float(np.sqrt(np.mean(pcm[np.abs(pcm) > 0.02] ** 2))) if np.any(np.abs(pcm) > 0.02) else 0.1
    result = pcm
    if not is_noise:
        if chance(rng, 0.7):
            hiss = rng.standard_normal(len(pcm), np.float32)
            if chance(rng, 0.5):
                hiss = np.convolve(hiss, np.full(6, 0.41, np.float32), "same").astype(np.float32)
            result = result + hiss * np.float32(loudness * 10 ** (-rng.uniform(5, 14) / 20))
        else:
            base = pick(rng, (50.0, 60.0))
            level = np.float32(loudness * 10 ** (-rng.uniform(9, 18) / 20))
            for overtone, part in ((1, 1.0), (2, 0.5), (3, 0.25)):
                turns = np.float32(2 * math.pi * base * overtone)
                swing = level * np.float32(part) * np.sin(turns * time_s + np.float32(rng.uniform(0, 6.28)))
                result = result + swing.astype(np.float32)
    if is_noise or chance(rng, 0.4):
        result = result * np.float32(rng.uniform(0.1, 0.3))
    return np.clip(result, -1, 1).astype(np.float32)
