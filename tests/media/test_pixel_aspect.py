"""Pixels that are not square: the size of a video is the one that players show."""

import io
from fractions import Fraction
from typing import Any

import av
import pytest

from mmrt.media.limits import MediaLimits
from mmrt.media.video_info import analyse
from mmrt.tests.media.conftest import picture

LIMITS = MediaLimits()


def clip(codec: str, container: str, aspect: Fraction, rotation: int = 0, height: int = 64, width: int = 96) -> bytes:
    buffer = io.BytesIO()
    with av.open(buffer, "w", format=container) as output:
        stream: Any = output.add_stream(codec, rate=24)
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
        stream.codec_context.sample_aspect_ratio = aspect
        if rotation:
            stream.set_display_rotation(rotation)
        for number in range(6):
            output.mux(stream.encode(av.VideoFrame.from_ndarray(picture(number, height, width), format="rgb24")))
        output.mux(stream.encode(None))
    return buffer.getvalue()


@pytest.mark.parametrize(
    ("codec", "container"),
    [("libx264", "mp4"), ("libx264", "matroska"), ("libx264", "mpegts"), ("libx264", "h264"), ("mpeg4", "mp4"), ("mpeg4", "avi")],
)
@pytest.mark.parametrize(
    ("aspect", "size"),
    [(Fraction(1), (64, 96)), (Fraction(4, 3), (64, 128)), (Fraction(8, 9), (72, 96)), (Fraction(64, 45), (64, 137))],
)
def test_the_shorter_side_of_a_pixel_is_stretched(codec, container, aspect, size):
    info = analyse(io.BytesIO(clip(codec, container, aspect)), LIMITS)
    assert (info.height, info.width) == size


def test_pixels_are_stretched_before_the_picture_is_turned():
    info = analyse(io.BytesIO(clip("libx264", "mp4", Fraction(2), 90)), LIMITS)
    assert (info.height, info.width) == (192, 64)


@pytest.mark.parametrize("aspect", [Fraction(1, 200), Fraction(150)])
def test_an_absurd_aspect_is_ignored(aspect):
    info = analyse(io.BytesIO(clip("libx264", "mp4", aspect)), LIMITS)
    assert (info.height, info.width) == (64, 96)
