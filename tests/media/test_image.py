"""Images of every format and mode against what transformers makes of them."""

import io

import numpy as np
import pytest
from PIL import Image, ImageOps

from mmrt.media.errors import MediaError
from mmrt.media.image import decode_image
from mmrt.media.limits import MediaLimits

LIMITS = MediaLimits()


def encoded(image: Image.Image, format: str = "PNG", **options) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, format, **options)
    return buffer.getvalue()


def decoded(data: bytes) -> np.ndarray:
    pixels = decode_image(io.BytesIO(data), LIMITS)
    assert pixels.dtype == np.uint8 and pixels.flags.writeable and pixels.flags.c_contiguous
    return pixels


def expected(data: bytes) -> np.ndarray:
    """transformers: exif_transpose as ``load_image``, then ``convert_to_rgb`` as the image processor."""
    image = ImageOps.exif_transpose(Image.open(io.BytesIO(data)))
    if "A" in image.getbands() or image.info.get("transparency") is not None:
        rgba = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", rgba.size, (255, 255, 255, 255)), rgba)
    return np.asarray(image.convert("RGB"))


@pytest.fixture
def image(make_picture) -> Image.Image:
    return Image.fromarray(make_picture(3, 37, 52))


@pytest.mark.parametrize("format", ["PNG", "JPEG", "WEBP", "GIF", "BMP"])
def test_formats(image, format):
    data = encoded(image, format)
    assert np.array_equal(decoded(data), expected(data))


@pytest.mark.parametrize("mode", ["L", "LA", "1", "P", "RGBA"])
def test_png_modes(image, mode):
    if "A" in mode:
        image = image.copy()
        image.putalpha(Image.linear_gradient("L").resize(image.size))
    data = encoded(image.convert(mode))
    assert np.array_equal(decoded(data), expected(data))


def test_a_transparent_palette_is_laid_on_white(image):
    data = encoded(image.convert("P"), transparency=5)
    assert np.array_equal(decoded(data), expected(data))


def test_cmyk_jpeg(image):
    data = encoded(image.convert("CMYK"), "JPEG")
    assert np.array_equal(decoded(data), expected(data))


def test_grey_of_16_bits_is_scaled():
    grey = np.arange(64 * 64, dtype=np.uint16).reshape(64, 64) * 16
    pixels = decoded(encoded(Image.fromarray(grey)))
    assert np.array_equal(pixels, np.repeat((grey >> 8).astype(np.uint8)[..., None], 3, axis=-1))


@pytest.mark.parametrize("orientation", range(10))
@pytest.mark.parametrize("format", ["JPEG", "PNG", "WEBP"])
def test_exif_orientation(image, format, orientation):
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = encoded(image, format, exif=exif)
    assert np.array_equal(decoded(data), expected(data))


def test_broken_exif_is_ignored(image):
    data = encoded(image, "JPEG", exif=b"Exif\0\0MM\0*\0\0\0\x08\0\xff\x01\x12")
    assert decoded(data).shape == (37, 52, 3)


@pytest.mark.parametrize("format", ["GIF", "WEBP", "PNG"])
def test_the_first_frame_of_an_animation_counts(make_picture, format):
    frames = [Image.fromarray(make_picture(i, 20, 30)) for i in range(3)]
    data = encoded(frames[0], format, save_all=True, append_images=frames[1:], duration=100, loop=0)
    assert np.array_equal(decoded(data), expected(data))


def test_the_first_picture_of_a_multi_picture_jpeg_counts(make_picture):
    frames = [Image.fromarray(make_picture(i, 20, 30)) for i in range(2)]
    data = encoded(frames[0], "MPO", save_all=True, append_images=frames[1:])
    assert np.array_equal(decoded(data), expected(data))


def test_one_pixel_and_one_row():
    assert decoded(encoded(Image.new("RGB", (1, 1), (1, 2, 3)))).tolist() == [[[1, 2, 3]]]
    assert decoded(encoded(Image.new("L", (200, 1), 9))).shape == (1, 200, 3)
    with pytest.raises(MediaError, match="201x1 exceeds the aspect ratio limit of 200:1") as caught:
        decoded(encoded(Image.new("L", (201, 1), 9)))
    assert caught.value.status == 400


def test_other_formats_are_refused_by_name(image):
    with pytest.raises(MediaError, match="this looks like a TIFF image, but it is broken or not supported"):
        decoded(encoded(image, "TIFF"))
