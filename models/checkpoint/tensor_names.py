"""The names of a checkpoint's tensors, without torch and without their places: what config.json may leave open."""

import json
from pathlib import Path

from .files import INDEX, weight_files

_MOST_BYTES = 100 << 20  # of a header


def tensor_names(path: Path) -> frozenset[str]:
    """Of its index or its safetensors files; none of a directory without them. Raises CheckpointError for a damaged index."""
    if not (path / INDEX).is_file() and not any(path.glob("*.safetensors")):
        return frozenset()
    files = weight_files(path)
    if (path / INDEX).is_file():
        return frozenset(json.loads((path / INDEX).read_bytes())["weight_map"])
    return frozenset().union(*map(_names, files))


def _names(file: Path) -> frozenset[str]:
    """Those of a file's header; none of a damaged one, which is refused where its tensors are read."""
    with file.open("rb") as stream:
        size = int.from_bytes(stream.read(8), "little")
        try:
            return frozenset(json.loads(stream.read(size))) if size <= _MOST_BYTES else frozenset()
        except (ValueError, RecursionError, TypeError):
            return frozenset()
