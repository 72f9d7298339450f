"""Requests that come at once take turns with all else in the loop."""

import asyncio

from mmrt.actors.gateway.keeping.turns import NUM_EACH, Turns


def test_a_few_begin_in_each_turn_of_the_loop_in_their_order() -> None:
    begun: list[int] = []
    most = 0

    async def watch() -> None:
        nonlocal most
        while len(begun) < 101:
            before = len(begun)
            await asyncio.sleep(0)
            most = max(most, len(begun) - before)

    async def wait(turns: Turns, number: int) -> None:
        await turns.wait()
        begun.append(number)

    async def test() -> None:
        turns, watching = Turns(), asyncio.create_task(watch())
        turns.ask(lambda: begun.append(0))
        assert begun == [0]  # alone, it waits for nobody
        for number in range(1, 51):
            turns.ask(lambda number=number: begun.append(number))  # type: ignore[misc]
        assert len(begun) == NUM_EACH
        await asyncio.gather(*(wait(turns, number) for number in range(51, 101)))
        await watching

    asyncio.run(test())
    assert begun == list(range(101)) and most <= NUM_EACH


def test_one_that_is_gone_takes_no_turn_from_others() -> None:
    async def test() -> None:
        turns = Turns()
        waiting = [asyncio.create_task(turns.wait()) for _ in range(3 * NUM_EACH)]
        await asyncio.sleep(0)
        assert [task.done() for task in waiting].count(False) >= NUM_EACH
        waiting[-1].cancel()
        await asyncio.wait_for(asyncio.gather(*waiting[:-1]), 5)

    asyncio.run(test())
