"""The files of saved pages (``cache.dir``) that a run uses: ``<run>/saved-pages``, written by ``memory``, names them. The controller
looks into them for keys, and keeps the era of the caches beside them; encoder and prefill read pages. Whatever that file names, only
files directly in ``cache.dir`` are read or written: callers say where the configuration has it (``cache_directory``)."""

import errno
import os
from collections.abc import Mapping
from pathlib import Path

import msgspec

from ...schema.page_key import KEY_BYTES
from ...shm.regular_file import read_regular
from ..config.runtime_config import RuntimeConfig

_NAME = "saved-pages"
_MAX_BYTES = 1 << 16


class SavedPages(msgspec.Struct, frozen=True):
    """The file of one pool. ``secret``: of the codes in it (``shm/page_file``)."""

    path: str
    secret: bytes
    page_bytes: int


class SavedFiles(msgspec.Struct, frozen=True):
    """``pools``: the files by pool. ``era``: the path of another file, with the era in which runs begin (``controller/cache_eras``)."""

    pools: dict[str, SavedPages]
    era: str


_decode = msgspec.json.Decoder(SavedFiles).decode


def cache_directory(config: RuntimeConfig) -> Path:
    """Return ``cache.dir``, absolute. Without one no run has such files."""
    return Path(config.cache.dir).expanduser().absolute()


def write_saved_files(run: Path, files: SavedFiles) -> None:
    """Tell the run in ``run`` of its files. Raises: OSError."""
    _write(run / _NAME, msgspec.json.encode(files))


def read_saved_pages(run: Path, cache: Path) -> Mapping[str, SavedPages]:
    """Return the run's files by pool; none if it has none. Raises: OSError."""
    files = _read(run, cache)
    return {} if files is None else files.pools


def read_era(run: Path, cache: Path) -> bytes:
    """Return the era that is kept; empty if none is, or the run has no files. Raises: OSError."""
    if (files := _read(run, cache)) is None:
        return b""
    try:
        era = read_regular(Path(files.era), KEY_BYTES + 1)
    except FileNotFoundError:
        return b""
    if len(era) != KEY_BYTES:
        raise OSError(errno.EINVAL, f"{files.era} has {os.stat(files.era).st_size} bytes, not {KEY_BYTES}")
    return era


def keep_era(run: Path, cache: Path, era: bytes) -> None:
    """Keep the era for later runs, if this one has files. Raises: OSError."""
    if len(era) != KEY_BYTES:
        raise OSError(errno.EINVAL, f"an era has {len(era)} bytes, not {KEY_BYTES}")
    if (files := _read(run, cache)) is not None:
        _write(Path(files.era), era)


def _read(run: Path, cache: Path) -> SavedFiles | None:
    try:
        files = _decode(read_regular(run / _NAME, _MAX_BYTES))
    except FileNotFoundError:
        return None
    except msgspec.DecodeError as error:
        raise OSError(errno.EINVAL, f"{run / _NAME} cannot be read: {error}") from None
    for named in (files.era, *(pool.path for pool in files.pools.values())):
        if Path(named).parent != cache:
            raise OSError(errno.EPERM, f"{run / _NAME} names {named[:200]}, which is not in cache.dir = {str(cache)!r}")
    return files


def _write(path: Path, data: bytes) -> None:
    """Replace a file whole, closed to others."""
    part = path.with_name(f"{path.name}.part")
    with open(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600), "wb") as file:
        file.write(data)
    os.replace(part, path)
