"""The hub's cache on this machine, in the layout of huggingface_hub.

A folder ``models--ORG--REPO`` has ``blobs`` by their digests, ``snapshots`` of links to them by commit, and ``refs`` with the commit of
a branch. Programs that use that library find what mmrt fetches, and mmrt what they have fetched.
"""

import os
import re
from pathlib import Path
from typing import NamedTuple

from ..models.checkpoint.files import ADAPTER_FILES, INDEX, gguf_shards, missing_files
from ..models.errors import CheckpointError
from .errors import HubError, ModelNotFoundError
from .names import HubName
from .repository import RemoteFile, choose_gguf, is_gguf

_MAIN = "main"
_COMMIT = re.compile(r"[0-9a-f]{40}")
_SNAPSHOT = re.compile(r".*/models--([^/]+?)--([^/]+)/snapshots/([0-9a-f]{40})(?:/(.+))?")
_SHARD = re.compile(r".+-[0-9]{5}-of-[0-9]{5}\.safetensors")
PARTIAL = ".mmrt.incomplete"  # of a file that is being fetched


class Cached(NamedTuple):
    """A whole model. ``path``: a checkpoint directory, or a GGUF file."""

    path: Path
    commit: str


class RepositoryCache:
    """What the cache has of one repository."""

    def __init__(self, repo: str, root: Path | None = None) -> None:
        """``root``: of the cache; by default that of huggingface_hub's environment (HF_HOME, HF_HUB_CACHE)."""
        self.folder = (root or cache_root()) / f"models--{repo.replace('/', '--')}"

    def snapshot(self, commit: str) -> Path:
        return self.folder / "snapshots" / commit

    def blob(self, file: RemoteFile) -> Path:
        return self.folder / "blobs" / file.digest

    def partial(self, file: RemoteFile) -> Path:
        return self.folder / "blobs" / f"{file.digest}{PARTIAL}"

    def has(self, file: RemoteFile) -> bool:
        return self.blob(file).is_file()

    def missing_bytes(self, files: list[RemoteFile]) -> int:
        """What has to be fetched yet."""
        return sum(file.num_bytes - min(self._partial_bytes(file), file.num_bytes) for file in files if not self.has(file))

    def _partial_bytes(self, file: RemoteFile) -> int:
        try:
            return self.partial(file).stat().st_size
        except OSError:
            return 0

    def link(self, commit: str, file: RemoteFile) -> Path:
        """Link a file's blob into the snapshot. Returns the link. Raises: OSError."""
        path = self.snapshot(commit) / file.name
        target = os.path.relpath(self.blob(file), path.parent)
        if path.is_symlink() and os.readlink(path) == target:
            return path
        path.parent.mkdir(parents=True, exist_ok=True)
        draft = path.with_name(f".{file.digest[:16]}.{os.getpid()}")
        draft.symlink_to(target)
        os.replace(draft, path)
        return path

    def note(self, revision: str, commit: str) -> None:
        """Note which commit a branch is, so that its name leads to what was fetched. Raises: HubError."""
        if (revision or _MAIN) == commit:
            return
        ref = self.folder / "refs" / (revision or _MAIN)
        try:
            ref.parent.mkdir(parents=True, exist_ok=True)
            draft = ref.with_name(f".{ref.name}.{os.getpid()}")
            draft.write_text(commit)
            os.replace(draft, ref)
        except OSError as error:
            raise HubError(f"{ref} cannot be written: {error.strerror}") from None

    def commit_of(self, revision: str) -> str | None:
        """The commit that a revision is known to be here."""
        if _COMMIT.fullmatch(revision):
            return revision
        try:
            found = (self.folder / "refs" / (revision or _MAIN)).read_text().strip()
        except (OSError, ValueError):
            return None
        return found if _COMMIT.fullmatch(found) else None


def cache_root() -> Path:
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE).expanduser().absolute()


def name_of(path: Path) -> HubName | None:
    """The name, with its commit, of a model that lies in a cache: the inverse of ``find_cached``."""
    found = _SNAPSHOT.fullmatch(str(path))
    return None if found is None else HubName(f"{found[1]}/{found[2]}", (found[4] or "").rpartition("/")[2], found[3])


def find_cached(name: HubName, root: Path | None = None) -> Cached | None:
    """Return a model that the cache has whole; None if it does not. No hub is asked for a newer commit. Raises: HubError."""
    cache = RepositoryCache(name.repo, root)
    commit = cache.commit_of(name.revision)
    if commit is None or not (snapshot := cache.snapshot(commit)).is_dir():
        return None
    try:
        path = _whole(name, snapshot)
    except OSError as error:
        raise HubError(f"{snapshot} cannot be read: {error.strerror}") from None
    return None if path is None else Cached(path, commit)


def find_adapter(name: HubName, root: Path | None = None) -> Cached | None:
    """As ``find_cached``, of a LoRA adapter; ``path`` is its directory."""
    cache = RepositoryCache(name.repo, root)
    commit = cache.commit_of(name.revision)
    is_whole = commit is not None and all((cache.snapshot(commit) / file).is_file() for file in ADAPTER_FILES)
    return Cached(cache.snapshot(commit), commit) if commit is not None and is_whole else None


def _whole(name: HubName, snapshot: Path) -> Path | None:
    files = [str(file.relative_to(snapshot)) for file in sorted(snapshot.rglob("*")) if file.is_file()]
    try:
        if is_gguf(name, files):
            path = snapshot / choose_gguf(name, files)
            gguf_shards(path)
            return path
    except (CheckpointError, ModelNotFoundError):
        return None  # a shard is missing, or the tag leads to another file
    if not (snapshot / "config.json").is_file() or missing_files(snapshot):
        return None
    is_part = not (snapshot / INDEX).is_file() and any(_SHARD.fullmatch(file) for file in files)
    return None if is_part else snapshot
