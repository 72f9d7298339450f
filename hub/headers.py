"""A draft of a model whose weights are not here yet: their headers in sparse files of the full size. What reads headers alone, as
``mmrt model check`` does, cannot tell it from the model.
"""

from collections.abc import Sequence
from pathlib import Path

from ..models.checkpoint.files import is_tower
from ..models.checkpoint.gguf_files import CutHeaderError, read_gguf
from ..models.errors import CheckpointError
from ..models.gguf.contents import FACTORS
from ..models.gguf.fields import towers_of
from .cache import RepositoryCache
from .client import Hub
from .fetch import together
from .repository import RemoteFile, Repository

_FIRST_BYTES = 256 << 10
_MAX_SAFETENSORS_BYTES = 100 << 20  # of a header, as its reader has it
_GGUF_BYTES = (2 << 20, 14 << 20, 50 << 20)  # read one after the other, until the header is whole
_MAX_ROPE_BYTES = 1 << 20


async def draft_checkpoint(
    hub: Hub, repository: Repository, small: Sequence[RemoteFile], weights: Sequence[RemoteFile], cache: RepositoryCache, folder: Path
) -> Path:
    """Make a checkpoint directory in ``folder``: links to the small files, which are in the cache, and sparse weights.

    Raises: HubError, OSError.
    """
    for file in small:
        (folder / file.name).symlink_to(cache.blob(file))
    await together(_draft_safetensors(hub, repository, file, cache, folder) for file in weights)
    return folder


async def draft_gguf(
    hub: Hub, repository: Repository, weights: Sequence[RemoteFile], cache: RepositoryCache, folder: Path
) -> list[RemoteFile]:
    """Make GGUF files in ``folder``. Returns those that the model takes: without a part that sees if mmrt has none of its architecture.

    Raises: HubError, OSError.
    """
    shards = [file for file in weights if not is_tower(Path(file.name))]
    await together(_draft_gguf(hub, repository, file, cache, folder) for file in shards)
    if len(shards) == len(weights) or not _sees(folder / Path(shards[0].name).name):
        return shards
    await together(_draft_gguf(hub, repository, file, cache, folder) for file in weights if file not in shards)
    return list(weights)


def _sees(path: Path) -> bool:
    try:
        return bool(towers_of(read_gguf(path).metadata))
    except CheckpointError:
        return False  # told by whoever reads the draft


async def _draft_safetensors(hub: Hub, repository: Repository, file: RemoteFile, cache: RepositoryCache, folder: Path) -> None:
    path = folder / Path(file.name).name
    if cache.has(file):
        path.symlink_to(cache.blob(file))
        return
    begin = await hub.read(repository, file, 0, _FIRST_BYTES)
    header_bytes = 8 + int.from_bytes(begin[:8], "little")
    if len(begin) < header_bytes <= _MAX_SAFETENSORS_BYTES:
        begin += await hub.read(repository, file, len(begin), header_bytes - len(begin))
    _write_sparse(path, begin, file.num_bytes)


async def _draft_gguf(hub: Hub, repository: Repository, file: RemoteFile, cache: RepositoryCache, folder: Path) -> None:
    path = folder / Path(file.name).name
    if cache.has(file):
        path.symlink_to(cache.blob(file))
        return
    begin = b""
    for num_bytes in _GGUF_BYTES:
        begin += await hub.read(repository, file, len(begin), num_bytes)
        path.write_bytes(begin)
        if len(begin) == file.num_bytes or not _is_cut(path):
            break
    _write_sparse(path, begin, file.num_bytes)
    try:
        tensors = read_gguf(path).tensors
    except CheckpointError:
        return  # told by whoever reads the draft
    for ropes in (tensors[name] for name in FACTORS & tensors.keys() if tensors[name].num_bytes <= _MAX_ROPE_BYTES):
        values = await hub.read(repository, file, ropes.start, ropes.num_bytes)
        with path.open("r+b") as stream:
            stream.seek(ropes.start)
            stream.write(values)


def _is_cut(path: Path) -> bool:
    """Whether a header goes beyond the end of what is here."""
    try:
        read_gguf(path)
    except CutHeaderError:
        return True
    except CheckpointError:
        return False  # as it is of tensors that are not here
    return False


def _write_sparse(path: Path, begin: bytes, num_bytes: int) -> None:
    path.write_bytes(begin[:num_bytes])
    with path.open("r+b") as stream:
        stream.truncate(num_bytes)
