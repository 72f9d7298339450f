"""A relay: sends a request on to a run and streams the bytes of its answer back. Neither is changed.

It speaks ASGI to what serves its clients. Who owns one decides which run gets a request. A run that is lost before the first byte of
an answer, or in the middle of a short one, is reported, so that its owner can try again. A stream that is lost later ends with an error
as its API has it, and a long answer that is no stream is cut off.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, MutableMapping, Sequence
from typing import Any, NamedTuple
from urllib.parse import quote

import aiohttp
import msgspec
from yarl import URL

from ..actors.gateway.apis.routes import error_body_of
from ..actors.gateway.reading.bodies import came_too_late, due_s, too_many_large
from ..runtime.errors import RequestError

MAX_BODY_BYTES = 64 << 20  # as a run's server.max_body_mib by default
PIECE_BYTES = 64 * 1024  # of a body, sent at once
HELD_BODIES = 4  # of the largest size are in memory at once, as at a run
SHORT_BYTES = 1 << 20  # an answer of a known length up to that is passed on when it is whole: until then its run may be lost
SMALL_BYTES = 32 * 1024  # bodies up to that are never refused for want of memory, and are read without a thread
CONNECT_TIMEOUT_S = 5.0
_OF_PROXIES = b"proxy-connection proxy-authorization".split()
_HOP_HEADERS = frozenset(b"connection keep-alive transfer-encoding te trailer upgrade expect host content-length".split() + _OF_PROXIES)
_OWN_HEADERS = ("accept", "accept-encoding", "content-type", "user-agent")  # that the client's library would add

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

_LINES = "application/x-ndjson"
_STREAMS = {"text/event-stream", _LINES}
_LOST = RequestError("the node that served this request was lost", status=500, type="internal_error")


class ClientGone(Exception):
    """The client has closed its connection."""


class RunLost(Exception):
    """The run's connection failed before the first byte of an answer."""


class Request:
    """A request. ``body``: it is kept until a run has begun to answer, for the case that the run is lost before."""

    def __init__(self, scope: Scope) -> None:
        self.method: str = scope["method"]
        self.path: str = scope["path"]
        query = scope["query_string"].decode("latin-1")
        # As its client has written it: what was one segment when the path was judged stays one.
        raw_path = scope.get("raw_path")
        self.target = (raw_path.decode("latin-1") if raw_path else quote(self.path)) + (f"?{query}" if query else "")
        named = b",".join(value for name, value in scope["headers"] if name == b"connection").lower()
        of_connection = _HOP_HEADERS | {name.strip() for name in named.split(b",")}
        self.headers = [(_text(name), _text(value)) for name, value in scope["headers"] if name not in of_connection]
        known = dict(scope["headers"])
        self.credentials = known.get(b"authorization", known.get(b"x-api-key", b"")).decode("latin-1")
        self.body = bytearray()


class Answer(NamedTuple):
    response: aiohttp.ClientResponse
    first: bytes  # of the body; all of a short one


class Relay:
    """``max_body_bytes``: of a request; ``HELD_BODIES`` times as many are in memory at once. Belongs to one event loop."""

    def __init__(self, max_body_bytes: int = MAX_BODY_BYTES) -> None:
        self.max_body_bytes = max_body_bytes
        self.num_body_bytes = 0
        self._session: aiohttp.ClientSession | None = None

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    async def serve(self, scope: Scope, receive: Receive, send: Send, answer: Callable[[Request], Coroutine[Any, Any, None]]) -> None:
        """Read a request and let ``answer`` answer it, which is cancelled if the client goes. A RequestError becomes the answer."""
        request = Request(scope)
        try:
            await self._read_body(request, receive)
            await _while_connected(answer(request), receive)
        except ClientGone:
            return
        except RequestError as error:
            await refuse(send, request.path, error)
        finally:
            self._drop_body(request)

    @contextlib.asynccontextmanager
    async def ask(self, request: Request, url: str, has_ended: Callable[[], bool] = lambda: False) -> AsyncIterator[Answer]:
        """The answer of the run at this URL, from its first byte on. ``has_ended``: whether the run has ended, whose gateway may refuse
        requests yet. Raises: RunLost."""
        try:
            try:
                answer = await self._begin(request, url)
            except (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError) as error:
                if isinstance(error, aiohttp.ClientConnectorError):
                    raise
                answer = await self._begin(request, url)  # the gateway has just ended, and another takes over
        except (aiohttp.ClientError, OSError) as error:
            raise RunLost(str(error) or type(error).__name__) from error
        if answer.response.status == 503 and has_ended():
            answer.response.close()
            raise RunLost("it has ended")
        self._drop_body(request)
        try:
            yield answer
        finally:
            answer.response.close()  # a connection whose answer has ended is kept

    async def _begin(self, request: Request, url: str) -> Answer:
        target = URL(url + request.target, encoded=True)
        headers = [*request.headers, ("Content-Length", str(len(request.body)))] if request.body else request.headers
        data = _pieces(request.body) if request.body else None
        response = await self._connections().request(request.method, target, data=data, headers=headers, allow_redirects=False)
        try:
            is_short = 0 < (response.content_length or 0) <= SHORT_BYTES
            return Answer(response, await (response.content.read() if is_short else response.content.readany()))
        except BaseException:
            response.close()
            raise

    def _connections(self) -> aiohttp.ClientSession:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S),
                connector=aiohttp.TCPConnector(limit=0),
                cookie_jar=aiohttp.DummyCookieJar(),  # else one client's cookies would go with another's requests
                skip_auto_headers=_OWN_HEADERS,
                auto_decompress=False,
            )
        return self._session

    async def _read_body(self, request: Request, receive: Receive) -> None:
        """Raises: ClientGone; RequestError for a body that is too long or too slow, or for which there is no memory."""
        loop = asyncio.get_running_loop()
        began_s, has_more = loop.time(), True
        try:
            async with asyncio.timeout_at(due_s(began_s, 0, began_s)) as timeout:
                while has_more:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise ClientGone
                    has_more = message.get("more_body", False)
                    self._take(request, message.get("body", b""))
                    timeout.reschedule(due_s(began_s, len(request.body), loop.time()))
        except TimeoutError:
            raise came_too_late(len(request.body), loop.time() - began_s) from None

    def _take(self, request: Request, piece: bytes) -> None:
        request.body += piece
        self.num_body_bytes += len(piece)
        if len(request.body) > self.max_body_bytes:
            raise RequestError(f"the body is longer than {self.max_body_bytes} bytes (server.max_body_mib)", status=413)
        if len(request.body) > SMALL_BYTES and self.num_body_bytes > HELD_BODIES * self.max_body_bytes:
            raise too_many_large()

    def _drop_body(self, request: Request) -> None:
        self.num_body_bytes -= len(request.body)
        request.body = bytearray()


