"""The front: an ASGI application that sends each request to a node and streams the bytes of its answer through.

A request whose node is lost before the first byte of the answer goes to another node, once to each. If the node is lost later, the
stream ends with an error as its API has it, and an answer that is no stream is cut off. Requests and answers are not changed. Only the
paths of the endpoint's APIs are served: a node's page and its metrics trust whoever is on its machine, as the front is.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, MutableMapping
from functools import partial
from typing import Any, NamedTuple
from urllib.parse import quote

import aiohttp
import msgspec
from yarl import URL

from ..actors.gateway.apis.routes import error_body_of
from ..actors.gateway.reading.bodies import came_too_late, due_s, too_many_large
from ..runtime.errors import RequestError
from .request_features import Features, read_features
from .routing import Routed, Router

PATHS = ("/v1/", "/openapi.json", "/tokenize", "/detokenize", "/api/", "/health", "/ready", "/version")
MAX_BODY_BYTES = 64 << 20  # as a node's server.max_body_mib by default
PIECE_BYTES = 64 * 1024  # of a body, sent at once
HELD_BODIES = 4  # of the largest size are in memory at once, as at a node
SMALL_BYTES = 32 * 1024  # bodies up to that are never refused for want of memory, and are read without a thread
REFRESH_S = 1.0
CONNECT_TIMEOUT_S = 5.0
_HOP_HEADERS = frozenset(b"connection keep-alive transfer-encoding te trailer upgrade expect host content-length".split())
_OWN_HEADERS = ("accept", "accept-encoding", "content-type", "user-agent")  # that the client's library would add

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Nodes = Callable[[], Awaitable[Mapping[str, str]]]

_RESPONSES = "/v1/responses/"
_LINES = "application/x-ndjson"
_STREAMS = {"text/event-stream", _LINES}
_LOST = RequestError("the node that served this request was lost", status=500, type="internal_error")

_log = logging.getLogger(__name__)


class _ClientGone(Exception):
    """The client has closed its connection."""


class _Request:
    """A request. ``body``: it is kept until a node has begun to answer, for the case that the node is lost before."""

    def __init__(self, scope: Scope) -> None:
        self.method: str = scope["method"]
        self.path: str = scope["path"]
        query = scope["query_string"].decode("latin-1")
        self.target = quote(self.path) + (f"?{query}" if query else "")
        self.headers = [(_text(name), _text(value)) for name, value in scope["headers"] if name not in _HOP_HEADERS]
        known = dict(scope["headers"])
        self.credentials = known.get(b"authorization", known.get(b"x-api-key", b"")).decode("latin-1")
        self.body = bytearray()


class _NodeLost(Exception):
    """The node's connection failed before the first byte of an answer."""


class _Answer(NamedTuple):
    response: aiohttp.ClientResponse
    first: bytes  # of the body


