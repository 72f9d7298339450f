"""Read GGUF files: their metadata, and their tensors by the names of a Hugging Face checkpoint. Every length is checked before it is
used, and nothing is executed; a file is mapped read-only.

The format: a header (magic, version, counts), key/value pairs, a table of tensors (name, sizes in reverse order, type, offset), and the
data from the next multiple of ``general.alignment`` on.
"""

import math
import mmap
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import numpy as np

from ..errors import CheckpointError
from .files import GGUF_MAGIC
from .gguf_blocks import BLOCKS, TYPE_NAMES
from .gguf_names import Naming, checkpoint_name, checkpoint_shape, is_experts, names_of_expert, naming_of
from .gguf_towers import has_swapped_names, swapped, tower_shape
from .safetensors_files import StoredTensor

_VERSIONS = (2, 3)
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_MAX_AXES = 4
_MAX_NAME_BYTES = 200  # the format allows more, and no file has it
_MAX_HEADER_BYTES = 64 << 20  # the largest known has 16 MB; in memory it becomes up to 16 times as large
_MAX_EXPERTS = 4096
_MIN_ALIGNMENT, _MAX_ALIGNMENT = 8, 1 << 20
_DEFAULT_ALIGNMENT = 32


class CutHeaderError(CheckpointError):
    """A header that goes beyond the end of its file."""


class GgufFile(NamedTuple):
    """What a file says: ``metadata`` by key, and ``tensors`` by its own names."""

    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, StoredTensor]
    mapped: mmap.mmap


def read_gguf(path: Path) -> GgufFile:
    """Read a file's header. Raises: CheckpointError naming the file, the place and the fault."""
    try:
        with path.open("rb") as stream:
            mapped = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: cannot be mapped: {error}") from None
    return _Reader(path, mapped).read()


def shapes_of(file: GgufFile) -> dict[str, tuple[int, ...]]:
    """Of its tensors, by name."""
    return {name: tensor.shape for name, tensor in file.tensors.items()}


class GgufFiles:
    """All tensors of a checkpoint directory that was made of GGUF files (``models/gguf``), by the names of its family's checkpoints. A
    context manager; views die with it."""

    def __init__(self, paths: list[Path]) -> None:
        """Raises: CheckpointError naming the file and the fault."""
        self._maps: dict[Path, mmap.mmap] = {}
        self.tensors: dict[str, StoredTensor] = {}
        files = [read_gguf(path) for path in paths]
        naming = naming_of((file.metadata for file in files), (name for file in files for name in file.tensors))
        for file in files:
            self._maps[file.path] = file.mapped
            are_swapped = has_swapped_names(shapes_of(file))
            for own, tensor in file.tensors.items():
                for name, part in _parts(swapped(own) if are_swapped else own, tensor, naming):
                    if name in self.tensors:
                        raise CheckpointError(f"{file.path}: tensor {own!r} is also in {self.tensors[name].file.name}")
                    self.tensors[name] = part

    def __enter__(self) -> "GgufFiles":
        return self

    def __exit__(self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None) -> None:
        self._maps.clear()

    def view(self, tensor: StoredTensor) -> memoryview:
        """The tensor's bytes, in place in the page cache."""
        return memoryview(self._maps[tensor.file])[tensor.start : tensor.start + tensor.num_bytes]


def _parts(name: str, tensor: StoredTensor, naming: Naming) -> Iterator[tuple[str, StoredTensor]]:
    """A tensor by its name in a checkpoint; one of all experts as one for each. Raises: CheckpointError."""
    if not is_experts(name) or len(tensor.shape) != 3:
        own = checkpoint_name(name, naming)
        yield own, tensor._replace(shape=tower_shape(own, checkpoint_shape(name, tensor.shape)))
        return
    experts, rows, columns = tensor.shape
    if experts > _MAX_EXPERTS:
        raise CheckpointError(f"{tensor.file}: tensor {name!r} has {experts} experts, expected at most {_MAX_EXPERTS}")
    for expert in range(experts):
        names = names_of_expert(name, expert, naming)
        height, rest = divmod(rows, len(names))
        if rest:
            raise CheckpointError(
                f"{tensor.file}: tensor {name!r} has {rows} rows for each expert, expected a multiple of {len(names)}"
            )
        for number, own in enumerate(names):
            yield own, tensor.rows(expert * rows + number * height, (height, columns))


