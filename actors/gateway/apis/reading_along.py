"""Streams of events that several clients may read, each from where it likes, while their answer goes on or afterwards. Runs in the
gateway's event loop."""

import asyncio
import logging
from typing import Protocol

from aiohttp import web

from ..answers.answer_format import COMMENT
from ..answers.answer_record import AnswerRecord
from ..keeping.endings import reset
from ..keeping.state import Place
from .streams import SLOW_READER_S, WRITE_BYTES

log = logging.getLogger(__name__)


class LeftError(Exception):
    """Another gateway goes on with the answer."""


class Source(Protocol):
    """The events for one client. ``position``: how far it has got, by which another gateway goes on with it."""

    @property
    def position(self) -> int: ...

    def take(self) -> tuple[bytes, bool]:
        """Return what has come since the last call, and whether it is the last. Raises: LeftError."""
        ...

    async def more(self, timeout_s: float) -> bool:
        """Wait for more. Returns whether it has come in this time."""
        ...


async def send_along(http: web.Request, record: AnswerRecord, id: str, source: Source, keep_alive_s: float) -> web.StreamResponse:
    """Send a stream up to its end, or until its client has gone."""
    head = {"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
    response = web.StreamResponse(headers={**head, "X-Request-Id": id})
    await response.prepare(http)
    if record.shown:
        http.writer.send_headers()
        record.restored()
    try:
        async with asyncio.timeout(None) as patience:

            def renew() -> None:
                patience.reschedule(asyncio.get_running_loop().time() + SLOW_READER_S)

            data, is_last = source.take()
            while True:
                renew()
                for start in range(0, len(data), WRITE_BYTES):
                    await response.write(data[start : start + WRITE_BYTES])
                    renew()
                if is_last:
                    break
                await record.commit([Place(has_begun=True)], source.position, renew)
                patience.reschedule(None)
                data, is_last = source.take()
                while not data and not is_last:
                    has_come = await source.more(keep_alive_s)
                    data, is_last = source.take()
                    if not has_come and not data:
                        data = COMMENT
            await response.write_eof()
            await record.finish(response, renew)
    except ConnectionResetError:
        pass
    except LeftError:
        reset(http.transport)  # as if this gateway had died: the client asks again
    except TimeoutError:
        log.info("%s: its client reads too slowly", id)
        reset(http.transport)
    return response
