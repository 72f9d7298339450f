"""Requests that end their gateway, beside others: with the second death they are given up, and nobody else is."""

import asyncio
import signal
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from mmrt.runtime.supervisor.connection_keeper import ConnectionKeeper
from mmrt.shm.connection_records import RecordSizes

GATEWAY = "mmrt.tests.actors.gateway.keeping.mortal_gateway"


@asynccontextmanager
async def gateway(keeper: ConnectionKeeper, has_crashed: bool) -> AsyncIterator["asyncio.subprocess.Process"]:
    with keeper.channel() as channel:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", GATEWAY, str(channel.fileno()), str(has_crashed), pass_fds=[channel.fileno()]
        )
    yield process
    if process.returncode is None:
        process.kill()
        await process.wait()


async def ask(port: int, path: str) -> tuple[int, bytes]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(b"GET /%b HTTP/1.1\r\nHost: localhost\r\n\r\n" % path.encode())
        head = (await reader.readuntil(b"\r\n\r\n")).lower()
        length = int(head.partition(b"content-length: ")[2].partition(b"\r")[0])
        return int(head.split()[1]), await reader.readexactly(length)
    finally:
        writer.close()


@pytest.mark.parametrize("poisons", [("step",), ("thread",), ("thread", "thread")])
def test_only_the_poison_is_given_up(poisons: tuple[str, ...]) -> None:
    async def test() -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            listener.setblocking(False)
            port = listener.getsockname()[1]
            keeper = ConnectionKeeper([listener], RecordSizes(8, 4096, 4096))
            bad = [asyncio.create_task(ask(port, poison)) for poison in poisons]
            good = [asyncio.create_task(ask(port, "slow")) for _ in range(3)]
            all_over, num_deaths = asyncio.gather(*bad, *good), 0
            while not all(one.done() for one in (*bad, *good)):
                async with gateway(keeper, has_crashed=bool(num_deaths)) as process:
                    ended = asyncio.create_task(process.wait())
                    await asyncio.wait([ended, all_over], timeout=20, return_when=asyncio.FIRST_COMPLETED)
                    if not ended.done():
                        break
                    assert ended.result() == -signal.SIGABRT
                    num_deaths += 1
                    assert num_deaths <= 2 * len(poisons)
            answers = await asyncio.wait_for(asyncio.gather(*bad), 5)
            assert [status for status, _ in answers] == [500] * len(poisons) and b"died twice" in answers[0][1]
            assert await asyncio.wait_for(asyncio.gather(*good), 5) == [(200, b"slow")] * 3
            assert num_deaths >= 2
            keeper.close()

    asyncio.run(test())


def test_a_death_between_all_requests_is_nobodys_fault() -> None:
    async def test() -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            listener.setblocking(False)
            port = listener.getsockname()[1]
            keeper = ConnectionKeeper([listener], RecordSizes(8, 4096, 4096))
            asking = asyncio.create_task(ask(port, "chance"))
            for number in range(4):
                async with gateway(keeper, has_crashed=bool(number)) as process:
                    assert await asyncio.wait_for(process.wait(), 20) == -signal.SIGABRT
            assert not asking.done()
            asking.cancel()
            keeper.close()

    asyncio.run(test())
