"""Matrices of FP8 numbers: their tensors in the files, checked, and their values. ``weights`` calls it, in the memory actor.

A value is number x scale, also where the scale's tensor is named ``weight_scale_inv``. Shapes: N rows, K columns.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from ...schema.quantization import Fp8Quantization
from ..errors import CheckpointError
from .safetensors_files import StoredTensor
from .weight_specs import Shape, Source

_NUMBERS = "F8_E4M3"
_EXPONENTS = ("U8", "F8_E8M0")  # a byte b says 2 to the power of b - 127
_SCALES = ("F32", "BF16", "F16", *_EXPONENTS)
_ENDINGS = ("_scale_inv", "_scale")


class StoredFp8(NamedTuple):
    """A matrix [N, K] in the files; ``parts`` by the roles "numbers" and "scales"."""

    name: str
    shape: Shape
    parts: Mapping[str, StoredTensor]

    @property
    def file(self) -> Path:
        return self.parts["numbers"].file


def find_fp8(source: Source, stored: Mapping[str, StoredTensor], how: Fp8Quantization) -> StoredFp8 | None:
    """The tensors of a matrix if the checkpoint has it in FP8. Raises: CheckpointError for missing scales and wrong shapes."""
    numbers = stored.get(source.name)
    if numbers is None or numbers.dtype != _NUMBERS or len(source.shape) != 2:
        return None
    if numbers.shape != source.shape:
        raise CheckpointError(f"{numbers.file}: tensor {source.name!r} has shape {list(numbers.shape)}, expected {list(source.shape)}")
    shapes = _scale_shapes(source.shape, how)
    wanted = " or ".join(str(list(shape)) for shape in shapes)
    name = next((name for name in (source.name + ending for ending in _ENDINGS) if name in stored), None)
    if name is None:
        raise CheckpointError(f"{numbers.file}: tensor {source.name + _ENDINGS[0]!r} of shape {wanted} is missing")
    scales = stored[name]
    if scales.shape not in shapes or scales.dtype not in _SCALES:
        told = f"has dtype {scales.dtype} and shape {list(scales.shape)}"
        raise CheckpointError(
            f"{scales.file}: tensor {name!r} {told}, expected {' or '.join(_SCALES)} and {wanted} by quantization_config"
        )
    return StoredFp8(source.name, source.shape, {"numbers": numbers, "scales": scales})


def _scale_shapes(shape: Shape, how: Fp8Quantization) -> tuple[Shape, ...]:
    rows, columns = shape
    if how.block is None:
        return (), (1,), (rows, 1), (1, 1), (rows,)
    return ((-(-rows // how.block[0]), -(-columns // how.block[1])),)


class Fp8Matrix:
    """Values of a matrix in FP8; ``tensors`` by role, as ``StoredFp8.parts``."""

    def __init__(self, shape: Shape, tensors: Mapping[str, Tensor], how: Fp8Quantization) -> None:
        """Raises: ValueError for scales that are not finite."""
        self.shape, self._numbers = shape, tensors["numbers"]
        scales = tensors["scales"]
        if scales.dtype == torch.uint8:
            scales = scales.view(torch.float8_e8m0fnu).float()
        if not bool(scales.isfinite().all()):
            raise ValueError("has a scale that is not finite")
        self._scales = scales.float().reshape(scales.shape if how.block is not None else (-1, 1))
        block = how.block or (shape[0] if len(self._scales) == 1 else 1, shape[1])
        self._rows, self._columns = min(block[0], shape[0]), min(block[1], shape[1])

    def values(self, rows: slice) -> Tensor:
        """Float32 [n, K]. Raises: ValueError for numbers that are not finite."""
        values = self._numbers[rows].float()
        if not bool(values.isfinite().all()):
            raise ValueError("has a value that is not finite")
        scales = self._scales[torch.arange(rows.start, rows.stop) // self._rows]
        return values.mul_(scales.repeat_interleave(self._columns, 1)[:, : values.shape[1]])
