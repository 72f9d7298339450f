"""The token that opens the page of a run without API keys where the kernel cannot tell whose a connection is: through a published port
of a container, or from another machine. It lies in the run directory, for its user alone.

``mmrt up`` prints it as the fragment of the page's address, which no browser sends and no server logs. The gateway compares it.
"""

import contextlib
import ipaddress
import logging
import os
import secrets
from pathlib import Path

from ..config.sections import ServerSection

log = logging.getLogger(__name__)

TOKEN_NAME = "page-token"


def page_token(run: Path) -> str:
    """Return the token of a run; the first caller makes it. "", which opens nothing, if the run directory has no room for it."""
    file = run / TOKEN_NAME
    try:
        if not file.exists():
            _make(file)
        return file.read_text()
    except OSError as error:
        log.warning("%s cannot be kept: %s", file, error)
        return ""


def _make(file: Path) -> None:
    part = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        with os.fdopen(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as stream:
            stream.write(secrets.token_urlsafe(24))
        with contextlib.suppress(FileExistsError):  # another process was faster: its token counts
            os.link(part, file)
    finally:
        part.unlink(missing_ok=True)


def is_token_needed(server: ServerSection) -> bool:
    """Return whether people may come to the page of this server whom nothing else lets in: it has no keys, and listens not only to this
    machine."""
    if not server.page or server.needs_key:
        return False
    try:
        return not ipaddress.ip_address(server.host).is_loopback
    except ValueError:
        return server.host != "localhost"
