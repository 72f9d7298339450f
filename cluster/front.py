"""The front: an ASGI application that sends each request to a node and streams the bytes of its answer through.

A request whose node is lost before the first byte of the answer goes to another node, once to each. Only the paths of the endpoint's
APIs are served: a node's page and its metrics trust whoever is on its machine, as the front is.
"""

import asyncio
import hashlib
import logging
from collections.abc import Awaitable, Callable, Mapping
from functools import partial

from ..runtime.errors import RequestError
from ..serving.relay import MAX_BODY_BYTES, SMALL_BYTES, Answer, Receive, Relay, Request, RunLost, Scope, Send, no_room, refuse, stream
from .request_features import Features, read_features
from .routing import Router

PATHS = ("/v1/", "/openapi.json", "/tokenize", "/detokenize", "/api/", "/health", "/ready", "/version")
REFRESH_S = 1.0

Nodes = Callable[[], Awaitable[Mapping[str, str]]]

_RESPONSES = "/v1/responses/"
_STREAMS, _STREAM_HEADER = "/v1/stream/", "x-conversation-id"

_log = logging.getLogger(__name__)


class Front:
    """The application. ``nodes`` tells the URL of each node that is there; it is asked every second. ``max_body_bytes``: of a
    request."""

    def __init__(self, nodes: Nodes, max_body_bytes: int = MAX_BODY_BYTES) -> None:
        self.relay = Relay(max_body_bytes)
        self._nodes = nodes
        self._router = Router()
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
        await self.relay.close()
        await send({"type": "lifespan.shutdown.complete"})

    async def _start(self) -> None:
        """Know the nodes before the first request."""
        if self._refreshed is None:
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
            await refuse(send, path, RequestError(problem, status=404))
            return
        await self.relay.serve(scope, receive, send, partial(self._answer, send=send))

    async def _answer(self, request: Request, send: Send) -> None:
        """Try one node after another until one has begun to answer. Raises: RequestError."""
        features = await _features_of(request)
        tried: set[str] = set()
        while (routed := self._router.route(features, tried)) is not None:
            tried.add(routed.node)
            try:
                async with self.relay.ask(request, self._router.urls[routed.node]) as answer:
                    routed.begun()
                    self._note(request, answer, routed.node)
                    await stream(answer, request.path, send)
                return
            except RunLost as error:
                _log.warning("%s is lost before it has answered: %s", routed.node, error)
            finally:
                routed.ended()
        raise no_room("no node is there" if not tried else "every node was lost before it had answered")

    def _note(self, request: Request, answer: Answer, node: str) -> None:
        """Note which node has the response, or the stream, that a later request may go on with."""
        if stream := _stream_of(request):
            self._router.note_response(stream, node)
        if request.method == "POST" and request.path.rstrip("/") == _RESPONSES.rstrip("/"):
            if id := answer.response.headers.get("X-Request-Id"):  # what the gateway's HTTP parser refuses has none
                self._router.note_response(id, node)


async def _features_of(request: Request) -> Features:
    if request.method == "POST" and not request.path.rstrip("/").endswith("/cancel"):
        read = partial(read_features, request.body, request.credentials)
        features = read() if len(request.body) <= SMALL_BYTES else await asyncio.to_thread(read)
        return features._replace(response=_stream_of(request) or features.response)
    if request.path.startswith(_RESPONSES):
        return Features(response=request.path.removeprefix(_RESPONSES).partition("/")[0])
    return Features(response=_stream_of(request))


def _stream_of(request: Request) -> str:
    """Return what the router knows the stream by that a request names: its client's name for it is its own. "" if it names none."""
    if request.path.startswith(_STREAMS):
        name = request.path.removeprefix(_STREAMS).rstrip("/")
    else:
        name = next((value for header, value in request.headers if header.lower() == _STREAM_HEADER), "")
    return hashlib.sha256(f"{request.credentials}\n{name}".encode()).hexdigest() if name else ""
