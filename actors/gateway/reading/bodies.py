"""Bodies of requests, received within bounds of time and memory and parsed, long ones in a thread. Runs in the gateway's loop.

Large bodies lie in a spool, outside of the gateway's own memory, and so do the media in them.
"""

import asyncio
import threading
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from functools import partial
from typing import TypeVar

from aiohttp import web

from ....runtime.errors import RequestError
from ....shm.spool import Spool, SpooledBytes, whole
from ..at_work import in_thread
from .forms import FORM, Form, read_form
from .json_body import Body, SpooledBody

# A body has so long, and longer by what has arrived at this rate, but never longer without a byte: a slow link is served, a trickle
# is not.
BODY_TIMEOUT_S = 60.0
LEAST_BYTES_S = 128 * 1024
OVERLOAD_RETRY_S = 1
# Bodies and media in memory at once, in bodies of the largest size.
_INTAKE_BODIES = 4
# Larger bodies are validated and tokenized in a thread, so that running streams need not wait.
_THREAD_BYTES = 4 * 1024
# Even larger ones are refused where memory is short, and use a few threads of their own, since each takes memory.
_LARGE_BYTES = 32 * 1024
_NUM_THREADS = 2
# Larger ones go to the spool. Pictures are mostly smaller, and come and go faster in memory.
_SPOOLED_BYTES = 1 << 20
_OF_ANY_TYPE = "/api/"  # Ollama's routes, which its documents call with curl's own type

JSON = "application/json"

_Body = TypeVar("_Body")
_Read = bytearray | SpooledBody
T = TypeVar("T")


def too_many_large() -> RequestError:
    """The error that clients get where memory is short."""
    message = "too many large requests are being received"
    return RequestError(message, status=503, type="overloaded_error", retry_after_s=OVERLOAD_RETRY_S)


def due_s(began_s: float, num_bytes: int, now_s: float) -> float:
    """Return the time by which more of a body must come. It began at ``began_s``, and ``num_bytes`` have come."""
    return min(began_s + BODY_TIMEOUT_S + num_bytes / LEAST_BYTES_S, now_s + BODY_TIMEOUT_S)


def came_too_late(num_bytes: int, took_s: float) -> RequestError:
    """The error that clients get whose body was not there by ``due_s``."""
    return RequestError(f"the body did not arrive in time: {num_bytes} bytes in {took_s:.0f} s", status=408)


class _Received:
    """The bytes of a body as they come: few in memory, more in the spool."""

    def __init__(self, spool: Spool) -> None:
        self._spool = spool
        self._bytes = bytearray()
        self._spooled: SpooledBytes | None = None
        self._num_bytes = 0

    def __len__(self) -> int:
        return self._num_bytes

    def append(self, chunk: bytes) -> None:
        self._num_bytes += len(chunk)
        if self._spooled is None and len(self._bytes) + len(chunk) <= _SPOOLED_BYTES:
            self._bytes += chunk
            return
        if self._spooled is None:
            self._spooled = self._spool.new()
            self._spooled.append(self._bytes)
            self._bytes = bytearray()
        self._spooled.append(chunk)

    @property
    def content(self) -> bytearray | SpooledBytes:
        return self._bytes if self._spooled is None else self._spooled

    def drop(self) -> None:
        """Give its memory back, as far as it is in the spool."""
        if self._spooled is not None:
            self._spooled.close()


