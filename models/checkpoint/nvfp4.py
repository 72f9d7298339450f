"""Matrices of NVFP4: numbers of 4 bits (E2M1), a scale of 8 bits (E4M3) for 16 columns, and one for the matrix. Their tensors in the
files, checked, and their values. ``weights`` calls it, in the memory actor. Shapes: N rows, K columns.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from ...schema.quantization import Nvfp4Quantization
from .gguf_blocks import TWICE_E2M1
from .parts import find_part
from .safetensors_files import StoredTensor
from .weight_specs import Shape, Source

GROUP = 16  # columns
_ENDINGS = {
    "compressed-tensors": ("_packed", "_scale", "_global_scale"),  # values are divided by the last
    "modelopt": ("", "_scale", "_scale_2"),  # and multiplied here
}


class StoredNvfp4(NamedTuple):
    """A matrix [N, K] in the files; ``parts`` by the roles "numbers", "scales" and "whole"."""

    name: str
    shape: Shape
    parts: Mapping[str, StoredTensor]

    @property
    def file(self) -> Path:
        return self.parts["numbers"].file


def find_nvfp4(source: Source, stored: Mapping[str, StoredTensor], how: Nvfp4Quantization) -> StoredNvfp4 | None:
    """The tensors of a matrix if the checkpoint has it in NVFP4. Raises: CheckpointError for missing scales and wrong shapes."""
    numbers, scales, whole = (source.name + ending for ending in _ENDINGS[how.packing])
    if len(source.shape) != 2 or numbers not in stored or stored[numbers].dtype != "U8":
        return None
    (rows, columns), file = source.shape, stored[numbers].file
    parts = {
        "numbers": find_part(numbers, stored, ("U8",), ((rows, -(-columns // 2)),), file),
        "scales": find_part(scales, stored, ("F8_E4M3",), ((rows, -(-columns // GROUP)),), file),
        "whole": find_part(whole, stored, ("F32",), ((1,), ()), file),
    }
    return StoredNvfp4(source.name, source.shape, parts)


class Nvfp4Matrix:
    """Values of a matrix in NVFP4; ``tensors`` by role, as ``StoredNvfp4.parts``."""

    def __init__(self, shape: Shape, tensors: Mapping[str, Tensor], how: Nvfp4Quantization) -> None:
        """Raises: ValueError for scales that are not finite."""
        self.shape, self._numbers = shape, tensors["numbers"]
        scales, whole = tensors["scales"].float(), tensors["whole"].reshape(())
        self._scales = scales / whole if how.packing == "compressed-tensors" else scales * whole
        if not bool(self._scales.isfinite().all()):
            raise ValueError("has a scale that is not finite")

    def values(self, rows: slice) -> Tensor:
        """Float32 [n, K]."""
        numbers = self._numbers[rows]
        codes = torch.stack([numbers & 15, numbers >> 4], -1).flatten(1)[:, : self.shape[1]]
        scales = self._scales[rows].repeat_interleave(GROUP, 1)[:, : self.shape[1]]
        return TWICE_E2M1[codes.int()].float().mul_(0.5).mul_(scales)
