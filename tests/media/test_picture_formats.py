"""Pictures of rarer formats against Pillow's own reading, their limits, and files that are broken or not what their names say."""

import io
import itertools
import struct

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image

from mmrt.media.errors import MediaError, OutOfTime
from mmrt.media.image import decode_image
from mmrt.media.limits import MediaLimits, TimeBudget
from mmrt.media.video_info import analyse
from mmrt.tests.media.test_image import decoded, encoded, expected
from mmrt.tests.settings import examples

FORMATS = {
    "AVIF": ("AVIF", "RGB", {}),
    "AVIF with alpha": ("AVIF", "RGBA", {"quality": 90}),
    "grey AVIF": ("AVIF", "L", {}),
    "AVIF, 4:4:4": ("AVIF", "RGB", {"subsampling": "4:4:4"}),
    "JPEG 2000": ("JPEG2000", "RGB", {}),
    "JPEG 2000 with alpha": ("JPEG2000", "RGBA", {}),
    "lossy JPEG 2000 in tiles": ("JPEG2000", "RGB", {"tile_size": (32, 32), "irreversible": True, "quality_layers": [10]}),
    "JPEG 2000, code stream alone": ("JPEG2000", "L", {"no_jp2": True}),
    "PPM": ("PPM", "RGB", {}),
    "PGM": ("PPM", "L", {}),
    "PBM": ("PPM", "1", {}),
    "TGA": ("TGA", "RGB", {}),
    "run-length TGA": ("TGA", "RGBA", {"compression": "tga_rle"}),
    "TGA with a palette": ("TGA", "P", {}),
    "grey TGA": ("TGA", "L", {}),
    "ICO": ("ICO", "RGBA", {"sizes": [(16, 16), (48, 34), (32, 32)]}),
    "ICO of bitmaps": ("ICO", "RGBA", {"sizes": [(16, 16), (32, 32)], "bitmap_format": "bmp"}),
    "ICO of a bitmap of 24 bits": ("ICO", "RGB", {"sizes": [(16, 16)], "bitmap_format": "bmp"}),
}


def file(picture: np.ndarray, name: str) -> bytes:
    format, mode, options = FORMATS[name]
    image = Image.fromarray(picture)
    if mode == "RGBA":
        image.putalpha(Image.linear_gradient("L").resize(image.size))
    return encoded(image.convert(mode), format, **options)


@pytest.fixture(scope="module")
def files(make_picture) -> dict[str, bytes]:
    return {name: file(make_picture(3, 37, 52), name) for name in FORMATS}


def refusal(data: bytes, limits: MediaLimits | None = None) -> tuple[int, str]:
    with pytest.raises(MediaError) as caught:
        decode_image(io.BytesIO(data), limits or MediaLimits())
    return caught.value.status, caught.value.message


@pytest.mark.parametrize("name", FORMATS)
def test_pixels_are_pillows(files, name):
    assert np.array_equal(decoded(files[name]), expected(files[name]))


def test_grey_of_16_bits(make_picture):
    grey = make_picture(1, 40, 50)[..., 0].astype(np.uint16) * 257
    for data in (encoded(Image.fromarray(grey), "JPEG2000"), b"P5\n50 40\n65535\n" + grey.astype(">u2").tobytes()):
        assert np.array_equal(decoded(data), np.repeat((grey >> 8).astype(np.uint8)[..., None], 3, axis=-1))


@pytest.mark.parametrize("orientation", range(1, 9))
def test_an_avif_is_turned_upright(make_picture, orientation):
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = encoded(Image.fromarray(make_picture(3, 37, 52)), "AVIF", exif=exif)
    assert np.array_equal(decoded(data), expected(data))
    assert decoded(data).shape == ((52, 37, 3) if orientation > 4 else (37, 52, 3))


@pytest.mark.parametrize("name", [name for name in FORMATS if "ICO" not in name])
def test_limits_hold_before_pixels_are_decoded(files, name):
    """A file that ends behind its head is refused for its size."""
    data = files[name] if "AVIF" in name else files[name][:200]
    assert refusal(data, MediaLimits(max_pixels=1000)) == (400, "the image of 52x37 exceeds the limit of 1000 pixels")