class BodyReader:
    """Reads the bodies of all requests."""

    def __init__(self, max_bytes: int, num_media_bytes: Callable[[], int]) -> None:
        """``max_bytes``: of one body. ``num_media_bytes``: how many of media are held beside the bodies."""
        self._max_bytes = max_bytes
        self._num_media_bytes = num_media_bytes
        self._num_bytes = 0
        self.spool = Spool()
        self._reading_whole = threading.Lock()
        self._threads = ThreadPoolExecutor(1, thread_name_prefix="intake")
        self._threads_of_large = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="intake-large")
        self.num_reading = 0  # requests whose body has not come whole

    async def read(self, http: web.Request, parse: Callable[[Body], T], *, takes_long: bool = False) -> T:
        """Receive a body of JSON and return what ``parse`` makes of it, in a thread where it is long. ``takes_long``: so may parsing a
        short one. Raises: RequestError."""
        _check_type(http, JSON)
        return await self._read(http, _as_json, partial(self._parse, parse), takes_long)

    async def read_form(self, http: web.Request, parse: Callable[[Form], T]) -> T:
        """Receive a form and return what ``parse`` makes of it, likewise. Raises: RequestError."""
        _check_type(http, FORM)
        return await self._read(http, partial(_as_form, http.headers), parse)

    async def _read(
        self,
        http: web.Request,
        unpack: Callable[[bytearray | SpooledBytes], Awaitable[_Body]],
        parse: Callable[[_Body], T],
        takes_long: bool = False,
    ) -> T:
        self._check_headers(http)
        body = _Received(self.spool)
        self.num_reading += 1
        try:
            await self._receive(http, body)
            content = await unpack(body.content)
            if len(body) <= _THREAD_BYTES and not takes_long:
                return parse(content)
            threads = self._threads if len(body) <= _LARGE_BYTES else self._threads_of_large
            parsing = threads.submit(copy_context().run, in_thread(parse), content)
        except BaseException:
            body.drop()
            raise
        finally:
            self.num_reading -= 1
            self._num_bytes -= len(body)
        # The body takes memory until its thread is done, even if no handler waits for it any more.
        loop, num_bytes = asyncio.get_running_loop(), len(body)
        self._num_bytes += num_bytes
        parsing.add_done_callback(lambda _: loop.call_soon_threadsafe(self.hold, -num_bytes))
        return await asyncio.shield(asyncio.wrap_future(parsing))  # cancelled, it would stay in the queue with its body all the same

    def _parse(self, parse: Callable[[Body], T], body: _Read) -> T:
        """Parse a body of JSON, in a thread unless it is short. One in the spool whose base64 is not all of media is read again as a
        whole, whatever came of the marks in it: one at a time, since that takes memory. So ``parse`` may be called twice."""
        if not isinstance(body, SpooledBody):
            return parse(body)
        try:
            try:
                parsed = parse(body)
                if body.is_used_up:
                    return parsed
            except Exception:
                if body.is_used_up:
                    raise
            with self._reading_whole:
                return parse(whole(body.bytes))
        finally:
            body.bytes.close()  # whoever still holds an error, holds this

    def hold(self, num_bytes: int) -> bool:
        """Count bytes in memory that are not yet submitted, or forget them; return whether there is room for more."""
        self._num_bytes += num_bytes
        return self._num_bytes + self._num_media_bytes() <= _INTAKE_BODIES * self._max_bytes

    def _check_headers(self, http: web.Request) -> None:
        packing = http.headers.get("Content-Encoding", "identity")
        if packing.lower() != "identity":
            raise RequestError(f"Content-Encoding is {packing[:100]!r}, compressed request bodies are not supported", status=415)
        length = http.content_length
        if length is not None and length > self._max_bytes:
            raise self._too_large(length)

    def _too_large(self, length: int) -> RequestError:
        return RequestError(f"the body has {length} bytes, the limit is {self._max_bytes} (server.max_body_mib)", status=413)

    async def _receive(self, http: web.Request, body: _Received) -> None:
        """Fill ``body``. Memory counts as it arrives: an announced length alone keeps no other request out, and a small body is
        never kept out: media of others may wait for minutes."""
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        try:
            async with asyncio.timeout_at(due_s(began_s, 0, began_s)) as timeout:
                async for chunk in http.content.iter_any():
                    body.append(chunk)
                    has_room = self.hold(len(chunk))
                    timeout.reschedule(due_s(began_s, len(body), loop.time()))
                    if len(body) > self._max_bytes:
                        raise self._too_large(len(body))
                    if len(body) > _LARGE_BYTES and not has_room:
                        raise too_many_large()
        except RequestError:
            raise
        except TimeoutError:
            raise came_too_late(len(body), loop.time() - began_s) from None
        except (web.RequestPayloadError, ValueError) as error:
            raise RequestError(f"the body cannot be read: {str(error)[:200]}") from None


def _check_type(http: web.Request, expected: str) -> None:
    """Check the type of a body. One of JSON may go without, and with any on some routes."""
    is_stated = "Content-Type" in http.headers
    is_free = expected == JSON and (not is_stated or http.path.startswith(_OF_ANY_TYPE))
    if http.content_type != expected and not is_free:
        stated = repr(http.content_type) if is_stated else "missing"
        raise RequestError(f"Content-Type is {stated}, expected {expected}", status=415)


async def _as_json(body: bytearray | SpooledBytes) -> _Read:
    return SpooledBody(body) if isinstance(body, SpooledBytes) else body


async def _as_form(headers: Mapping[str, str], body: bytearray | SpooledBytes) -> Form:
    try:
        return await read_form(headers, body)
    finally:
        if isinstance(body, SpooledBytes):
            body.close()
