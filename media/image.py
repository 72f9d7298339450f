"""Still images: compressed bytes to upright RGB pixels, as transformers and vLLM see them. Pillow decodes formats of an allow-list.

The pixel limit is checked on the header, before any pixel is decoded. EXIF orientation is applied (transformers' ``load_image``),
transparency is laid on white (transformers' ``convert_to_rgb``), of an animation the first frame counts. Grey images of 16 bits are
scaled to 8; Pillow's own conversion, and so transformers', clips them to white.
"""

import struct
import warnings
import zlib
from typing import IO, cast

import numpy as np
import numpy.typing as npt
from PIL import (
    BmpImagePlugin,
    GifImagePlugin,
    Image,
    JpegImagePlugin,
    PngImagePlugin,
    WebPImagePlugin,
)

from .errors import MediaError, MediaMemoryError
from .formats import refuse
from .limits import UNLIMITED, GuardedReader, MediaLimits, Reader, TimeBudget

_FORMATS = (
    JpegImagePlugin.JpegImageFile.format,  # also JPEGs of several pictures (MPO), of which the first counts
    PngImagePlugin.PngImageFile.format,
    WebPImagePlugin.WebPImageFile.format,
    GifImagePlugin.GifImageFile.format,
    BmpImagePlugin.BmpImageFile.format,
)
_ACCEPTED = "JPEG, PNG, WebP, GIF, BMP"
_BROKEN = (
    OSError,
    SyntaxError,
    ValueError,
    EOFError,
    IndexError,
    KeyError,
    TypeError,
    AttributeError,
    OverflowError,
    struct.error,
    zlib.error,
    Image.DecompressionBombError,
)
_ORIENTATION_TAG = 0x0112
_UPRIGHT = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}


def decode_image(reader: Reader, limits: MediaLimits, budget: TimeBudget = UNLIMITED) -> npt.NDArray[np.uint8]:
    """RGB [height, width, 3], upright.

    Raises: MediaError, 422 for what is not an image, is broken or cut off, 400 for pixels, aspect ratio or time over the limit.
    """
    guarded = GuardedReader(reader, budget)
    if guarded.num_bytes == 0:
        raise MediaError("the image is empty (0 bytes)")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Pillow warns of bombs below our limit and of odd metadata
        try:
            image = Image.open(cast(IO[bytes], guarded), formats=_FORMATS)
        except MediaError:
            raise
        except Image.DecompressionBombError:
            raise MediaError(f"the image exceeds the limit of {limits.max_pixels} pixels", 400) from None
        except _BROKEN:
            raise refuse(reader, "image", _ACCEPTED) from None
        with image:
            _check_size(*image.size, limits)
            if image.format in ("JPEG", "MPO"):
                _check_scans(guarded, limits)
            try:
                image.load()
                return np.array(_to_rgb(_turned_upright(image)))
            except MediaError:
                raise
            except MemoryError:
                raise MediaMemoryError from None
            except _BROKEN:
                raise MediaError("the image is broken or cut off: its pixels cannot be decoded") from None


def _turned_upright(image: Image.Image) -> Image.Image:
    try:
        orientation = image.getexif().get(_ORIENTATION_TAG, 1)
    except _BROKEN:
        return image
    method = _UPRIGHT.get(orientation) if isinstance(orientation, int) else None
    if method is None:
        return image
    turned = image.transpose(method)
    turned.info = image.info
    return turned


def _to_rgb(image: Image.Image) -> Image.Image:
    if image.mode == "I" or image.mode.startswith("I;16"):
        return Image.fromarray((np.asarray(image).astype(np.int64).clip(0, 65535) >> 8).astype(np.uint8)).convert("RGB")
    if "A" in image.getbands() or image.info.get("transparency") is not None:
        rgba = image.convert("RGBA")
        background = Image.new("RGBA", rgba.size, (255, 255, 255, 255))
        return Image.alpha_composite(background, rgba).convert("RGB")
    return image.convert("RGB")


def _check_scans(reader: GuardedReader, limits: MediaLimits) -> None:
    """Count start-of-scan markers. In compressed data a zero follows every 0xFF, so there are none by chance."""
    position = reader.tell()
    reader.seek(0)
    num_scans, tail = 0, b""
    while block := reader.read(1 << 20):
        num_scans += (tail + block).count(b"\xff\xda")
        tail = block[-1:]
    reader.seek(position)
    if num_scans > limits.max_jpeg_scans:
        raise MediaError(f"the image of {num_scans} scans exceeds the limit of {limits.max_jpeg_scans}", 400)


def _check_size(width: int, height: int, limits: MediaLimits) -> None:
    if width <= 0 or height <= 0:
        raise MediaError(f"the image has no pixels ({width}x{height})")
    if width * height > limits.max_pixels:
        raise MediaError(f"the image of {width}x{height} exceeds the limit of {limits.max_pixels} pixels", 400)
    if max(width, height) > limits.max_aspect * min(width, height):
        raise MediaError(f"the image of {width}x{height} exceeds the aspect ratio limit of {limits.max_aspect:g}:1", 400)
