"""Whatever the codec, the container, the groups of pictures, the rate and the packet that a video begins with: its frames are those that
a plain decoder delivers, the first of them is frame 0, and sampled ones equal those of decoding in sequence.
"""

import io
import shutil
import subprocess
from functools import lru_cache
from itertools import product
from pathlib import Path
from typing import NamedTuple
from unittest.mock import patch

import av.error
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from mmrt.media import video_info
from mmrt.media.errors import MediaError
from mmrt.media.limits import MediaLimits
from mmrt.media.video_info import analyse
from mmrt.tests.media.conftest import assert_frames, decode_on, encode_video
from mmrt.tests.media.cut_video import cut, decode_plainly
from mmrt.tests.media.h264_fields import field_coded

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


GROUPS = [
    *(Groups(length, num_b_frames, is_open) for length in (8, 12, 300) for num_b_frames, is_open in [(0, False), (2, False), (3, True)]),
    Groups(12, is_refresh=True),
]


def options_of(codec: str, groups: Groups) -> dict[str, str]:
    length, num_b_frames, is_open, is_refresh = groups
    if codec in ("libx264", "libx265"):
        named = f"bframes={num_b_frames}:b-adapt=0:keyint={length}:min-keyint={length}:scenecut=0"
        named += f":open-gop={is_open:d}:intra-refresh={is_refresh:d}"
        return {"preset": "ultrafast", "x264-params": named} if codec == "libx264" else {"preset": "ultrafast", "x265-params": f"log-level=none:{named}"}
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
    return encode_video(
        codec, container, num_frames=NUM_FRAMES, height=48, width=64, gop=groups.length, options=options, times=times
    )


def assert_as_decoded(data: bytes, num_engines: int = 2) -> None:
    expected = decode_plainly(data)
    if not expected:
        with pytest.raises(MediaError):
            analyse(io.BytesIO(data), LIMITS)
        return
    assert analyse(io.BytesIO(data), LIMITS).num_frames == len(expected)
    for wanted in (range(len(expected)), range(1, len(expected), 5), [0]):
        assert_frames(decode_on(num_engines, data, wanted), [expected[index] for index in wanted])


@pytest.mark.parametrize(("codec", "container"), KINDS)
@settings(max_examples=12)
@given(st.data())
def test_what_decodes_is_counted_and_sampled(codec, container, data):
    groups = data.draw(st.sampled_from(GROUPS))
    is_even = (codec, container) in EVEN_ONLY or container == "avi" or data.draw(st.booleans())
    first = data.draw(st.integers(0, 20))
    try:
        video = cut(source(codec, container, groups, is_even), container, first)
    except av.error.FFmpegError:
        assume(False)
    assert_as_decoded(video, data.draw(st.integers(1, 3)))