class _Reader:
    def __init__(self, path: Path, mapped: mmap.mmap) -> None:
        self._path, self._mapped = path, mapped
        self._bytes = memoryview(mapped)
        self._size, self._at = len(mapped), 0
        self._end = min(self._size, _MAX_HEADER_BYTES)  # of what a header may take

    def read(self) -> GgufFile:
        if bytes(self._take(4, "the magic")) != GGUF_MAGIC:
            raise CheckpointError(f"{self._path}: is not GGUF: it begins with {bytes(self._bytes[:4])!r}")
        version = self._number("I", "the version")
        if version not in _VERSIONS:
            raise CheckpointError(f"{self._path}: is GGUF of version {version}, expected 2 or 3 in little-endian order")
        num_tensors, num_pairs = self._count("tensors", 24), self._count("key/value pairs", 13)
        metadata: dict[str, Any] = {}
        for _ in range(num_pairs):
            key = self._name("a key")
            if key in metadata:
                raise CheckpointError(f"{self._path}: has key {key!r} twice")
            metadata[key] = self._value(key, self._number("I", f"the type of {key!r}"))
        entries = [self._entry() for _ in range(num_tensors)]
        alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
        if type(alignment) is not int or not _MIN_ALIGNMENT <= alignment <= _MAX_ALIGNMENT or alignment & alignment - 1:
            limits = f"{_MIN_ALIGNMENT} to {_MAX_ALIGNMENT}"
            raise CheckpointError(f"{self._path}: general.alignment is {alignment!r}, expected a power of two from {limits}")
        return GgufFile(self._path, metadata, self._placed(entries, alignment), self._mapped)

    def _take(self, num_bytes: int, what: str) -> memoryview:
        if num_bytes > self._end - self._at:
            raise self._cut(f"{what} at byte {self._at} takes {num_bytes} bytes")
        self._at += num_bytes
        return self._bytes[self._at - num_bytes : self._at]

    def _cut(self, problem: str) -> CheckpointError:
        if self._end < self._size:
            return CheckpointError(f"{self._path}: {problem}, a header has at most {self._end}")
        return CutHeaderError(f"{self._path}: truncated: {problem}, the file has {self._size}")

    def _number(self, code: str, what: str) -> Any:
        return struct.unpack(f"<{code}", self._take(struct.calcsize(f"<{code}"), what))[0]

    def _count(self, what: str, least_bytes: int) -> int:
        """A number of things of which each takes so many bytes of the file."""
        count: int = self._number("Q", f"the number of {what}")
        if count > (self._end - self._at) // least_bytes:
            of = "a header" if self._end < self._size else "the file"
            raise CutHeaderError(f"{self._path}: tells of {count} {what}, more than fit in the {self._end} bytes of {of}")
        return count

    def _text(self, what: str) -> str:
        return bytes(self._take(self._number("Q", f"the length of {what}"), what)).decode("utf-8", "replace")

    def _name(self, what: str) -> str:
        name = self._text(what)
        if not 0 < len(name) <= _MAX_NAME_BYTES:
            raise CheckpointError(
                f"{self._path}: {what} at byte {self._at} has a length of {len(name)}, expected 1 to {_MAX_NAME_BYTES}"
            )
        return name

    def _value(self, key: str, kind: int) -> Any:
        if kind == _STRING:
            return self._text(f"the value of {key!r}")
        if kind == _ARRAY:
            return self._array(key)
        if kind not in _SCALARS:
            raise CheckpointError(f"{self._path}: key {key!r} has a value of type {kind}, which GGUF does not have")
        value = self._number(_SCALARS[kind], f"the value of {key!r}")
        return float(str(np.float32(value))) if _SCALARS[kind] == "f" else value  # 1e-06, as its checkpoint says

    def _array(self, key: str) -> list[Any]:
        kind: int = self._number("I", f"the type of the elements of {key!r}")
        if kind == _STRING:
            return self._strings(self._count(f"elements of {key!r}", 8), key)
        if kind not in _SCALARS:
            raise CheckpointError(f"{self._path}: key {key!r} has an array of type {kind}, expected numbers or strings")
        width = struct.calcsize(f"<{_SCALARS[kind]}")
        count = self._count(f"elements of {key!r}", width)
        code: Any = _SCALARS[kind]
        found: list[Any] = self._take(count * width, f"the elements of {key!r}").cast(code).tolist()
        return found

    def _strings(self, count: int, key: str) -> list[str]:
        """In one loop over local names: a vocabulary has hundreds of thousands."""
        at, end, data, length_at = self._at, self._end, self._mapped, struct.Struct("<Q").unpack_from
        found: list[str] = []
        for _ in range(count):
            first = at + 8
            if first > end or (length := length_at(data, at)[0]) > end - first:
                raise self._cut(f"element {len(found)} of {key!r} at byte {at} goes beyond the end")
            at = first + length
            found.append(data[first:at].decode("utf-8", "replace"))
        self._at = at
        return found

    def _entry(self) -> tuple[str, tuple[int, ...], int, int]:
        """Name, shape, type and offset of a tensor."""
        name = self._name("the name of a tensor")
        num_axes: int = self._number("I", f"the number of axes of {name!r}")
        if num_axes > _MAX_AXES:
            raise CheckpointError(f"{self._path}: tensor {name!r} has {num_axes} axes, expected at most {_MAX_AXES}")
        shape = tuple(self._number("Q", f"the shape of {name!r}") for _ in range(num_axes))[::-1]
        return name, shape, self._number("I", f"the type of {name!r}"), self._number("Q", f"the offset of {name!r}")

    def _placed(self, entries: list[tuple[str, tuple[int, ...], int, int]], alignment: int) -> dict[str, StoredTensor]:
        start = -(-self._at // alignment) * alignment
        tensors: dict[str, StoredTensor] = {}
        for name, shape, kind, offset in entries:
            if name in tensors:
                raise CheckpointError(f"{self._path}: has tensor {name!r} twice")
            if 0 in shape:
                raise CheckpointError(f"{self._path}: tensor {name!r} has shape {list(shape)}, expected sizes of at least 1")
            if offset % alignment:
                raise CheckpointError(f"{self._path}: tensor {name!r} has offset {offset}, which is no multiple of {alignment}")
            if kind not in TYPE_NAMES:
                raise CheckpointError(f"{self._path}: tensor {name!r} is of type {kind}, which is not known")
            values, num_bytes = BLOCKS[TYPE_NAMES[kind]]
            columns = shape[-1] if shape else 1
            if columns % values:
                raise CheckpointError(
                    f"{self._path}: tensor {name!r} of type {TYPE_NAMES[kind]} has rows of {columns}, which is no multiple of {values}"
                )
            total = math.prod(shape) // values * num_bytes
            if start + offset + total > self._size:
                end = start + offset + total
                raise CheckpointError(f"{self._path}: truncated: tensor {name!r} ends at byte {end}, the file at {self._size}")
            tensors[name] = StoredTensor(self._path, TYPE_NAMES[kind], shape, start + offset, total)
        self._check_overlaps(tensors)
        return tensors

    def _check_overlaps(self, tensors: Mapping[str, StoredTensor]) -> None:
        end, before = 0, ""
        for name, tensor in sorted(tensors.items(), key=lambda item: (item[1].start, item[1].num_bytes)):
            if tensor.start < end:
                raise CheckpointError(f"{self._path}: tensor {name!r} overlaps tensor {before!r}")
            end, before = tensor.start + tensor.num_bytes, name
