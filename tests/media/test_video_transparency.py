"""Transparent pixels of videos and animations become white, as those of pictures do."""

import io
import struct
from collections.abc import Sequence
from typing import Any

import av
import numpy as np
import pytest
from PIL import Image

from mmrt.media.errors import MediaError
from mmrt.media.limits import MediaLimits, TimeBudget
from mmrt.media.video_info import analyse
from mmrt.tests.media.conftest import Frames, assert_frames, decode_on, picture

LIMITS = MediaLimits()
HEIGHT, WIDTH, NUM_FRAMES = 48, 64, 20
LIBVPX = {"auto-alt-ref": "0", "deadline": "good", "cpu-used": "8", "crf": "4", "b": "8M"}

CLIPS: dict[str, tuple[str, str, str, dict[str, str]]] = {
    "ProRes 4444": ("prores_ks", "mov", "yuva444p10le", {"profile": "4444"}),
    "FFV1, BGRA": ("ffv1", "matroska", "bgra", {}),
    "FFV1, YUVA": ("ffv1", "matroska", "yuva420p", {}),
    "VP8": ("libvpx", "webm", "yuva420p", LIBVPX),
    "VP9": ("libvpx-vp9", "webm", "yuva420p", LIBVPX),
    "VP9 in Matroska": ("libvpx-vp9", "matroska", "yuva420p", LIBVPX),
}


def see_through(number: int) -> np.ndarray:
    """RGBA: a picture, of which a bar that moves is clear and a row half so. Its edges lie where chroma is not shared."""
    alpha = np.full((HEIGHT, WIDTH), 255, np.uint8)
    alpha[16:32] = 128
    alpha[:, 2 * number : 2 * number + 16] = 0
    smooth = np.asarray(Image.fromarray(picture(number, HEIGHT, WIDTH)).resize((8, 6)).resize((WIDTH, HEIGHT)))
    return np.dstack([smooth, alpha])


def on_white(rgba: np.ndarray) -> np.ndarray:
    alpha = rgba[..., 3:] / 255
    return np.round(rgba[..., :3] * alpha + 255 * (1 - alpha)).astype(int)


def clip(name: str) -> bytes:
    codec, container, pix_fmt, options = CLIPS[name]
    buffer = io.BytesIO()
    with av.open(buffer, "w", format=container) as output:
        stream: Any = output.add_stream(codec, rate=10, options=options)
        stream.width, stream.height, stream.pix_fmt = WIDTH, HEIGHT, pix_fmt
        stream.codec_context.gop_size, stream.codec_context.thread_count = 6, 1
        for number in range(NUM_FRAMES):
            frame = av.VideoFrame.from_ndarray(see_through(number), format="rgba").reformat(format=pix_fmt)
            frame.pts = number
            output.mux(stream.encode(frame))
        output.mux(stream.encode(None))
    return buffer.getvalue()


@pytest.mark.parametrize("name", CLIPS)
def test_a_video_is_laid_on_white(name):
    data = clip(name)
    frames = decode_on(1, data, range(NUM_FRAMES))
    for number, frame in enumerate(frames):
        rgba = see_through(number)
        assert np.abs(frame - on_white(rgba)).mean() < 3, number
        clear = rgba[..., 3] == 0
        clear[:, 1:-1] &= clear[:, 2:] & clear[:, :-2]  # edges are blurred
        assert frame[clear].min() > 245, number
    for wanted in (range(0, NUM_FRAMES, 7), [NUM_FRAMES - 1]):
        for num_engines in (1, 3):
            assert_frames(decode_on(num_engines, data, wanted), [frames[number] for number in wanted])


def test_key_frames_of_colour_need_not_be_those_of_transparency():
    """Encoders choose both by themselves: decoding begins with the file."""
    data = clip("VP8")
    with av.open(io.BytesIO(data)) as container:
        assert sum(packet.is_keyframe for packet in container.demux(video=0) if packet.size) > 1
    index = analyse(io.BytesIO(data), LIMITS).index
    assert index is not None and index.keys.tolist() == [0] and not index.is_disposable.any()


# GIF


def gif(
    frames: Sequence[tuple[np.ndarray, tuple[int, int], int, int | None]],
    palette: Sequence[tuple[int, int, int]],
    size: tuple[int, int] = (8, 6),
    behind: bytes = b"",
    background: int = 0,
) -> bytes:
    """frames: (indices, (left, top), disposal, transparent index). Pillow packs the pixels of each."""
    bits = max(1, (len(palette) - 1).bit_length())
    colors = b"".join(bytes(color) for color in palette).ljust(3 << bits, b"\0")
    data = b"GIF89a" + struct.pack("<HHBBB", *size, 0x80 | bits - 1, background, 0) + colors
    for indices, (left, top), disposal, transparent in frames:
        height, width = indices.shape
        alone = io.BytesIO()
        Image.fromarray(indices.astype(np.uint8)).save(alone, "GIF", optimize=False)
        packed = alone.getvalue()
        begin = packed.index(b"\x2c" + struct.pack("<HHHH", 0, 0, width, height)) + 10
        pixels = packed[begin + (3 << (packed[begin - 1] & 7) + 1 if packed[begin - 1] & 0x80 else 0) : -1]
        flags = disposal << 2 | (transparent is not None)
        data += b"\x21\xf9\x04" + struct.pack("<BHBB", flags, 10, transparent or 0, 0)
        data += b"\x2c" + struct.pack("<HHHHB", left, top, width, height, 0) + pixels
    return data + behind + b"\x3b"


