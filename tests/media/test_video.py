"""On any number of engines, every wanted frame equals the one that PyAV gives when it decodes the whole file in sequence: for each
codec, container and structure that hurts.
"""

import io
import struct
import threading
from collections.abc import Callable, Sequence

import av
import av.stream
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mmrt.media import engines
from mmrt.media.engines import CpuDecoder
from mmrt.media.limits import MediaLimits
from mmrt.media.video import decode_frames
from mmrt.media.video_info import analyse
from mmrt.tests.media.conftest import Frames, assert_frames, decode_on
from mmrt.tests.settings import examples

LIMITS = MediaLimits()
X265 = {"preset": "ultrafast"}
REALTIME = {"deadline": "realtime", "cpu-used": "8"}
OPEN_GOP = "open-gop=1:keyint=12:min-keyint=12:bframes=3:scenecut=0"

CASES: dict[str, dict] = {
    "h264": {},
    "h264 with B-frames": {"options": {"bf": "3", "preset": "veryfast"}},
    "h264 open GOP": {"options": {"x264-params": OPEN_GOP}},
    "h264 intra refresh": {"options": {"x264-params": "intra-refresh=1:keyint=12"}},
    "h264 interlaced": {"options": {"x264-params": "tff=1:keyint=12"}},
    "h264 in one GOP": {"gop": 300},
    "h264 in odd GOPs": {"gop": 5},
    "h264 of 10 bits": {"pix_fmt": "yuv420p10le"},
    "h264 4:4:4, odd size": {"pix_fmt": "yuv444p", "height": 61, "width": 97},
    "h264 Matroska": {"container": "matroska"},
    "h264 MPEG-TS": {"container": "mpegts"},
    "h264 without time stamps": {"container": "h264"},
    "h264 fragmented": {"container_options": {"movflags": "frag_keyframe+empty_moov"}},
    "h264 with sound": {"audio": True},
    "h264, one frame": {"num_frames": 1},
    "variable frame rate": {"times": [25 * i + 3 * (i % 5) for i in range(48)]},
    "hidden first frames": {"times": [25 * i - 200 for i in range(48)]},
    "rotated by 90": {"rotation": 90},
    "rotated by 180": {"rotation": 180},
    "rotated by -90": {"rotation": -90},
    "hevc open GOP": {"codec": "libx265", "options": X265 | {"x265-params": f"log-level=none:{OPEN_GOP}"}},
    "hevc closed GOP": {"codec": "libx265", "options": X265 | {"x265-params": "log-level=none:keyint=12:open-gop=0"}},
    "hevc without time stamps": {"codec": "libx265", "container": "hevc", "options": X265 | {"x265-params": "log-level=none"}},
    "vp8 WebM": {"codec": "libvpx", "container": "webm", "options": REALTIME},
    "vp9 WebM": {"codec": "libvpx-vp9", "container": "webm", "options": REALTIME},
    "av1": {"codec": "libsvtav1", "options": {"preset": "12"}},
    "mpeg4 AVI": {"codec": "mpeg4", "container": "avi", "options": {"bf": "2"}},
    "mpeg2 MPEG-TS": {"codec": "mpeg2video", "container": "mpegts", "options": {"bf": "2"}},
    "motion JPEG": {"codec": "mjpeg", "container": "avi", "pix_fmt": "yuvj420p"},
}


class Video:
    def __init__(self, data: bytes, frames: Frames) -> None:
        self.data = data
        self.frames = frames
        self.info = analyse(io.BytesIO(data), LIMITS)

    def decode(self, wanted: Sequence[int]) -> Frames:
        """On one engine, in large segments."""
        taken = dict(decode_frames(io.BytesIO(self.data), self.info, wanted))
        assert list(taken) == list(dict.fromkeys(wanted))
        return [taken[index] for index in wanted]

    def assert_exact(self, wanted: Sequence[int]) -> None:
        due = [self.frames[index] for index in wanted]
        assert_frames(self.decode(wanted), due)
        for num_engines in (1, 2, 3):
            assert_frames(decode_on(num_engines, self.data, wanted), due)


@pytest.fixture(scope="module")
def open_video(make_video, decode_sequentially) -> Callable[[str], Video]:
    made: dict[str, Video] = {}

    def open_case(name: str) -> Video:
        if name not in made:
            data = make_video(**CASES[name])
            made[name] = Video(data, decode_sequentially(data))
        return made[name]

    return open_case


@pytest.mark.many
@pytest.mark.parametrize("name", CASES)
def test_wanted_frames_equal_sequential_decoding(open_video, name):
    video = open_video(name)
    num_frames = len(video.frames)
    assert video.info.num_frames == num_frames
    assert (video.info.height, video.info.width) == video.frames[0].shape[:2]
    for wanted in (range(num_frames), range(0, num_frames, 5), [num_frames - 1], [7, 8, 8, 8, 30]):
        video.assert_exact([index for index in wanted if index < num_frames])


