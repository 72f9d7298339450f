"""Makes the three files beside it: a picture, a video and a sound that are easy to describe. No randomness, no downloads.

usage: python -m mmrt.examples.media_files DIRECTORY
"""

import argparse
import math
import wave
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import numpy.typing as npt
from PIL import Image, ImageDraw

_WHITE, _RED, _GREEN, _BLUE, _YELLOW = (255, 255, 255), (220, 40, 40), (40, 160, 70), (50, 90, 220), (245, 200, 40)

VIDEO_RATE = 24
VIDEO_SIZE = (160, 120)
VIDEO_FRAMES = 72
SOUND_RATE = 16000
SOUND_S = 2.0
BEEPS_S = ((0.2, 440.0), (0.8, 660.0), (1.4, 880.0))  # start, frequency in Hz
BEEP_S = 0.25


def shapes() -> Image.Image:
    """A red circle, a green square, a blue triangle and a yellow star on white, 320 x 240."""
    image = Image.new("RGB", (320, 240), _WHITE)
    draw = ImageDraw.Draw(image)
    draw.ellipse((30, 20, 130, 120), fill=_RED)
    draw.rectangle((195, 25, 285, 115), fill=_GREEN)
    draw.polygon(((80, 130), (30, 220), (130, 220)), fill=_BLUE)
    angles = [math.pi * (k / 5 - 0.5) for k in range(10)]
    radii = [50 if k % 2 == 0 else 20 for k in range(10)]
    star = [(240 + r * math.cos(a), 178 + r * math.sin(a)) for a, r in zip(angles, radii, strict=True)]
    draw.polygon(star, fill=_YELLOW)
    return image


def moving_frames() -> Iterator[npt.NDArray[np.uint8]]:
    """An orange square that crosses a dark blue picture from left to right in three seconds. uint8 [120, 160, 3] each."""
    width, height = VIDEO_SIZE
    side = 30
    for number in range(VIDEO_FRAMES):
        frame = np.empty((height, width, 3), np.uint8)
        frame[:] = (20, 30, 70)
        left = round(number * (width - side) / (VIDEO_FRAMES - 1))
        top = (height - side) // 2
        frame[top : top + side, left : left + side] = (250, 140, 30)
        yield frame


def beeps() -> npt.NDArray[np.int16]:
    """Three beeps, each higher than the one before, in two seconds. int16 [samples]."""
    samples = np.zeros(int(SOUND_S * SOUND_RATE))
    time_s = np.arange(int(BEEP_S * SOUND_RATE)) / SOUND_RATE
    envelope = np.minimum(1.0, np.minimum(time_s, time_s[::-1]) / 0.01)
    for start_s, frequency_hz in BEEPS_S:
        start = int(start_s * SOUND_RATE)
        samples[start : start + len(time_s)] = 0.4 * envelope * np.sin(2 * np.pi * frequency_hz * time_s)
    return np.round(samples * 32767).astype(np.int16)


def write_video(path: Path) -> None:
    """H.264 in MP4, two groups of pictures a second."""
    with av.open(path, "w", options={"movflags": "+faststart"}) as output:
        stream = output.add_stream("libx264", rate=VIDEO_RATE, options={"crf": "20", "preset": "medium"})
        stream.width, stream.height = VIDEO_SIZE
        stream.pix_fmt = "yuv420p"
        stream.codec_context.gop_size = VIDEO_RATE // 2
        stream.codec_context.thread_count = 1
        for number, pixels in enumerate(moving_frames()):
            frame = av.VideoFrame.from_ndarray(pixels, format="rgb24")
            frame.pts, frame.time_base = number, Fraction(1, VIDEO_RATE)
            output.mux(stream.encode(frame))
        output.mux(stream.encode(None))


def write_sound(path: Path) -> None:
    """16-bit mono WAV."""
    with wave.open(str(path), "wb") as output:
        output.setparams((1, 2, SOUND_RATE, 0, "NONE", "not compressed"))
        output.writeframes(beeps().astype("<i2").tobytes())


def write_examples(directory: Path) -> None:
    """Write shapes.png, moving.mp4 and beeps.wav into ``directory``."""
    directory.mkdir(parents=True, exist_ok=True)
    shapes().save(directory / "shapes.png", optimize=True)
    write_video(directory / "moving.mp4")
    write_sound(directory / "beeps.wav")


def main() -> None:
    parser = argparse.ArgumentParser(description="Make the example picture, video and sound.")
    parser.add_argument("directory", type=Path)
    write_examples(parser.parse_args().directory)


if __name__ == "__main__":
    main()
