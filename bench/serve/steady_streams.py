"""Text streams that flow all the time, each started again when it ends. Called by ``restart`` in its event loop."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import aiohttp

from .client import stream_chat
from .errors import BenchError
from .record import Record

_LOOK_S = 0.01
_FLOW_TIMEOUT_S = 60.0
_MAX_TOKENS = 1500
_FAILURES_TO_GIVE_UP = 3


class SteadyStreams:
    """``num_streams`` streams from ``url``. ``records`` are those of the streams that are there now and of those that have ended."""

    def __init__(self, session: aiohttp.ClientSession, url: str, model: str, num_streams: int) -> None:
        self._session = session
        self._url = url
        self._model = model
        self._num_streams = num_streams
        self._current: list[Record] = []
        self._ended: list[Record] = []
        self._failure = ""

    @property
    def records(self) -> list[Record]:
        return [*self._ended, *self._current]

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """All of them, cut at the end."""
        self._ended.clear()
        self._failure = ""
        self._current = [_record(index) for index in range(self._num_streams)]
        tasks = [asyncio.create_task(self._keep(index)) for index in range(self._num_streams)]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def flow(self) -> None:
        """Wait until every stream has had a token since now. Raises: BenchError if one does not within a minute, or keeps failing."""
        now_s = time.monotonic()
        while not all(record.chunks and record.chunks[-1].time_s > now_s for record in self._current):
            if self._failure or time.monotonic() > now_s + _FLOW_TIMEOUT_S:
                raise BenchError(self._failure or f"a stream was silent for {_FLOW_TIMEOUT_S:g} s")
            await asyncio.sleep(_LOOK_S)
        self._ended = [record for record in self._ended if record.end_s > now_s]

    def silences(self, start_s: float, end_s: float) -> list[float]:
        """``longest_silence`` of each stream."""
        indices = range(self._num_streams)
        return [longest_silence([record for record in self.records if record.index == index], start_s, end_s) for index in indices]

    async def _keep(self, index: int) -> None:
        failures = 0
        while failures < _FAILURES_TO_GIVE_UP:
            record = self._current[index] = _record(index)
            await stream_chat(self._session, self._url, self._body(index), record)
            self._ended.append(record)
            failures = 0 if record.is_success else failures + 1
        self._failure = f"a stream failed {failures} times in a row: {record.error}"

    def _body(self, index: int) -> bytes:
        return json.dumps(
            {
                "model": self._model,
                "messages": [{"role": "user", "content": f"Story number {index}, please, and a long one."}],
                "stream": True,
                "max_tokens": _MAX_TOKENS,
                "temperature": 0,
                "min_tokens": _MAX_TOKENS,  # with ``ignore_eos`` ends could follow one another: without text they look like silence
                "stream_options": {"include_usage": True, "continuous_usage_stats": True},
            }
        ).encode()


def _record(index: int) -> Record:
    return Record(index=index, group="steady", scheduled_s=time.monotonic())


def longest_silence(records: Sequence[Record], start_s: float, end_s: float) -> float:
    """The longest time between two chunks of one stream that overlaps with [start_s, end_s]; 0 without any."""
    gaps = (gap_s for record in records for time_s, gap_s in record.timed_gaps() if time_s > start_s and time_s - gap_s < end_s)
    return max(gaps, default=0.0)
