"""JPEGs through nvImageCodec: its own processor backend where it is installed, a toy of the same calls elsewhere.

It shows what is asked of the library and what is done with its answers, not what the units of a GPU put out.
"""

import io
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import simplejpeg
from PIL import Image

from mmrt.media import nvjpg
from mmrt.media.errors import MediaError
from mmrt.media.image import decode_image
from mmrt.media.limits import MediaLimits, TimeBudget
from mmrt.media.nvjpg import NvjpgDecoder


class ToyStream(NamedTuple):
    data: bytes
    height: int
    width: int


class ToyImage:
    """What lies on the GPU can be had by ``cpu`` alone."""

    def __init__(self, pixels: np.ndarray) -> None:
        self._pixels = pixels

    def cpu(self) -> np.ndarray:
        return self._pixels


class ToyLibrary:
    """Takes baseline JPEGs only, as the units do, and rounds otherwise than libjpeg."""

    def __init__(self) -> None:
        self.BackendKind = SimpleNamespace(HW_GPU_ONLY="units")
        self.ColorSpec = SimpleNamespace(SRGB=1)
        self.SampleFormat = SimpleNamespace(I_RGB=7)
        self.error: Exception | None = None
        self.num_decoded = 0

    def Backend(self, kind: str) -> str:
        return kind

    def DecodeParams(self, apply_exif_orientation: bool, color_spec: int, sample_format: int) -> tuple[bool, int, int]:
        return apply_exif_orientation, color_spec, sample_format

    def CodeStream(self, data: bytes) -> ToyStream:
        return ToyStream(data, *simplejpeg.decode_jpeg_header(data)[:2])

    def Decoder(self, device_id: int, backends: list[str], options: str) -> "ToyLibrary":
        assert backends == ["units"] and device_id == 0
        return self

    def decode(self, stream: ToyStream, params: tuple[bool, int, int]) -> ToyImage | None:
        assert params == (False, 1, 7)
        if self.error is not None:
            raise self.error
        if b"\xff\xc2" in stream.data:
            return None
        self.num_decoded += 1
        return ToyImage(simplejpeg.decode_jpeg(stream.data, "RGB") ^ 1)


def jpeg(picture: np.ndarray, **options: Any) -> bytes:
    out = io.BytesIO()
    Image.fromarray(picture).save(out, "JPEG", **options)
    return out.getvalue()


def decoded(data: bytes, decoder: Any = None) -> np.ndarray:
    return decode_image(io.BytesIO(data), MediaLimits(), TimeBudget(60), decoder)


@pytest.fixture
def toy() -> ToyLibrary:
    return ToyLibrary()


@pytest.fixture
def units(toy: ToyLibrary) -> NvjpgDecoder:
    return NvjpgDecoder(toy, 0, toy.BackendKind.HW_GPU_ONLY)


def test_the_units_go_first(toy, units, make_picture):
    data = jpeg(make_picture(0, 37, 52), quality=90)
    assert np.array_equal(decoded(data, units), decoded(data) ^ 1)
    assert toy.num_decoded == 1


def test_orientation_is_applied_once(units, make_picture):
    exif = Image.Exif()
    exif[0x0112] = 6
    data = jpeg(make_picture(0, 40, 64), exif=exif)
    assert decoded(data, units).shape == (64, 40, 3)
    assert np.array_equal(decoded(data, units), decoded(data) ^ 1)


@pytest.mark.parametrize("how", ["progressive", "CMYK", "PNG"])
def test_the_processor_decodes_what_the_units_do_not_take(toy, units, make_picture, how):
    picture = Image.fromarray(make_picture(0, 37, 52))
    out = io.BytesIO()
    options = {"progressive": True} if how == "progressive" else {}
    picture.convert("CMYK" if how == "CMYK" else "RGB").save(out, "PNG" if how == "PNG" else "JPEG", **options)
    assert np.array_equal(decoded(out.getvalue(), units), decoded(out.getvalue()))
    assert toy.num_decoded == 0


def test_a_failure_on_the_gpu_is_none_of_the_client(toy, units, make_picture, caplog):
    toy.error = RuntimeError("CUDA out of memory")
    data = jpeg(make_picture(0, 37, 52))
    assert np.array_equal(decoded(data, units), decoded(data))
    assert "going on with the processor" in caplog.text


def test_files_that_are_cut_off_stay_refused(toy, units, make_picture):
    data = jpeg(make_picture(0, 64, 96))
    for cut in (data[:-2], data[: len(data) // 2]):
        with pytest.raises(MediaError, match="broken or cut off"):
            decoded(cut, units)
    assert toy.num_decoded == 0
    assert np.array_equal(decoded(data + bytes(50), units), decoded(data) ^ 1)


def test_another_size_than_the_header_says_is_not_decoded(toy, units, make_picture):
    assert units(jpeg(make_picture(0, 37, 52)), 52, 36) is None
    assert toy.num_decoded == 0


def test_without_a_gpu_there_is_no_decoder():
    assert nvjpg.nvjpg_decoder() is None


@pytest.mark.parametrize("options", [{}, {"subsampling": 0}, {"subsampling": 1}, {"progressive": True}], ids=str)
@pytest.mark.parametrize("mode", ["RGB", "L"])
def test_the_real_library_on_the_processor(make_picture, mode, options):
    """The same calls with another backend, which is libjpeg-turbo."""
    library = pytest.importorskip("nvidia.nvimgcodec")
    decoder = NvjpgDecoder(library, library.NVIMGCODEC_DEVICE_CPU_ONLY, library.BackendKind.CPU_ONLY)
    data = jpeg(np.asarray(Image.fromarray(make_picture(0, 67, 101)).convert(mode)), **options)
    pixels = decoder(data, 101, 67)
    assert pixels is not None and pixels.flags.writeable
    assert np.array_equal(pixels, decoded(data))
    for broken in (b"", data[:100], b"text" + data[-2:], data[:100] + data[-2:]):
        assert decoder(broken, 101, 67) is None


@pytest.mark.gpu
def test_the_units_of_a_gpu(make_picture):
    decoder = nvjpg.nvjpg_decoder()
    assert decoder is not None
    data = jpeg(make_picture(0, 480, 640), quality=90)
    pixels = decoder(data, 640, 480)
    assert pixels is not None
    assert np.abs(pixels.astype(int) - decoded(data)).max() <= 4
