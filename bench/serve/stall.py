"""The ``stall`` scenario: does decoding stall while another request's image is encoded?

Phase one: N text streams alone. Phase two: the same streams while an image (or video, or sound) that is new to the server arrives at
every interval. Both are of one run, so that the P99 of the times between tokens can be compared. Streams that end are started
again; the bench cuts them when every fresh request is done. Called by ``serve`` in its event loop; the functions at the end are
pure.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

import msgspec

from .drivers import Notice, Send, new_record
from .errors import BenchError
from .record import Record
from .workload import RequestPlan

STREAM_GROUP = "stream"
_FAILURES_TO_GIVE_UP = 3
_LOOK_S = 0.01
_TAIL_S = 0.5  # streams run on for this long after the last fresh request, so that the end of a stall is seen

Phase = tuple[float, float]


class StallPlan(msgspec.Struct, frozen=True, kw_only=True):
    """``phase_s`` seconds of ``num_streams`` streams alone, then one of ``fresh`` every ``interval_s``."""

    num_streams: int
    phase_s: float
    interval_s: float
    fresh: tuple[RequestPlan, ...]


class StallRun(msgspec.Struct, frozen=True):
    """The results. Phases are (start, end) on the monotonic clock; the second lasts until all fresh requests are done."""

    streams: list[Record]
    fresh: list[Record]
    alone: Phase
    with_fresh: Phase

    @property
    def records(self) -> list[Record]:
        return [*self.streams, *self.fresh]


class _Streams:
    """The text streams, a slot each. ``failure`` gets a result when one fails several times in a row."""

    def __init__(self, num_streams: int, plan_stream: Callable[[int], RequestPlan], send: Send, notice: Notice) -> None:
        self.failure: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._slots: list[list[Record]] = [[] for _ in range(num_streams)]
        self._plan_stream = plan_stream
        self._send = send
        self._notice = notice
        self._num_started = 0

    @property
    def records(self) -> list[Record]:
        return [record for slot in self._slots for record in slot]

    @property
    def all_flow(self) -> bool:
        """Every slot has had a token."""
        return all(any(record.chunks for record in slot) for slot in self._slots)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """All slots, cut at the end."""
        tasks = [asyncio.create_task(self._keep_running(slot)) for slot in self._slots]
        try:
            yield
        finally:
            await _cancel(tasks)

    async def _keep_running(self, slot: list[Record]) -> None:
        failures = 0
        while failures < _FAILURES_TO_GIVE_UP:
            plan = self._plan_stream(self._num_started)
            self._num_started += 1
            record = new_record(plan, time.monotonic())
            slot.append(record)
            await self._send(plan, record)
            self._notice(record)
            failures = 0 if record.is_success else failures + 1
        if not self.failure.done():
            self.failure.set_result(f"a text stream failed {failures} times in a row: {slot[-1].error}")

    async def pause(self, seconds: float) -> None:
        """Wait. Raises: BenchError as soon as a slot has given up."""
        await asyncio.wait([self.failure], timeout=max(0.0, seconds))
        if self.failure.done():
            raise BenchError(self.failure.result())


async def run_stall(plan: StallPlan, plan_stream: Callable[[int], RequestPlan], send: Send, notice: Notice) -> StallRun:
    """Run both phases. ``plan_stream(i)`` is the i-th text request. Raises: BenchError when the text streams keep failing."""
    streams = _Streams(plan.num_streams, plan_stream, send, notice)
    async with streams.running():
        while not streams.all_flow:
            await streams.pause(_LOOK_S)
        alone_s = time.monotonic()
        await streams.pause(plan.phase_s)
        fresh_s = time.monotonic()
        fresh = await _send_fresh(plan, fresh_s, streams, send, notice)
        await streams.pause(_TAIL_S)
        end_s = time.monotonic()
    return StallRun(streams.records, fresh, (alone_s, fresh_s), (fresh_s, end_s))


async def _send_fresh(plan: StallPlan, start_s: float, streams: _Streams, send: Send, notice: Notice) -> list[Record]:
    async def one(fresh: RequestPlan, record: Record) -> None:
        await send(fresh, record)
        notice(record)

    records = []
    tasks: list[asyncio.Task[None]] = []
    try:
        for number, fresh in enumerate(plan.fresh):
            record = new_record(fresh, start_s + number * plan.interval_s)
            records.append(record)
            await streams.pause(record.scheduled_s - time.monotonic())
            tasks.append(asyncio.create_task(one(fresh, record)))
        while not all(task.done() for task in tasks):
            await streams.pause(_LOOK_S)
    finally:
        await _cancel(tasks)
    return records


async def _cancel(tasks: Sequence[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def times_alone(run: StallRun) -> list[float]:
    """Times between tokens of the streams, wholly within the first phase; seconds."""
    return [end_s - start_s for start_s, end_s in _spans(run.streams) if run.alone[0] <= start_s and end_s <= run.alone[1]]


def times_with_fresh(run: StallRun) -> list[float]:
    """Times between tokens that end in the second phase: one that began before the first fresh request came is counted here."""
    return [end_s - start_s for start_s, end_s in _spans(run.streams) if run.with_fresh[0] < end_s <= run.with_fresh[1]]


def times_under_way(run: StallRun) -> list[float]:
    """Those that overlap with the time from sending to the first token of any fresh request: no quiet time in between."""
    busy = [(r.sent_s, r.chunks[0].time_s if r.chunks else r.end_s) for r in run.fresh]
    return [
        end_s - start_s
        for start_s, end_s in _spans(run.streams)
        if any(start_s < busy_end_s and busy_start_s < end_s for busy_start_s, busy_end_s in busy)
    ]


def _spans(streams: Sequence[Record]) -> list[Phase]:
    return [(time_s - length_s, time_s) for record in streams for time_s, length_s in record.timed_tbts()]
