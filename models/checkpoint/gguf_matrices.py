"""Matrices of GGUF files whose rows are blocks, or lie in another order than a checkpoint's, or in several tensors. ``weights`` calls
it, in the memory actor."""

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from ...cpu_kernels import block_kernels
from ...schema.quantization import GgufQuantization
from ...schema.weight_layout import INT8G_COLUMNS
from ..architecture import LanguageConfig
from ..errors import CheckpointError
from . import int4, int8g
from .gguf_blocks import BLOCKS, INT4_TYPES, INT8G_TYPES, NARROW_TYPES, READ_TYPES, block_codes, block_values, whole_numbers
from .gguf_orders import Orders, orders_of
from .gguf_towers import FRAME
from .narrowing import narrow
from .safetensors_files import DTYPES, StoredTensor
from .values import Order, reordered
from .weight_specs import Shape, Source

_QKV = ".attn.qkv."
_MADE_OF = {  # what values of a checkpoint are, by those that a file has
    ".A_log": lambda rates: rates.neg().log(),
    ".per_dim_scale": lambda scales: scales + (-scales).expm1().neg().log(),  # softplus of them
}


class StoredBlocks(NamedTuple):
    """A matrix [N, K], or a vector [N], in a file. ``values_of``: makes a checkpoint's values of the file's, where those differ."""

    name: str
    tensor: StoredTensor
    orders: Orders = Orders()
    values_of: Callable[[Tensor], Tensor] | None = None

    @property
    def file(self) -> Path:
        return self.tensor.file

    @property
    def shape(self) -> Shape:
        return self.tensor.shape

    @property
    def has_4_bits(self) -> bool:
        """True if int4 holds it, code for code or rounded again."""
        return self.tensor.dtype in NARROW_TYPES


class StoredPieces(NamedTuple):
    """A tensor that lies in several: rows of each behind one another, or, for ``frames``, each a part of the third axis."""

    name: str
    shape: Shape
    pieces: tuple[StoredBlocks, ...]
    frames: bool

    @property
    def file(self) -> Path:
        return self.pieces[0].file


def find_blocks(
    source: Source, stored: Mapping[str, StoredTensor], how: GgufQuantization, language: LanguageConfig
) -> StoredBlocks | StoredPieces | None:
    """The tensor, unless it is read as that of any checkpoint. Raises: CheckpointError for another shape or a type that is not read."""
    if (pieces := _find_pieces(source, stored)) is not None:
        return pieces
    tensor = stored.get(source.name)
    if tensor is None:
        return None
    orders = orders_of(source.name, how, language)
    values_of = next((values for end, values in _MADE_OF.items() if source.name.endswith(end)), None)
    if tensor.dtype in DTYPES and orders == Orders() and values_of is None:
        return None
    return _checked(source.name, tensor, source.shape)._replace(orders=orders, values_of=values_of)


