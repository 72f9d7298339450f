"""The file of saved KV pages (``cache.dir``) that prefill reads: ``<run>/saved-pages``, written by ``memory``, names it."""

import os
from pathlib import Path

import msgspec

_NAME = "saved-pages"


class SavedPages(msgspec.Struct, frozen=True):
    """``secret``: of the codes in the file (``shm/page_file``)."""

    path: str
    secret: bytes
    page_bytes: int


_decode = msgspec.json.Decoder(SavedPages).decode


def write_saved_pages(run: Path, saved: SavedPages) -> None:
    """Tell the run in ``run`` of the file. Raises: OSError."""
    part = run / f"{_NAME}.part"
    with open(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
        file.write(msgspec.json.encode(saved))
    os.replace(part, run / _NAME)


def read_saved_pages(run: Path) -> SavedPages | None:
    """Return the run's file; None if it has none."""
    try:
        return _decode((run / _NAME).read_bytes())
    except FileNotFoundError:
        return None
