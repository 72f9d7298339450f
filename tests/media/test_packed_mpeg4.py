"""MPEG-4 in AVI whose time stamps say nothing of the order of its frames: they come in the order in which a decoder delivers them."""

import io
from itertools import pairwise
from pathlib import Path

import av
import numpy as np
import pytest
from av.bitstream import BitStreamFilterContext

from mmrt.media.limits import MediaLimits
from mmrt.media.video_info import analyse
from mmrt.tests.media.conftest import Frames, assert_frames, decode_all, decode_on, encode_video
from mmrt.tests.media.cut_video import cut, decode_plainly
from mmrt.tests.media.packed_mpeg4 import packed, with_pauses

LIMITS = MediaLimits()
SAMPLES = Path("/usr/share/doc/opencv-doc/examples/data")  # of Debian's package opencv-doc


def assert_delivery_order(data: bytes, expected: Frames) -> None:
    """All frames, and some, on any number of engines."""
    num_frames = analyse(io.BytesIO(data), LIMITS).num_frames
    assert num_frames == len(expected)
    for num_engines in (1, 3):
        for wanted in (range(num_frames), range(2, num_frames, 7), [num_frames - 1]):
            assert_frames(decode_on(num_engines, data, wanted), [expected[index] for index in wanted])


def time_stamps(data: bytes) -> list[int]:
    with av.open(io.BytesIO(data)) as container:
        return [frame.pts for frame in container.decode(video=0)]


def unpacked_frames(data: bytes) -> Frames:
    """What PyAV decodes of the packets that FFmpeg's filter gives."""
    frames = []
    with av.open(io.BytesIO(data)) as container:
        stream = container.streams.video[0]
        unpack = BitStreamFilterContext("mpeg4_unpack_bframes", stream)
        for packet in container.demux(stream):
            for picture in unpack.filter(packet) if packet.size else [None]:
                frames += [frame.to_ndarray(format="rgb24") for frame in stream.codec_context.decode(picture)]
    return frames


@pytest.mark.parametrize("container", ["avi", "matroska"])
@pytest.mark.parametrize("gop", [8, 300])
@pytest.mark.parametrize("num_b_frames", [1, 2, 3])
def test_a_packed_bitstream(num_b_frames, gop, container):
    data = packed(36, num_b_frames, gop, container)
    assert any(a >= b for a, b in pairwise(time_stamps(data)))
    frames = decode_all(data)
    assert len(frames) == 36
    assert_delivery_order(data, frames)


@pytest.mark.parametrize("user_data", [b"DivX503Build1393p", b"DivX503b1393", b"XviD0063"], ids=repr)
def test_user_data_say_whether_packets_are_packed(user_data):
    """Where they do not, FFmpeg's decoder leaves out the second picture of a packet, and what stands in for it is no picture."""
    data = packed(36, user_data=user_data)
    frames = decode_all(data)
    assert (len(frames) == 36) == user_data.endswith(b"p")
    assert_delivery_order(data, frames)


@pytest.mark.parametrize("first", [1, 2, 4, 9, 10])
def test_a_packed_bitstream_that_is_cut(first):
    """Its user data come with the first I-frame behind the cut."""
    data = cut(packed(36, gop=8), "avi", first)
    assert_delivery_order(data, decode_plainly(data))


def test_a_packed_bitstream_that_begins_with_b_frames_that_lack_theirs():
    """FFmpeg's decoder leaves them out, and takes the packet that stands in for them for a picture unless it is unpacked before."""
    data = cut(packed(36, gop=8), "avi", 7)
    frames = unpacked_frames(data)
    assert 0 < len(frames) < 29
    assert_delivery_order(data, frames)


@pytest.mark.parametrize("rate", [1, 2, 24, 30, 60])
@pytest.mark.parametrize("num_b_frames", [0, 2])
def test_pictures_that_are_not_coded_are_no_frames(num_b_frames, rate):
    data = with_pauses(rate, num_b_frames)
    frames = decode_all(data)
    assert len(frames) == 24
    assert_delivery_order(data, frames)


def test_mpeg4_of_plain_packets_keeps_its_time_stamps():
    """It is decoded by all engines together."""
    info = analyse(io.BytesIO(encode_video("mpeg4", "avi", options={"bf": "2"})), LIMITS)
    assert info.index is not None and info.num_frames == 48


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Megamind.avi", "Megamind_bugy.avi"])
def test_files_that_divx_made(name):
    if not (SAMPLES / name).exists():
        pytest.skip(f"{SAMPLES / name} is not there: apt-get install opencv-doc")
    data = (SAMPLES / name).read_bytes()
    stamps = time_stamps(data)
    assert sum(a >= b for a, b in pairwise(stamps)) == 88
    frames = decode_all(data)
    assert len(frames) == 270
    assert all(np.array_equal(a, b) for a, b in zip(frames, unpacked_frames(data), strict=True))
    assert_delivery_order(data, frames)
