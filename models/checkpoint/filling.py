"""How a tensor of the model is written: rows of what a checkpoint's files have of it, in the format in which they are kept. ``weights``
calls it, in the memory actor."""

import math
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch

from ...schema.quantization import Fp4Quantization, Fp8Quantization, GgufQuantization, IntegerQuantization
from ..architecture import ModelConfig
from ..errors import CheckpointError
from .adapter import Adapter
from .fp4 import Fp4Matrix, StoredFp4
from .fp8 import Fp8Matrix, StoredFp8
from .gguf_files import GgufFiles
from .gguf_matrices import BlockMatrix, JoinedMatrix, StoredBlocks, StoredPieces
from .jobs import Job
from .narrowing import narrow, row_blocks
from .quantized import Integers, StoredIntegers
from .safetensors_files import DTYPES, SafetensorsFiles, StoredTensor
from .stacked import Place
from .values import Order, Plain, Reordered, Sum, Values
from .weight_specs import TensorSpec

_JOB_VALUES = 1 << 23  # of a matrix that one thread converts

_ALL_DTYPES = {  # beside those of plain tensors, those of quantized matrices
    **DTYPES,
    **{"I32": torch.int32, "I8": torch.int8, "F8_E4M3": torch.float8_e4m3fn, "F8_E8M0": torch.uint8, "U8": torch.uint8},
}


Files = SafetensorsFiles | GgufFiles


class StoredNumbers(NamedTuple):
    """A source that is not quantized."""

    name: str
    place: Place

    @property
    def file(self) -> Path:
        return self.place.tensor.file


Quantized = StoredIntegers | StoredFp8 | StoredFp4 | StoredBlocks | StoredPieces
Stored = StoredNumbers | Quantized


def tensor_jobs(
    target: torch.Tensor,
    scales: torch.Tensor | None,
    spec: TensorSpec,
    parts: list[Stored],
    files: Files,
    config: ModelConfig,
    adapter: Adapter | None,
) -> Iterator[Job]:
    """What writes a tensor of the model: some rows each. Jobs raise CheckpointError."""
    row, offset = 0, 0.0 if isinstance(config.quantization, GgufQuantization) else spec.offset  # GGUF has norms as they are used
    for source, part in zip(spec.sources, parts, strict=True):
        try:
            matrix = _matrix(part, files, config)
            if adapter is not None and (delta := adapter.delta_of(source.name)) is not None:
                matrix = Sum(matrix, delta)
            write = _writer(_in_order(matrix, source.order), config)
        except ValueError as error:
            raise _named(part, error) from None
        for piece in source.pieces():
            for rows in row_blocks(piece, math.prod(source.shape[1:]), len(source.order) or 1, _JOB_VALUES):
                at = slice(row, row + rows.stop - rows.start)
                yield partial(_do, part, write, rows, target[at], _rows_of(scales, at), offset)
                row = at.stop


def _do(part: Stored, write: "_Writer", rows: slice, target: torch.Tensor, scales: torch.Tensor | None, offset: float) -> None:
    try:
        write(rows, target, scales)
    except ValueError as error:
        raise _named(part, error) from None
    if offset:
        target.add_(offset)


def _named(part: Stored, error: ValueError) -> CheckpointError:
    return CheckpointError(f"{part.file}: tensor {part.name!r} {error}")


_Writer = Callable[[slice, torch.Tensor, torch.Tensor | None], None]
"""Writes these rows of a checkpoint's tensor to a target and its scales."""


_Matrix = Plain | Integers | Fp8Matrix | Fp4Matrix | BlockMatrix | JoinedMatrix | Sum | Reordered


