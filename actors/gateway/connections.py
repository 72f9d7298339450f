"""The HTTP server of aiohttp, hardened: connections are limited, half-sent headers have little time and are few for each address, and
no answer tells versions, not even an answer to bytes that are no HTTP.

Runs in the gateway's event loop. A connection that has sent nothing since its last answer merely idles: that costs little.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from ...runtime.errors import RequestError
from ...runtime.process.listening import EXTRA_CONNECTIONS
from .at_work import in_steps
from .keeping.connection import KeptConnection
from .keys.tls import HANDSHAKE_S

log = logging.getLogger(__name__)

SERVER_NAME = "mmrt"
HEADER_TIMEOUT_S = 10.0  # from the first byte of a request to the end of its headers
MAX_HALF_SENT = 128  # headers that one address may have begun at a time


IDLE_CONNECTION_S = 75.0  # also for the first request to come
EXTRA_S = 2.0  # that a connection beyond the limit lasts at most


class Connections(Collector):
    """The open connections. ``limit`` of them are served, and those beyond it are extra.

    An extra connection may ask whether the server lives; other requests are refused. It is closed after one answer, after ``EXTRA_S``,
    or when there are ``EXTRA_CONNECTIONS`` younger ones. So neither idle nor new connections keep probes out.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._num_open = 0
        self._num_extra = 0  # so far
        self._extra: dict[_Connection, asyncio.TimerHandle] = {}  # the oldest first

    def add(self, connection: "_Connection", loop: asyncio.AbstractEventLoop) -> None:
        self._num_open += 1
        if self._num_open - len(self._extra) <= self.limit:
            return
        if not self._extra:
            log.warning("%d connections are open, more are refused (server.max_connections)", self.limit)
        self._num_extra += 1
        self._extra[connection] = loop.call_later(EXTRA_S, connection.abort)
        if len(self._extra) > EXTRA_CONNECTIONS:
            next(iter(self._extra)).abort()

    def remove(self, connection: "_Connection") -> None:
        self._num_open -= 1
        if (timer := self._extra.pop(connection, None)) is not None:
            timer.cancel()

    def is_extra(self, request: web.Request) -> bool:
        return request.protocol in self._extra

    def refuse(self, is_probe: Callable[[web.Request], bool]) -> Middleware:
        """Refuse requests on extra connections, except probes."""

        @web.middleware
        async def refuse(request: web.Request, handler: Handler) -> web.StreamResponse:
            if self.is_extra(request) and not is_probe(request):
                message = f"{self.limit} connections are open already (server.max_connections)"
                raise RequestError(message, status=503, type="overloaded_error")
            return await handler(request)

        return refuse

    def collect(self) -> Iterator[Metric]:
        yield GaugeMetricFamily("mmrt_connections", "Open connections of clients.", self._num_open)
        yield CounterMetricFamily("mmrt_connections_over_limit", "Connections beyond server.max_connections.", self._num_extra)


class Runner(web.AppRunner):
    """The runner of aiohttp, for watched connections."""

    def __init__(self, app: web.Application, connections: Connections, **kwargs: Any) -> None:
        super().__init__(app, **kwargs)
        self._connections = connections

    async def _make_server(self) -> web.Server:
        made = await super()._make_server()
        return _Server(
            self._connections,
            made.request_handler,
            request_factory=made.request_factory,
            handler_cancellation=made.handler_cancellation,
            loop=made._loop,
            **made._kwargs,
        )


def runner_of(app: web.Application, connections: Connections, shutdown_s: float) -> Runner:
    """Return the runner of the application. ``shutdown_s``: for connections to end, at its end."""
    return Runner(
        app,
        connections,
        handler_cancellation=True,
        access_log=None,
        logger=_protocol_log(),
        shutdown_timeout=shutdown_s,
        keepalive_timeout=IDLE_CONNECTION_S,
        auto_decompress=False,  # it would unpack in this loop, without a pause, even bodies no longer read
    )


