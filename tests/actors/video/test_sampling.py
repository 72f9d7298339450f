"""Samples of videos whose rate varies: each is the frame that is shown at its instant. Of a constant rate they are transformers'."""

import io
from functools import partial
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from mmrt.actors.video.items import OpenVideo
from mmrt.media.decoding import DecodingPool
from mmrt.media.engines import CpuEngine
from mmrt.media.limits import UNLIMITED, MediaLimits
from mmrt.media.timing import sampled, sampled_fps, varying_starts
from mmrt.media.video_info import VideoInfo, analyse
from mmrt.models.architecture import ModelConfig
from mmrt.models.families.registry import family_of
from mmrt.tests.actors.bench import Weights
from mmrt.tests.media.conftest import encode_video, picture

LIMITS = MediaLimits()
TICK = 25  # of 600 in a second: 24 frames
HOLD = [TICK * number for number in range(24)] + [95 * TICK]


@pytest.fixture(scope="module")
def model(tiny: tuple[ModelConfig, Weights]) -> ModelConfig:
    """Two frames a second, without a limit that matters."""
    rules = msgspec.structs.replace(tiny[0].vision_rules, fps=2.0, min_frames=2, max_frames=768, temporal_patch_size=2)
    return msgspec.structs.replace(tiny[0], vision_rules=rules)


def shown_at(starts: list[float], instant: float) -> int:
    return max(number for number, start in enumerate(starts) if start <= instant + 1e-9)


def saved(durations: list[int], format: str) -> bytes:
    pictures = [Image.fromarray(picture(number, 48, 64)) for number in range(len(durations))]
    buffer = io.BytesIO()
    pictures[0].save(buffer, format, save_all=True, append_images=pictures[1:], duration=durations)
    return buffer.getvalue()


def opened(data: bytes, model: ModelConfig) -> tuple[list[int], float | None]:
    """The frames that are sampled, and the seconds of a temporal patch."""
    with DecodingPool([CpuEngine()]) as pool:
        video = OpenVideo(io.BytesIO(data), model, LIMITS, UNLIMITED, pool)
        return video._wanted, video.item.second_per_grid_s


@pytest.mark.parametrize("container", ["mp4", "matroska", "mpegts", "flv"])
def test_a_frame_that_is_held_is_sampled_as_long_as_it_is_shown(model, container):
    """24 frames in the first second, and one at its 3.96th."""
    data = encode_video(container=container, num_frames=25, times=HOLD)
    info = analyse(io.BytesIO(data), LIMITS)
    assert info.duration_s == pytest.approx(4, abs=0.05) and info.fps == pytest.approx(25 / 4, abs=0.1)
    wanted, second_per_grid_s = opened(data, model)
    assert wanted == [0, 12, 23, 23, 23, 23, 23, 23]
    assert second_per_grid_s == pytest.approx(1, abs=0.02)


@pytest.mark.parametrize("format", ["GIF", "WEBP", "AVIF"])
def test_an_animation_lasts_as_long_as_its_last_picture(model, format):
    """29 pictures in 2.9 s, and a last one that stays for 39.1."""
    data = saved([100] * 29 + [39100], format)
    info = analyse(io.BytesIO(data), LIMITS)
    assert (info.num_frames, info.duration_s) == (30, pytest.approx(42))
    wanted, second_per_grid_s = opened(data, model)
    assert wanted == [0, 5, 10, 15, 20, 25, *[29] * 78]
    assert second_per_grid_s == pytest.approx(1)


@pytest.mark.parametrize("format", ["GIF", "WEBP", "AVIF"])
def test_pictures_of_an_animation_count_as_long_as_each_is_shown(model, format):
    durations = [700, 100, 100, 1500, 60, 40, 2000, 500]
    wanted, _ = opened(saved(durations, format), model)
    starts = [sum(durations[:number]) / 1000 for number in range(8)]
    assert wanted == [shown_at(starts, instant / 2) for instant in range(10)]


@pytest.mark.parametrize(
    "times",
    [
        [TICK * number for number in range(96)],
        [TICK * number + number % 3 for number in range(96)],  # as cameras write them
        [TICK * number + 3000 for number in range(96)],
        [TICK * number - 200 for number in range(104)],  # the first eight are hidden
    ],
)
@pytest.mark.parametrize("container", ["mp4", "matroska"])
def test_a_constant_rate_is_sampled_as_by_transformers(model, times, container):
    if container == "matroska" and times[0] < 0:
        times = times[8:]
    data = encode_video(container=container, num_frames=len(times), times=times)
    info = analyse(io.BytesIO(data), LIMITS)
    assert info.starts_s is None and info.num_frames == 96
    assert opened(data, model)[0] == family_of(model).sample_frames(model, info.num_frames, info.fps).tolist()


@pytest.mark.parametrize("codec", ["mpeg1video", "mpeg2video", "mpeg4", "libx264"])
def test_b_frames_in_avi_are_no_varying_rate(codec):
    """AVI has no time stamps, and those that FFmpeg makes for MPEG-1 lack one."""
    info = analyse(io.BytesIO(encode_video(codec, "avi", num_frames=48, options={"bf": "2"})), LIMITS)
    assert (info.starts_s, info.duration_s, info.fps) == (None, 2.0, 24.0)


def test_a_frame_that_was_dropped_moves_no_sample_behind_it(model):
    """A camera of 24 frames a second that left out a tenth of them, here and there."""
    kept = [number for number in range(240) if number % 10 != 7 or number < 60]
    wanted, _ = opened(encode_video(num_frames=len(kept), times=[TICK * number for number in kept]), model)
    assert [kept[index] for index in wanted] == [12 * sample for sample in range(20)]


@given(st.lists(st.floats(0.001, 5), min_size=1, max_size=40), st.floats(0.1, 30))
def test_each_sample_is_the_frame_of_its_instant(lengths_s, fps):
    ends = np.cumsum(lengths_s)
    starts_s = [0.0, *ends[:-1].tolist()]
    end_s = float(ends[-1])
    starts = varying_starts([start + 7 for start in starts_s], end_s + 7)
    video = SimpleNamespace(num_frames=len(starts_s), fps=len(starts_s) / end_s, duration_s=end_s, starts_s=starts)
    count = max(1, int(end_s * fps))
    found = sampled(video, lambda total, rate: (np.arange(count) * (total / count)).astype(np.int64))
    assert len(found) == count and sampled_fps(video, count) == pytest.approx(count / end_s)
    for sample, frame in enumerate(found):
        instant = end_s * sample / count
        assert starts_s[frame] <= instant + (0.4 * end_s / len(starts_s) if starts is None else 0.006)
        end = starts_s[frame + 1] if frame + 1 < len(starts_s) else end_s
        assert instant <= end + (1.4 * end_s / len(starts_s) if starts is None else 0.006)


def test_half_an_hour_is_sampled_to_the_frame(model):
    """Samplings count in float32."""
    starts = [number / 30 for number in range(54_000) if number % 7 != 3]
    info = VideoInfo(len(starts), len(starts) / 1800, 1800.0, 48, 64, "h264", 12, None, tuple(starts))
    rules = msgspec.structs.replace(model.vision_rules, max_frames=3600)
    config = msgspec.structs.replace(model, vision_rules=rules)
    wanted = sampled(info, partial(family_of(config).sample_frames, config))
    assert len(wanted) == 3600
    for number, frame in enumerate(wanted):
        assert starts[frame] <= number / 2 + 0.0003 and starts[frame + 1] > number / 2
