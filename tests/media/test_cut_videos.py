"""Whatever the codec, the container, the groups of pictures, the rate and the packet that a video begins with: its frames are those
that a plain decoder delivers, the first of them is frame 0, and sampled ones equal those of decoding in sequence.
"""

import io
import shutil
import subprocess
from contextlib import suppress
from functools import lru_cache
from itertools import product
from pathlib import Path
from typing import NamedTuple
from unittest.mock import patch

import av.error
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mmrt.media import video_info
from mmrt.media.errors import MediaError
from mmrt.media.limits import MediaLimits
from mmrt.media.video_info import analyse
from mmrt.tests.media.conftest import assert_frames, decode_on, encode_video
from mmrt.tests.media.cut_video import cut, decode_plainly
from mmrt.tests.media.h264_fields import field_coded
from mmrt.tests.settings import examples

LIMITS = MediaLimits()
NUM_FRAMES = 30

CONTAINERS = {
    "libx264": ["mp4", "matroska", "avi", "mpegts", "flv", "h264"],
    "libx265": ["mp4", "matroska", "mpegts", "hevc"],
    "mpeg4": ["mp4", "matroska", "avi", "mpegts", "m4v"],
    "mpeg2video": ["mp4", "matroska", "avi", "mpegts", "mpeg", "mpeg2video"],
    "libvpx": ["webm", "ivf"],
    "libvpx-vp9": ["webm", "mp4", "ivf"],
    "libsvtav1": ["webm", "mp4"],
}
KINDS = [(codec, container) for codec, containers in CONTAINERS.items() for container in containers]
EVEN_ONLY = {("mpeg2video", container) for container in CONTAINERS["mpeg2video"]} | {("mpeg4", c) for c in CONTAINERS["mpeg4"]}


class Groups(NamedTuple):
    """Of pictures. ``refresh``: none of them is a key frame but the first; parts of each are."""

    length: int
    num_b_frames: int = 0
    is_open: bool = False
    is_refresh: bool = False


KINDS_OF_GROUPS = [(0, False), (2, False), (3, True)]  # B-frames, whether they may lie behind the next key frame
GROUPS = [Groups(length, *kind) for length in (8, 12, 300) for kind in KINDS_OF_GROUPS] + [Groups(12, is_refresh=True)]


def options_of(codec: str, groups: Groups) -> dict[str, str]:
    length, num_b_frames, is_open, is_refresh = groups
    if codec in ("libx264", "libx265"):
        named = f"bframes={num_b_frames}:b-adapt=0:keyint={length}:min-keyint={length}:scenecut=0"
        named += f":open-gop={is_open:d}:intra-refresh={is_refresh:d}"
        return (
            {"preset": "ultrafast", "x264-params": named}
            if codec == "libx264"
            else {"preset": "ultrafast", "x265-params": f"log-level=none:{named}"}
        )
    if codec in ("mpeg4", "mpeg2video"):
        return {"bf": str(num_b_frames)} | ({} if is_open else {"flags": "+cgop", "sc_threshold": "1000000000"})
    if codec == "libsvtav1":
        return {"preset": "12"}
    hidden = {"lag-in-frames": "12", "auto-alt-ref": "1"}  # what VP8 and VP9 have instead of B-frames
    return {"deadline": "good", "cpu-used": "8"} | (hidden if num_b_frames else {})


@lru_cache(maxsize=64)
def source(codec: str, container: str, groups: Groups, is_even: bool) -> bytes:
    times = None if is_even else [25 * number + 3 * (number % 5) for number in range(NUM_FRAMES)]
    options = options_of(codec, groups)
    return encode_video(codec, container, num_frames=NUM_FRAMES, height=48, width=64, gop=groups.length, options=options, times=times)


def assert_as_decoded(data: bytes, num_engines: int = 2) -> None:
    expected = decode_plainly(data)
    if not expected:
        with pytest.raises(MediaError):
            analyse(io.BytesIO(data), LIMITS)
        return
    assert analyse(io.BytesIO(data), LIMITS).num_frames == len(expected)
    for wanted in (range(len(expected)), range(1, len(expected), 5), [0]):
        assert_frames(decode_on(num_engines, data, wanted), [expected[index] for index in wanted])


