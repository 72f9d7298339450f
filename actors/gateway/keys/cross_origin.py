"""Web pages of other origins (CORS): those that ``server.allow_origins`` names may use the server, and their browsers are told so."""

from collections.abc import Sequence

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from ..reading.ignored import HEADER as IGNORED

_MAX_AGE_S = 600  # for which a browser need not ask again
_MAX_HEADERS_CHARS = 1000
_LIMITS = [f"X-RateLimit-{fact}-{what}" for what in ("Requests", "Tokens") for fact in ("Limit", "Remaining", "Reset")]
_EXPOSED = ", ".join(("X-Request-Id", "Retry-After", IGNORED, *_LIMITS))


class AllowedOrigins:
    """The origins whose pages may use the server, such as "https://app.example"; "*" is any."""

    def __init__(self, origins: Sequence[str]) -> None:
        self._origins = frozenset(origin.lower() for origin in origins)

    def allow(self, origin: str) -> bool:
        return "*" in self._origins or origin.lower() in self._origins

    def mark(self, request: web.Request, response: web.StreamResponse) -> None:
        """Let the page that sent the request read its response."""
        origin = request.headers.get("Origin")
        if self._origins:
            response.headers.add("Vary", "Origin")  # caches must not give one origin's answer to another
        if origin is not None and self.allow(origin):
            response.headers["Access-Control-Allow-Origin"] = origin
            response.headers["Access-Control-Expose-Headers"] = _EXPOSED

    @property
    def preflight(self) -> Middleware:
        """Answer a browser that asks, without the page's key, whether it may send a request."""

        @web.middleware
        async def preflight(request: web.Request, handler: Handler) -> web.StreamResponse:
            asked = request.headers
            is_preflight = request.method == "OPTIONS" and "Access-Control-Request-Method" in asked
            if not is_preflight or not self.allow(asked.get("Origin", "")):
                return await handler(request)
            response = web.Response(status=204)
            response.headers["Access-Control-Allow-Methods"] = "GET, POST, DELETE"
            response.headers["Access-Control-Allow-Headers"] = asked.get("Access-Control-Request-Headers", "")[:_MAX_HEADERS_CHARS]
            response.headers["Access-Control-Max-Age"] = str(_MAX_AGE_S)
            if asked.get("Access-Control-Request-Private-Network") == "true":  # a page of the Internet, a server of this machine
                response.headers["Access-Control-Allow-Private-Network"] = "true"
            return response

        return preflight
