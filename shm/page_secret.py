"""Secrets for the keys of cached pages: keys cannot be guessed, and name nothing in another run unless it has the same secret."""

import os
import secrets
import tempfile
from pathlib import Path

from .regular_file import read_regular

SECRET_BYTES = 32

_NAME = "page-secret"


def page_secret(run: Path, secret: bytes | None = None) -> bytes:
    """Return the run's secret. The first call makes it: ``secret``, or a random one."""
    return kept_secret(run / _NAME, secret)


def kept_secret(path: Path, secret: bytes | None = None) -> bytes:
    """Return the secret in a file. The first call makes it: ``secret``, or a random one. Of several at once, all return the same.

    Raises: OSError.
    """
    if not path.exists():
        fd, part = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)  # new, no link, and closed to other users
        try:
            with open(fd, "wb") as file:
                file.write(secret or secrets.token_bytes(SECRET_BYTES))
            os.link(part, path)
        except FileExistsError:
            pass  # another process was first
        finally:
            os.unlink(part)
    return read_regular(path, SECRET_BYTES + 1)
