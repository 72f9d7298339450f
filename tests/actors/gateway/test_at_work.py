"""The words of a record that say where its request is worked on."""

import asyncio
from collections.abc import Iterator

import pytest

from mmrt.actors.gateway.at_work import Work, in_steps, in_thread
from mmrt.shm.connection_records import ConnectionRecord, ConnectionRecords, RecordSizes
from mmrt.shm.workplace import Workplace


@pytest.fixture
def record() -> Iterator[ConnectionRecord]:
    records = ConnectionRecords.create(RecordSizes(1, 4096, 4096))
    yield records.record(0)
    records.close()


def test_a_step_is_marked_and_the_time_between_steps_is_not(record: ConnectionRecord) -> None:
    seen, work = list[bool](), Work(record)

    def look() -> None:
        seen.append(record.is_at_work(Workplace.LOOP))

    async def handler() -> str:
        look()
        asyncio.get_running_loop().call_soon(look)
        await asyncio.sleep(0)
        with pytest.raises(KeyError):
            await failing()
        look()
        return "answer"

    async def failing() -> None:
        await asyncio.sleep(0)
        raise KeyError

    assert asyncio.run(in_steps(work, handler())) == "answer"
    assert seen == [True, False, True] and not record.is_at_work(Workplace.LOOP)


def test_a_cancelled_handler_sees_it_and_leaves_no_mark(record: ConnectionRecord) -> None:
    ends = list[str]()

    async def handler() -> None:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            ends.append("cancelled")
            raise

    async def test() -> None:
        task = asyncio.create_task(in_steps(Work(record), handler()))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(test())
    assert ends == ["cancelled"] and not any(record.is_at_work(place) for place in Workplace)


def test_what_goes_on_behind_a_request_is_not_the_next_ones_work(record: ConnectionRecord) -> None:
    work = Work(record)

    async def handler() -> list[bool]:
        look = in_thread(lambda: record.is_at_work(Workplace.THREAD))
        during = look()
        work.retire()
        return [during, look(), record.is_at_work(Workplace.LOOP)]

    assert asyncio.run(in_steps(work, handler())) == [True, False, False]
    assert in_thread(len) is len, "outside of any request"
