"""The HTTP server of aiohttp, hardened: half-sent headers have little time and are few for each address, and no answer tells
versions, not even an answer to bytes that are no HTTP.

Runs in the gateway's event loop. A connection that has sent nothing since its last answer merely idles: that costs little.
"""

import asyncio
import logging
from collections import Counter
from typing import Any

from aiohttp import web

log = logging.getLogger(__name__)

SERVER_NAME = "mmrt"
HEADER_TIMEOUT_S = 10.0  # from the first byte of a request to the end of its headers
MAX_HALF_SENT = 128  # headers that one address may have begun at a time


class Runner(web.AppRunner):
    """The runner of aiohttp, for watched connections."""

    async def _make_server(self) -> web.Server:
        made = await super()._make_server()
        return _Server(
            made.request_handler,
            request_factory=made.request_factory,
            handler_cancellation=made.handler_cancellation,
            loop=made._loop,
            **made._kwargs,
        )


class _Server(web.Server):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.num_half_sent: Counter[str] = Counter()  # by address

    def __call__(self) -> web.RequestHandler:
        return _Connection(self, loop=self._loop, **self._kwargs)


class _Connection(web.RequestHandler):
    """One connection. Its header is half-sent while bytes have come and the handler still waits for a request. One that began in the
    same piece as the request before it counts once more of it comes: until then the connection looks idle."""

    def __init__(self, server: _Server, *, loop: asyncio.AbstractEventLoop, **kwargs: Any) -> None:
        super().__init__(server, loop=loop, **kwargs)
        self._num_half_sent = server.num_half_sent
        self._address = ""
        self._has_asked = False
        self._header_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._address = str((transport.get_extra_info("peername") or ("",))[0])

    def connection_lost(self, exc: BaseException | None) -> None:
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

    def handle_error(self, *args: Any, **kwargs: Any) -> web.StreamResponse:
        response = super().handle_error(*args, **kwargs)
        response.headers["Server"] = SERVER_NAME
        return response

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
