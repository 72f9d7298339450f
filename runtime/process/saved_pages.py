"""The files of saved pages (``cache.dir``) that a run uses: ``<run>/saved-pages``, written by ``memory``, names them. The controller
looks into them for keys; encoder and prefill read pages."""

import os
from collections.abc import Mapping
from pathlib import Path

import msgspec

_NAME = "saved-pages"


class SavedPages(msgspec.Struct, frozen=True):
    """The file of one pool. ``secret``: of the codes in it (``shm/page_file``)."""

    path: str
    secret: bytes
    page_bytes: int


_decode = msgspec.json.Decoder(dict[str, SavedPages]).decode


def write_saved_pages(run: Path, saved: Mapping[str, SavedPages]) -> None:
    """Tell the run in ``run`` of the files, by pool. Raises: OSError."""
    part = run / f"{_NAME}.part"
    with open(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
        file.write(msgspec.json.encode(saved))
    os.replace(part, run / _NAME)


def read_saved_pages(run: Path) -> dict[str, SavedPages]:
    """Return the run's files by pool; none if it has none."""
    try:
        return _decode((run / _NAME).read_bytes())
    except FileNotFoundError:
        return {}
