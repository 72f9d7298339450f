"""The rows of a video, whichever segments are asked for in which order, on any number of engines."""

import io
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pytest

from mmrt.actors.video.items import OpenAudio, OpenItem, OpenVideo, open_item
from mmrt.media.audio import decode_sound_track
from mmrt.media.decoding import DecodingPool
from mmrt.media.dispatch import Request
from mmrt.media.engines import CpuEngine
from mmrt.media.errors import MediaError
from mmrt.media.limits import UNLIMITED, MediaLimits, TimeBudget
from mmrt.media.packets import Bitstream
from mmrt.media.preprocess import video_rows
from mmrt.models.architecture import ModelConfig
from mmrt.schema.media import MediaOptions
from mmrt.tests.actors.bench import Weights
from mmrt.tests.media.conftest import decode_all, encode_film, encode_video

CASES: dict[str, dict] = {
    "open GOP": {"options": {"x264-params": "open-gop=1:keyint=12:min-keyint=12:bframes=3:scenecut=0"}},
    "without time stamps": {"container": "h264"},
    "intra refresh": {"options": {"x264-params": "intra-refresh=1:keyint=12"}},
    "av1, odd number of frames": {"codec": "libsvtav1", "options": {"preset": "12"}, "num_frames": 47},
}


class Video(NamedTuple):
    opened: OpenVideo
    segments: list[np.ndarray]  # the rows of each, from frames decoded in sequence
    requests: list[int]  # frames wanted of each request to the pool

    def rows(self, segment: int) -> np.ndarray:
        return np.concatenate(list(self.opened.rows(segment)))

    def check(self, segment: int) -> None:
        assert np.array_equal(self.rows(segment), self.segments[segment]), f"segment {segment}"


@pytest.fixture(scope="module")
def encoded() -> dict[str, bytes]:
    return {name: encode_video(**how) for name, how in CASES.items()}


@pytest.fixture(params=[1, 2, 3])
def pool(request: pytest.FixtureRequest) -> Iterator[DecodingPool]:
    with DecodingPool([CpuEngine()] * request.param, packets_per_segment=8) as pool:
        yield pool


@pytest.fixture
def model(tiny: tuple[ModelConfig, Weights]) -> ModelConfig:
    """One that is given nearly all frames, of such a size that segments hold several temporal patches."""
    rules = tiny[0].vision_rules
    assert rules is not None
    rules = msgspec.structs.replace(rules, fps=24, video_min_pixels=25_000, video_max_pixels=30_000)
    return msgspec.structs.replace(tiny[0], vision_rules=rules)


def open_video(
    data: bytes, model: ModelConfig, pool: DecodingPool, monkeypatch: pytest.MonkeyPatch, budget: TimeBudget = UNLIMITED
) -> Video:
    """In segments that end anywhere in a group of pictures."""
    rules = model.vision_rules
    assert rules is not None
    opened = OpenVideo(io.BytesIO(data), model, MediaLimits(), budget, pool)
    _, h, w = opened.item.grid
    frames = decode_all(data)
    sampled = [frames[index] for index in opened._wanted]
    rows = np.concatenate(list(video_rows(sampled, rules.patch_size * h, rules.patch_size * w, rules)))
    ends = np.cumsum([part.num_rows for part in opened.item.segments])
    requests: list[int] = []
    add = pool.add_decoding_request

    def noted(bitstream: Bitstream, wanted: Sequence[int], *how: Any) -> Request:
        requests.append(len(wanted))
        return add(bitstream, wanted, *how)

    monkeypatch.setattr(pool, "add_decoding_request", noted)
    return Video(opened, np.split(rows, ends[:-1]), requests)


@pytest.mark.parametrize("case", CASES)
def test_rows_go_on_where_the_last_call_stopped_or_anew(encoded, model, pool, monkeypatch, case):
    video = open_video(encoded[case], model, pool, monkeypatch)
    last = len(video.segments) - 1
    assert last >= 3
    for segment in range(last + 1):
        video.check(segment)
    assert len(video.requests) == 1, "consecutive segments are decoded once"
    for segment in (2, 0, 1, last):
        video.check(segment)
    assert len(video.requests) == 1 + 3, "0 and 1 are consecutive"
    video.opened.close()
    video.check(1)
    assert len(video.requests) == 1 + 3 + 1
    video.opened.close()


