"""Matrices of FP8 numbers: their tensors in the files, checked, and their values. ``weights`` calls it, in the memory actor.

A value is number x scale, also where the scale's tensor is named ``weight_scale_inv``. Shapes: N rows, K columns.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from ...schema.quantization import Fp8Quantization
from ..errors import CheckpointError
from .parts import EXPONENTS, find_part, scale_values
from .safetensors_files import StoredTensor
from .stacked import Place, place_of, turned
from .weight_specs import Part, Shape, Source

_NUMBERS = "F8_E4M3"
_SCALES = ("F32", "BF16", "F16", *EXPONENTS)
_ENDINGS = ("_scale_inv", "_scale")


class StoredFp8(NamedTuple):
    """A matrix [N, K] in the files; ``parts`` by the roles "numbers" and "scales". ``names``: of the tensors that they are in."""

    name: str
    shape: Shape
    parts: Mapping[str, Place]
    names: tuple[str, str]

    @property
    def file(self) -> Path:
        return self.parts["numbers"].tensor.file


def find_fp8(source: Source, stored: Mapping[str, StoredTensor], how: Fp8Quantization) -> StoredFp8 | None:
    """The tensors of a matrix if the checkpoint has it in FP8, alone or with those of a layer's other experts. Raises: CheckpointError
    for missing scales and wrong shapes."""
    if len(source.shape) != 2:
        return None
    if _is_fp8(source.name, stored):
        numbers = _numbers(source.name, stored, (source.shape,))
        name, scales = _scales(source.name, stored, _scale_shapes(source.shape, how))
        return StoredFp8(source.name, source.shape, {"numbers": Place(numbers), "scales": Place(scales)}, (source.name, name))
    if source.part is not None and how.block is not None and source.name not in stored and _is_fp8(source.part.name, stored):
        return _find_stacked(source, source.part, stored, how.block)
    return None


def _find_stacked(source: Source, part: Part, stored: Mapping[str, StoredTensor], block: tuple[int, int]) -> StoredFp8:
    numbers = _numbers(part.name, stored, (part.shape, turned(part.shape)))
    is_turned, num_rows = numbers.shape != part.shape, source.shape[0]
    if part.first % block[0] or (is_turned and block[0] != block[1]):
        told = f"expected blocks of as many rows as columns that divide {part.first} rows of an expert"
        raise CheckpointError(f"{numbers.file}: tensor {part.name!r} has blocks of {list(block)}, {told}")
    count, rows, columns = part.shape
    of_scales = Part("", (count, -(-rows // block[0]), -(-columns // block[1])), part.number, part.first // block[0])
    name, scales = _scales(part.name, stored, (turned(of_scales.shape) if is_turned else of_scales.shape,))
    places = {
        "numbers": place_of(part, num_rows, numbers, is_turned),
        "scales": place_of(of_scales, -(-num_rows // block[0]), scales, is_turned),
    }
    return StoredFp8(part.name, source.shape, places, (part.name, name))


def _is_fp8(name: str, stored: Mapping[str, StoredTensor]) -> bool:
    return name in stored and stored[name].dtype == _NUMBERS


def _numbers(name: str, stored: Mapping[str, StoredTensor], shapes: Sequence[Shape]) -> StoredTensor:
    if (numbers := stored[name]).shape not in shapes:
        raise CheckpointError(f"{numbers.file}: tensor {name!r} has shape {list(numbers.shape)}, expected {list(shapes[0])}")
    return numbers


def _scales(numbers: str, stored: Mapping[str, StoredTensor], shapes: Sequence[Shape]) -> tuple[str, StoredTensor]:
    """Their name, and the tensor."""
    names = [numbers + ending for ending in _ENDINGS]
    name = next((name for name in names if name in stored), names[0])
    return name, find_part(name, stored, _SCALES, shapes, stored[numbers].file)


def _scale_shapes(shape: Shape, how: Fp8Quantization) -> tuple[Shape, ...]:
    rows, columns = shape
    if how.block is None:
        return (), (1,), (rows, 1), (1, 1), (rows,)
    return ((-(-rows // how.block[0]), -(-columns // how.block[1])),)


class Fp8Matrix:
    """Values of a matrix in FP8; ``tensors`` by role, those of ``StoredFp8.parts``."""

    def __init__(self, shape: Shape, tensors: Mapping[str, Tensor], how: Fp8Quantization) -> None:
        """Raises: ValueError for scales that are not finite."""
        self.shape, self._numbers = shape, tensors["numbers"]
        scales = scale_values(tensors["scales"])
        if not bool(scales.isfinite().all()):
            raise ValueError("has a scale that is not finite")
        self._scales = scales.reshape(scales.shape if how.block is not None else (-1, 1))
        block = how.block or (shape[0] if len(self._scales) == 1 else 1, shape[1])
        self._rows, self._columns = min(block[0], shape[0]), min(block[1], shape[1])

    def values(self, rows: slice) -> Tensor:
        """Float32 [n, K]. Raises: ValueError for numbers that are not finite."""
        values = self._numbers[rows].float()
        if not bool(values.isfinite().all()):
            raise ValueError("has a value that is not finite")
        scales = self._scales[torch.arange(rows.start, rows.stop) // self._rows]
        return values.mul_(scales.repeat_interleave(self._columns, 1)[:, : values.shape[1]])
