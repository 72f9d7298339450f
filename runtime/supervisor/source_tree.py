"""The package's source files: changes since the last scan, and imports. Used by ``reload`` in the supervisor.

It checks the modification times of some 150 files, about a millisecond each time: that needs no library, no descriptors, and works on
every file system. A file counts as changed when its bytes differ, not when it was merely rewritten.
"""

import ast
import contextlib
import hashlib
import importlib.util
import os
import traceback
from collections.abc import Iterator
from pathlib import Path

import msgspec

from .import_graph import imports_of


class _File(msgspec.Struct):
    path: str
    is_package: bool
    stamp: tuple[int, int, int]  # inode, size, modification time in ns
    digest: bytes = b""
    imports: frozenset[str] = frozenset()
    error: str = ""  # why it does not compile, in Python's words


class SourceTree:
    """All modules of the package ``name`` whose directory is ``root``. ``load`` first; then ``scan`` whenever there is time."""

    def __init__(self, root: Path, name: str) -> None:
        self._root = str(root)
        self._name = name
        self._files: dict[str, _File] = {}

    def load(self) -> Iterator[str]:
        """Read everything, one module per iteration, so that the caller can do other work in between."""
        for module, file in self._walk(self._root, self._name):
            _read(module, file)
            self._files[module] = file
            yield module

    def scan(self) -> set[str]:
        """Return the modules added, removed or changed since the last scan."""
        changed = set()
        seen = set()
        for module, file in self._walk(self._root, self._name):
            seen.add(module)
            known = self._files.get(module)
            if known is not None and known.stamp == file.stamp and known.path == file.path:
                continue
            _read(module, file, known)
            self._files[module] = file
            if known is None or known.digest != file.digest:
                changed.add(module)
        for module in self._files.keys() - seen:
            del self._files[module]
            changed.add(module)
        return changed

    @property
    def imports(self) -> dict[str, frozenset[str]]:
        """Return the possible imports of each module; for one that does not compile, those when it last compiled."""
        return {module: file.imports for module, file in self._files.items()}

    @property
    def errors(self) -> dict[str, str]:
        """Return the modules that do not compile, and why."""
        return {module: file.error for module, file in self._files.items() if file.error}

    def label(self, module: str) -> str:
        """Return the module's name for users: its path inside the package."""
        known = self._files.get(module)
        return module if known is None else os.path.relpath(known.path, self._root)

    def forget_bytecode(self, module: str) -> None:
        """Remove the module's bytecode, which Python takes for current if the source has the same size and second."""
        known = self._files.get(module)
        if known is not None:
            with contextlib.suppress(OSError):  # not there, or not ours to remove
                Path(importlib.util.cache_from_source(known.path)).unlink()

    def _walk(self, directory: str, package: str) -> Iterator[tuple[str, _File]]:
        """Every module below a directory that is a package. Symbolic links and files that disappear meanwhile are left out."""
        try:
            entries = list(os.scandir(directory))
        except OSError:
            return
        if not any(entry.name == "__init__.py" for entry in entries):
            return
        for entry in entries:
            try:
                if entry.is_dir(follow_symlinks=False):
                    if entry.name.isidentifier():
                        yield from self._walk(entry.path, f"{package}.{entry.name}")
                elif entry.name.endswith(".py"):
                    status = entry.stat()
                    stem = entry.name.removesuffix(".py")
                    module = package if stem == "__init__" else f"{package}.{stem}"
                    yield module, _File(entry.path, stem == "__init__", (status.st_ino, status.st_size, status.st_mtime_ns))
            except OSError:
                continue


def _read(module: str, file: _File, before: _File | None = None) -> None:
    """Fill in the file's current contents. A vanished file counts as empty until the next scan."""
    try:
        source = Path(file.path).read_bytes()
    except OSError:
        source = b""
    file.digest = hashlib.blake2b(source).digest()
    if before is not None and before.digest == file.digest:
        file.imports, file.error = before.imports, before.error
        return
    try:
        file.imports = imports_of(ast.parse(source, file.path), module, file.is_package)
    except (SyntaxError, ValueError) as error:
        file.imports = frozenset() if before is None else before.imports
        file.error = "".join(traceback.format_exception_only(error)).rstrip()
