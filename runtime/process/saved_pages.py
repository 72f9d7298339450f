"""The files of saved pages (``cache.dir``) that a run uses: ``<run>/saved-pages``, written by ``memory``, names them. The controller
looks into them for keys, and keeps the era of the caches beside them; encoder and prefill read pages."""

import errno
import os
from collections.abc import Mapping
from pathlib import Path

import msgspec

from ...schema.page_key import KEY_BYTES

_NAME = "saved-pages"


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


def write_saved_files(run: Path, files: SavedFiles) -> None:
    """Tell the run in ``run`` of its files. Raises: OSError."""
    _write(run / _NAME, msgspec.json.encode(files))


def read_saved_pages(run: Path) -> Mapping[str, SavedPages]:
    """Return the run's files by pool; none if it has none."""
    files = _read(run)
    return {} if files is None else files.pools


def read_era(run: Path) -> bytes:
    """Return the era that is kept; empty if none is, or the run has no files. Raises: OSError."""
    if (files := _read(run)) is None:
        return b""
    try:
        era = Path(files.era).read_bytes()
    except FileNotFoundError:
        return b""
    if len(era) != KEY_BYTES:
        raise OSError(errno.EINVAL, f"{files.era} has {len(era)} bytes, not {KEY_BYTES}")
    return era


def keep_era(run: Path, era: bytes) -> None:
    """Keep the era for later runs, if this one has files. Raises: OSError."""
    if (files := _read(run)) is not None:
        _write(Path(files.era), era)


def _read(run: Path) -> SavedFiles | None:
    try:
        return _decode((run / _NAME).read_bytes())
    except FileNotFoundError:
        return None


def _write(path: Path, data: bytes) -> None:
    """Replace a file whole, closed to others."""
    part = path.with_name(f"{path.name}.part")
    with open(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600), "wb") as file:
        file.write(data)
    os.replace(part, path)
