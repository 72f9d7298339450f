"""Textures as in nature, and what else strange pictures are drawn with."""

import numpy as np
from PIL import Image, ImageDraw

from .drawing import Canvas, Mask, Rng, pixels
from .kinds import pick


def field(rng: Rng, height: int, width: int, slope: float, stretch: float = 1.0) -> Mask:
    """[height, width] of 0 to 1: noise whose amplitude falls with frequency to the power of ``slope``, as in nature."""
    fy, fx = np.fft.fftfreq(height)[:, None], np.fft.rfftfreq(width)[None]
    frequency = np.sqrt((fy * stretch) ** 2 + fx**2)
    frequency[0, 0] = 1.0
    spectrum = np.fft.rfft2(rng.standard_normal((height, width))) / frequency**slope
    spectrum[0, 0] = 0
    waves = np.fft.irfft2(spectrum, (height, width))
    low, high = np.quantile(waves, (0.01, 0.99))
    scaled: Mask = np.clip((waves - low) / max(high - low, 1e-9), 0, 1).astype(np.float32)
    return scaled


def coloured(rng: Rng, weight: Mask, num: int = 4) -> Canvas:
    """A field in a run of colours, mostly muted."""
    grey = rng.uniform(20, 235, (num, 1))
    stops = np.clip(grey + rng.normal(0, pick(rng, (12.0, 30.0, 70.0)), (num, 3)), 0, 255)
    at = np.linspace(0, 1, num)
    return np.stack([np.interp(weight, at, stops[:, channel]) for channel in range(3)], axis=-1).astype(np.float32)


def texture(rng: Rng, height: int, width: int) -> Canvas:
    canvas = coloured(rng, field(rng, height, width, rng.uniform(0.8, 2.2), pick(rng, (1.0, 1.0, 0.2, 4.0))), int(rng.integers(3, 7)))
    return canvas + (field(rng, height, width, 0.7)[..., None] - np.float32(0.5)) * np.float32(rng.uniform(0, 60))


def mixed(first: Canvas, second: Canvas, weight: Mask) -> Canvas:
    return first + (second - first) * weight[..., None]


def drawn(canvas: Canvas) -> tuple[Image.Image, ImageDraw.ImageDraw]:
    image = Image.fromarray(pixels(canvas))
    return image, ImageDraw.Draw(image)


def as_canvas(image: Image.Image) -> Canvas:
    return np.array(image.convert("RGB"), np.float32)


def muted(rng: Rng) -> tuple[int, int, int]:
    grey = int(rng.integers(20, 236))
    red, green, blue = np.clip(grey + rng.normal(0, 35, 3), 0, 255).astype(int).tolist()
    return red, green, blue
