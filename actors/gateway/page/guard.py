"""Decide whose requests may see the live run and command its processes (pure).

Both are for holders of the API key. A server without one shows them to the user who runs it, on this machine, and to holders of the
run's token. A web page open in their browser is neither: it is refused by its origin, and a name that is made to point here (DNS
rebinding) by ``Host``. Nothing here depends on ``server.allow_origins`` or ``server.allowed_hosts``, which are about the rest of the
endpoint.
"""

import ipaddress
import secrets
from collections.abc import Callable
from typing import NamedTuple

from aiohttp import web

from ....runtime.errors import RequestError
from ..keys.api_keys import CLIENT

PROXIED = ("forwarded", "x-real-ip", "via", "cf-connecting-ip")  # and x-forwarded-…
TOKEN_HEADER = "X-Mmrt-Token"
_OTHERWISE = "open the address with #token= that `mmrt up` prints (its token lies in the run directory), or set server.api_key"


class Access(NamedTuple):
    """Who may come. ``has_key``: the server has an API key, which has been checked. ``token``: of the run, opens it otherwise.
    ``is_own``: whether the kernel says that a request comes from the user who runs the server."""

    has_key: bool
    token: str
    is_own: Callable[[web.Request], bool]


def check_reader(http: web.Request, access: Access) -> None:
    """Check that the live run may be shown. Raises: RequestError."""
    _check_page(http)
    if access.has_key or _has_token(http, access.token):
        return
    if TOKEN_HEADER in http.headers:
        raise _refusal("the token is not this run's")
    if not _is_loopback(http.remote or ""):
        raise _refusal(f"without an API key the run is shown on its own machine; you are {http.remote}")
    if proxied := [name for name in http.headers if name.lower() in PROXIED or name.lower().startswith("x-forwarded-")]:
        raise _refusal(f"{proxied[0][:100]}: without an API key the run is not shown behind a proxy")
    if not _is_loopback(_host_name(http.host)):
        raise _refusal(f"Host is {http.host[:100]!r}: without an API key the run is shown as localhost or a loopback address")
    if not access.is_own(http):
        raise _refusal("without an API key the run is shown to the user who runs the server, and you seem to be another one")


def check_command(http: web.Request, access: Access) -> None:
    """Check that a process may be commanded: as ``check_reader``, the key allows it, and the request is no form of a web page.
    Raises: RequestError."""
    check_reader(http, access)
    if CLIENT in http and not http[CLIENT].key.may_command:
        raise _forbidden(f"the API key {http[CLIENT].key.name!r} may neither kill nor restart processes (may_command)")
    if http.content_type != "application/json" or "Content-Type" not in http.headers:
        raise RequestError(f"Content-Type is {http.headers.get('Content-Type', '')[:100]!r}, expected application/json", status=415)


def _check_page(http: web.Request) -> None:
    """Refuse other pages than the server's own, whatever ``server.allow_origins`` says. Programs say neither header."""
    origin = http.headers.get("Origin")
    if origin is not None and origin.lower().partition("://")[2] != http.host.lower():
        raise _forbidden(f"web pages of another origin ({origin[:100]!r}) may neither see nor command the run")
    site = http.headers.get("Sec-Fetch-Site", "none")
    if site not in ("same-origin", "none"):
        raise _forbidden(f"Sec-Fetch-Site is {site[:100]!r}: web pages of another origin may neither see nor command the run")


def _has_token(http: web.Request, token: str) -> bool:
    given = http.headers.get(TOKEN_HEADER, "").encode(errors="surrogateescape")  # a header may be no UTF-8
    return token != "" and secrets.compare_digest(given, token.encode())


def _host_name(host: str) -> str:
    """Return the name or address in a ``Host``, without its port."""
    name = host.rpartition(":")[0] if ":" in host and not host.endswith("]") else host
    return name.strip("[]")


def _is_loopback(name: str) -> bool:
    if name.lower() == "localhost" or name.lower().endswith(".localhost"):
        return True
    try:
        address = ipaddress.ip_address(name)
    except ValueError:
        return False
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return (mapped or address).is_loopback


def _refusal(message: str) -> RequestError:
    return _forbidden(f"{message}; {_OTHERWISE}")


def _forbidden(message: str) -> RequestError:
    return RequestError(message, status=403, type="permission_error")