@given(wanted=st.lists(st.integers(0, 47), min_size=1, max_size=20).map(sorted), num_engines=st.integers(1, 3))
@settings(max_examples=examples(25), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_choice_of_frames(open_video, wanted, num_engines):
    video = open_video("hevc open GOP")
    assert_frames(decode_on(num_engines, video.data, wanted), [video.frames[index] for index in wanted])


def test_decoding_skips_what_nobody_wants(open_video, monkeypatch):
    """Of 48 frames in 4 groups, the last frame of the second group costs that group at most, and one conversion."""
    video = open_video("h264")
    fed, turned = [], []
    feed, orientation_of = CpuDecoder.decode, engines.orientation_of
    monkeypatch.setattr(CpuDecoder, "decode", lambda self, *packet: fed.append(packet) or feed(self, *packet))
    monkeypatch.setattr(engines, "orientation_of", lambda frame: turned.append(frame) or orientation_of(frame))
    assert_frames(video.decode([20]), [video.frames[20]])
    assert len(turned) == 1
    assert len(fed) <= 13


def test_who_stops_taking_leaves_no_thread(open_video):
    video = open_video("h264")
    before = threading.active_count()
    frames = decode_frames(io.BytesIO(video.data), video.info, range(48))
    assert next(frames)[0] == 0 and threading.active_count() == before + 1
    frames.close()
    assert threading.active_count() == before


def test_the_size_may_change_in_mid_stream(make_video, decode_sequentially):
    """Time stamps start again, too: such a file is decoded in sequence."""
    small, large = (make_video(container="mpegts", num_frames=24, height=height) for height in (64, 128))
    video = Video(small + large, decode_sequentially(small + large))
    assert {frame.shape for frame in video.frames} == {(64, 96, 3), (128, 96, 3)}
    assert video.info.index is None
    video.assert_exact(range(0, len(video.frames), 3))


def test_rate_and_duration(open_video):
    info = open_video("h264").info
    assert (info.fps, info.duration_s, info.codec) == (24.0, 2.0, "h264")
    assert open_video("variable frame rate").info.fps == pytest.approx(24, rel=0.05)


@pytest.mark.parametrize("offset_s", ["0", "0.02"])
def test_time_that_begins_anew_leaves_the_rate_alone(make_video, offset_s):
    """Two clips in one transport stream, whose time stamps repeat or lie between each other."""
    first, second = (make_video(container="mpegts", container_options={"output_ts_offset": late}) for late in (offset_s, "0"))
    info = analyse(io.BytesIO(first + second), LIMITS)
    assert (info.num_frames, info.fps, info.duration_s) == (96, 24.0, 4.0)


def test_rotation_turns_the_way_the_file_says(make_video, make_picture):
    """A display rotation of 90 degrees counterclockwise, applied to the stored picture."""
    data = make_video(rotation=90, num_frames=1, options={"qp": "0"}, pix_fmt="yuv444p")
    info = analyse(io.BytesIO(data), LIMITS)
    ((_, frame),) = decode_frames(io.BytesIO(data), info, [0])
    expected = np.rot90(make_picture(0, 64, 96)).astype(int)
    assert np.abs(frame.astype(int) - expected).mean() < 3


ONE = 1 << 16
UPRIGHT: dict[str, tuple[tuple[int, int, int, int], Callable[[np.ndarray], np.ndarray]]] = {
    "as stored": ((ONE, 0, 0, ONE), lambda stored: stored),
    "mirrored": ((-ONE, 0, 0, ONE), np.fliplr),
    "upside down": ((ONE, 0, 0, -ONE), np.flipud),
    "by 180": ((-ONE, 0, 0, -ONE), lambda stored: np.rot90(stored, 2)),
    "by 90": ((0, -ONE, ONE, 0), np.rot90),
    "by 89.95": ((57, -ONE, ONE, 57), np.rot90),
    "by -90": ((0, ONE, -ONE, 0), lambda stored: np.rot90(stored, -1)),
    "transposed": ((0, ONE, ONE, 0), lambda stored: stored.swapaxes(0, 1)),
    "transposed, by 180": ((0, -ONE, -ONE, 0), lambda stored: np.rot90(stored.swapaxes(0, 1), 2)),
    "by 45": ((ONE, -ONE, ONE, ONE), lambda stored: stored),
}


@pytest.mark.parametrize("name", UPRIGHT)
def test_a_file_may_turn_and_mirror_its_pictures(make_video, name):
    (a, b, c, d), turn = UPRIGHT[name]
    data = bytearray(make_video(num_frames=1))
    ((_, stored),) = decode_frames(io.BytesIO(data), analyse(io.BytesIO(data), LIMITS), [0])
    struct.pack_into(">5i", data, data.index(b"tkhd") + 44, a, b, 0, c, d)
    info = analyse(io.BytesIO(data), LIMITS)
    ((_, frame),) = decode_frames(io.BytesIO(data), info, [0])
    assert np.array_equal(frame, turn(stored))
    assert (info.height, info.width) == frame.shape[:2]


def test_wanted_indices_are_checked(open_video):
    video = open_video("h264")
    with pytest.raises(ValueError, match="ascend"):
        video.decode([3, 2])
    with pytest.raises(ValueError, match=r"0\.\.47"):
        video.decode([48])


@pytest.mark.parametrize("container", ["mp4", "mov", "matroska"])
@pytest.mark.parametrize("default", [0, 1, None])
def test_of_several_videos_the_default_one_counts(make_picture, container, default):
    """Where the file marks none, or all, the first."""
    sizes = [(64, 96), (48, 128)]
    buffer = io.BytesIO()
    with av.open(buffer, "w", format=container) as output:
        streams = []
        for height, width in sizes:
            stream = output.add_stream("libx264", rate=24)
            stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
            stream.disposition = av.stream.Disposition.default if default in (len(streams), None) else av.stream.Disposition(0)
            streams.append(stream)
        for number in range(6):
            for stream in streams:
                frame = av.VideoFrame.from_ndarray(make_picture(number, stream.height, stream.width), format="rgb24")
                output.mux(stream.encode(frame))
        for stream in streams:
            output.mux(stream.encode(None))
    data = buffer.getvalue()
    info = analyse(io.BytesIO(data), LIMITS)
    assert (info.height, info.width) == sizes[default or 0]
    frames = [frame for _, frame in decode_frames(io.BytesIO(data), info, range(info.num_frames))]
    assert [frame.shape for frame in frames] == [(*sizes[default or 0], 3)] * 6
