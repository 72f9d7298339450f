"""Animated WebP as a video: the pictures that Pillow shows, times of the file's own chunks, and what is broken or too much."""

import io
from collections.abc import Sequence

import numpy as np
import pytest
from PIL import Image, ImageSequence

from mmrt.media.errors import MediaError
from mmrt.media.image import decode_image
from mmrt.media.limits import MediaLimits, TimeBudget
from mmrt.media.video import decode_frames
from mmrt.media.video_info import VideoInfo, analyse
from mmrt.tests.media.conftest import assert_frames, decode_on, picture

LIMITS = MediaLimits()
NUM_FRAMES = 12


def see_through(number: int) -> np.ndarray:
    """RGBA, transparent to every degree, changing in one corner only."""
    rgba = np.dstack([picture(0, 48, 64), np.tile(np.linspace(0, 255, 64).astype(np.uint8), (48, 1))])
    rgba[10:30, number : number + 20] = (255 - 20 * number, 20 * number, 90, 25 * (number % 3) * 5)
    return rgba


def animation(duration: int | list[int] = 40, see: bool = True, lossless: bool = True, **options: object) -> bytes:
    pictures = [Image.fromarray(see_through(number) if see else picture(number, 48, 64)) for number in range(NUM_FRAMES)]
    out = io.BytesIO()
    pictures[0].save(
        out, "WEBP", save_all=True, append_images=pictures[1:], duration=duration, lossless=lossless, quality=60, **options
    )
    return out.getvalue()


def shown(data: bytes) -> list[np.ndarray]:
    """All pictures, composed by Pillow, on white."""
    frames = []
    for frame in ImageSequence.Iterator(Image.open(io.BytesIO(data))):
        white = Image.new("RGBA", frame.size, "white")
        white.alpha_composite(frame.convert("RGBA"))
        frames.append(np.asarray(white.convert("RGB")))
    return frames


def info_of(data: bytes, limits: MediaLimits = LIMITS) -> VideoInfo:
    return analyse(io.BytesIO(data), limits, TimeBudget(60))


def refusal(data: bytes, limits: MediaLimits = LIMITS) -> tuple[int, str]:
    with pytest.raises(MediaError) as caught:
        info_of(data, limits)
    return caught.value.status, caught.value.message


FILES = {
    "transparent": {},
    "opaque": {"see": False},
    "lossy": {"see": False, "lossless": False},
    "lossy and transparent": {"lossless": False},
    "key frames only": {"kmax": 1},
    "far between key frames": {"kmin": 30, "kmax": 60, "minimize_size": True},
    "looping": {"loop": 3, "background": (10, 20, 30, 255)},
}


@pytest.mark.parametrize("name", FILES)
def test_frames_are_those_that_pillow_shows(name: str) -> None:
    data = animation(**FILES[name])
    expected = shown(data)
    info = info_of(data)
    assert (info.num_frames, info.height, info.width) == (NUM_FRAMES, 48, 64) and len(expected) == NUM_FRAMES
    assert not np.array_equal(expected[0], expected[-1])
    wanted: Sequence[int]
    for wanted in (range(NUM_FRAMES), range(1, NUM_FRAMES, 3), [NUM_FRAMES - 1], [2, 2, 7]):
        for num_engines in (1, 3):
            assert_frames(decode_on(num_engines, data, wanted), [expected[number] for number in wanted])


def test_the_first_frame_is_the_still_that_an_image_is() -> None:
    data = animation()
    assert_frames(decode_on(1, data, [0]), [decode_image(io.BytesIO(data), LIMITS)])


@pytest.mark.parametrize(
    ("durations", "seconds"),
    [([40] * 12, 0.48), ([1000, 20] * 6, 6.12), ([0] * 12, 1.2), ([5, 100] * 6, 1.2), (list(range(11, 23)), 0.198)],
)
def test_times(durations: list[int], seconds: float) -> None:
    """The rate is the average; frames that last 10 ms or less take 100 ms, as in browsers."""
    info = info_of(animation(durations))
    assert info.duration_s == pytest.approx(seconds)
    assert info.fps == pytest.approx(NUM_FRAMES / seconds)


def chunks(data: bytes) -> list[tuple[bytes, int, int]]:
    """(name, start, end) of each chunk of the file."""
    found, at = [], 12
    while at < len(data):
        size = int.from_bytes(data[at + 4 : at + 8], "little")
        end = at + 8 + size + size % 2
        found.append((data[at : at + 4], at, end))
        at = end
    return found