def _find_pieces(source: Source, stored: Mapping[str, StoredTensor]) -> StoredPieces | None:
    """What towers have in one tensor and files in several: queries, keys and values, and the patch embedding's frames."""
    if _QKV in source.name and source.name not in stored:
        shape = (source.shape[0] // 3, *source.shape[1:])
        names = [source.name.replace(_QKV, f".attn.{part}.") for part in "qkv"]
    elif len(source.shape) == 5:
        shape = (*source.shape[:2], *source.shape[3:])
        names = [source.name, *(f"{source.name}{FRAME.format(frame)}" for frame in range(1, source.shape[2]))]
    else:
        return None
    if absent := [name for name in names if name not in stored]:
        if len(absent) == len(names):
            return None
        file = next(stored[name].file for name in names if name in stored)
        raise CheckpointError(f"{file}: tensor {absent[0]!r} of shape {list(shape)} is missing")
    pieces = tuple(_checked(name, stored[name], shape) for name in names)
    return StoredPieces(source.name, source.shape, pieces, frames=len(source.shape) == 5)


def _checked(name: str, tensor: StoredTensor, shape: Shape) -> StoredBlocks:
    if tensor.shape != shape:
        raise CheckpointError(f"{tensor.file}: tensor {name!r} has shape {list(tensor.shape)}, expected {list(shape)}")
    if len(tensor.shape) < 2 and BLOCKS[tensor.dtype][0] > 1:
        raise CheckpointError(f"{tensor.file}: tensor {name!r} is of type {tensor.dtype}, which is none of vectors")
    if tensor.dtype not in READ_TYPES:
        raise CheckpointError(f"{tensor.file}: tensor {name!r} is of type {tensor.dtype}, expected one of {', '.join(READ_TYPES)}")
    return StoredBlocks(name, tensor)


class BlockMatrix:
    """The values of a matrix; ``data`` uint8 [bytes], in the file."""

    def __init__(self, stored: StoredBlocks, data: Tensor) -> None:
        self._kind, self.shape = stored.tensor.dtype, stored.shape
        num_values, num_bytes = BLOCKS[self._kind]
        self._rows = data.view(self.shape[0], math.prod(self.shape[1:]) // num_values * num_bytes)
        rows, columns = stored.orders
        self._order = None if rows is None else rows.places(self.shape[0])
        self._heads = None if columns is None else columns.places(columns.num_groups(self.shape[1]))
        self._has_whole_groups = self._heads is None or not self.shape[1] % (len(self._heads) * INT8G_COLUMNS)
        self._values_of = stored.values_of

    def values(self, rows: slice) -> Tensor:
        """Float32 [n, ...]. Raises: ValueError for values that are not finite."""
        values = self._across(block_values(self._data(rows), self._kind)).view(-1, *self.shape[1:])
        if self._values_of is not None:
            values = self._values_of(values)
        if not bool(torch.stack(torch.aminmax(values)).isfinite().all()):  # in less time than all of them
            raise ValueError("has a value that is not finite")
        return values

    def write(self, rows: slice, target: Tensor, scales: Tensor | None) -> None:
        """Write rows as ``narrowing.narrow`` does, but codes as they are where the target's format holds them, with scales rounded to
        bfloat16. Raises: ValueError for values and scales that are not finite."""
        axes = 0 if scales is None or not self._has_whole_groups else scales.dim()
        if scales is not None and axes == 3 and self._heads is None and block_kernels.can_pack(self._rows, self._kind):
            block_kernels.pack(self._data(rows), target, scales)
            _check_scales(scales)
        elif scales is not None and axes == 3 and self._kind in INT4_TYPES:
            codes, steps, shifts = map(self._across, block_codes(self._data(rows), self._kind))
            _check_scales(steps + shifts)
            int4.pack(codes, steps, shifts, target, scales)
        elif scales is not None and axes == 2 and self._kind in INT8G_TYPES:
            whole, steps = map(self._across, whole_numbers(self._data(rows), self._kind))
            _check_scales(steps)
            int8g.pack(whole, steps, target, scales)
        else:
            narrow(self.values(rows), target, scales)

    def reorder(self, order: Order) -> None:
        """Have rows in this order of the model's, which ``values.Order`` tells."""
        places = torch.arange(self.shape[0]) if self._order is None else self._order
        self._order = reordered(places, order)

    def _data(self, rows: slice) -> Tensor:
        return self._rows[rows if self._order is None else self._order[rows]]

    def _across(self, part: Tensor) -> Tensor:
        """What columns, or groups of them, have, in the checkpoint's order of heads."""
        return part if self._heads is None else part.view(len(part), len(self._heads), -1)[:, self._heads].flatten(1)


class JoinedMatrix:
    """The values of a tensor that lies in several."""

    def __init__(self, stored: StoredPieces, matrices: Sequence[BlockMatrix]) -> None:
        self.shape, self._matrices, self._frames = stored.shape, matrices, stored.frames

    def values(self, rows: slice) -> Tensor:
        """Float32 [n, ...]. Raises: ValueError for values that are not finite."""
        if self._frames:
            return torch.stack([matrix.values(rows) for matrix in self._matrices], 2)
        height, found = self._matrices[0].shape[0], list[Tensor]()
        for number, matrix in enumerate(self._matrices):
            first, stop = max(rows.start - number * height, 0), min(rows.stop - number * height, height)
            if first < stop:
                found.append(matrix.values(slice(first, stop)))
        return torch.cat(found)


def _check_scales(scales: Tensor) -> None:
    if not bool(scales.isfinite().all()):
        raise ValueError("has a scale that is not finite")
