"""Data beside frames that PyAV has no name for: FFmpeg's decoders make them here of real files, and nobody is harmed by them."""

import io
import re
from fractions import Fraction
from typing import Any

import av
import numpy as np
import pytest
from av.sidedata.sidedata import Type
from PIL import Image, ImageOps

from mmrt.media.limits import MediaLimits
from mmrt.media.video import decode_frames
from mmrt.media.video_info import analyse
from mmrt.tests.media.conftest import Frames, assert_frames, encode_video, picture

LIMITS = MediaLimits()
LCEVC, VIEW_ID, REFERENCE_DISPLAYS, EXIF = 28, 29, 30, 31
ORIENTATION = 0x0112
LCEVC_SEI = b"\x06\x04\x08\xb4\x00\x50\x00\x01\x02\x03\x04\x80"  # a message of H.264, registered by V-Nova


def motion_jpeg(pictures: list[Image.Image], orientation: int) -> bytes:
    """Motion JPEG in AVI, whose pictures have EXIF data as cameras write them."""
    exif = Image.Exif()
    exif[0x010F], exif[ORIENTATION] = "camera", orientation
    buffer = io.BytesIO()
    with av.open(buffer, "w", format="avi") as output:
        stream: Any = output.add_stream("mjpeg", rate=4)
        stream.width, stream.height = pictures[0].size
        stream.pix_fmt = "yuvj420p"
        for number, image in enumerate(pictures):
            jpeg = io.BytesIO()
            image.save(jpeg, "JPEG", exif=exif, quality=95)
            packet = av.Packet(jpeg.getvalue())
            packet.stream, packet.time_base, packet.is_keyframe = stream, Fraction(1, 4), True
            packet.pts = packet.dts = number
            output.mux(packet)
    return buffer.getvalue()


def decoded(data: bytes) -> Frames:
    info = analyse(io.BytesIO(data), LIMITS)
    frames = [frame for _, frame in decode_frames(io.BytesIO(data), info, range(info.num_frames))]
    assert all(frame.shape == (info.height, info.width, 3) for frame in frames)
    return frames


def kinds_in(data: bytes) -> set[int]:
    with av.open(io.BytesIO(data)) as container:
        return {int(kind.type.value) for frame in container.decode(video=0) for kind in frame.side_data}


@pytest.mark.parametrize("orientation", range(1, 9))
def test_motion_jpeg_with_exif_is_upright(orientation):
    """As ffmpeg turns it by default."""
    pictures = [Image.fromarray(picture(number, 48, 80)) for number in range(4)]
    data = motion_jpeg(pictures, orientation)
    assert EXIF in kinds_in(data)
    exif = Image.Exif()
    exif[ORIENTATION] = orientation
    for image, frame in zip(pictures, decoded(data), strict=True):
        image.getexif().update(exif)
        expected = np.asarray(ImageOps.exif_transpose(image)).astype(int)
        assert expected.shape == frame.shape
        assert np.abs(expected - frame).mean() < 12  # of a JPEG with half the chroma


def test_what_an_encoder_adds_changes_no_picture():
    plain = encode_video(container="h264", num_frames=8)
    data = re.sub(rb"\x00\x00\x01[\x65\x41\x61\x01]", lambda found: b"\0\0\1" + LCEVC_SEI + found[0], plain)
    assert LCEVC in kinds_in(data)
    assert_frames(decoded(data), decoded(plain))


def test_every_number_has_a_kind():
    assert Type(6) is Type.DISPLAYMATRIX
    for number in (LCEVC, VIEW_ID, REFERENCE_DISPLAYS, EXIF, 99):
        assert Type(number).value == number
        assert hash(Type(number)) == hash(Type(number))
