"""Requests about answers that are kept, where a run has several gateways: the first one alone keeps any, and gets them with their
connections. Runs in the event loop of another gateway, before all else that is done with a request.
"""

import asyncio

from aiohttp import web
from aiohttp.typedefs import Handler

from .connection import KeptConnection

CONVERSATION = "X-Conversation-Id"
_PATHS = ("/v1/responses", "/v1/stream")


@web.middleware
async def to_first(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Leave a request that keeps an answer, or is about one, to the first gateway."""
    is_about_one = any(request.path == path or request.path.startswith(f"{path}/") for path in _PATHS)
    if (is_about_one or CONVERSATION in request.headers) and isinstance(request.transport, KeptConnection):
        request.transport.move(0)
        await asyncio.Event().wait()  # until the handler learns that its connection is lost
    return await handler(request)
