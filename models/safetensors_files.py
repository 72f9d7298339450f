"""Read a checkpoint's safetensors files, single or sharded: where each tensor lies, checked before a byte of it is used.

``weights`` calls it, in the memory actor. Nothing is executed; a file is mapped read-only and its header is JSON.
"""

import json
import math
import mmap
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

import torch

from .errors import CheckpointError

_INDEX = "model.safetensors.index.json"
_MAX_HEADER_BYTES = 100 << 20
DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class StoredTensor(NamedTuple):
    """A tensor in a file; ``start`` and ``num_bytes`` are within it. ``dtype`` is safetensors' name, checked by who uses it."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    num_bytes: int


class SafetensorsFiles:
    """All tensors of a checkpoint directory by name. A context manager; views die with it."""

    def __init__(self, path: Path) -> None:
        """Raises: CheckpointError naming the file and what is wrong with it."""
        self._maps: dict[Path, mmap.mmap] = {}
        self.tensors: dict[str, StoredTensor] = {}
        for file in self._files(path):
            for name, tensor in self._read_header(file):
                if name in self.tensors:
                    raise CheckpointError(f"{file}: tensor {name!r} is also in {self.tensors[name].file.name}")
                self.tensors[name] = tensor

    def __enter__(self) -> "SafetensorsFiles":
        return self

    def __exit__(self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None) -> None:
        self._maps.clear()  # a map that is still looked at, by a traceback say, goes when that does

    def view(self, tensor: StoredTensor) -> memoryview:
        """The tensor's bytes, where they lie in the page cache."""
        return memoryview(self._maps[tensor.file])[tensor.start : tensor.start + tensor.num_bytes]

    @staticmethod
    def _files(path: Path) -> list[Path]:
        index = path / _INDEX
        if index.is_file():
            try:
                weight_map = json.loads(index.read_bytes())["weight_map"]
                names = sorted(set(weight_map.values()))
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise CheckpointError(f"{index}: not an index of safetensors shards: {error!r}") from None
            files = [path / name for name in names if isinstance(name, str) and Path(name).name == name]
            if len(files) != len(names):
                raise CheckpointError(f"{index}: names a shard outside of the model directory")
        else:
            files = sorted(path.glob("*.safetensors"))
        if not files:
            raise CheckpointError(f"{path}: holds no *.safetensors file")
        for file in files:
            if not file.is_file():
                raise CheckpointError(f"{file}: missing, though {_INDEX} names it")
        return files

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
        for name, entry in header.items():
            if name != "__metadata__":
                yield name, _stored(file, name, entry, 8 + header_bytes, size)


def _stored(file: Path, name: str, entry: object, data_start: int, file_bytes: int) -> StoredTensor:
    try:
        assert isinstance(entry, dict)
        dtype_name, shape = str(entry["dtype"]), tuple(int(n) for n in entry["shape"])
        begin, end = (int(n) for n in entry["data_offsets"])
    except (AssertionError, KeyError, TypeError, ValueError):
        raise CheckpointError(f"{file}: header entry of tensor {name!r} is malformed: {entry!r}") from None
    known = DTYPES.get(dtype_name)
    expected = math.prod(shape) * known.itemsize if known is not None else end - begin
    if min(shape, default=0) < 0 or begin < 0 or end - begin != expected:
        raise CheckpointError(f"{file}: tensor {name!r} of shape {list(shape)} takes {expected} bytes, found {end - begin}")
    if data_start + end > file_bytes:
        raise CheckpointError(f"{file}: truncated: tensor {name!r} ends at byte {data_start + end}, the file at {file_bytes}")
    return StoredTensor(file, dtype_name, shape, data_start + begin, expected)
