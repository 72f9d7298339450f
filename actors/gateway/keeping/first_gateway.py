"""Requests that the first of several gateways answers, and gets with their connections: those about answers that are kept, for it alone
keeps any, and those of the page for news, which each gateway would number in its own way. Runs in the event loop of another gateway,
before all else that is done with a request.
"""

import asyncio
from collections.abc import Callable, Mapping

from aiohttp import web
from aiohttp.typedefs import Handler

from ....runtime.errors import RequestError
from .connection import KeptConnection

CONVERSATION = "X-Conversation-Id"
_FIRST = "gateway"
_PATHS = ("/v1/responses", "/v1/stream")
_NEWS = "/page/state"


def leave_to_first(app: web.Application, broken: Callable[[], Mapping[str, str]]) -> None:
    """Let the application leave such requests to the first gateway. ``broken``: actors that the run does without for now, and why.
    While the first is one of them, those about kept answers are refused, and the others answered."""

    @web.middleware
    async def move(request: web.Request, handler: Handler) -> web.StreamResponse:
        is_for_first = request.path == _NEWS or _is_about_kept(request)
        if is_for_first and isinstance(request.transport, KeptConnection) and _FIRST not in broken():
            request.transport.move(0)
            await asyncio.Event().wait()  # until the handler learns that its connection is lost
        return await handler(request)

    @web.middleware
    async def refuse(request: web.Request, handler: Handler) -> web.StreamResponse:
        if _is_about_kept(request):
            reason = broken().get(_FIRST, "it is away")
            raise RequestError(f"{_FIRST}, which alone keeps answers, is broken: {reason}", status=503, type="overloaded_error")
        return await handler(request)

    app.middlewares.insert(0, move)
    app.middlewares.append(refuse)


def _is_about_kept(request: web.Request) -> bool:
    is_about_one = any(request.path == path or request.path.startswith(f"{path}/") for path in _PATHS)
    return is_about_one or CONVERSATION in request.headers