PALETTE = [(200, 30, 30), (30, 200, 30), (30, 30, 200), (90, 90, 90)]


def full(index: int, height: int = 6, width: int = 8) -> np.ndarray:
    return np.full((height, width), index)


def decoded(data: bytes) -> Frames:
    return decode_on(1, data, range(analyse(io.BytesIO(data), LIMITS, TimeBudget(60)).num_frames))


@pytest.mark.parametrize("background", [0, 3])
def test_what_a_gif_takes_away_is_white(background):
    """As in browsers, which show a GIF on the page that it is on."""
    frames = decoded(gif([(full(1), (0, 0), 1, None), (full(2, 3, 4), (2, 1), 2, None), (full(3, 1, 1), (0, 0), 1, None)], PALETTE))
    expected = np.zeros((3, 6, 8, 3), np.uint8)
    expected[:] = PALETTE[1]
    expected[1, 1:4, 2:6] = PALETTE[2]
    expected[2, 1:4, 2:6] = 255
    expected[2, 0, 0] = PALETTE[3]
    assert_frames(frames, list(expected))


def test_what_a_gif_restores_and_leaves_clear():
    clear = full(0)
    clear[2:4] = 2
    frames = decoded(gif([(clear, (0, 0), 1, 0), (full(1, 2, 2), (0, 0), 3, None), (full(0, 2, 2), (4, 3), 1, 0)], PALETTE))
    first = np.full((6, 8, 3), 255, np.uint8)
    first[2:4] = PALETTE[2]
    second = first.copy()
    second[:2, :2] = PALETTE[1]
    assert_frames(frames, [first, second, first])


def test_a_frame_smaller_than_the_screen_and_one_beyond_it():
    (small, large) = decoded(gif([(full(1, 2, 2), (1, 1), 1, None), (full(2, 10, 10), (4, 3), 1, None)], PALETTE))
    expected = np.full((6, 8, 3), 255, np.uint8)
    expected[1:3, 1:3] = PALETTE[1]
    assert np.array_equal(small, expected)
    expected[3:, 4:] = PALETTE[2]
    assert np.array_equal(large, expected)


@pytest.mark.parametrize(
    "behind", [b"\x21\xfe\x05hello\x00", b"\x21\xfe\x01a\x00\x21\xf9\x04\x00\x00\x00\x00\x00", b"\x00\x00", b"\x2c\x00"]
)
def test_what_comes_behind_the_last_picture_is_no_frame(behind):
    assert len(decoded(gif([(full(1), (0, 0), 1, None), (full(2), (0, 0), 1, None)], PALETTE, behind=behind))) == 2


@pytest.mark.parametrize("interlace", [0, 1])
def test_a_gif_of_256_colours_is_that_of_pillow(interlace):
    pictures = [Image.fromarray(picture(number, 40, 56)).quantize(256) for number in range(4)]
    buffer = io.BytesIO()
    pictures[0].save(buffer, "GIF", save_all=True, append_images=pictures[1:], duration=50, interlace=interlace)
    assert_frames(decoded(buffer.getvalue()), [np.asarray(one.convert("RGB")) for one in pictures])


def test_a_broken_picture_of_a_gif_is_left_out():
    data = gif([(full(number), (0, 0), 1, None) for number in (1, 2, 3)], PALETTE)
    at = data.index(b"\x2c", data.index(b"\x2c", data.index(b"\x2c") + 1) + 1) + 11
    second = data.index(b"\x2c", data.index(b"\x2c") + 1) + 12
    broken = data[:second] + b"\xff" * 3 + data[second + 3 :]
    frames = decoded(broken)
    assert at > second and len(frames) == 3
    assert_frames([frames[0], frames[2]], [np.full((6, 8, 3), PALETTE[index], np.uint8) for index in (1, 3)])


def test_a_gif_that_is_cut_off_or_too_much_is_refused():
    data = gif([(full(1), (0, 0), 1, None)], PALETTE)
    for length in (6, 20, len(data) - 6):
        with pytest.raises(MediaError) as caught:
            analyse(io.BytesIO(data[:length]), LIMITS, TimeBudget(60))
        assert caught.value.status == 422
    many = gif([(full(1), (0, 0), 1, None)] * 5, PALETTE)
    with pytest.raises(MediaError, match="more than 4 frames"):
        analyse(io.BytesIO(many), MediaLimits(max_animation_frames=4), TimeBudget(60))
    large = bytearray(data)
    at = data.index(b"\x2c")
    large[at + 5 : at + 9] = b"\xff" * 4
    with pytest.raises(MediaError, match="65535x65535"):
        analyse(io.BytesIO(bytes(large)), LIMITS, TimeBudget(60))
