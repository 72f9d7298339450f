"""What lies in the hub's cache, to be listed and removed. huggingface_hub reads and empties it."""

from pathlib import Path
from typing import NamedTuple

from ..models.checkpoint.files import GGUF_SUFFIX, is_tower
from .cache import PARTIAL, find_adapter, find_cached
from .errors import HubError, ModelNotFoundError
from .names import HubName
from .repository import choose_gguf, gguf_places, is_adapter


class Stored(NamedTuple):
    """A model at a commit, or one of a repository of GGUF files. ``is_whole``: it can be served; else ``mmrt pull`` goes on."""

    name: HubName
    num_bytes: int
    used_s: float
    is_whole: bool
    folder: Path

    @property
    def label(self) -> str:
        return self.name.served


def stored_models(root: Path) -> list[Stored]:
    """All models of the cache that have a configuration, a GGUF file or a part of one, and adapters, by name. Raises: HubError."""
    from huggingface_hub import scan_cache_dir

    if not root.is_dir():
        return []
    try:
        repos = scan_cache_dir(root).repos
    except (OSError, ValueError) as error:
        raise HubError(f"{root} cannot be read: {error}") from None
    found = []
    for repo in repos:
        if repo.repo_type != "model":
            continue
        partial = sum(_size(file) for file in repo.repo_path.glob(f"blobs/*{PARTIAL}"))
        for revision in repo.revisions:
            files = {str(file.file_path.relative_to(revision.snapshot_path)): file for file in revision.files}
            names = {HubName(repo.repo_id, tag, revision.commit_hash): list(part) for tag, part in gguf_places(files).items()}
            if not names and ("config.json" in files or is_adapter(files) or partial):
                names[HubName(repo.repo_id, "", revision.commit_hash)] = list(files)
            for name, part in names.items():
                size = sum(files[file].size_on_disk for file in part)
                used_s = max((files[file].blob_last_accessed for file in part), default=0.0)
                is_whole = (find_adapter if is_adapter(files) else find_cached)(name, root) is not None
                found.append(Stored(name, size + (0 if is_whole else partial), used_s, is_whole, repo.repo_path))
    return sorted(found)


def _size(file: Path) -> int:
    try:
        return file.stat().st_size
    except OSError:  # its pull has just ended
        return 0


def remove_model(name: HubName, root: Path) -> int:
    """Remove a model: of one revision if the name has one, of one GGUF file if it has a tag. Returns the bytes that are free then.

    Raises: HubError if there is no such model, or it cannot be removed.
    """
    from huggingface_hub import scan_cache_dir

    repo = next((repo for repo in (scan_cache_dir(root).repos if root.is_dir() else ()) if repo.repo_id == name.repo), None)
    revisions = [] if repo is None else [one for one in repo.revisions if _is_meant(name, one.commit_hash, one.refs)]
    if repo is None or not revisions:
        raise ModelNotFoundError(f"{name} is not in {root}: mmrt model list shows what is")
    try:
        if not name.tag:
            strategy = scan_cache_dir(root).delete_revisions(*(one.commit_hash for one in revisions))
            strategy.execute()
            return strategy.expected_freed_size
        links = [link for one in revisions for link in _links(name, one.snapshot_path)]
        blobs = {link.resolve() for link in links}
        for link in links:
            link.unlink()
        kept = {file.resolve() for file in repo.repo_path.glob("snapshots/*/**/*") if file.is_symlink()}
        freed = sum(blob.stat().st_size for blob in blobs - kept)
        for blob in blobs - kept:
            blob.unlink()
    except OSError as error:
        raise HubError(f"{name} cannot be removed: {error.strerror or error}") from None
    return freed


def _is_meant(name: HubName, commit: str, refs: frozenset[str]) -> bool:
    return not name.revision or name.revision in refs or commit.startswith(name.revision)


def _links(name: HubName, snapshot: Path) -> list[Path]:
    files = [str(file.relative_to(snapshot)) for file in snapshot.rglob(f"*{GGUF_SUFFIX}")]
    first, places = choose_gguf(name, files), gguf_places(files)
    towers = [file for file in files if is_tower(Path(file))] if len(places) == 1 else []  # what the last model leaves
    return [snapshot / file for part in places.values() if first in part for file in (*part, *towers)]
