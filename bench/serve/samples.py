"""Images, videos and sounds made from a seed: the same seed and size give the same bytes, another seed gives fresh content.

Pure. Called by ``workload`` and ``versus_transformers``.
"""

import io
import wave
from fractions import Fraction
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from PIL import Image

REPEATABLE = "mbtree=0"  # with x264's macroblock trees the same frames give different files, now and then (measured)

ImageFormat = Literal["png", "jpeg"]


def make_image(seed: int, width: int, height: int, image_format: ImageFormat = "png") -> bytes:
    """A picture of gradients, rectangles and a little noise: it neither compresses to nothing nor is it white noise."""
    buffer = io.BytesIO()
    Image.fromarray(_picture(np.random.default_rng(seed), width, height)).save(buffer, image_format, quality=90)
    return buffer.getvalue()


def make_video(seed: int, width: int, height: int, num_frames: int, fps: int) -> bytes:
    """H.264 in MP4: a picture that scrolls. Raises: ValueError for odd or non-positive sizes (the pixel format is 4:2:0)."""
    if width % 2 or height % 2 or width < 2 or height < 2:
        raise ValueError(f"a video of {width}x{height}: both must be even and positive")
    if num_frames < 1 or fps < 1:
        raise ValueError(f"a video of {num_frames} frames at {fps} fps: both must be at least 1")
    import av  # slow, and only videos need it

    picture = _picture(np.random.default_rng(seed), width, height)
    buffer = io.BytesIO()
    with av.open(buffer, "w", format="mp4") as container:
        stream = container.add_stream(
            "libx264", rate=Fraction(fps), options={"preset": "veryfast", "threads": "1", "x264-params": REPEATABLE}
        )
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
        for index in range(num_frames):
            frame = av.VideoFrame.from_ndarray(np.ascontiguousarray(np.roll(picture, 4 * index, axis=1)), "rgb24")
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return buffer.getvalue()


def make_audio(seed: int, duration_s: float, sample_rate: int = 16000) -> bytes:
    """16-bit mono WAV: three gliding tones and noise. Raises: ValueError for a length that is not positive."""
    if duration_s <= 0:
        raise ValueError(f"a sound of {duration_s} s: must be above 0")
    rng = np.random.default_rng(seed)
    time_s = np.arange(round(duration_s * sample_rate)) / sample_rate
    start_hz, glide = rng.uniform(120, 900, (3, 1)), rng.uniform(-0.3, 0.3, (3, 1))
    tones = np.sin(2 * np.pi * start_hz * time_s * (1 + glide * time_s / duration_s)).mean(0)
    signal = 0.6 * tones + 0.05 * rng.standard_normal(len(time_s))
    buffer = io.BytesIO()
    with wave.open(buffer, "wb") as sound:
        sound.setnchannels(1)
        sound.setsampwidth(2)
        sound.setframerate(sample_rate)
        sound.writeframes((np.clip(signal, -1, 1) * 32767).astype("<i2").tobytes())
    return buffer.getvalue()


def _picture(rng: np.random.Generator, width: int, height: int) -> NDArray[np.uint8]:
    """uint8 [height, width, 3]. Raises: ValueError for sizes that are not positive."""
    if width < 1 or height < 1:
        raise ValueError(f"a picture of {width}x{height}: both must be at least 1")
    x, y = np.linspace(0, 1, width), np.linspace(0, 1, height)[:, None]
    slope = rng.uniform(-150, 150, (2, 3))
    picture = rng.uniform(60, 200, 3) + x[None, :, None] * slope[0] + y[..., None] * slope[1]
    for _ in range(12):
        left, top = rng.integers(0, width), rng.integers(0, height)
        right, bottom = left + 1 + rng.integers(0, width), top + 1 + rng.integers(0, height)
        picture[top:bottom, left:right] = rng.uniform(0, 255, 3)
    picture += rng.normal(0, 3, (height, width, 1))
    pixels: NDArray[np.uint8] = np.clip(picture, 0, 255).astype(np.uint8)
    return pixels