def with_size(data: bytes) -> bytes:
    """The same with a true size in its head."""
    return data[:4] + (len(data) - 8).to_bytes(4, "little") + data[8:]


def test_one_frame_is_a_video_too() -> None:
    data = animation()
    frames = [end for name, _, end in chunks(data) if name == b"ANMF"]
    one = with_size(data[: frames[0]])
    assert info_of(one).num_frames == 1
    assert_frames(decode_on(1, one, [0]), shown(data)[:1])


def test_what_stands_behind_the_file_is_not_read() -> None:
    data = animation()
    assert info_of(data + b"ANMF" + bytes(100)).num_frames == NUM_FRAMES


def test_cut_off_anywhere() -> None:
    data = animation()
    for end in (*range(30, 700, 7), len(data) // 2, len(data) - 1):
        assert refusal(data[:end]) == (422, "the video is broken: its data cannot be read")
        assert refusal(with_size(data[:end]))[0] == 422


def test_no_frames() -> None:
    data = animation()
    first = next(start for name, start, _ in chunks(data) if name == b"ANMF")
    assert refusal(with_size(data[:first])) == (422, "the video has no frames")


def test_a_broken_frame_is_replaced_by_the_one_before() -> None:
    data = bytearray(animation(see=False, kmax=1))
    frames = [(start, end) for name, start, end in chunks(data) if name == b"ANMF"]
    start, end = frames[6]
    data[start + 40 : end] = bytes(end - start - 40)
    expected = shown(animation(see=False, kmax=1))
    found = decode_on(1, bytes(data), range(NUM_FRAMES))
    assert_frames(found[:6], expected[:6])
    assert len(found) == NUM_FRAMES and all(np.array_equal(frame, expected[5]) for frame in found[6:])


def test_a_file_whose_first_frame_is_broken() -> None:
    data = bytearray(animation(see=False, kmax=1))
    start, end = next((start, end) for name, start, end in chunks(data) if name == b"ANMF")
    data[start + 40 : end] = bytes(end - start - 40)
    assert refusal(bytes(data))[0] == 422


@pytest.mark.parametrize(
    ("limits", "says"),
    [
        (MediaLimits(max_frame_pixels=48 * 64 - 1), "video frames of 64x48 exceed the limit of 3071 pixels"),
        (MediaLimits(max_video_s=0.4), "the video takes 0.5 s, longer than the limit of 0.4 s"),
        (MediaLimits(max_packets=10), "the file has more than 10 packets"),
        (MediaLimits(max_animation_frames=9), "the animation has more than 9 frames"),
        (MediaLimits(max_aspect=1.2), "video frames of 64x48 exceed the aspect ratio limit of 1.2:1"),
    ],
)
def test_limits(limits: MediaLimits, says: str) -> None:
    assert refusal(animation(), limits) == (400, says)


def test_a_huge_canvas_is_refused_before_it_is_made() -> None:
    data = bytearray(animation())
    data[24:30] = b"\xff\xff\xff\xff\xff\xff"
    assert refusal(bytes(data)) == (400, "video frames of 16777216x16777216 exceed the limit of 35651584 pixels")


def test_time_runs_out() -> None:
    data = animation()
    info = info_of(data)
    clock = iter(range(100))
    budget = TimeBudget(5, clock=lambda: next(clock))
    with budget.running(), pytest.raises(MediaError, match="decoding took longer than the limit of 5 s"):
        list(decode_frames(io.BytesIO(data), info, range(NUM_FRAMES), LIMITS, budget))


def test_a_still_is_no_video() -> None:
    out = io.BytesIO()
    Image.fromarray(see_through(0)).save(out, "WEBP")
    assert refusal(out.getvalue()) == (422, "this is a WebP image, not a video: send it as image_url")


def test_noise_in_the_file_is_a_refusal_or_a_video() -> None:
    rng = np.random.default_rng(0)
    whole = animation(lossless=False)
    for _ in range(150):
        data = bytearray(whole)
        for at in rng.integers(16, len(data), rng.integers(1, 6)):
            data[at] = rng.integers(256)
        try:
            info = info_of(bytes(data), MediaLimits(max_frame_pixels=1 << 20))
            frames = decode_on(1, bytes(data), range(0, info.num_frames, 3))
        except MediaError as error:
            assert error.status in (400, 422)
        else:
            assert all(frame.shape == (info.height, info.width, 3) for frame in frames)
