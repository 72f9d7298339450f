"""The names of this server in ``Host``: which requests a server without API keys answers.

A web page whose own name is made to point here would have the same origin for its browser, and could read everything. Addresses cannot
be forged so, nor can names that no stranger's name server answers for; docs/security.md says why for each.
"""

import ipaddress
import socket
import threading
from collections.abc import Iterable
from functools import lru_cache

_OF_HOSTS = ("host.docker.internal", "gateway.docker.internal", "host.containers.internal")
"""By which containers reach the machine that they run on."""


class HostNames:
    """The names. ``configured``: further ones; "*" is any."""

    def __init__(self, configured: Iterable[str]) -> None:
        host = socket.gethostname().lower()
        short = host.partition(".")[0]
        self._names = {"localhost", *_OF_HOSTS, host, short, f"{short}.local", *(name.lower() for name in configured)}
        # It may ask a name server, which may be slow to answer.
        threading.Thread(target=lambda: self._names.add(socket.getfqdn().lower()), daemon=True, name="own name").start()

    def has(self, host: str) -> bool:
        """Return whether a ``Host``, with or without its port, is an address or one of the names."""
        name = _name_of(host.lower())
        return name is None or name in self._names or name.endswith(".localhost") or "*" in self._names


@lru_cache(64)
def _name_of(host: str) -> str | None:
    """Return the name in a ``Host``, None for an address."""
    name = host.rpartition(":")[0] if not host.endswith("]") and ":" in host else host
    try:
        ipaddress.ip_address(name.strip("[]"))
    except ValueError:
        return name.removesuffix(".")
    return None