class Front:
    """The application. ``nodes`` tells the URL of each node that is there; it is asked every second. ``max_body_bytes``: of a request;
    ``HELD_BODIES`` times as many are in memory at once."""

    def __init__(self, nodes: Nodes, max_body_bytes: int = MAX_BODY_BYTES) -> None:
        self._nodes = nodes
        self._max_body_bytes = max_body_bytes
        self._num_body_bytes = 0
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
            self._session = aiohttp.ClientSession(
                timeout=timeout,
                connector=aiohttp.TCPConnector(limit=0),
                cookie_jar=aiohttp.DummyCookieJar(),  # else one client's cookies would go with another's requests
                skip_auto_headers=_OWN_HEADERS,
                auto_decompress=False,
            )
            self._refreshed = asyncio.create_task(self._refresh_always())
        if not self._router.urls:
            await self._refresh()

    async def _refresh_always(self) -> None:
        while True:
            await asyncio.sleep(REFRESH_S)
            await self._refresh()

    async def _refresh(self) -> None:
        """Take the nodes that are listed. A directory that lists none has just started, or its nodes cannot answer anyway."""
        try:
            if urls := await self._nodes():
                self._router.set_nodes(urls)
        except Exception:  # whatever the directory raises: the nodes known so far serve on
            _log.exception("the nodes cannot be listed")

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"]
        if not path.startswith(PATHS) or not {".", ".."}.isdisjoint(path.split("/")):
            problem = f"the front serves no {path}; its paths begin with {', '.join(PATHS)}"
            await _refuse(send, path, RequestError(problem, status=404))
            return
        request = _Request(scope)
        try:
            await self._read_body(request, receive)
            await self._pass_on(request, receive, send)
        except _ClientGone:
            return
        except RequestError as error:
            await _refuse(send, path, error)
        finally:
            self._drop_body(request)

    async def _read_body(self, request: _Request, receive: Receive) -> None:
        """Raises: _ClientGone; RequestError for a body that is too long or too slow, or for which there is no memory."""
        loop = asyncio.get_running_loop()
        began_s, has_more = loop.time(), True
        try:
            async with asyncio.timeout_at(due_s(began_s, 0, began_s)) as timeout:
                while has_more:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise _ClientGone
                    has_more = message.get("more_body", False)
                    self._take(request, message.get("body", b""))
                    timeout.reschedule(due_s(began_s, len(request.body), loop.time()))
        except TimeoutError:
            raise came_too_late(len(request.body), loop.time() - began_s) from None

    def _take(self, request: _Request, piece: bytes) -> None:
        request.body += piece
        self._num_body_bytes += len(piece)
        if len(request.body) > self._max_body_bytes:
            raise RequestError(f"the body is longer than {self._max_body_bytes} bytes (server.max_body_mib)", status=413)
        if len(request.body) > SMALL_BYTES and self._num_body_bytes > HELD_BODIES * self._max_body_bytes:
            raise too_many_large()

    def _drop_body(self, request: _Request) -> None:
        self._num_body_bytes -= len(request.body)
        request.body = bytearray()

    async def _pass_on(self, request: _Request, receive: Receive, send: Send) -> None:
        """Answer, unless the client goes before the end."""
        features = Features()
        if request.method == "POST":
            read = partial(read_features, request.body, request.credentials)
            features = read() if len(request.body) <= SMALL_BYTES else await asyncio.to_thread(read)
        elif request.path.startswith(_RESPONSES):
            features = Features(response=request.path.removeprefix(_RESPONSES).partition("/")[0])
        work = asyncio.ensure_future(self._answer(request, features, send))
        gone = asyncio.ensure_future(_disconnected(receive))
        try:
            await asyncio.wait((work, gone), return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (work, gone):
                task.cancel()
            results = await asyncio.gather(work, gone, return_exceptions=True)
        if isinstance(results[0], Exception):
            raise results[0]

    async def _answer(self, request: _Request, features: Features, send: Send) -> None:
        """Try one node after another until one has begun to answer. Raises: RequestError."""
        tried: set[str] = set()
        while (routed := self._router.route(features, tried)) is not None:
            tried.add(routed.node)
            try:
                async with self._ask(request, routed) as answer:
                    await _stream(answer, request.path, send)
                return
            except _NodeLost as error:
                _log.warning("%s is lost before it has answered: %s", routed.node, error)
            finally:
                routed.ended()
        problem = "no node is there" if not tried else "every node was lost before it had answered"
        raise _no_room(problem)

    @contextlib.asynccontextmanager
    async def _ask(self, request: _Request, routed: Routed) -> AsyncIterator[_Answer]:
        """The node's answer, from its first byte on. Raises: _NodeLost."""
        url = self._router.urls[routed.node]
        try:
            try:
                answer = await self._begin(request, url)
            except (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError) as error:
                if isinstance(error, aiohttp.ClientConnectorError):
                    raise
                answer = await self._begin(request, url)  # the gateway has just ended, and another takes over
        except (aiohttp.ClientError, OSError) as error:
            raise _NodeLost(str(error) or type(error).__name__) from error
        routed.begun()
        self._drop_body(request)
        if request.method == "POST" and request.path.startswith("/v1/responses"):
            if id := answer.response.headers.get("X-Request-Id"):  # what the gateway's HTTP parser refuses has none
                self._router.note_response(id, routed.node)
        try:
            yield answer
        finally:
            answer.response.close()  # a connection whose answer has ended is kept

    async def _begin(self, request: _Request, url: str) -> _Answer:
        assert self._session is not None
        target = URL(url + request.target, encoded=True)
        headers = [*request.headers, ("Content-Length", str(len(request.body)))] if request.body else request.headers
        data = _pieces(request.body) if request.body else None
        response = await self._session.request(request.method, target, data=data, headers=headers, allow_redirects=False)
        try:
            return _Answer(response, await response.content.readany())
        except BaseException:
            response.close()
            raise


def _text(header: bytes) -> str:
    """Return a part of a header as the client's library encodes it."""
    return header.decode("utf-8", "surrogateescape")


async def _pieces(body: bytearray) -> AsyncIterator[bytes]:
    for start in range(0, len(body), PIECE_BYTES):
        yield bytes(memoryview(body)[start : start + PIECE_BYTES])


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
            if response.content_type not in _STREAMS:
                raise ConnectionError(f"the node was lost in the middle of an answer: {error}") from error
            end = _lost_line(path, chunk) if response.content_type == _LINES else _lost_event(path, chunk)
            await send({"type": "http.response.body", "body": end, "more_body": True})
            break
    await send({"type": "http.response.body", "body": b"", "more_body": False})


def _lost_event(path: str, before: bytes) -> bytes:
    """Return the events that end a stream whose node is lost. No empty line comes behind a comment (``answer_format.COMMENT``)."""
    body, between = error_body_of(path)(_LOST), b"" if before.endswith(b"\n") else b"\n\n"
    if path.startswith("/v1/messages"):
        return between + b"event: error\ndata: " + body + b"\n\n"
    if path.startswith("/v1/responses"):
        event = {"type": "error", "code": "server_error", "message": _LOST.message, "param": None, **msgspec.json.decode(body)}
        return between + b"event: error\ndata: " + msgspec.json.encode(event) + b"\n\n"
    return between + b"data: " + body + b"\n\ndata: [DONE]\n\n"


def _lost_line(path: str, before: bytes) -> bytes:
    """Return the line that ends a stream of lines, which may have broken off within one."""
    return (b"" if before.endswith(b"\n") else b"\n") + error_body_of(path)(_LOST) + b"\n"


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _no_room(problem: str) -> RequestError:
    return RequestError(problem, status=503, type="overloaded_error", retry_after_s=1)


async def _refuse(send: Send, path: str, error: RequestError) -> None:
    """Answer with an error, in the form of the path's API."""
    body = error_body_of(path)(error)
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    if error.retry_after_s is not None:
        headers.append((b"retry-after", b"%d" % error.retry_after_s))
    await send({"type": "http.response.start", "status": error.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
