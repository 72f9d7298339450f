"""Decoding JPEGs on the JPEG units (NVJPG) of an NVIDIA GPU through nvImageCodec.

**This has never run on a GPU.** It is written against nvidia-nvimgcodec 0.9; the tests let that library's own processor backend stand
in where it is installed, and a toy elsewhere. Import it only where CUDA is: it needs torch and, to be of use, the library with nvJPEG,
which the package's extra ``nvjpeg`` brings.

JPEG leaves the rounding of the inverse transform and the filter of the chroma to decoders, so **pixels may differ from the processor's
by a few levels of 255**, and a run that uses the units is no longer bit for bit transformers': ``media.gpu_jpegs`` asks for them. The
units take baseline JPEGs only; the processor decodes everything else, and whatever fails there.

Called by ``image.decode_image``'s users: ``decode_image(reader, limits, budget, nvjpg_decoder())``.
"""

import importlib
import logging
from typing import Any

import numpy as np
import torch

from .image import Pixels

log = logging.getLogger(__name__)

_END_OF_IMAGE = b"\xff\xd9"


def load() -> Any | None:
    """The module nvidia.nvimgcodec, or None where it cannot be used."""
    try:
        return importlib.import_module("nvidia.nvimgcodec")
    except (ImportError, RuntimeError, OSError) as error:
        log.info("no JPEGs on the GPU: %s", error)
        return None


def nvjpg_decoder() -> "NvjpgDecoder | None":
    """A decoder for the units of the current GPU; None where they cannot be used."""
    library = load()
    if library is None or not torch.cuda.is_available():
        return None
    try:
        return NvjpgDecoder(library, torch.cuda.current_device(), library.BackendKind.HW_GPU_ONLY)
    except RuntimeError as error:
        log.info("no JPEGs on the GPU: %s", error)
        return None


class NvjpgDecoder:
    """A decoder of the library, for one thread at a time. The driver chooses the unit.

    Memory is the library's own, and not torch's: the units ignore streams, and torch might reuse their memory too soon.
    """

    def __init__(self, library: Any, gpu: int, backend: Any) -> None:
        """``backend`` is a member of the library's BackendKind. Raises: RuntimeError where it is unavailable."""
        self._library = library
        self._decoder = library.Decoder(device_id=gpu, backends=[library.Backend(backend)], options=":fancy_upsampling=1")
        self._params = library.DecodeParams(
            apply_exif_orientation=False, color_spec=library.ColorSpec.SRGB, sample_format=library.SampleFormat.I_RGB
        )

    def __call__(self, data: bytes, width: int, height: int) -> Pixels | None:
        """RGB [height, width, 3] on the host; None for unsupported formats, another size, and truncated files."""
        if not data.rstrip(b"\0").endswith(_END_OF_IMAGE):
            return None  # what is missing would come out grey
        try:
            stream = self._library.CodeStream(data)
            if (stream.height, stream.width) != (height, width):
                return None  # before there is memory for it
            decoded = self._decoder.decode(stream, params=self._params)
            on_host = decoded.cpu() if decoded is not None else None
            pixels = np.array(on_host) if on_host is not None else None
        except RuntimeError as error:
            log.warning("a JPEG failed on the GPU, going on with the processor: %s", error)
            return None
        return pixels if pixels is not None and pixels.shape == (height, width, 3) and pixels.dtype == np.uint8 else None