def icon(width: int, height: int, body: bytes, bits: int = 32) -> bytes:
    """An ICO whose directory says this size, of what it holds."""
    return struct.pack("<HHHBBBBHHII", 0, 1, 1, width, height, 0, 0, 1, bits, len(body), 22) + body


def test_an_icon_is_as_large_as_what_it_holds():
    """Not as its directory says, which Pillow believes until all is decoded."""
    large = icon(16, 16, encoded(Image.new("1", (5000, 5000))))
    assert refusal(large, MediaLimits(max_pixels=1 << 20)) == (400, "the image of 5000x5000 exceeds the limit of 1048576 pixels")
    bitmap = icon(16, 16, struct.pack("<IiiHHIIiiII", 40, 5000, 2 * 5000, 1, 32, 0, 0, 0, 0, 0, 0))
    assert refusal(bitmap, MediaLimits(max_pixels=1 << 20)) == (400, "the image of 5000x5000 exceeds the limit of 1048576 pixels")
    assert decoded(icon(16, 16, encoded(Image.new("RGB", (40, 30), "red")))).tolist() == [[[255, 0, 0]] * 40] * 30


@pytest.mark.parametrize("data", [b"\0\0\1\0\0\0", b"\0\0\1\0\5\0" + bytes(40), icon(16, 16, b"\x89PNG\r\n\x1a\n"), icon(16, 16, b"")])
def test_broken_icons(data):
    assert refusal(data) == (422, refusal(data)[1]) and "ICO image" in refusal(data)[1]


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("part", [0.3, 0.7])
def test_cut_off_files(files, name, part):
    assert refusal(files[name][: int(part * len(files[name]))])[0] == 422


@given(data=st.data(), name=st.sampled_from(list(FORMATS)))
@settings(max_examples=examples(300), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_flipped_bytes_raise_nothing_else(files, data, name):
    broken = bytearray(files[name])
    for position in data.draw(st.lists(st.integers(0, len(broken) - 1), min_size=1, max_size=12)):
        broken[position] = data.draw(st.integers(0, 255))
    try:
        pixels = decode_image(io.BytesIO(bytes(broken)), MediaLimits(max_pixels=1 << 20))
    except MediaError as error:
        assert error.status in (400, 422)
    else:
        assert pixels.shape[0] * pixels.shape[1] <= 1 << 20


def test_floating_point_maps_are_refused():
    assert refusal(b"Pf\n4 4\n-1.0\n" + bytes(64))[1].startswith("PFM images are not supported (supported: JPEG")


@pytest.mark.parametrize("brands", [b"heic\0\0\0\0mif1heic", b"mif1\0\0\0\0mif1heic", b"hevc\0\0\0\0msf1hevc"])
def test_heic_is_refused_by_name(make_video, brands):
    """As an image and as a video, also where FFmpeg finds videos in it."""
    film = make_video("libx265", options={"x265-params": "log-level=none"})
    data = struct.pack(">I", 24) + b"ftyp" + brands + film[int.from_bytes(film[:4], "big") :]
    assert refusal(data)[1].startswith("this is a HEIC image, which is not supported (supported: JPEG, PNG")
    with pytest.raises(MediaError, match="^this is a HEIC image, which is not supported .supported: MP4") as caught:
        analyse(io.BytesIO(data), MediaLimits())
    assert caught.value.status == 422


def test_an_avif_still_is_no_video(files):
    for name in ("AVIF", "AVIF with alpha"):
        with pytest.raises(MediaError, match="this is an AVIF image, not a video: send it as image_url") as caught:
            analyse(io.BytesIO(files[name]), MediaLimits())
        assert caught.value.status == 422


def test_a_jpeg_2000_that_takes_too_long_says_so() -> None:
    """Its decoder reads from C, which turns our exceptions into its own."""
    out = io.BytesIO()
    Image.effect_noise((1200, 1200), 90).convert("RGB").save(out, "JPEG2000", tile_size=(64, 64))

    def decode_in(limit_s: float) -> int:
        """How often the clock was looked at, a second apart."""
        clock = itertools.count()
        budget = TimeBudget(limit_s, lambda: float(next(clock)))
        with budget.running():
            decode_image(io.BytesIO(out.getvalue()), MediaLimits(), budget)
        return next(clock)

    num_looks = decode_in(1e9)
    with pytest.raises(OutOfTime):
        decode_in(num_looks - 4)