def _matrix(part: Stored, files: Files, config: ModelConfig) -> _Matrix:
    if isinstance(part, StoredNumbers):
        numbers = part.place.of(_view(files, part.place.tensor))
        return Plain(numbers if numbers.dim() else numbers.unsqueeze(0))
    if isinstance(part, StoredBlocks):
        return BlockMatrix(part, tensor_over(files.view(part.tensor), torch.uint8))
    if isinstance(part, StoredPieces):
        return JoinedMatrix(part, [BlockMatrix(piece, tensor_over(files.view(piece.tensor), torch.uint8)) for piece in part.pieces])
    if isinstance(part, StoredIntegers):
        assert isinstance(config.quantization, IntegerQuantization)
        return Integers(part.shape, {role: _view(files, tensor) for role, tensor in part.parts.items()}, config.quantization)
    places = {role: place.of(_view(files, place.tensor)) for role, place in part.parts.items()}
    if isinstance(part, StoredFp4):
        assert isinstance(config.quantization, Fp4Quantization)
        return Fp4Matrix(part.shape, places, config.quantization)
    assert isinstance(config.quantization, Fp8Quantization)
    return Fp8Matrix(part.shape, places, config.quantization)


def _in_order(matrix: _Matrix, order: Order) -> _Matrix:
    """In the model's order."""
    if order and isinstance(matrix, BlockMatrix):  # its codes move with their rows
        matrix.reorder(order)
        return matrix
    if not order or not isinstance(matrix, Integers):
        return Reordered(matrix, order) if order else matrix
    matrix.order = order  # its integers have to be reordered before they are packed
    return matrix


def _writer(matrix: _Matrix, config: ModelConfig) -> _Writer:
    """As they are if the target's format holds them."""
    if isinstance(matrix, Plain):
        return lambda rows, target, scales: narrow(matrix.tensor[rows], target, scales)
    if isinstance(matrix, Integers):
        assert isinstance(config.quantization, IntegerQuantization)
        return partial(_write_integers, matrix, config.quantization)
    if isinstance(matrix, BlockMatrix | Fp4Matrix):
        return partial(_write_packed, matrix)
    return partial(_write_values, matrix)


def _write_packed(matrix: BlockMatrix | Fp4Matrix, piece: slice, target: torch.Tensor, scales: torch.Tensor | None) -> None:
    for rows, at in _blocks(piece, matrix):
        matrix.write(rows, target[at], _rows_of(scales, at))


def _write_values(matrix: Values, piece: slice, target: torch.Tensor, scales: torch.Tensor | None) -> None:
    for rows, at in _blocks(piece, matrix):
        narrow(matrix.values(rows), target[at], _rows_of(scales, at))


def _write_integers(
    integers: Integers, how: IntegerQuantization, piece: slice, target: torch.Tensor, scales: torch.Tensor | None
) -> None:
    for rows, at in _blocks(piece, integers):
        its = _rows_of(scales, at)
        if its is not None and target.dtype == torch.uint8 and how.form == "int4":
            integers.write_int4(rows, target[at], its)
        elif its is not None and its.dim() == 2:
            integers.write_int8g(rows, target[at], its)
        elif its is not None and its.dim() == 1 and how.form == "int8":
            integers.write_int8(rows, target[at], its)
        else:
            narrow(integers.values(rows), target[at], its)


def _blocks(piece: slice, matrix: Values) -> Iterator[tuple[slice, slice]]:
    """Rows of a matrix that are read at once, and their places in the target of ``piece``."""
    order = matrix.order if isinstance(matrix, Reordered | Integers) else ()
    for rows in row_blocks(piece, math.prod(matrix.shape[1:]), unit=len(order) or 1):
        yield rows, slice(rows.start - piece.start, rows.stop - piece.start)


def _rows_of(scales: torch.Tensor | None, rows: slice) -> torch.Tensor | None:
    """Scales of rows."""
    return None if scales is None else scales[rows]


def _view(files: Files, tensor: StoredTensor) -> torch.Tensor:
    return tensor_over(files.view(tensor), _ALL_DTYPES[tensor.dtype]).view(tensor.shape)


def tensor_over(buffer: memoryview, dtype: torch.dtype) -> torch.Tensor:
    with warnings.catch_warnings():  # torch warns of read-only buffers; these are never written
        warnings.filterwarnings("ignore", message="The given buffer is not writable", category=UserWarning)
        return torch.frombuffer(buffer, dtype=dtype)