async def stream(answer: Answer, path: str, send: Send, *, has_begun: bool = False) -> None:
    """Pass the answer on. ``has_begun``: its client has a status and a stream has begun, so that an error becomes its end.
    Raises: ConnectionError if the run is lost in the middle of an answer that is no stream of events."""
    response, chunk = answer
    if has_begun and response.status != 200:
        body = chunk + await response.content.read()
        chunk = _ended_by(path, body, b"\n", is_lines=path.startswith("/api/"))
    elif not has_begun:
        kept = _HOP_HEADERS - {b"content-length"}
        headers = [(name.lower(), value) for name, value in response.raw_headers if name.lower() not in kept]
        await send({"type": "http.response.start", "status": response.status, "headers": headers})
    while chunk:
        await send({"type": "http.response.body", "body": chunk, "more_body": True})
        try:
            chunk = await response.content.readany()
        except (aiohttp.ClientError, OSError) as error:
            if response.content_type not in _STREAMS:
                raise ConnectionError(f"the node was lost in the middle of an answer: {error}") from error
            end = end_of_stream(path, _LOST, chunk, is_lines=response.content_type == _LINES)
            await send({"type": "http.response.body", "body": end, "more_body": True})
            break
    await send({"type": "http.response.body", "body": b"", "more_body": False})


async def refuse(send: Send, path: str, error: RequestError) -> None:
    """Answer with an error, in the form of the path's API."""
    retry = [] if error.retry_after_s is None else [(b"retry-after", b"%d" % error.retry_after_s)]
    await reply(send, error_body_of(path)(error), error.status, retry)


async def reply(
    send: Send,
    body: bytes,
    status: int = 200,
    headers: Sequence[tuple[bytes, bytes]] = (),
    content_type: str = "application/json",
) -> None:
    """Answer with a whole body."""
    own = [(b"content-type", content_type.encode()), (b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": status, "headers": [*own, *headers]})
    await send({"type": "http.response.body", "body": body})


def no_room(problem: str) -> RequestError:
    """Return the error that no run can serve a request now."""
    return RequestError(problem, status=503, type="overloaded_error", retry_after_s=1)


async def _while_connected(work: Coroutine[Any, Any, None], receive: Receive) -> None:
    """Do the work, unless the client goes before its end."""
    tasks = asyncio.ensure_future(work), asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
    if isinstance(results[0], Exception):
        raise results[0]


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _text(header: bytes) -> str:
    """Return a part of a header as the client's library encodes it."""
    return header.decode("utf-8", "surrogateescape")


async def _pieces(body: bytearray) -> AsyncIterator[bytes]:
    for start in range(0, len(body), PIECE_BYTES):
        yield bytes(memoryview(body)[start : start + PIECE_BYTES])


def end_of_stream(path: str, error: RequestError, before: bytes, *, is_lines: bool) -> bytes:
    """Return what ends a stream of this path's API with an error. ``before``: what stands in front of it."""
    return _ended_by(path, error_body_of(path)(error), before, is_lines=is_lines)


def _ended_by(path: str, body: bytes, before: bytes, *, is_lines: bool) -> bytes:
    """Return the same for an error's body. A line may have broken off; no empty line comes behind a comment
    (``answer_format.COMMENT``)."""
    if is_lines:
        return (b"" if before.endswith(b"\n") else b"\n") + body.rstrip(b"\n") + b"\n"
    between = b"" if before.endswith(b"\n") else b"\n\n"
    if path.startswith("/v1/messages"):
        return between + b"event: error\ndata: " + body + b"\n\n"
    if path.startswith("/v1/responses"):
        error = msgspec.json.decode(body)
        message = error["error"]["message"]
        event = {"type": "error", "code": "server_error", "message": message, "param": None, **error}
        return between + b"event: error\ndata: " + msgspec.json.encode(event) + b"\n\n"
    return between + b"data: " + body + b"\n\ndata: [DONE]\n\n"
