"""After broken data the frames of a sampling are those that decoding in sequence gives, whichever engines decode them."""

import io
from typing import Any

import av
import numpy as np
import pytest

from mmrt.media.errors import MediaError
from mmrt.media.limits import MediaLimits
from mmrt.media.video_info import PacketIndex, analyse
from mmrt.tests.media.conftest import Frames, decode_on, encode_video

LIMITS = MediaLimits()
X265 = {"preset": "ultrafast", "x265-params": "log-level=none:keyint=12"}
CASES: dict[str, dict[str, Any]] = {
    "h264": {"options": {"bf": "0"}},
    "h264 with B-frames": {"options": {"bf": "3"}},
    "h264 MPEG-TS": {"container": "mpegts", "options": {"bf": "0"}},
    "hevc": {"codec": "libx265", "options": X265},
    "mpeg4": {"codec": "mpeg4", "options": {"bf": "2"}},
    "mpeg2": {"codec": "mpeg2video", "container": "mpegts", "options": {"bf": "2"}},
    "vp9": {"codec": "libvpx-vp9", "container": "webm", "options": {"deadline": "realtime", "cpu-used": "8"}},
}


def broken(data: bytes, seed: int) -> bytes:
    """Three bytes of the second quarter and behind are others."""
    rng = np.random.default_rng(seed)
    changed = bytearray(data)
    for at in rng.integers(len(data) // 4, len(data) * 9 // 10, 3):
        changed[at] ^= int(rng.integers(1, 256))
    return bytes(changed)


def shown_in_sequence(data: bytes, index: PacketIndex) -> Frames:
    """What one thread of FFmpeg's decoder shows at the time of each frame."""
    frames: dict[int, np.ndarray] = {}
    with av.open(io.BytesIO(data), metadata_errors="ignore") as container:
        stream = container.streams.video[0]
        stream.codec_context.thread_count = 1
        for packet in container.demux(stream):
            try:
                decoded = stream.codec_context.decode(packet if packet.size else None)
            except av.error.FFmpegError:
                continue
            frames |= {frame.pts: frame.to_ndarray(format="rgb24") for frame in decoded if frame.pts is not None}
    return [frames[max((pts for pts in frames if pts <= time), default=min(frames))] for time in index.timeline.tolist()]


@pytest.mark.many
@pytest.mark.parametrize("name", CASES)
def test_samples_are_those_of_decoding_in_sequence(name):
    whole = encode_video(num_frames=48, **CASES[name])
    num_compared = 0
    for seed in range(4):
        data = broken(whole, seed)
        try:
            info = analyse(io.BytesIO(data), LIMITS)
        except MediaError:
            continue
        if info.index is None:
            continue
        expected = shown_in_sequence(data, info.index)
        for num_engines in (1, 2):
            wanted = range(0, info.num_frames, 5)
            frames = decode_on(num_engines, data, wanted)
            num_compared += 1
            assert [number for number, frame in zip(wanted, frames, strict=True) if not np.array_equal(frame, expected[number])] == []
    assert num_compared


def test_a_frame_that_does_not_come_out_is_the_one_shown_before_it():
    """Not the one sampled before it, which may be seconds older."""
    whole = encode_video("libvpx-vp9", "webm", num_frames=24, gop=8, options={"deadline": "realtime", "cpu-used": "8"})
    with av.open(io.BytesIO(whole)) as container:
        packets = [bytes(packet) for packet in container.demux(video=0) if packet.size]
    data = whole.replace(packets[12], b"\xff" * len(packets[12]))
    info = analyse(io.BytesIO(data), LIMITS)
    assert info.index is not None
    expected = shown_in_sequence(data, info.index)
    frames = decode_on(1, data, [2, 12, 20])
    assert np.array_equal(frames[1], expected[12]) and not np.array_equal(frames[1], frames[0])
    assert np.array_equal(expected[12], expected[11])
    assert np.array_equal(frames[2], expected[20])
