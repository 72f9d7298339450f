"""Matrices of GGUF files whose rows are blocks, or lie in another order than a checkpoint's. ``weights`` calls it, in the memory
actor."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from ...schema.quantization import GgufQuantization
from ..architecture import AttentionConfig
from ..errors import CheckpointError
from . import int4, int8g
from .gguf_blocks import BLOCKS, INT4_TYPES, INT8G_TYPES, READ_TYPES, block_codes, block_values, whole_numbers
from .narrowing import narrow
from .safetensors_files import DTYPES, StoredTensor
from .weight_specs import Shape, Source


class StoredBlocks(NamedTuple):
    """A matrix [N, K], or a vector [N], in a file. ``turned_heads``: of how many heads the halves lie by turns; 0: of none."""

    name: str
    tensor: StoredTensor
    turned_heads: int

    @property
    def file(self) -> Path:
        return self.tensor.file

    @property
    def shape(self) -> Shape:
        return self.tensor.shape

    @property
    def has_4_bits(self) -> bool:
        """Whether int4 holds its codes as they are."""
        return self.tensor.dtype in INT4_TYPES


def find_blocks(
    source: Source, stored: Mapping[str, StoredTensor], how: GgufQuantization, heads: AttentionConfig
) -> StoredBlocks | None:
    """The tensor, unless it is read as that of any checkpoint. Raises: CheckpointError for another shape or a type that is not read."""
    tensor = stored.get(source.name)
    if tensor is None:
        return None
    turned = _turned_heads(source.name, heads) if how.permuted else 0
    if tensor.dtype in DTYPES and not turned:
        return None
    if tensor.shape != source.shape:
        raise CheckpointError(f"{tensor.file}: tensor {source.name!r} has shape {list(tensor.shape)}, expected {list(source.shape)}")
    if len(tensor.shape) < 2 and BLOCKS[tensor.dtype][0] > 1:
        raise CheckpointError(f"{tensor.file}: tensor {source.name!r} is of type {tensor.dtype}, which is none of vectors")
    if tensor.dtype not in READ_TYPES:
        raise CheckpointError(
            f"{tensor.file}: tensor {source.name!r} is of type {tensor.dtype}, expected one of {', '.join(READ_TYPES)}"
        )
    return StoredBlocks(source.name, tensor, turned)


def _turned_heads(name: str, heads: AttentionConfig) -> int:
    return {"q_proj": heads.num_heads, "k_proj": heads.num_kv_heads}.get(name.split(".")[-2], 0)


class BlockMatrix:
    """The values of a matrix; ``data`` uint8 [bytes], in the file."""

    def __init__(self, stored: StoredBlocks, data: Tensor) -> None:
        self._kind, self.shape = stored.tensor.dtype, stored.shape
        num_values, num_bytes = BLOCKS[self._kind]
        self._rows = data.view(self.shape[0], math.prod(self.shape[1:]) // num_values * num_bytes)
        self._order = None if not stored.turned_heads else _order(self.shape[0], stored.turned_heads)

    def values(self, rows: slice) -> Tensor:
        """Float32 [n, ...]. Raises: ValueError for values that are not finite."""
        values = block_values(self._data(rows), self._kind).view(-1, *self.shape[1:])
        if not bool(values.isfinite().all()):
            raise ValueError("has a value that is not finite")
        return values

    def write(self, rows: slice, target: Tensor, scales: Tensor | None) -> None:
        """Write rows as ``narrowing.narrow`` does, but codes as they are where the target's format holds them, with scales rounded to
        bfloat16. Raises: ValueError for values and scales that are not finite."""
        if scales is not None and scales.dim() == 3 and self._kind in INT4_TYPES:
            codes, steps, shifts = block_codes(self._data(rows), self._kind)
            _check_scales(steps + shifts)
            int4.pack(codes, steps, shifts, target, scales)
        elif scales is not None and scales.dim() == 2 and self._kind in INT8G_TYPES:
            whole, steps = whole_numbers(self._data(rows), self._kind)
            _check_scales(steps)
            int8g.pack(whole, steps, target, scales)
        else:
            narrow(self.values(rows), target, scales)

    def _data(self, rows: slice) -> Tensor:
        return self._rows[rows if self._order is None else self._order[rows]]


def _check_scales(scales: Tensor) -> None:
    if not bool(scales.isfinite().all()):
        raise ValueError("has a scale that is not finite")


def _order(num_rows: int, heads: int) -> Tensor:
    """The file's row for each row of the checkpoint: row i of half j of a head stands at 2 i + j in it."""
    places = torch.arange(num_rows).view(heads, num_rows // heads // 2, 2)
    return places.transpose(1, 2).reshape(-1)
