"""Animated AVIF as a video: the pictures that Pillow shows, times of the file's own tables, and what is broken or too much."""

import io

import av
import numpy as np
import pytest
from PIL import Image

from mmrt.media.errors import MediaError
from mmrt.media.image import decode_image
from mmrt.media.limits import MediaLimits
from mmrt.tests.media.conftest import assert_frames, decode_on, picture
from mmrt.tests.media.test_webp import info_of, refusal, see_through, shown

NUM_FRAMES = 8


def animation(duration: int | list[int] = 40, see: bool = True, num_frames: int = NUM_FRAMES) -> bytes:
    pictures = [Image.fromarray(see_through(number) if see else picture(number, 48, 64)) for number in range(num_frames)]
    out = io.BytesIO()
    pictures[0].save(out, "AVIF", save_all=True, append_images=pictures[1:], duration=duration, quality=70, speed=9, max_threads=1)
    return out.getvalue()


@pytest.fixture(scope="module")
def film() -> bytes:
    return animation()


@pytest.mark.parametrize("see", [True, False])
def test_frames_are_those_that_pillow_shows(see):
    """Where they are transparent, on white; FFmpeg has the alpha as a video of its own."""
    data = animation(see=see)
    expected = shown(data)
    info = info_of(data)
    assert (info.codec, info.num_frames, info.height, info.width) == ("avif", NUM_FRAMES, 48, 64)
    assert not np.array_equal(expected[0], expected[-1])
    for wanted in (range(NUM_FRAMES), range(1, NUM_FRAMES, 3), [NUM_FRAMES - 1], [2, 2, 7]):
        for num_engines in (1, 3):
            assert_frames(decode_on(num_engines, data, wanted), [expected[number] for number in wanted])


def test_the_first_frame_is_the_still_that_an_image_is(film):
    assert_frames(decode_on(1, film, [0]), [decode_image(io.BytesIO(film), MediaLimits())])


@pytest.mark.parametrize(("durations", "seconds"), [([40] * 8, 0.32), ([1000, 20] * 4, 4.08), ([100, 50, 30, 400] * 2, 1.16)])
def test_times(durations, seconds):
    """The rate is the average."""
    info = info_of(animation(durations))
    assert info.duration_s == pytest.approx(seconds)
    assert info.fps == pytest.approx(NUM_FRAMES / seconds)


@pytest.mark.parametrize(
    ("limits", "says"),
    [
        (MediaLimits(max_frame_pixels=48 * 64 - 1), "video frames of 64x48 exceed the limit of 3071 pixels"),
        (MediaLimits(max_video_s=0.3), "the video takes 0.3 s, longer than the limit of 0.3 s"),
        (MediaLimits(max_packets=5), "the file has more than 5 packets"),
        (MediaLimits(max_animation_frames=5), "the animation has more than 5 frames"),
        (MediaLimits(max_aspect=1.2), "video frames of 64x48 exceed the aspect ratio limit of 1.2:1"),
    ],
)
def test_limits(film, limits, says):
    assert refusal(film, limits) == (400, says)


def test_cut_off(film):
    for end in (20, 100, 400, len(film) // 2):
        assert refusal(film[:end])[0] == 422


def test_a_broken_frame_is_replaced_by_the_one_before():
    data = bytearray(animation(see=False))
    expected = shown(bytes(data))
    with av.open(io.BytesIO(bytes(data))) as container:
        packet = [packet for packet in container.demux(container.streams.video[1]) if packet.size][5]
        data[packet.pos : packet.pos + packet.size] = bytes(packet.size)
    found = decode_on(1, bytes(data), range(NUM_FRAMES))
    assert_frames(found[:5], expected[:5])
    assert len(found) == NUM_FRAMES and all(np.array_equal(frame, expected[4]) for frame in found[5:])


def test_noise_in_the_file_is_a_refusal_or_a_video(film):
    rng = np.random.default_rng(0)
    for number in range(150):
        data = bytearray(film)
        for at in rng.integers(0, len(data) if number % 2 else 2000, rng.integers(1, 6)):
            data[at] = rng.integers(256)
        refused_or_shown(bytes(data))


def refused_or_shown(data: bytes) -> None:
    try:
        info = info_of(data, MediaLimits(max_frame_pixels=1 << 20))
        frames = decode_on(1, data, range(0, info.num_frames, 3))
    except MediaError as error:
        assert error.status in (400, 422)
    else:
        assert all(frame.shape == (info.height, info.width, 3) for frame in frames)
