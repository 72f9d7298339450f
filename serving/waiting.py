"""Keep the stream of a request alive while its model is loaded, which may take longer than proxies and clients wait in silence."""

import asyncio
import time
from typing import Self

from ..actors.gateway.answers.answer_format import COMMENT
from ..actors.gateway.apis.anthropic.answers import MessageEvents
from ..actors.gateway.apis.ollama.answers import CHAT, GENERATE, Lines
from ..runtime.errors import RequestError
from .relay import Send, end_of_stream

_LINES = {"/api/chat": CHAT, "/api/generate": GENERATE}


class Waiting:
    """After ``every_s`` of silence the stream begins, and gets what its API has for that each ``every_s``, until ``stop``. The status
    is 200 then, whatever comes: errors are told in the stream. An answer that is no stream (``is_stream``) waits in silence."""

    def __init__(self, send: Send, path: str, model: str, every_s: float, is_stream: bool) -> None:
        self.has_begun = False
        self._send = send
        self._path = path
        self._model = model
        self._every_s = every_s
        self._is_stream = is_stream
        self._is_over = False
        self._sending = asyncio.Lock()
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        if self._is_stream:
            self._task = asyncio.create_task(self._keep_alive())
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._task is not None:
            self._task.cancel()

    async def stop(self) -> None:
        """Send nothing more from now on."""
        self._is_over = True
        async with self._sending:
            pass

    async def fail(self, error: RequestError) -> None:
        """End the stream that has begun with an error."""
        await self.stop()
        end = end_of_stream(self._path, error, b"\n", is_lines=self._is_of_lines)
        await self._send({"type": "http.response.body", "body": end, "more_body": True})
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    @property
    def _is_of_lines(self) -> bool:
        return self._path.rstrip("/") in _LINES

    async def _keep_alive(self) -> None:
        while True:
            await asyncio.sleep(self._every_s)
            async with self._sending:
                if self._is_over:
                    return
                if not self.has_begun:
                    self.has_begun = True
                    kind = b"application/x-ndjson" if self._is_of_lines else b"text/event-stream; charset=utf-8"
                    await self._send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", kind)]})
                await self._send({"type": "http.response.body", "body": self._sign_of_life(), "more_body": True})

    def _sign_of_life(self) -> bytes:
        path = self._path.rstrip("/")
        if path in _LINES:
            return Lines(_LINES[path].begin("", int(time.time()), self._model, "")).keep_alive
        return MessageEvents.keep_alive if path == "/v1/messages" else COMMENT
