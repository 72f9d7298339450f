"""The run's secret for the keys of cached pages: keys cannot be guessed, and name nothing in another run unless it has the same one."""

import os
import secrets
from pathlib import Path

SECRET_BYTES = 32

_NAME = "page-secret"


def page_secret(run: Path, secret: bytes | None = None) -> bytes:
    """Return the run's secret. The first call makes it: ``secret``, or a random one."""
    path = run / _NAME
    if not path.exists():
        part = run / f".{_NAME}.{os.getpid()}"
        fd = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        with open(fd, "wb") as file:
            file.write(secret or secrets.token_bytes(SECRET_BYTES))
        os.replace(part, path)
    return path.read_bytes()
