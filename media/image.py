"""Still images: compressed bytes to upright RGB pixels, as transformers and vLLM see them. Pillow decodes formats of an allow-list.

The pixel limit is checked on the header, before any pixel is decoded. Sound grey and colour JPEGs are then decoded by simplejpeg, which
hands all bytes to libjpeg-turbo at once: bit for bit what Pillow gives with its blocks and copies, in about half the time. None is
decoded to a smaller size: libjpeg's scaled transform gives other pixels than a whole picture that is resized, as transformers does it.

EXIF orientation is applied (transformers' ``load_image``), transparency is laid on white (transformers' ``convert_to_rgb``), and of an
animation the first frame is taken. Grey images of 16 bits are scaled to 8; Pillow's own conversion, and so transformers', clips them to
white.
"""

import struct
import warnings
import zlib
from collections.abc import Callable
from typing import IO, cast

import numpy as np
import numpy.typing as npt
import simplejpeg
from PIL import (
    AvifImagePlugin,
    BmpImagePlugin,
    GifImagePlugin,
    IcoImagePlugin,
    Image,
    Jpeg2KImagePlugin,
    JpegImagePlugin,
    PngImagePlugin,
    PpmImagePlugin,
    TgaImagePlugin,
    WebPImagePlugin,
)

from .errors import MediaError, MediaMemoryError
from .formats import ICON, UNKNOWN, describe, refuse
from .jpeg import check_scans, end_of_picture, num_scans
from .limits import UNLIMITED, GuardedReader, MediaLimits, Reader, TimeBudget

Pixels = npt.NDArray[np.uint8]
"""RGB [height, width, 3]."""

JpegDecoder = Callable[[bytes, int, int], Pixels | None]
"""(a file, width, height) -> its pixels, not turned upright; None for a file that this decoder does not take, or of another size."""

_FORMATS = (
    JpegImagePlugin.JpegImageFile.format,  # also JPEGs of several pictures (MPO): the first is taken
    PngImagePlugin.PngImageFile.format,
    WebPImagePlugin.WebPImageFile.format,
    GifImagePlugin.GifImageFile.format,
    BmpImagePlugin.BmpImageFile.format,
    AvifImagePlugin.AvifImageFile.format,
    Jpeg2KImagePlugin.Jpeg2KImageFile.format,
    PpmImagePlugin.PpmImageFile.format,
)
_UNSIGNED_FORMATS = (TgaImagePlugin.TgaImageFile.format,)  # files without a signature
_ACCEPTED = "JPEG, PNG, WebP, GIF, BMP, AVIF, JPEG 2000, PPM, TGA, ICO"
AvifImagePlugin.DEFAULT_MAX_THREADS = 1  # other items have the other cores
BROKEN_IMAGE = (
    OSError,
    SyntaxError,
    ValueError,
    EOFError,
    IndexError,
    KeyError,
    TypeError,
    AttributeError,
    ArithmeticError,
    RuntimeError,  # libavif's
    struct.error,
    zlib.error,
    Image.DecompressionBombError,
)
"""What Pillow raises for files that are broken."""

_FREE_PIXELS = 1 << 20  # that a picture may have beyond what its header says, as GIFs have whose frames reach out of their screen
_BAND_PIXELS = 1 << 20
_MAX_SCANS_AT_ONCE = 16  # encoders make about ten; Pillow looks at the clock between blocks, simplejpeg never
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


def decode_image(
    reader: Reader, limits: MediaLimits, budget: TimeBudget = UNLIMITED, jpeg_decoder: JpegDecoder | None = None
) -> Pixels:
    """RGB [height, width, 3], upright. ``jpeg_decoder`` is tried on JPEGs before simplejpeg is (see ``nvjpg``).

    Raises: MediaError, 422 for a file that is not an image, is broken or cut off, 400 for pixels, aspect ratio or time over the limit.
    """
    guarded = GuardedReader(reader, budget)
    if guarded.num_bytes == 0:
        raise MediaError("the image is empty (0 bytes)")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Pillow warns of bombs below our limit and of odd metadata
        try:
            image = _opened(guarded, limits)
        except MediaError:
            raise
        except Image.DecompressionBombError:
            raise MediaError(f"the image exceeds the limit of {limits.max_pixels} pixels", 400) from None
        except MemoryError:
            raise MediaMemoryError from None
        except BROKEN_IMAGE:
            raise refuse(reader, "image", _ACCEPTED) from None
        with image:
            _check_size(*image.size, limits)
            # Pillow's errors count as the file's, ours never do: both are of the same types.
            pixels = _decode_jpeg(guarded, image, limits, budget, jpeg_decoder) if image.format in ("JPEG", "MPO") else None
            if pixels is None:
                pixels = _decode_by_pillow(image)
            return _turned_upright(pixels, image)


def _decode_by_pillow(image: Image.Image) -> Pixels:
    try:
        image.load()
        return _pixels(image)
    except MediaError:
        raise
    except SystemError as error:  # the JPEG 2000 decoder reads from C, which does not look for the reader's exceptions
        if isinstance(error.__cause__, MediaError):
            raise error.__cause__ from None
        if isinstance(error.__cause__, MemoryError):
            raise MediaMemoryError from None
        raise
    except MemoryError:
        raise MediaMemoryError from None
    except BROKEN_IMAGE:
        raise MediaError("the image is broken or cut off: its pixels cannot be decoded") from None