def test_rows_that_are_not_taken_to_their_end_come_anew(encoded, model, pool, monkeypatch):
    video = open_video(encoded["open GOP"], model, pool, monkeypatch)
    assert video.opened.item.segments[0].grid[0] > 1
    next(video.opened.rows(0))
    video.check(1)
    video.check(2)
    assert len(video.requests) == 2
    video.opened.close()


def test_it_costs_little_until_it_is_decoded_and_after(encoded, model, pool, monkeypatch):
    video = open_video(encoded["open GOP"], model, pool, monkeypatch)
    assert video.opened.num_bytes < 1 << 16
    video.check(0)
    assert video.opened.num_bytes > 1 << 20
    video.opened.close()
    assert video.opened.num_bytes < 1 << 16


def test_a_spent_budget_is_an_error_and_leaves_nothing_running(encoded, model, pool, monkeypatch):
    budget = TimeBudget(60)
    video = open_video(encoded["without time stamps"], model, pool, monkeypatch, budget)
    budget._spent_s = 61.0
    with pytest.raises(MediaError, match="longer than the limit of 60 s"):
        for segment in range(len(video.segments)):
            video.rows(segment)
    video.opened.close()
    assert pool._dispatch.requests == ()


class Sounded(NamedTuple):
    opened: OpenItem
    video: OpenItem
    sound: OpenItem


@pytest.fixture
def sounded(tiny: tuple[ModelConfig, Weights], pool: DecodingPool) -> Iterator[Sounded]:
    """Five seconds of video with four and a half of sound, opened together and each for itself."""
    data = io.BytesIO(encode_film(np.sin(np.arange(72000) / 6), "pcm_s16le", "matroska", num_frames=50))
    opened = [
        open_item("video", data, tiny[0], MediaLimits(), UNLIMITED, pool, MediaOptions(use_audio_in_video=sound))
        for sound in (True, False)
    ]
    yield Sounded(*opened, OpenAudio(data, tiny[0], MediaLimits(), UNLIMITED, decode_sound_track))
    for item in opened:
        item.close()


@pytest.mark.parametrize("order", [1, -1])
def test_a_video_with_sound_has_the_rows_of_both(sounded, order):
    """In segments of their own, whichever are asked for first."""
    item = sounded.opened.item
    assert [kind for kind, _ in groupby(part.kind for part in item.segments)] == ["video", "audio"] * 3
    assert item.num_tokens == sounded.video.item.num_tokens + sounded.sound.item.num_tokens
    rows = {number: list(sounded.opened.rows(number)) for number in range(len(item.segments))[::order]}
    for kind, alone in (("video", sounded.video), ("audio", sounded.sound)):
        ours = [piece for number, part in enumerate(item.segments) if part.kind == kind for piece in rows[number]]
        expected = [piece for number in range(len(alone.item.segments)) for piece in alone.rows(number)]
        assert np.array_equal(np.concatenate(ours), np.concatenate(expected))


def test_what_a_video_with_sound_costs(sounded):
    assert sounded.opened.num_bytes == sounded.video.num_bytes + sounded.sound.num_bytes
    list(sounded.opened.rows(0))
    assert sounded.opened.num_bytes > 1 << 20
    sounded.opened.close()
    assert sounded.opened.num_bytes < 1 << 19


def test_sound_of_a_video_needs_a_model_that_takes_it(encoded, model, pool):
    deaf = msgspec.structs.replace(model, audio=None, audio_rules=None)
    with pytest.raises(MediaError, match="this model takes no audio") as caught:
        options = MediaOptions(use_audio_in_video=True)
        open_item("video", io.BytesIO(encoded["open GOP"]), deaf, MediaLimits(), UNLIMITED, pool, options)
    assert caught.value.status == 400
