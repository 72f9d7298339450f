"""Load shapes: open loop (arrival times) and closed loop (fixed concurrency). Called by ``serve`` in its event loop."""

import asyncio
import itertools
import time
from collections.abc import Awaitable, Callable, Sequence

from .record import Record
from .workload import RequestPlan

Send = Callable[[RequestPlan, Record], Awaitable[None]]
Notice = Callable[[Record], None]

START_DELAY_S = 0.05


async def run_open_loop(plans: Sequence[RequestPlan], send: Send, notice: Notice) -> list[Record]:
    """Send every request at its arrival time, independent of the others. ``notice`` is called with each record at its end."""
    start_s = time.monotonic() + START_DELAY_S
    records = [new_record(plan, start_s + plan.arrival_s) for plan in plans]

    async def one(plan: RequestPlan, record: Record) -> None:
        await send(plan, record)
        notice(record)

    async with asyncio.TaskGroup() as group:
        for plan, record in sorted(zip(plans, records, strict=True), key=lambda pair: pair[1].scheduled_s):
            await asyncio.sleep(record.scheduled_s - time.monotonic())
            group.create_task(one(plan, record))
    return records


async def run_closed_loop(plans: Sequence[RequestPlan], concurrency: int, send: Send, notice: Notice) -> list[Record]:
    """Keep ``concurrency`` requests running until all have been sent. Raises: ValueError for a concurrency below 1."""
    if concurrency < 1:
        raise ValueError(f"concurrency {concurrency} must be at least 1")
    records: list[Record] = []
    waiting = iter(plans)

    async def worker() -> None:
        for plan in waiting:
            record = new_record(plan, time.monotonic())
            records.append(record)
            await send(plan, record)
            notice(record)

    async with asyncio.TaskGroup() as group:
        for _ in itertools.repeat(None, min(concurrency, len(plans))):
            group.create_task(worker())
    return records


def new_record(plan: RequestPlan, scheduled_s: float) -> Record:
    """An empty record of a plan that should be sent at ``scheduled_s``."""
    return Record(index=plan.index, group=plan.group, scheduled_s=scheduled_s)
