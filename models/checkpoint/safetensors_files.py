"""Read a checkpoint's safetensors files, single or sharded. Each tensor's place is checked before its bytes are used.

``weights`` calls it, in the memory actor. Nothing is executed; a file is mapped read-only and its header is JSON.
"""

import json
import math
import mmap
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

import torch

from ..errors import CheckpointError
from .files import weight_files

_MAX_HEADER_BYTES = 100 << 20
_MAX_ELEMENTS = 1 << 64  # of a tensor; more are not told apart
DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
# Bits of an element, of all types that the format has; one off the list takes what its offsets say.
_BITS = {
    **{"F4": 4, "F6_E2M3": 6, "F6_E3M2": 6},
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("I16", "U16", "F16", "BF16"), 16),
    **dict.fromkeys(("I32", "U32", "F32"), 32),
    **dict.fromkeys(("C64", "F64", "I64", "U64"), 64),
}


class StoredTensor(NamedTuple):
    """A tensor in a file; ``start`` and ``num_bytes`` are within it. ``dtype`` is safetensors' name, which the caller checks."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    num_bytes: int

    def rows(self, first: int, shape: tuple[int, ...]) -> "StoredTensor":
        """Its rows from ``first`` on as a tensor [rows, columns]. Of a tensor with more axes, all but the last are rows."""
        row_bytes = self.num_bytes // math.prod(self.shape[:-1])
        return self._replace(shape=shape, start=self.start + first * row_bytes, num_bytes=shape[0] * row_bytes)


class SafetensorsFiles:
    """All tensors of a checkpoint directory by name. A context manager; views die with it."""

    def __init__(self, path: Path) -> None:
        """Raises: CheckpointError naming the file and the fault."""
        self._maps: dict[Path, mmap.mmap] = {}
        self.tensors: dict[str, StoredTensor] = {}
        for file in weight_files(path):
            for name, tensor in self._read_header(file):
                if name in self.tensors:
                    raise CheckpointError(f"{file}: tensor {name!r} is also in {self.tensors[name].file.name}")
                self.tensors[name] = tensor

    def __enter__(self) -> "SafetensorsFiles":
        return self

    def __exit__(self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None) -> None:
        self._maps.clear()  # a map still in use, by a traceback for example, is freed with its user

    def view(self, tensor: StoredTensor) -> memoryview:
        """The tensor's bytes, in place in the page cache."""
        return memoryview(self._maps[tensor.file])[tensor.start : tensor.start + tensor.num_bytes]

    def _read_header(self, file: Path) -> Iterable[tuple[str, StoredTensor]]:
        size = file.stat().st_size
        if size < 8:
            raise CheckpointError(f"{file}: truncated: {size} bytes, a safetensors file has at least 8")
        with file.open("rb") as stream:
            mapped = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
        self._maps[file] = mapped
        header_bytes = int.from_bytes(mapped[:8], "little")
        if header_bytes > _MAX_HEADER_BYTES or 8 + header_bytes > size:
            raise CheckpointError(f"{file}: truncated or not safetensors: header of {header_bytes} bytes in a file of {size}")
        try:
            header = json.loads(mapped[8 : 8 + header_bytes])
        except (ValueError, RecursionError) as error:
            raise CheckpointError(f"{file}: header is not JSON: {error}") from None
        if not isinstance(header, dict):
            raise CheckpointError(f"{file}: header is not a JSON object")
        tensors = {name: _stored(file, name, entry, 8 + header_bytes, size) for name, entry in header.items() if name != "__metadata__"}
        _check_cover(file, tensors, 8 + header_bytes, size)
        return tensors.items()


def _check_cover(file: Path, tensors: Mapping[str, StoredTensor], data_start: int, file_bytes: int) -> None:
    """Check that each byte after the header belongs to exactly one tensor, as the format demands: no overlaps and no gaps."""
    at, before = data_start, "the header"
    for name, tensor in sorted(tensors.items(), key=lambda item: (item[1].start, item[1].num_bytes)):
        if tensor.start != at:
            problem = "overlaps" if tensor.start < at else f"begins {tensor.start - at} bytes behind the end of"
            raise CheckpointError(f"{file}: tensor {name!r} {problem} {before}")
        at, before = tensor.start + tensor.num_bytes, f"tensor {name!r}"
    if at != file_bytes:
        raise CheckpointError(f"{file}: {file_bytes - at} bytes behind {before} belong to no tensor")


def _integers(values: object) -> tuple[int, ...]:
    """A JSON array of integers of 64 bits; 2.0 and true are not integers. Raises TypeError."""
    if not isinstance(values, list) or any(type(value) is not int or abs(value) >= 1 << 63 for value in values):
        raise TypeError
    return tuple(values)


def _bytes(num_bits: int) -> str:
    return f"{num_bits} bits" if num_bits % 8 else f"{num_bits // 8} bytes"


def _stored(file: Path, name: str, entry: object, data_start: int, file_bytes: int) -> StoredTensor:
    try:
        assert isinstance(entry, dict)
        dtype_name, shape = str(entry["dtype"]), _integers(entry["shape"])
        begin, end = _integers(entry["data_offsets"])
    except (AssertionError, KeyError, TypeError, ValueError):
        raise CheckpointError(f"{file}: header entry of tensor {name!r} is malformed: {entry!r}") from None
    num_bits = _BITS.get(dtype_name)
    found = 8 * (end - begin)
    expected = min(math.prod(shape), _MAX_ELEMENTS) * num_bits if num_bits is not None else found
    if min(shape, default=0) < 0 or begin < 0 or found != expected:
        raise CheckpointError(f"{file}: tensor {name!r} of shape {list(shape)} takes {_bytes(expected)}, found {end - begin}")
    if num_bits in (16, 32, 64) and begin % (num_bits // 8):
        raise CheckpointError(
            f"{file}: tensor {name!r} of {dtype_name} begins at byte {begin}, which is no multiple of {num_bits // 8}"
        )
    if data_start + end > file_bytes:
        raise CheckpointError(f"{file}: truncated: tensor {name!r} ends at byte {data_start + end}, the file at {file_bytes}")
    return StoredTensor(file, dtype_name, shape, data_start + begin, end - begin)
