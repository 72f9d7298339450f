"""A checkpoint's tensors in the model's layout, in one buffer that all processes map: host memory, or a device's.

The memory actor calls ``write_weights`` once; prefill, decode and encoder call ``attach_weights`` and share its pages.
"""

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import msgspec
import torch

from ...schema.quantization import Fp4Quantization, Fp8Quantization, GgufQuantization, IntegerQuantization
from ...shm.mapping import private_memory
from ..architecture import ModelConfig
from ..errors import CheckpointError
from ..families.registry import family_of
from .adapter import Adapter, read_adapter
from .files import GGUF_SUFFIX, weight_files
from .filling import Files, Quantized, Stored, StoredNumbers, tensor_jobs, tensor_over
from .fp4 import StoredFp4, find_fp4
from .fp8 import StoredFp8, find_fp8
from .gguf_files import GgufFiles
from .gguf_matrices import StoredBlocks, StoredPieces, find_blocks
from .jobs import Job, do_all
from .quantized import StoredIntegers, find_integers
from .safetensors_files import DTYPES, SafetensorsFiles, StoredTensor
from .stacked import Place, place_of, turned
from .tied_head import check_tied
from .weight_specs import Part, Shape, Source, TensorSpec, scales_of, stored_parts

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
    num_threads: int = 1,
) -> WeightIndex:
    """Write the checkpoint at ``path`` into the buffer that ``allocate(num_bytes)`` returns, in ``config.dtype`` and matrices in
    ``config.weights``. All tensors are checked before ``allocate`` is called, once. ``progress(done_bytes, total_bytes)`` follows each
    tensor; what it raises ends the writing. For a device the CPU converts them on their way from the mapped files, in ``num_threads``
    threads.

    Raises: CheckpointError naming the tensor, the expected and the actual.
    """
    family = family_of(config)
    specs = family.tensor_specs(config)
    if not specs:
        index = plan_weights(config)
        allocate(index.num_bytes)
        return index
    with _open(Path(path)) as files:
        stored = {family.canonical_name(name): tensor for name, tensor in files.tensors.items()}
        check_tied(files, stored, config.language)
        chosen = {spec.name: [_choose(Path(path), source, stored, config) for source in spec.sources] for spec in specs}
        by_name = {spec.name: spec for spec in specs}
        adapter = _adapter_of(Path(path), config, specs)
        index = plan_weights(config, {name for name, parts in chosen.items() if _is_spared(parts, config)})
        targets = attach_weights(allocate(index.num_bytes), index)

        def jobs_of(entry: TensorEntry) -> Iterator[Job]:
            if entry.name in chosen:  # else the scales of the one before, which came with it
                spec, parts = by_name[entry.name], chosen[entry.name]
                yield from tensor_jobs(targets[entry.name], targets.get(scales_of(entry.name)), spec, parts, files, config, adapter)

        def done(entry: TensorEntry) -> None:
            if progress is not None:
                progress(entry.offset + entry.num_bytes, index.num_bytes)

        do_all(((entry, jobs_of(entry)) for entry in index.entries), done, num_threads)
    return index


def _open(path: Path) -> Files:
    """Raises: CheckpointError."""
    files = weight_files(path)
    return GgufFiles(files) if files[0].suffix == GGUF_SUFFIX else SafetensorsFiles(path)


def _adapter_of(path: Path, config: ModelConfig, specs: Collection[TensorSpec]) -> Adapter | None:
    """Raises: CheckpointError for one that does not fit the model."""
    adapter = read_adapter(path, family_of(config).canonical_name)
    if adapter is not None:
        adapter.check(source for spec in specs for source in spec.sources)
    return adapter


class FoundWeights(NamedTuple):
    """The contents of a checkpoint's files. ``dtypes``: safetensors' names, that of most bytes first. ``problems``: tensors that
    the model needs and cannot have, a sentence each. ``unread``: names of tensors that the model does not have."""

    num_files: int
    num_bytes: int
    dtypes: tuple[str, ...]
    problems: tuple[str, ...]
    unread: tuple[str, ...]


def check_weights(path: Path, config: ModelConfig) -> FoundWeights:
    """Compare all tensors of a checkpoint with those of the model, by the headers of its files. Raises: CheckpointError for files that
    cannot be read."""
    family = family_of(config)
    specs = family.tensor_specs(config)
    problems, read = list[str](), set[StoredTensor]()
    try:
        _adapter_of(path, config, specs)
    except CheckpointError as error:
        problems.append(str(error))
    with _open(path) as files:
        stored = {family.canonical_name(name): tensor for name, tensor in files.tensors.items()}
        for source in (source for spec in specs for source in spec.sources):
            try:
                found = _choose(path, source, stored, config)
            except CheckpointError as error:
                problems.append(str(error))
            else:
                read.update(_tensors_of(found, stored))
        try:
            check_tied(files, stored, config.language, is_whole=False)
        except CheckpointError as error:
            problems.append(str(error))
        tensors = files.tensors
    sizes = Counter[str]()
    for tensor in tensors.values():
        sizes[tensor.dtype] += tensor.num_bytes
    return FoundWeights(
        num_files=len({tensor.file for tensor in tensors.values()}),
        num_bytes=sizes.total(),
        dtypes=tuple(dtype for dtype, _ in sizes.most_common()),
        problems=tuple(dict.fromkeys(problems)),
        unread=tuple(name for name, tensor in tensors.items() if tensor not in read),
    )


