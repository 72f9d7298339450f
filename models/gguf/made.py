"""Directories that were made of GGUF files (``directory``): which there are, and of which files. Without torch."""

import hashlib
import json
from pathlib import Path
from typing import NamedTuple

MADE_OF = "made_of.json"  # in a directory: the files that it depends on, also those that might have been taken
UNUSED = "unused_towers.json"  # why each file beside the model that may be its part that sees is not used
_FORMAT = 9  # of the directories: another number makes all anew


class Made(NamedTuple):
    """A directory that was made. ``files``: those that it was made of. ``is_stale``: they are gone, or others by now."""

    path: Path
    files: list[Path]
    is_stale: bool

    @property
    def num_bytes(self) -> int:
        return sum(file.stat().st_size for file in self.path.iterdir() if not file.is_symlink())


def made_directories(home: Path) -> list[Made]:
    """All directories that were made below ``home``. Raises: OSError."""
    found = []
    for path in sorted(home.glob("*/*/")):
        files = list[Path]()
        try:
            files = [Path(file) for file in json.loads((path / MADE_OF).read_bytes())]
            is_stale = path.parent.name != digest_of(files)
        except (OSError, ValueError, TypeError):
            is_stale = True
        found.append(Made(path, files, is_stale))
    return found


def unused_towers(path: Path) -> list[str]:
    """Of a checkpoint directory: sentences about files with towers beside its model, none of which fits; none if there are none."""
    try:
        found = json.loads((path / UNUSED).read_bytes())
    except (OSError, ValueError):
        return []
    return [f"{reason}; it is not used: name the model's own by --mmproj FILE, for pictures" for reason in found]


def digest_of(files: list[Path]) -> str:
    """Return a key that differs between files, and changes with a file. Raises: OSError."""
    marks = [(str(file.resolve()), file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    return hashlib.sha256(repr((_FORMAT, marks)).encode()).hexdigest()[:16]
