"""The sizes of pictures by their headers, and what decoding them is thought to cost."""

import io

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from PIL import Image

from mmrt.media.header import UNKNOWN_PIXELS, decoding_work, num_pixels

SIZES = st.integers(1, 300)
FORMATS = {
    "PNG": {},
    "JPEG": {},
    "progressive": {"format": "JPEG", "progressive": True},
    "GIF": {},
    "BMP": {},
    "WEBP": {},
    "lossless": {"format": "WEBP", "lossless": True},
    "WebP with EXIF": {"format": "WEBP", "exif": b"Exif\0\0II*\0"},
    "AVIF": {},
    "JPEG2000": {},
    "codestream": {"format": "JPEG2000", "no_jp2": True},
    "PPM": {},
}
STARTS = [
    b"\x89PNG\r\n\x1a\n",
    b"\xff\xd8\xff",
    b"GIF89a",
    b"BM",
    *(b"RIFF\0\0\0\0WEBP" + kind for kind in (b"VP8 ", b"VP8L", b"VP8X")),
]


def encoded(width: int, height: int, how: str) -> bytes:
    out = io.BytesIO()
    Image.new("RGB", (width, height), (9, 99, 200)).save(out, **({"format": how} | FORMATS[how]))
    return out.getvalue()


@pytest.mark.many
@pytest.mark.parametrize("how", FORMATS)
@given(width=SIZES, height=SIZES)
def test_sizes(how: str, width: int, height: int) -> None:
    assert num_pixels(encoded(width, height, how)) == width * height


def test_comments_in_a_portable_pixmap() -> None:
    assert num_pixels(b"P6 # a comment 9 9\n\n#another\n 5\t7 255 " + bytes(105)) == 35
    assert num_pixels(b"P6" + 60_000 * b" " + b"x") == UNKNOWN_PIXELS


def test_an_old_bitmap() -> None:
    assert num_pixels(b"BM" + bytes(12) + (12).to_bytes(4, "little") + b"\x05\0\x07\0" + bytes(40)) == 35


def test_a_bitmap_from_top_to_bottom() -> None:
    size = (5).to_bytes(4, "little") + (-7).to_bytes(4, "little", signed=True)
    assert num_pixels(b"BM" + bytes(12) + (40).to_bytes(4, "little") + size + bytes(40)) == 35


def test_a_jpeg_behind_much_else() -> None:
    data = encoded(20, 30, "JPEG")
    filler = b"\xff\xe1\xff\xff" + b"\xff\xc0\0\x08" * 16383 + b"\0"
    assert num_pixels(data[:2] + 20 * filler + b"\xff\xff" + data[2:]) == 600
    assert num_pixels(data[:2] + 5000 * b"\xff\xe1\0\x02" + data[2:]) == UNKNOWN_PIXELS, "the walk is of bounded length"


@given(st.sampled_from([b"", *STARTS]), st.binary(max_size=200))
@example(b"\x89PNG\r\n\x1a\n", b"\0\0\0\x0dIHDR" + b"\xff" * 8)
def test_anything(start: bytes, rest: bytes) -> None:
    assert num_pixels(start + rest) >= 0
    assert num_pixels(b"\0\0\0\x20ftypavif" + rest) >= 0


def test_scans_are_work() -> None:
    plain, progressive = (encoded(100, 100, how) for how in ("JPEG", "progressive"))
    assert decoding_work(plain) == 10_000 < decoding_work(progressive)
    assert decoding_work(progressive[:-2] + 96 * b"\xff\xda") >= 250_000
    assert decoding_work(encoded(10, 10, "PNG") + 40 * b"\xff\xda") == 100


def test_jpeg_2000_costs_more_than_its_pixels() -> None:
    assert decoding_work(encoded(20, 30, "JPEG2000")) == 16 * 600
    liar = b"\xff\x4f\xff\x51" + bytes(4) + b"\xff" * 8 + bytes(20)
    assert num_pixels(liar) == (2**32 - 1) ** 2 and decoding_work(liar) < 2**63, "a message holds it"