def _protocol_log() -> logging.Logger:
    """Log a client's bytes that are no HTTP as a line, not a traceback; our own handlers log their failures themselves."""

    def shorten(record: logging.LogRecord) -> bool:
        if record.exc_info is not None:
            record.msg = f"{record.getMessage()}: {str(record.exc_info[1])[:200]!r}"
            record.args, record.exc_info, record.levelno, record.levelname = None, None, logging.INFO, "INFO"
        return True

    protocol_log = logging.getLogger(f"{__name__}.http")
    protocol_log.filters.clear()
    protocol_log.addFilter(shorten)
    return protocol_log


class Site(web.SockSite):
    """A site of aiohttp, with little time for handshakes: until their end, connections do not count."""

    async def start(self) -> None:
        await web.BaseSite.start(self)
        assert self._runner.server is not None
        handshake_s = None if self._ssl_context is None else HANDSHAKE_S
        self._server = await asyncio.get_running_loop().create_server(
            self._runner.server, sock=self._sock, ssl=self._ssl_context, backlog=self._backlog, ssl_handshake_timeout=handshake_s
        )


class _Server(web.Server):
    def __init__(self, connections: Connections, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.connections_of_clients = connections
        self.num_half_sent: Counter[str] = Counter()  # by address

    def __call__(self) -> web.RequestHandler:
        return _Connection(self, loop=self._loop, **self._kwargs)


class _Connection(web.RequestHandler):
    """One connection. Its header is half-sent while bytes have come and the handler still waits for a request. One that began in the
    same piece as the request before it counts once more of it comes: until then the connection looks idle."""

    def __init__(self, server: _Server, *, loop: asyncio.AbstractEventLoop, **kwargs: Any) -> None:
        super().__init__(server, loop=loop, **kwargs)
        self._num_half_sent = server.num_half_sent
        self._all = server.connections_of_clients
        self._address = ""
        self._has_asked = False
        self._header_timer: asyncio.TimerHandle | None = None

    async def _handle_request(self, *args: Any, **kwargs: Any) -> tuple[web.StreamResponse, bool]:
        kept, handling = self.transport, super()._handle_request(*args, **kwargs)
        return await (in_steps(kept.work, handling) if isinstance(kept, KeptConnection) else handling)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._address = str((transport.get_extra_info("peername") or ("",))[0])
        self._all.add(self, self._loop)

    def connection_lost(self, exc: BaseException | None) -> None:
        self._all.remove(self)
        self._end_header()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._has_asked |= bool(self._messages)
        # The first bytes may come before the handler has begun to wait.
        is_waiting = not self._has_asked if self._waiter is None else not self._waiter.done()
        if not is_waiting:
            self._end_header()
        elif self._header_timer is None:
            self._begin_header()

    async def finish_response(
        self, request: web.BaseRequest, resp: web.StreamResponse, start_time: float | None
    ) -> tuple[web.StreamResponse, bool]:
        kept = self.transport
        response, is_gone = await super().finish_response(request, resp, start_time)
        if isinstance(kept, KeptConnection) and not is_gone:
            await kept.finish(bool(response.keep_alive))
        return response, is_gone

    def handle_error(self, *args: Any, **kwargs: Any) -> web.StreamResponse:
        response = super().handle_error(*args, **kwargs)
        response.headers["Server"] = SERVER_NAME
        return response

    def abort(self) -> None:
        """Close the connection at once, whatever is under way."""
        if self.transport is not None:
            self.transport.abort()

    def _begin_header(self) -> None:
        if self._num_half_sent[self._address] >= MAX_HALF_SENT:
            self._drop(f"its address has {MAX_HALF_SENT} others")
            return
        self._num_half_sent[self._address] += 1
        self._header_timer = self._loop.call_later(HEADER_TIMEOUT_S, self._drop, f"its header did not end in {HEADER_TIMEOUT_S:g} s")

    def _end_header(self) -> None:
        if self._header_timer is None:
            return
        self._header_timer.cancel()
        self._header_timer = None
        self._num_half_sent[self._address] -= 1
        if not self._num_half_sent[self._address]:
            del self._num_half_sent[self._address]

    def _drop(self, reason: str) -> None:
        log.info("%s: a half-sent request is dropped: %s", self._address, reason)
        self._end_header()
        self.force_close()
