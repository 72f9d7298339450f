"""Who answers for a broken gateway: everybody, at once, and for as long as it is broken."""

import asyncio
import io
import json
import socket
import time
from collections.abc import Awaitable, Callable

import aiohttp
import pytest

from mmrt.runtime.process.listening import open_listeners
from mmrt.runtime.supervisor.stand_in import StandIn


def run(test: Callable[[StandIn, int], Awaitable[None]]) -> None:
    async def main() -> None:
        (listener,) = open_listeners("127.0.0.1", 0)
        with listener:
            stand_in = StandIn([listener])
            try:
                stand_in.open(time.monotonic() + 6.5)
                await test(stand_in, listener.getsockname()[1])
            finally:
                stand_in.close()

    asyncio.run(main())


@pytest.mark.parametrize("num_bytes", [0, 10, 8 << 20])
def test_any_request_is_told_to_come_again(num_bytes: int) -> None:
    @run
    async def _(stand_in: StandIn, port: int) -> None:
        async with aiohttp.ClientSession() as session:
            for method in ("GET", "POST"):
                data = io.BytesIO(b"x" * num_bytes) if method == "POST" else None
                async with session.request(method, f"http://127.0.0.1:{port}/v1/chat/completions", data=data) as answer:
                    assert answer.status == 503 and 7 <= int(answer.headers["Retry-After"]) <= 8
                    error = json.loads(await answer.read())["error"]
                    assert error["code"] == 503 and "the gateway is broken" in error["message"]


def test_what_is_no_request_is_answered_too() -> None:
    @run
    async def _(stand_in: StandIn, port: int) -> None:
        for data in (b"nonsense", b"x" * (1 << 17), b""):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(data)
            writer.write_eof()
            assert (await reader.read()).startswith(b"HTTP/1.1 503 ")
            writer.close()


def test_who_comes_when_it_has_closed_waits_for_the_gateway() -> None:
    @run
    async def _(stand_in: StandIn, port: int) -> None:
        stand_in.open(time.monotonic())  # the second probe failed, too
        stand_in.close()
        stand_in.open(time.monotonic())
        stand_in.close()  # before it has begun
        await asyncio.sleep(0.01)
        with socket.create_connection(("127.0.0.1", port)) as client:
            client.sendall(b"GET / HTTP/1.1\r\n\r\n")
            client.settimeout(0.2)
            with pytest.raises(TimeoutError):
                await asyncio.to_thread(client.recv, 1)
