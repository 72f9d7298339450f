"""Decide whose requests may see the live run and command its processes (pure).

Both are for the machine's own users, or for holders of the API key. A web page open in their browser is neither: it is refused by
its origin, and a name that is made to point here (DNS rebinding) by ``Host``. Nothing here depends on ``server.allow_origins`` or
``server.allowed_hosts``, which are about the rest of the endpoint.
"""

import ipaddress

from aiohttp import web

from ....runtime.errors import RequestError
from ..api_keys import CLIENT

_PROXIED = ("forwarded", "x-real-ip", "via", "cf-connecting-ip")  # and x-forwarded-…


def check_reader(http: web.Request, has_key: bool) -> None:
    """Check that the live run may be shown. ``has_key``: the server has an API key, which has been checked. Raises: RequestError."""
    _check_page(http)
    if has_key:
        return
    if not _is_loopback(http.remote or ""):
        raise _refusal(f"only this machine may see the run while the server has no API key (server.api_key); you are {http.remote}")
    if proxied := [name for name in http.headers if name.lower() in _PROXIED or name.lower().startswith("x-forwarded-")]:
        raise _refusal(f"{proxied[0][:100]}: behind a proxy the run is shown only with an API key (server.api_key)")
    if not _is_loopback(_host_name(http.host)):
        raise _refusal(f"Host is {http.host[:100]!r}: without an API key the run is shown as localhost or a loopback address only")


def check_command(http: web.Request, has_key: bool) -> None:
    """Check that a process may be commanded: as ``check_reader``, the key allows it, and the request is no form of a web page.
    Raises: RequestError."""
    check_reader(http, has_key)
    if CLIENT in http and not http[CLIENT].key.may_command:
        raise _refusal(f"the API key {http[CLIENT].key.name!r} may neither kill nor restart processes (may_command)")
    if http.content_type != "application/json" or "Content-Type" not in http.headers:
        raise RequestError(f"Content-Type is {http.headers.get('Content-Type', '')[:100]!r}, expected application/json", status=415)


def _check_page(http: web.Request) -> None:
    """Refuse other pages than the server's own, whatever ``server.allow_origins`` says. Programs say neither header."""
    origin = http.headers.get("Origin")
    if origin is not None and origin.lower().partition("://")[2] != http.host.lower():
        raise _refusal(f"web pages of another origin ({origin[:100]!r}) may neither see nor command the run")
    site = http.headers.get("Sec-Fetch-Site", "none")
    if site not in ("same-origin", "none"):
        raise _refusal(f"Sec-Fetch-Site is {site[:100]!r}: web pages of another origin may neither see nor command the run")


def _host_name(host: str) -> str:
    """Return the name or address in a ``Host``, without its port."""
    name = host.rpartition(":")[0] if ":" in host and not host.endswith("]") else host
    return name.strip("[]")


def _is_loopback(name: str) -> bool:
    if name.lower() == "localhost":
        return True
    try:
        address = ipaddress.ip_address(name)
    except ValueError:
        return False
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return (mapped or address).is_loopback


def _refusal(message: str) -> RequestError:
    return RequestError(message, status=403, type="permission_error")
