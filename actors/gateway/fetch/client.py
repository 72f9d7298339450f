"""The gateway's side of the fetch process: ask it, and replace it when it dies or hangs.

Runs in the gateway's event loop, which fetches nothing by itself. The process starts with the first URL.
"""

import asyncio
import contextlib
import itertools
import logging
import sys

import msgspec

from ....runtime.config.fetch import FetchSection
from ..reading.url_rules import FetchError
from .frames import MAX_FETCHED_BYTES, MAX_FETCHES, Ask, Fetched, decode_fetched, frame, read_frame

log = logging.getLogger(__name__)

START_S = 60.0
GRACE_S = 5.0  # beyond the limit on a fetch, for a process that is late itself
_NUM_TRIALS = 2
_BUFFER_BYTES = 1 << 20
_MODULE = f"{__package__}.process"


class FetchClient:
    """Has URLs fetched, many at a time."""

    def __init__(self, rules: FetchSection) -> None:
        self._rules = rules
        self._process: _Process | None = None
        self._start = asyncio.Lock()
        self._num_fetches = 0

    @property
    def pid(self) -> int | None:
        """Of the process, if there is one."""
        return None if self._process is None else self._process.pid

    async def fetch(self, url: str, max_bytes: int) -> bytes:
        """Return the bytes at a URL. A process that dies meanwhile is replaced once, and the URL fetched again.

        Raises:
            FetchError: with the status for the client: 4xx for the URL's or its server's fault, 503 if there are too many, or the
                process does not answer in time; 500 if it fails.
        """
        if self._num_fetches >= MAX_FETCHES:
            raise FetchError(f"{self._num_fetches} media are being fetched, the limit is {MAX_FETCHES}", 503)
        self._num_fetches += 1
        try:
            for _ in range(_NUM_TRIALS):
                with contextlib.suppress(EOFError, OSError):
                    process = await self._started()
                    return await self._ask(process, url, max_bytes)
            raise FetchError("the fetch process failed", 500)
        finally:
            self._num_fetches -= 1

    async def close(self) -> None:
        """End the process."""
        if self._process is not None:
            await self._process.end()

    async def _ask(self, process: "_Process", url: str, max_bytes: int) -> bytes:
        try:
            async with asyncio.timeout(self._rules.timeout_s + GRACE_S):
                return await process.ask(url, max_bytes)
        except TimeoutError:
            log.warning("the fetch process does not answer and is replaced")
            await process.end()
            raise FetchError("the fetch process did not answer in time", 503) from None

    async def _started(self) -> "_Process":
        async with self._start:
            if self._process is None or self._process.is_over:
                self._process = None
                self._process = await _Process.start(self._rules)
            return self._process


class _Process:
    """One process, and the fetches that wait for it."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdin is not None and process.stdout is not None
        self._process = process
        self._target, self._source = process.stdin, process.stdout
        self._numbers = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[bytes]] = {}
        self._reader: asyncio.Task[None] | None = None
        self._is_ending = False
        self._most_bytes = 0  # of a medium that was asked for
        self.pid = process.pid

    @classmethod
    async def start(cls, rules: FetchSection) -> "_Process":
        """Raises: EOFError or OSError if it does not start; FetchError if this takes too long."""
        pipe = asyncio.subprocess.PIPE
        command = [sys.executable, "-P", "-m", _MODULE]
        process = cls(await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe, limit=_BUFFER_BYTES))
        try:
            async with asyncio.timeout(START_S):
                process._target.write(frame(rules))
                await read_frame(process._source, MAX_FETCHED_BYTES)
        except BaseException as error:
            await process.end()
            if isinstance(error, TimeoutError):
                raise FetchError(f"the fetch process has not started within {START_S:.0f} s", 503) from None
            raise
        process._reader = asyncio.get_running_loop().create_task(process._read())
        return process

    @property
    def is_over(self) -> bool:
        return self._reader is None or self._reader.done()

    async def ask(self, url: str, max_bytes: int) -> bytes:
        """Raises: FetchError; EOFError or OSError if the process ends."""
        if self.is_over:
            raise EOFError
        number, self._most_bytes = next(self._numbers), max(self._most_bytes, max_bytes)
        answer = self._waiting[number] = asyncio.get_running_loop().create_future()
        try:
            self._target.write(frame(Ask(number, url, max_bytes)))
            data: bytes = await answer
            return data
        finally:
            del self._waiting[number]
            if answer.cancelled() and not self.is_over:
                self._target.write(frame(Ask(number)))

    async def end(self) -> None:
        """Kill it."""
        self._is_ending = True
        await self._kill()
        if self._reader is not None:
            await self._reader

    async def _kill(self) -> int:
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        return await self._process.wait()

    async def _read(self) -> None:
        """Hand out answers until the process ends. One that breaks the protocol is ended: a hostile server may have taken it over."""
        try:
            while True:
                fetched = decode_fetched(await read_frame(self._source, MAX_FETCHED_BYTES))
                if fetched.num_bytes > self._most_bytes:
                    raise EOFError(f"a medium of {fetched.num_bytes} bytes, the limit is {self._most_bytes}")
                data = await self._source.readexactly(fetched.num_bytes)
                self._hand_out(fetched, data)
        except (EOFError, OSError, msgspec.MsgspecError) as error:
            status = await self._kill()
            if not self._is_ending:
                log.warning("the fetch process has ended (%s: %s), %d fetches waited", status, error, len(self._waiting))
            for answer in self._waiting.values():
                if not answer.done():
                    answer.set_exception(EOFError(str(error)))

    def _hand_out(self, fetched: Fetched, data: bytes) -> None:
        answer = self._waiting.get(fetched.number)
        if answer is None or answer.done():
            return
        if fetched.status:
            answer.set_exception(FetchError(fetched.error, fetched.status))
        else:
            answer.set_result(data)
