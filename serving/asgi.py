"""Serve a request of aiohttp's server with an ASGI application, as the relay is."""

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from aiohttp import web
from multidict import CIMultiDict

from ..actors.gateway.apis.streams import SLOW_READER_S
from ..actors.gateway.watching.request_log import REQUEST_ID
from ..runtime.errors import RequestError
from .relay import Receive, Scope, Send

_Message = MutableMapping[str, Any]


async def serve_asgi(http: web.Request, application: Callable[[Scope, Receive, Send], Awaitable[None]]) -> web.StreamResponse:
    """Let the application answer. A client that goes cancels it, so it is never told of that. Where it breaks off an answer, or its
    client does not read, the connection is closed."""
    exchange = _Exchange(http)
    try:
        await application(exchange.scope, exchange.receive, exchange.send)
    except asyncio.CancelledError:
        if not exchange.is_whole:
            raise  # else its client has all of the answer, and went while the application was tidying up
    except ConnectionError:
        if http.transport is not None:
            http.transport.abort()
    if exchange.response is None:
        raise RequestError("the request was not answered", status=500, type="internal_error")
    return exchange.response


class _Exchange:
    def __init__(self, http: web.Request) -> None:
        self._http = http
        self._has_ended = False
        self.response: web.StreamResponse | None = None
        self.is_whole = False  # the answer has been sent
        self.scope: Scope = {
            "type": "http",
            "method": http.method,
            "path": http.path,
            "raw_path": http.rel_url.raw_path.encode("latin-1", "replace"),
            "query_string": http.rel_url.raw_query_string.encode("latin-1", "replace"),
            "headers": [(name.lower(), value) for name, value in http.raw_headers],
        }

    async def receive(self) -> _Message:
        if self._has_ended:
            await asyncio.Event().wait()  # for ever: the handler is cancelled when the client goes
        try:
            body = await self._http.content.readany()
        except (web.RequestPayloadError, ValueError) as error:
            raise RequestError(f"the body cannot be read: {str(error)[:200]}") from None
        self._has_ended = not body and self._http.content.at_eof()
        return {"type": "http.request", "body": body, "more_body": not self._has_ended}

    async def send(self, message: _Message) -> None:
        if message["type"] == "http.response.start":
            headers = CIMultiDict((name.decode(), value.decode("utf-8", "surrogateescape")) for name, value in message["headers"])
            if id := headers.get("X-Request-Id"):
                self._http[REQUEST_ID] = id
            self.response = web.StreamResponse(status=message["status"], headers=headers)
            await self.response.prepare(self._http)
            return
        assert self.response is not None
        try:
            async with asyncio.timeout(SLOW_READER_S):
                if message["body"]:
                    await self.response.write(message["body"])
                if not message.get("more_body", False):
                    self.is_whole = True
                    await self.response.write_eof()
        except TimeoutError:
            raise ConnectionError("its client reads too slowly") from None
