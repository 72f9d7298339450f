"""A number for the code that determines what cached pages hold. Every actor tells it to the controller once it is active."""

from collections.abc import Iterator
from hashlib import blake2b
from pathlib import Path

_PACKAGE = Path(__file__).parents[2]
_DECISIVE = ("actors", "cpu_kernels", "media", "models", "schema", "triton_kernels")


def loaded_code() -> int:
    """Return a number for the source that decodes media and computes: another one after an edit. Call it when all is imported."""
    return int.from_bytes(blake2b("\n".join(_files()).encode(), digest_size=7).digest(), "little")


def _files() -> Iterator[str]:
    for file in sorted(file for part in _DECISIVE for file in (_PACKAGE / part).rglob("*.py")):
        try:
            found = file.stat()
        except FileNotFoundError:  # an editor's lock, or a file that is being replaced
            continue
        yield f"{file} {found.st_mtime_ns} {found.st_size}"
