"""The run's secret for the keys of cached pages: keys cannot be guessed, and name nothing in another run unless it has the same one."""

import os
import secrets
import tempfile
from pathlib import Path

SECRET_BYTES = 32

_NAME = "page-secret"


def page_secret(run: Path, secret: bytes | None = None) -> bytes:
    """Return the run's secret. The first call makes it: ``secret``, or a random one. Of several at once, all return the same."""
    path = run / _NAME
    if not path.exists():
        fd, part = tempfile.mkstemp(prefix=f".{_NAME}.", dir=run)  # it is new, follows no link, and only this user can read it
        try:
            with open(fd, "wb") as file:
                file.write(secret or secrets.token_bytes(SECRET_BYTES))
            os.link(part, path)
        except FileExistsError:
            pass  # another process was first
        finally:
            os.unlink(part)
    return path.read_bytes()
