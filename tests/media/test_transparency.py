"""Transparent pictures, and those of 16 bits, against transformers' Qwen2-VL processor on what Pillow opens: both families' own."""

import io
import struct
import zlib

import numpy as np
import pytest
from PIL import Image

from mmrt.media.image import decode_image
from mmrt.media.limits import MediaLimits
from mmrt.media.preprocess import image_rows
from mmrt.models.media_config import VisionRules
from mmrt.tests.media.test_preprocess import normalised

HEIGHT, WIDTH = 56, 84
GREY, RGB, GREY_ALPHA, RGB_ALPHA = 0, 2, 4, 6  # colour types of PNG


def saved(image: Image.Image, format: str = "PNG", **options: object) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, format, **options)
    return buffer.getvalue()


def png_16(color_type: int, samples: np.ndarray, transparent: tuple[int, ...] = ()) -> bytes:
    """samples uint16 [height, width, channels]; ``transparent``: the colour of a tRNS chunk. Pillow writes no such files."""
    height, width, _ = samples.shape
    rows = b"".join(b"\0" + row.astype(">u2").tobytes() for row in samples)
    chunks = [(b"IHDR", struct.pack(">IIBBBBB", width, height, 16, color_type, 0, 0, 0))]
    chunks += [(b"tRNS", struct.pack(f">{len(transparent)}H", *transparent))] if transparent else []
    chunks += [(b"IDAT", zlib.compress(rows)), (b"IEND", b"")]
    whole = [struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body)) for name, body in chunks]
    return b"\x89PNG\r\n\x1a\n" + b"".join(whole)


def pictures(picture: np.ndarray) -> dict[str, bytes]:
    """A file of each way to be transparent."""
    image = Image.fromarray(picture)
    grey, alpha = image.convert("L"), Image.linear_gradient("L").resize(image.size)
    rgba, grey_alpha = image.copy(), image.convert("LA")
    rgba.putalpha(alpha)
    grey_alpha.putalpha(alpha)
    wide = picture.astype(np.uint16) * 257
    clear = np.asarray(alpha).astype(np.uint16)[..., None] * 257
    corner = tuple(int(value) for value in wide[0, 0])
    return {
        "RGBA": saved(rgba),
        "RGBA in WebP": saved(rgba, "WEBP", lossless=True),
        "LA": saved(grey_alpha),
        "palette, one colour": saved(image.quantize(64), transparency=5),
        "palette, by degrees": saved(image.quantize(64), transparency=bytes(range(0, 256, 4))),
        "palette in GIF": saved(image.quantize(64), "GIF", transparency=3),
        "RGB with tRNS": saved(image, transparency=image.getpixel((0, 0))),
        "grey with tRNS": saved(grey, transparency=grey.getpixel((0, 0))),
        "1 bit with tRNS": saved(image.convert("1"), transparency=0),
        "RGB of 16 bits": png_16(RGB, wide),
        "RGB of 16 bits with tRNS": png_16(RGB, wide, corner),
        "RGBA of 16 bits": png_16(RGB_ALPHA, np.concatenate([wide, clear], axis=-1)),
        "LA of 16 bits": png_16(GREY_ALPHA, np.concatenate([wide[..., :1], clear], axis=-1)),
    }


NAMES = list(pictures(np.zeros((HEIGHT, WIDTH, 3), np.uint8)))


@pytest.fixture(scope="module")
def files(make_picture) -> dict[str, bytes]:
    return pictures(make_picture(3, HEIGHT, WIDTH))


@pytest.fixture(scope="module")
def reference(files, processor_reference) -> dict[str, np.ndarray]:
    return processor_reference({f"image {name}": np.frombuffer(data, np.uint8) for name, data in files.items()})


@pytest.mark.parametrize("name", NAMES)
def test_it_is_laid_on_white_as_the_models_processor_does(files, reference, name):
    rules = VisionRules()
    _, h, w = reference[f"image {name}_grid"]
    rows = image_rows(decode_image(io.BytesIO(files[name]), MediaLimits()), rules.patch_size * h, rules.patch_size * w, rules)
    assert np.array_equal(normalised(rows), reference[f"image {name}"])


@pytest.mark.parametrize("transparent", [(), (13 * 70,)])
def test_grey_of_16_bits_is_scaled_where_the_processor_clips_it_to_white(transparent):
    samples = np.arange(HEIGHT * WIDTH, dtype=np.uint16).reshape(HEIGHT, WIDTH, 1) * 13
    data = png_16(GREY, samples, transparent)
    pixels = decode_image(io.BytesIO(data), MediaLimits())
    grey = np.where(np.isin(samples, transparent), 255, samples >> 8)
    assert np.array_equal(pixels, np.repeat(grey, 3, axis=-1))
    assert np.asarray(Image.open(io.BytesIO(data)).convert("RGB")).min(axis=-1)[10:].min() == 255
