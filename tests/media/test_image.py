"""Images of every format and mode against what transformers makes of them."""

import io

import numpy as np
import pytest
import simplejpeg
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image, ImageOps

from mmrt.media.errors import MediaError
from mmrt.media.image import decode_image
from mmrt.media.limits import MediaLimits
from mmrt.tests.settings import examples

LIMITS = MediaLimits()
JPEG_XL = b"\xff\x0a\xfa\x1f\x41\x91\x08\x06\x01\x00"


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


@pytest.mark.parametrize("mode", ["L", "LA", "1", "P", "RGBA", "I;16"])
def test_pixels_are_made_in_bands(image, mode, monkeypatch):
    """Of five rows each, the last one of two."""
    if "A" in mode:
        image = image.copy()
        image.putalpha(Image.linear_gradient("L").resize(image.size))
    data = encoded(
        image.convert("I").convert(mode) if mode == "I;16" else image.convert(mode), **({"transparency": 5} if mode == "P" else {})
    )
    whole = decoded(data)
    monkeypatch.setattr("mmrt.media.image._BAND_PIXELS", 5 * image.width)
    assert np.array_equal(decoded(data), whole)


def test_a_picture_larger_than_it_was_said_to_be(image):
    data = encoded(image.resize((1100, 1000)))
    limits = MediaLimits(said_pixels=1000)
    with pytest.raises(MediaError, match=r"the image of 1100x1000 is larger than its header says \(1000 pixels\)") as caught:
        decode_image(io.BytesIO(data), limits)
    assert caught.value.status == 422
    assert decode_image(io.BytesIO(encoded(image)), limits).shape == (37, 52, 3), "a little more is no harm"


@pytest.fixture
def at_once(monkeypatch) -> list[bytes]:
    """The JPEGs that simplejpeg has decoded."""
    taken: list[bytes] = []
    decode = simplejpeg.decode_jpeg

    def noted(data: bytes, colorspace: str) -> np.ndarray:
        pixels = decode(data, colorspace)
        taken.append(data)
        return pixels

    monkeypatch.setattr(simplejpeg, "decode_jpeg", noted)
    return taken


@pytest.mark.parametrize("options", [{}, {"progressive": True}, {"restart_marker_blocks": 2}], ids=str)
@pytest.mark.parametrize("subsampling", ["4:4:4", "4:2:2", "4:2:0", "4:1:1"])
@pytest.mark.parametrize("mode", ["RGB", "L"])
def test_jpegs_are_decoded_at_once_as_pillow_decodes_them(make_picture, at_once, mode, subsampling, options):
    for number, (height, width) in enumerate([(1, 1), (7, 3), (8, 16), (37, 52), (65, 129)]):
        picture = Image.fromarray(make_picture(number, height, width)).convert(mode)
        data = encoded(picture, "JPEG", quality=30 + 17 * number, subsampling=subsampling, **options)
        assert np.array_equal(decoded(data), expected(data))
        assert at_once == [data]
        at_once.clear()


def with_scans(jpeg: bytes, num_scans: int) -> bytes:
    """The JPEG with so many start-of-scan markers, most of them in a comment."""
    body = b"\xff\xda" * (num_scans - jpeg.count(b"\xff\xda"))
    return jpeg[:2] + b"\xff\xfe" + (2 + len(body)).to_bytes(2, "big") + body + jpeg[2:]


def test_odd_jpegs_stay_with_pillow(image, at_once):
    plain, progressive = encoded(image, "JPEG"), encoded(image, "JPEG", progressive=True)
    for data in (encoded(image.convert("CMYK"), "JPEG"), with_scans(progressive, 17)):
        assert np.array_equal(decoded(data), expected(data))
    assert at_once == []
    taken = [with_scans(progressive, 16), with_scans(plain, 200), plain + b"\0 what follows the end", plain + plain]
    taken += [encoded(image, "JPEG", keep_rgb=True), encoded(image.convert("L"), "JPEG")]
    for data in taken:
        assert np.array_equal(decoded(data), expected(data))
    assert at_once == taken


def test_scans_of_four_components_are_counted(image):
    with pytest.raises(MediaError, match="101 scans exceeds the limit of 100"):
        decoded(with_scans(encoded(image.convert("CMYK"), "JPEG"), 101))


def test_what_follows_the_end_of_a_jpeg_has_no_scans(image):
    progressive = encoded(image, "JPEG", progressive=True)
    data = progressive + np.random.default_rng(1).bytes(8 << 20)
    assert np.array_equal(decoded(data), decoded(progressive))


def test_an_end_in_a_comment_hides_no_scans(image):
    progressive = encoded(image, "JPEG", progressive=True)
    at = progressive.rindex(b"\xff\xda")
    data = progressive[:at] + b"\xff\xfe\0\x04\xff\xd9" + 100 * progressive[at:-2] + progressive[-2:]
    with pytest.raises(MediaError, match="scans exceeds the limit of 100"):
        decoded(data)


def test_a_second_scan_of_all_components_is_not_decoded(image):
    plain = encoded(image, "JPEG")
    scan = plain[plain.index(b"\xff\xda") : -2]
    with pytest.raises(MediaError, match="broken or cut off"):
        decoded(plain[:-2] + 1000 * scan + plain[-2:])


@given(data=st.data(), progressive=st.booleans(), mode=st.sampled_from(["RGB", "L"]))
@settings(max_examples=examples(200), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_broken_jpegs_come_to_what_pillow_alone_makes_of_them(image, data, progressive, mode):
    broken = bytearray(encoded(image.convert(mode), "JPEG", progressive=progressive))
    for position in data.draw(st.lists(st.integers(0, len(broken) - 1), max_size=4)):
        broken[position] = data.draw(st.integers(0, 255))
    broken = broken[: data.draw(st.integers(len(broken) // 2, 2 * len(broken)))]

    def outcome() -> tuple[int, str] | list:
        try:
            return decoded(bytes(broken)).tolist()
        except MediaError as error:
            return error.status, error.message

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("mmrt.media.image._decode_jpeg", lambda *_: None)
        alone = outcome()
    assert outcome() == alone


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
    for data, name in ((encoded(image, "TIFF"), "a TIFF image"), (encoded(image, "DDS"), "a DDS image"), (JPEG_XL, "a JPEG XL image")):
        with pytest.raises(MediaError, match=f"^this is {name}, which is not supported .supported: JPEG, PNG, WebP, GIF, BMP, AVIF"):
            decoded(data)