def _opened(reader: GuardedReader, limits: MediaLimits) -> Image.Image:
    """Open the image; only an icon's pixels are decoded yet. Raises: MediaError (400), and what Pillow does."""
    found = describe(reader)
    if found == ICON:
        return _largest_of_icon(reader, limits)
    formats = (*_FORMATS, *_UNSIGNED_FORMATS) if found == UNKNOWN else _FORMATS
    image = Image.open(cast(IO[bytes], reader), formats=formats)
    if image.mode == "F":
        raise MediaError(f"PFM images are not supported (supported: {_ACCEPTED})")
    return image


def _largest_of_icon(reader: GuardedReader, limits: MediaLimits) -> Image.Image:
    """Pillow takes the directory's word for the size, and decodes what is there: PNGs, and bitmaps that say twice their height."""
    icon = IcoImagePlugin.IcoFile(cast(IO[bytes], reader))
    reader.seek(icon.entry[0].offset)
    head = reader.read(24)
    if head[:4] == b"\x89PNG":
        width, height = struct.unpack(">II", head[16:24])
    else:
        width, height = (abs(side) for side in struct.unpack("<ii", head[4:12]))
        height //= 2
    _check_size(width, height, limits)
    return icon.frame(0)


def _decode_jpeg(
    reader: GuardedReader, image: Image.Image, limits: MediaLimits, budget: TimeBudget, first: JpegDecoder | None
) -> Pixels | None:
    """The pixels of an open JPEG; None for what Pillow is to decode or refuse: CMYK, broken files, a size that the two read otherwise.

    Raises: MediaError (400) for too many scans.
    """
    position = reader.tell()
    reader.seek(0)
    data = reader.read()
    reader.seek(position)
    scans = 1 if _has_one_scan(image, data[:position]) else num_scans(data)
    if scans > _MAX_SCANS_AT_ONCE:
        scans = num_scans(data[: end_of_picture(data, position, budget)])
    check_scans(scans, "the image", limits)
    if scans > _MAX_SCANS_AT_ONCE or image.mode not in ("RGB", "L"):
        return None
    pixels = first(data, *image.size) if first is not None else None
    return pixels if pixels is not None else _simplejpeg(data, *image.size)


def _simplejpeg(data: bytes, width: int, height: int) -> Pixels | None:
    try:
        if simplejpeg.decode_jpeg_header(data)[:2] != (height, width):
            return None
        pixels: Pixels = simplejpeg.decode_jpeg(data, "RGB")
    except ValueError:
        return None
    return pixels


def _has_one_scan(image: Image.Image, head: bytes) -> bool:
    """True if the first scan, whose header ends ``head``, has all components in full: libjpeg then takes no second one.

    Of one component or three: their headers cannot be taken for the end of a longer one's, which four components' could.
    """
    if image.mode not in ("RGB", "L"):
        return False
    num_components = len(image.getbands())
    header = b"\xff\xda" + struct.pack(">HB", 6 + 2 * num_components, num_components)
    return "progressive" not in image.info and head[: -3 - 2 * num_components].endswith(header)


def _turned_upright(pixels: Pixels, image: Image.Image) -> Pixels:
    """``pixels`` as the image's EXIF says."""
    try:
        orientation = image.getexif().get(_ORIENTATION_TAG, 1)
    except BROKEN_IMAGE:
        return pixels
    method = _UPRIGHT.get(orientation) if isinstance(orientation, int) else None
    return pixels if method is None else np.array(Image.fromarray(pixels).transpose(method))


def _pixels(image: Image.Image) -> Pixels:
    """The pixels of a loaded image, on white. Made band by band: whole copies of a large one would cost more than decoding it."""
    width, height = image.size
    pixels: Pixels = np.empty((height, width, 3), np.uint8)
    step = max(1, _BAND_PIXELS // width)
    for top in range(0, height, step):
        bottom = min(height, top + step)
        pixels[top:bottom] = np.asarray(on_white(image.crop((0, top, width, bottom))))
    return pixels


def on_white(image: Image.Image) -> Image.Image:
    """The image in mode RGB, with white where it is transparent."""
    if image.mode == "I" or image.mode.startswith("I;16"):
        samples = np.asarray(image).astype(np.int64).clip(0, 65535)
        grey = (samples >> 8).astype(np.uint8)
        grey[samples == image.info.get("transparency", -1)] = 255
        return Image.fromarray(grey).convert("RGB")
    if "A" in image.getbands() or image.info.get("transparency") is not None:
        rgba = image.convert("RGBA")
        background = Image.new("RGBA", rgba.size, (255, 255, 255, 255))
        return Image.alpha_composite(background, rgba).convert("RGB")
    return image.convert("RGB")


def _check_size(width: int, height: int, limits: MediaLimits) -> None:
    if width <= 0 or height <= 0:
        raise MediaError(f"the image has no pixels ({width}x{height})")
    if width * height > limits.max_pixels:
        raise MediaError(f"the image of {width}x{height} exceeds the limit of {limits.max_pixels} pixels", 400)
    if 0 <= limits.said_pixels < width * height - _FREE_PIXELS:
        raise MediaError(f"the image of {width}x{height} is larger than its header says ({limits.said_pixels} pixels)")
    if max(width, height) > limits.max_aspect * min(width, height):
        raise MediaError(f"the image of {width}x{height} exceeds the aspect ratio limit of {limits.max_aspect:g}:1", 400)
