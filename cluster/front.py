"""The front: an ASGI application that sends each request to a node and streams the bytes of its answer through.

A request whose node is lost before the first byte of the answer goes to another node, once to each. If the node is lost later, the
stream ends with an error event, and an answer that is no stream is cut off. Requests and answers are not changed. Only the paths of
the endpoint's APIs are served: a node's page and its metrics trust whoever is on its machine, which the front is not.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, MutableMapping
from typing import Any, NamedTuple

import aiohttp
import msgspec

from .request_features import Features, read_features
from .routing import Routed, Router

PATHS = ("/v1/", "/openapi.json", "/tokenize", "/detokenize", "/api/", "/health", "/ready", "/version")
MAX_BODY_BYTES = 1 << 30
REFRESH_S = 1.0
CONNECT_TIMEOUT_S = 5.0
_HOP_HEADERS = {b"connection", b"keep-alive", b"transfer-encoding", b"te", b"trailer", b"upgrade", b"host", b"content-length"}

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Nodes = Callable[[], Awaitable[Mapping[str, str]]]

_log = logging.getLogger(__name__)


class _ClientGone(Exception):
    """The client has closed its connection."""


class _NodeLost(Exception):
    """The node's connection failed before the first byte of an answer."""


class _Answer(NamedTuple):
    response: aiohttp.ClientResponse
    first: bytes  # of the body


class Front:
    """The application. ``nodes`` tells the URL of each node that is there; it is asked every second."""

    def __init__(self, nodes: Nodes) -> None:
        self._nodes = nodes
        self._router = Router()
        self._session: aiohttp.ClientSession | None = None
        self._refreshed: asyncio.Task[None] | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection's request, or the lifespan."""
        if scope["type"] == "lifespan":
            await self._live(receive, send)
        elif scope["type"] == "http":
            await self._start()
            await self._serve(scope, receive, send)
        else:
            await send({"type": "websocket.close", "code": 1000})

    async def _live(self, receive: Receive, send: Send) -> None:
        await receive()
        await send({"type": "lifespan.startup.complete"})
        await receive()
        if self._refreshed is not None:
            self._refreshed.cancel()
        if self._session is not None:
            await self._session.close()
        await send({"type": "lifespan.shutdown.complete"})

    async def _start(self) -> None:
        """Know the nodes before the first request."""
        if self._session is None:
            timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S)
            self._session = aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0), auto_decompress=False)
            self._refreshed = asyncio.create_task(self._refresh_always())
        if not self._router.urls:
            await self._refresh()

    async def _refresh_always(self) -> None:
        while True:
            await asyncio.sleep(REFRESH_S)
            await self._refresh()

    async def _refresh(self) -> None:
        try:
            self._router.set_nodes(await self._nodes())
        except Exception:  # whatever the directory raises: the nodes known so far serve on
            _log.exception("the nodes cannot be listed")

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"]
        if not path.startswith(PATHS):
            await _refuse(send, 404, f"the front serves no {path}; its paths begin with {', '.join(PATHS)}")
            return
        body = await _read_body(receive)
        if body is None:
            await _refuse(send, 413, f"the body is longer than {MAX_BODY_BYTES} bytes")
            return
        headers = dict(scope["headers"])
        credentials = headers.get(b"authorization", headers.get(b"x-api-key", b"")).decode("latin-1")
        features = await asyncio.to_thread(read_features, body, credentials) if scope["method"] == "POST" else Features()
        work = asyncio.ensure_future(self._answer(scope, body, features, send))
        gone = asyncio.ensure_future(_disconnected(receive))
        try:
            await asyncio.wait((work, gone), return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (work, gone):
                task.cancel()
            results = await asyncio.gather(work, gone, return_exceptions=True)
        if isinstance(results[0], Exception):
            raise results[0]

    async def _answer(self, scope: Scope, body: bytes, features: Features, send: Send) -> None:
        """Try one node after another until one has begun to answer."""
        tried: set[str] = set()
        while (routed := self._router.route(features, tried)) is not None:
            tried.add(routed.node)
            try:
                async with self._ask(scope, body, routed) as answer:
                    await _stream(answer, scope["path"], send)
                return
            except _NodeLost as error:
                _log.warning("%s is lost before it has answered: %s", routed.node, error)
            finally:
                routed.ended()
        await _refuse(send, 503, "no node is there" if not tried else "every node was lost before it had answered")

    @contextlib.asynccontextmanager
    async def _ask(self, scope: Scope, body: bytes, routed: Routed) -> AsyncIterator[_Answer]:
        """The node's answer, from its first byte on. Raises: _NodeLost."""
        assert self._session is not None
        query = scope["query_string"].decode("latin-1")
        url = self._router.urls[routed.node] + scope.get("raw_path", scope["path"].encode()).decode("latin-1").partition("?")[0]
        headers = [(name.decode("latin-1"), value.decode("latin-1")) for name, value in scope["headers"] if name not in _HOP_HEADERS]
        try:
            response = await self._session.request(
                scope["method"], f"{url}?{query}" if query else url, data=body or None, headers=headers, allow_redirects=False
            )
            first = await response.content.readany()
        except (aiohttp.ClientError, OSError) as error:
            raise _NodeLost(str(error) or type(error).__name__) from error
        routed.begun()
        try:
            yield _Answer(response, first)
        finally:
            response.close()


async def _stream(answer: _Answer, path: str, send: Send) -> None:
    """Pass the answer on. Raises: ConnectionError if the node is lost in the middle of an answer that is no stream of events."""
    response, chunk = answer
    headers = [(name.lower(), value) for name, value in response.raw_headers if name.lower() not in _HOP_HEADERS - {b"content-length"}]
    await send({"type": "http.response.start", "status": response.status, "headers": headers})
    while chunk:
        await send({"type": "http.response.body", "body": chunk, "more_body": True})
        try:
            chunk = await response.content.readany()
        except (aiohttp.ClientError, OSError) as error:
            if response.content_type != "text/event-stream":
                raise ConnectionError(f"the node was lost in the middle of an answer: {error}") from error
            chunk = _lost_event(path)
            await send({"type": "http.response.body", "body": chunk, "more_body": True})
            break
    await send({"type": "http.response.body", "body": b"", "more_body": False})


def _lost_event(path: str) -> bytes:
    """Return the events that end a stream whose node is lost."""
    error = {"message": "the node that served this request was lost", "type": "server_error", "param": None, "code": 500}
    if path.startswith("/v1/messages"):
        body = msgspec.json.encode({"type": "error", "error": {"type": "api_error", "message": error["message"]}})
        return b"\n\nevent: error\ndata: " + body + b"\n\n"
    if path.startswith("/v1/responses"):
        body = msgspec.json.encode({"type": "error", "code": "server_error", "message": error["message"], "param": None})
        return b"\n\nevent: error\ndata: " + body + b"\n\n"
    return b"\n\ndata: " + msgspec.json.encode({"error": error}) + b"\n\ndata: [DONE]\n\n"


async def _read_body(receive: Receive) -> bytes | None:
    """Return the request's body; None if it is too long. Raises: _ClientGone."""
    body = bytearray()
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise _ClientGone
        body += message.get("body", b"")
        if len(body) > MAX_BODY_BYTES:
            return None
        if not message.get("more_body", False):
            return bytes(body)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _refuse(send: Send, status: int, message: str) -> None:
    kind = "server_error" if status >= 500 else "invalid_request_error"
    body = msgspec.json.encode({"error": {"message": message, "type": kind, "param": None, "code": status}})
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    if status == 503:
        headers.append((b"retry-after", b"1"))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
