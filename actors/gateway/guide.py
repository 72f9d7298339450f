"""Help for people who have come to the wrong place: ``GET /v1`` is a short page of help, and a 404 names routes that are
like the one asked for.
"""

from collections.abc import Sequence
from difflib import get_close_matches

import msgspec
from aiohttp import web

from .page.files import HEADERS

_MAIN_ROUTES = {
    "POST /v1/chat/completions": "a conversation (OpenAI's chat completions)",
    "POST /v1/responses": "OpenAI's Responses",
    "POST /v1/completions": "a text goes on",
    "POST /v1/embeddings": "vectors of texts",
    "POST /v1/messages": "Anthropic's Messages",
    "POST /api/chat": "Ollama's chat",
    "GET /v1/models": "the model that is served",
    "GET /openapi.json": "all routes and their fields",
}
_MOST_NAMED = 3
_ALIKE = 0.6  # of difflib's ratio


async def serve(http: web.Request) -> web.Response:
    """Answer ``GET /v1`` with a page for a browser, with JSON for others. It says only what documents say, so no key is needed."""
    host = http.host[:100].encode("ascii", "backslashreplace").decode()  # a header may be no UTF-8
    base = f"{http.scheme}://{host}/v1"
    if "text/html" not in http.headers.get("Accept", ""):
        about = f"an OpenAI-compatible server: give clients the base URL {base}"
        return web.Response(body=msgspec.json.encode({"about": about, "routes": _MAIN_ROUTES}), content_type="application/json")
    rows = "".join(f"<tr><td><code>{route}</code></td><td>{what}</td></tr>" for route, what in _MAIN_ROUTES.items())
    body = (
        '<!doctype html><html lang="en"><meta charset="utf-8"><title>mmrt</title><h1>This is an API for programs</h1>'
        '<p>People are served by <a href="/">the page</a>. Give OpenAI\'s clients this address as their base URL.</p>'
        f"<table>{rows}</table>"
    )
    return web.Response(text=body, content_type="text/html", headers={**HEADERS, "Cache-Control": "no-cache"})


def hint(path: str, routes: Sequence[tuple[str, str]]) -> str:
    """Return what to say about a path that is none of ``routes`` (method and path)."""
    known: dict[str, str] = {}
    for method, route in routes:
        known.setdefault(route.lower(), f"{method} {route}")
    alike = get_close_matches(path.lower().rstrip("/"), known, _MOST_NAMED, _ALIKE)
    named = f"did you mean {' or '.join(known[route] for route in alike)}? " if alike else ""
    return f"{named}GET /v1 tells the main routes, GET /openapi.json all"
