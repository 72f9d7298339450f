"""Admit requests: of holders of an API key, within its limits; without keys, of programs and of web pages of allowed origins."""

import json
import time
from collections.abc import Callable

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from ....runtime.errors import RequestError
from ..keeping.connection import KeptConnection
from .api_keys import CLIENT, ApiKeys
from .cross_origin import AllowedOrigins
from .host_names import HostNames

_HANDED_ON = web.RequestKey("handed_on", bool)


def check_host(keys: ApiKeys, names: HostNames) -> Middleware:
    """Refuse requests to a name that is not the server's, unless a key is needed, which no web page has. Programs may leave ``Host``
    out."""

    @web.middleware
    async def check_host(request: web.Request, handler: Handler) -> web.StreamResponse:
        host = request.headers.get("Host", "")
        if host and not keys.is_needed and not names.has(host):
            shown = host[:100]
            name = json.dumps(shown.rpartition(":")[0] or shown)  # with escapes: a header may be no UTF-8
            message = f"Host is {shown!r}, which is none of this server's names; if it should be one, configure [server] "
            message += f"allowed_hosts = [{name}], or an API key (server.api_key), with which any name may be used"
            raise RequestError(message, status=421, type="permission_error")
        return await handler(request)

    return check_host


def authenticate(keys: ApiKeys, names: HostNames, origins: AllowedOrigins, is_open: Callable[[web.Request], bool]) -> Middleware:
    """Demand an API key, as ``Authorization: Bearer KEY`` or ``X-Api-Key: KEY``, on every route, known or not, that is not open.

    Without keys clients look alike, but a web page open in a user's browser must not use the server unnoticed: the origin that its
    POST names is another one, or a name that is made to point here. (Its GET names none: see docs/security.md.) Origins that are
    allowed may.
    """

    @web.middleware
    async def authenticate(request: web.Request, handler: Handler) -> web.StreamResponse:
        if keys.is_needed and not is_open(request):
            client = keys.find(*_keys_of(request))
            if client is None:
                raise RequestError("the API key is missing or wrong", status=401, type="authentication_error", code="invalid_api_key")
            request[CLIENT] = client
        origin = request.headers.get("Origin")
        is_foreign = origin is not None and not _is_own(origin.lower(), request.host.lower(), names) and not origins.allow(origin)
        if origin is not None and is_foreign and not keys.is_needed:
            message = f"web pages of another origin ({origin[:100]!r}) may not use this server: it has no API key (server.api_key)"
            message += ", and server.allow_origins does not name it"
            raise RequestError(message, status=403, type="permission_error")
        return await handler(request)

    return authenticate


@web.middleware
async def limit(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Hold each key to its limits. They count POST requests, except those of the page, and those that end an answer under way, which
    may be the one that reaches a limit."""
    if not _is_limited(request):
        return await handler(request)
    quota, kept = request[CLIENT].quota, request.transport
    quota.begin(time.monotonic(), is_known=isinstance(kept, KeptConnection) and kept.recorded is not None)
    try:
        return await handler(request)
    finally:
        if _HANDED_ON not in request:
            quota.end()


def hand_on(request: web.Request) -> None:
    """Count an answer that goes on by itself in place of the request that reads it."""
    if _is_limited(request) and _HANDED_ON not in request:
        request[_HANDED_ON] = True
        request[CLIENT].quota.end()


def mark_limits(request: web.Request, response: web.StreamResponse) -> None:
    """Tell a client what is left of its limits, in OpenAI's headers, before the response's headers leave."""
    if _is_limited(request):
        response.headers.update(request[CLIENT].quota.headers(time.monotonic()))


def _is_limited(request: web.Request) -> bool:
    is_free = request.path.startswith("/page/") or request.path.rstrip("/").endswith("/cancel")
    return CLIENT in request and request.method == "POST" and not is_free


def _keys_of(request: web.Request) -> tuple[str, str]:
    """Return the keys that the request gives, in OpenAI's header and in Anthropic's; empty where it has none."""
    scheme, _, key = request.headers.get("Authorization", "").partition(" ")
    return key if scheme.lower() == "bearer" else "", request.headers.get("X-Api-Key", "")


def _is_own(origin: str, host: str, names: HostNames) -> bool:
    """Return whether this origin is the server's: same host and port, by an address or one of the server's names."""
    return names.has(host) and origin.partition("://")[2] == host
