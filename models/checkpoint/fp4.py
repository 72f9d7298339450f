"""Matrices of numbers of 4 bits (E2M1): NVFP4, with a scale of 8 bits (E4M3) for 16 columns and one for the matrix, and MXFP4, with a
power of two for 32 columns. Their tensors in the files, checked, and their values. ``weights`` calls it, in the memory actor. Shapes: N
rows, K columns, G groups of columns.
"""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from ...schema.quantization import Fp4Packing, Fp4Quantization
from ...schema.weight_layout import INT8G_COLUMNS
from . import int8g
from .gguf_blocks import TWICE_E2M1
from .narrowing import narrow
from .parts import EXPONENTS, find_part, scale_values
from .safetensors_files import StoredTensor
from .stacked import Place, place_of, turned
from .weight_specs import Part, Shape, Source


class _Form(NamedTuple):
    """``group``: columns that share a scale. The ends of names: of the numbers, behind a matrix's name, and of the others, behind that
    or, where the matrices of all experts are in one tensor, behind ``stacked``. ``whole``: of the matrix's own scale."""

    group: int
    scales: tuple[str, ...]
    numbers: str = "_packed"
    whole: str = ""
    stacked: str = ""


_FORMS: dict[Fp4Packing, _Form] = {
    "nvfp4": _Form(16, ("F8_E4M3",), whole="_global_scale"),  # by which values are divided
    "modelopt": _Form(16, ("F8_E4M3",), numbers="", whole="_scale_2", stacked="_weight"),
    "mxfp4": _Form(32, EXPONENTS),
}


class StoredFp4(NamedTuple):
    """A matrix [N, K] in the files; ``parts`` by the roles "numbers", "scales" and "whole". ``names``: of the tensors that they are
    in."""

    name: str
    shape: Shape
    parts: Mapping[str, Place]
    names: tuple[str, ...]

    @property
    def file(self) -> Path:
        return self.parts["numbers"].tensor.file


def find_fp4(source: Source, stored: Mapping[str, StoredTensor], how: Fp4Quantization) -> StoredFp4 | None:
    """The tensors of a matrix if the checkpoint has it in 4 bits, alone or with those of a layer's other experts. Raises:
    CheckpointError for missing scales and wrong shapes."""
    form = _FORMS[how.packing]
    if len(source.shape) != 2:
        return None
    if _has_bytes(source.name + form.numbers, stored):
        return _find_alone(source, stored, form)
    if source.part is not None and form.stacked and source.name not in stored and _has_bytes(source.part.name, stored):
        return _find_stacked(source, source.part, stored, form)
    return None


def _has_bytes(name: str, stored: Mapping[str, StoredTensor]) -> bool:
    return name in stored and stored[name].dtype == "U8"


def _find_alone(source: Source, stored: Mapping[str, StoredTensor], form: _Form) -> StoredFp4:
    (rows, columns), name = source.shape, source.name
    names = _names(name + form.numbers, name, form)
    shapes: dict[str, Sequence[Shape]] = {
        "numbers": ((rows, -(-columns // 2)),),
        "scales": ((rows, -(-columns // form.group)),),
        "whole": ((1,), ()),
    }
    places = {role: Place(found) for role, found in _found(names, stored, shapes, form).items()}
    return StoredFp4(name, source.shape, places, tuple(names.values()))


def _find_stacked(source: Source, part: Part, stored: Mapping[str, StoredTensor], form: _Form) -> StoredFp4:
    """Each expert's matrix may be transposed, as its tensor's shape tells."""
    count, rows, columns = part.shape
    parts = {
        role: Part("", (count, rows, -(-columns // each)), part.number, part.first)
        for role, each in (("numbers", 2), ("scales", form.group))
    }
    names = _names(part.name, part.name + form.stacked, form)
    is_turned = parts["numbers"].shape != stored[part.name].shape == turned(parts["numbers"].shape)
    shapes: dict[str, Sequence[Shape]] = {role: (turned(own.shape) if is_turned else own.shape,) for role, own in parts.items()}
    found = _found(names, stored, {**shapes, "whole": ((count,), (count, 1), (count, 1, 1), (1,), ())}, form)
    places = {role: place_of(own, source.shape[0], found[role], is_turned) for role, own in parts.items()}
    number = part.number if math.prod(found["whole"].shape) > 1 else 0
    places["whole"] = Place(found["whole"]._replace(shape=(1,), start=found["whole"].start + 4 * number, num_bytes=4))
    return StoredFp4(part.name, source.shape, places, tuple(names.values()))


def _names(numbers: str, others: str, form: _Form) -> dict[str, str]:
    return {"numbers": numbers, "scales": f"{others}_scale"} | ({"whole": others + form.whole} if form.whole else {})


def _found(
    names: Mapping[str, str], stored: Mapping[str, StoredTensor], shapes: Mapping[str, Sequence[Shape]], form: _Form
) -> dict[str, StoredTensor]:
    dtypes, file = {"numbers": ("U8",), "scales": form.scales, "whole": ("F32",)}, stored[names["numbers"]].file
    return {role: find_part(name, stored, dtypes[role], shapes[role], file) for role, name in names.items()}


class Fp4Matrix:
    """Values of a matrix of 4 bits; ``tensors`` by role, those of ``StoredFp4.parts``."""

    def __init__(self, shape: Shape, tensors: Mapping[str, Tensor], how: Fp4Quantization) -> None:
        """Raises: ValueError for scales that are not finite."""
        self.shape, self._numbers, self._group = shape, tensors["numbers"], _FORMS[how.packing].group
        self._scales = scale_values(tensors["scales"])
        if "whole" in tensors:
            whole = tensors["whole"].reshape(())
            self._scales = self._scales / whole if how.packing == "nvfp4" else self._scales * whole
        if not bool(self._scales.isfinite().all()):
            raise ValueError("has a scale that is not finite")

    def values(self, rows: slice) -> Tensor:
        """Float32 [n, K]."""
        scales = self._scales[rows].repeat_interleave(self._group, 1)[:, : self.shape[1]]
        return self._twice(rows).float().mul_(0.5).mul_(scales)

    def write(self, rows: slice, target: Tensor, scales: Tensor | None) -> None:
        """Write rows as ``narrow`` does, but numbers as they are where int8g has a scale for the same columns."""
        if scales is not None and scales.dim() == 2 and self._group == INT8G_COLUMNS:
            int8g.pack(self._twice(rows), self._scales[rows] * 0.5, target, scales)
        else:
            narrow(self.values(rows), target, scales)

    def _twice(self, rows: slice) -> Tensor:
        """Twice the numbers: int8 [n, K]."""
        numbers = self._numbers[rows]
        return TWICE_E2M1[torch.stack([numbers & 15, numbers >> 4], -1).flatten(1)[:, : self.shape[1]].int()]
