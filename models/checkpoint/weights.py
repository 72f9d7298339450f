"""A checkpoint's tensors in the model's layout, in one buffer that all processes map: host memory, or a device's.

The memory actor calls ``write_weights`` once; prefill, decode and encoder call ``attach_weights`` and share its pages.
"""

import math
import warnings
from collections.abc import Callable
from pathlib import Path

import msgspec
import torch

from ..architecture import ModelConfig
from ..errors import CheckpointError
from ..families.registry import family_of
from .narrowing import narrow
from .safetensors_files import DTYPES, SafetensorsFiles, StoredTensor
from .weight_specs import Source, TensorSpec, scales_of, stored_parts

ALIGNMENT = 64

Buffer = memoryview | torch.Tensor
"""Bytes in host memory; or uint8 [num_bytes], wherever it lies."""


class TensorEntry(msgspec.Struct, frozen=True, array_like=True):
    """A tensor in the buffer, at a byte offset that is a multiple of 64."""

    name: str
    dtype: str  # torch's name
    offset: int
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * torch_dtype(self.dtype).itemsize


class WeightIndex(msgspec.Struct, frozen=True):
    """Places of the tensors in the buffer of ``num_bytes``."""

    num_bytes: int
    entries: tuple[TensorEntry, ...]


def torch_dtype(dtype: str) -> torch.dtype:
    """The torch dtype of this name."""
    found: torch.dtype = getattr(torch, dtype)
    return found


def write_weights(
    path: Path | str,
    config: ModelConfig,
    allocate: Callable[[int], Buffer],
    progress: Callable[[int, int], None] | None = None,
) -> WeightIndex:
    """Write the checkpoint at ``path`` into the buffer that ``allocate(num_bytes)`` returns, in ``config.dtype`` and matrices in
    ``config.weights``.

    All tensors are checked before ``allocate`` is called, once. ``progress(done_bytes, total_bytes)`` follows each tensor. For a device
    the CPU converts them on their way from the mapped files.

    Raises: CheckpointError naming the tensor, the expected and the actual.
    """
    index = plan_weights(config)
    if not index.entries:
        allocate(index.num_bytes)
        return index
    with SafetensorsFiles(Path(path)) as files:
        family = family_of(config)
        stored = {family.canonical_name(name): tensor for name, tensor in files.tensors.items()}
        chosen = {spec.name: _choose(Path(path), spec, stored) for spec in family.tensor_specs(config)}
        targets = attach_weights(allocate(index.num_bytes), index)
        for entry in index.entries:
            if entry.name in chosen:  # else the scales of the one before, which came with it
                _fill(targets[entry.name], targets.get(scales_of(entry.name)), chosen[entry.name], files)
            if progress is not None:
                progress(entry.offset + entry.num_bytes, index.num_bytes)
    return index


def read_weights(path: Path, config: ModelConfig) -> dict[str, torch.Tensor]:
    """The checkpoint's tensors in memory of this process alone, for what is no actor. Raises: CheckpointError."""
    buffers: list[memoryview] = []

    def allocate(num_bytes: int) -> memoryview:
        buffers.append(memoryview(bytearray(num_bytes)))
        return buffers[0]

    index = write_weights(path, config, allocate)
    return attach_weights(buffers[0], index)


def _choose(path: Path, spec: TensorSpec, stored: dict[str, StoredTensor]) -> dict[str, StoredTensor]:
    """The checkpoint tensors that make up this one, by name, in order, shapes checked."""
    for source in spec.sources:
        if source.name not in stored:
            raise CheckpointError(f"{path}: tensor {source.name!r} of shape {list(source.shape)} is missing")
    return {source.name: _checked(source, stored[source.name]) for source in spec.sources}


def _checked(source: Source, tensor: StoredTensor) -> StoredTensor:
    if tensor.shape != source.shape:
        raise CheckpointError(f"{tensor.file}: tensor {source.name!r} has shape {list(tensor.shape)}, expected {list(source.shape)}")
    if tensor.dtype not in DTYPES:
        raise CheckpointError(f"{tensor.file}: tensor {source.name!r} has dtype {tensor.dtype}, expected one of {', '.join(DTYPES)}")
    return tensor


def _fill(target: torch.Tensor, scales: torch.Tensor | None, parts: dict[str, StoredTensor], files: SafetensorsFiles) -> None:
    row = 0
    for name, part in parts.items():
        values = _tensor(files.view(part), DTYPES[part.dtype]).view(part.shape)
        rows = slice(row, row + part.shape[0])
        try:
            narrow(values, target[rows], None if scales is None else scales[rows])
        except ValueError as error:
            raise CheckpointError(f"{part.file}: tensor {name!r} {error}") from None
        row = rows.stop


def _tensor(buffer: memoryview, dtype: torch.dtype) -> torch.Tensor:
    with warnings.catch_warnings():  # torch warns of read-only buffers; these are never written
        warnings.filterwarnings("ignore", message="The given buffer is not writable", category=UserWarning)
        return torch.frombuffer(buffer, dtype=dtype)


def plan_weights(config: ModelConfig) -> WeightIndex:
    """Plan the place of each tensor of the model."""
    entries: list[TensorEntry] = []
    offset = 0
    for spec in family_of(config).tensor_specs(config):
        for part in stored_parts(spec, config):
            entries.append(TensorEntry(part.name, part.dtype, offset, part.shape))
            offset += -(-entries[-1].num_bytes // ALIGNMENT) * ALIGNMENT
    return WeightIndex(max(offset, ALIGNMENT), tuple(entries))


def attach_weights(buffer: Buffer, index: WeightIndex) -> dict[str, torch.Tensor]:
    """Views of the buffer by name, without copying. Do not write to them."""
    whole = buffer if isinstance(buffer, torch.Tensor) else _tensor(buffer, torch.uint8)
    found: dict[str, torch.Tensor] = {}
    for entry in index.entries:
        place = whole[entry.offset : entry.offset + entry.num_bytes]
        found[entry.name] = place.view(torch_dtype(entry.dtype)).view(entry.shape)
    return found