@pytest.mark.many
@pytest.mark.parametrize(("codec", "container"), KINDS)
@settings(max_examples=examples(8))
@given(st.data())
def test_what_decodes_is_counted_and_sampled(codec, container, data):
    groups = data.draw(st.sampled_from(GROUPS))
    is_even = (codec, container) in EVEN_ONLY or container == "avi" or data.draw(st.booleans())
    first = data.draw(st.integers(0, 20))
    assert_as_decoded(cut_from(source(codec, container, groups, is_even), container, first), data.draw(st.integers(1, 3)))


def cut_from(video: bytes, container: str, first: int) -> bytes:
    """From this packet on, or the first behind it that the container may begin with."""
    for number in range(first, NUM_FRAMES):
        with suppress(av.error.FFmpegError):
            return cut(video, container, number)
    raise AssertionError("the container takes none of the packets")


def num_frames_of_ffmpeg(path: Path) -> int:
    """0 where it finds no video."""
    command = ["ffmpeg", "-v", "quiet", "-i", str(path), "-map", "0:v:0", "-fps_mode", "passthrough", "-f", "framecrc", "-"]
    lines = subprocess.run(command, stdout=subprocess.PIPE, check=False, text=True).stdout.splitlines()
    return sum(not line.startswith("#") for line in lines)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("ffmpeg") is None, reason="the program ffmpeg is not there")
@pytest.mark.parametrize(("codec", "container"), KINDS)
def test_ffmpeg_counts_the_same(codec, container, tmp_path):
    """Versions of FFmpeg differ in which H.264 and HEVC pictures that lack others they deliver: the program may not be PyAV's."""
    path = tmp_path / "video"
    for groups, first in product(GROUPS, (0, 1, 9, 10)):
        video = cut_from(source(codec, container, groups, True), container, first)
        assert_as_decoded(video)
        if first == 0 or codec not in ("libx264", "libx265"):
            path.write_bytes(video)
            assert num_frames_of_ffmpeg(path) == len(decode_plainly(video)), (groups, first)


@pytest.mark.many
@pytest.mark.parametrize("first", range(0, 24, 3))
@pytest.mark.parametrize("codec", ["libx264", "libx265", "mpeg4"])
def test_a_cut_file_that_calls_every_frame_a_key_frame(codec, first):
    data = cut(source(codec, "mp4", Groups(12, 3, True), True), "mp4", first)
    assert_as_decoded(data.replace(b"stss", b"free"))


def test_a_point_of_recovery_is_no_key_frame():
    """A decoder that begins there gives frames that are not yet whole."""
    refresh = "intra-refresh=1:keyint=60:bframes=0"
    options = {"preset": "veryfast", "x264-params": refresh}
    video = encode_video("libx264", "mpegts", num_frames=300, height=48, width=64, options=options)
    assert_as_decoded(cut(video, "mpegts", 0))
    assert_as_decoded(cut(video, "mpegts", 60))


@pytest.mark.parametrize("first", [0, 1, 4, 5])
def test_fields_that_are_coded_apart_and_have_time_stamps(first):
    """As in broadcasts: a packet and a time stamp for each field, of which there are two in a frame."""
    assert_as_decoded(cut(field_coded(24, "mpegts"), "mpegts", first))


@pytest.mark.parametrize("codec", ["libx264", "libx265"])
def test_a_head_that_comes_late(codec):
    """FFmpeg looks for it in the first five seconds when it opens a file."""
    options = options_of(codec, Groups(30))
    video = encode_video(codec, "mpegts", num_frames=36, height=48, width=64, rate=2, options=options)
    assert_as_decoded(cut(video, "mpegts", 1))


@pytest.mark.parametrize(("first", "num_opened", "max_decoded"), [(0, 1, 3), (1, 2, 120)])
def test_no_more_is_decoded_to_count_frames_than_may_be_missing(first, num_opened, max_decoded):
    options = {"preset": "ultrafast", "x264-params": "keyint=20:min-keyint=20:bframes=2"}
    data = cut(encode_video("libx264", "mpegts", num_frames=240, height=48, width=64, options=options), "mpegts", first)
    opening = patch.object(video_info, "open_video", wraps=video_info.open_video)
    decoding = patch.object(video_info, "ffmpeg", wraps=video_info.ffmpeg)
    with opening as opened, decoding as decoded:
        analyse(io.BytesIO(data), LIMITS)
    assert opened.call_count == num_opened
    assert decoded.call_count <= max_decoded