def read_weights(path: Path, config: ModelConfig) -> dict[str, torch.Tensor]:
    """The checkpoint's tensors in memory of this process alone, for what is no actor. Raises: CheckpointError."""
    buffers: list[memoryview] = []

    def allocate(num_bytes: int) -> memoryview:
        buffers.append(private_memory(num_bytes))
        return buffers[0]

    index = write_weights(path, config, allocate)
    return attach_weights(buffers[0], index)


def _tensors_of(found: Stored, stored: Mapping[str, StoredTensor]) -> Collection[StoredTensor]:
    """The tensors in the files that it is made of."""
    if isinstance(found, StoredIntegers):
        return found.parts.values()
    if isinstance(found, StoredPieces):
        return [piece.tensor for piece in found.pieces]
    return [stored[name] for name in (found.names if isinstance(found, StoredFp4 | StoredFp8) else (found.name,))]


def _choose(path: Path, source: Source, stored: dict[str, StoredTensor], config: ModelConfig) -> Stored:
    """Return what the checkpoint has of a source, its shape checked."""
    if (quantized := _find_quantized(source, stored, config)) is not None:
        return quantized
    if (part := source.part) is not None and source.name not in stored and part.name in stored:
        return _choose_part(part, source.shape, stored[part.name])
    if source.name not in stored:
        hint = (
            "; tie_word_embeddings: true in config.json lets the vocabulary serve as the head"
            if source.name == "lm_head.weight"
            else ""
        )
        raise CheckpointError(f"{path}: tensor {source.name!r} of shape {list(source.shape)} is missing{hint}")
    return StoredNumbers(source.name, Place(_checked(source.name, stored[source.name], source.shape)))


def _choose_part(part: Part, shape: Shape, tensor: StoredTensor) -> StoredNumbers:
    """Of all experts' matrices in one tensor, transposed as its shape tells."""
    is_turned = part.shape != tensor.shape == turned(part.shape)
    checked = _checked(part.name, tensor, turned(part.shape) if is_turned else part.shape)
    return StoredNumbers(part.name, place_of(part, shape[0], checked, is_turned))


def _find_quantized(source: Source, stored: dict[str, StoredTensor], config: ModelConfig) -> Quantized | None:
    match config.quantization:
        case IntegerQuantization() as how:
            return find_integers(source, stored, how)
        case Fp8Quantization() as how:
            return find_fp8(source, stored, how)
        case Fp4Quantization() as how:
            return find_fp4(source, stored, how)
        case GgufQuantization() as how:
            return find_blocks(source, stored, how, config.language)
        case None:
            return None


def _checked(name: str, tensor: StoredTensor, shape: Shape) -> StoredTensor:
    if tensor.shape != shape:
        raise CheckpointError(f"{tensor.file}: tensor {name!r} has shape {list(tensor.shape)}, expected {list(shape)}")
    if tensor.dtype not in DTYPES:
        raise CheckpointError(f"{tensor.file}: tensor {name!r} has dtype {tensor.dtype}, expected one of {', '.join(DTYPES)}")
    return tensor


def _is_spared(parts: list[Stored], config: ModelConfig) -> bool:
    """Return whether a quantized checkpoint has this tensor, or a part of it, in full precision, or GGUF of 4 bits in more."""
    if isinstance(config.quantization, GgufQuantization):
        return config.quantization.form == "int4" and not all(isinstance(part, StoredBlocks) and part.has_4_bits for part in parts)
    return config.quantization is not None and not all(isinstance(part, Quantized) for part in parts)


def plan_weights(config: ModelConfig, in_8_bits: Collection[str] = ()) -> WeightIndex:
    """Plan the place of each tensor of the model. Matrices named by ``in_8_bits`` have 8 bits at least."""
    entries: list[TensorEntry] = []
    offset = 0
    for spec in family_of(config).tensor_specs(config):
        for part in stored_parts(spec, config, spec.name in in_8_bits):
            entries.append(TensorEntry(part.name, part.dtype, offset, part.shape))
            offset += -(-entries[-1].num_bytes // ALIGNMENT) * ALIGNMENT
    return WeightIndex(max(offset, ALIGNMENT), tuple(entries))


def attach_weights(buffer: Buffer, index: WeightIndex) -> dict[str, torch.Tensor]:
    """Views of the buffer by name, without copying. Do not write to them."""
    whole = buffer if isinstance(buffer, torch.Tensor) else tensor_over(buffer, torch.uint8)
    found: dict[str, torch.Tensor] = {}
    for entry in index.entries:
        place = whole[entry.offset : entry.offset + entry.num_bytes]
        found[entry.name] = place.view(torch_dtype(entry.dtype)).view(entry.shape)
    return found
