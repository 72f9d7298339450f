"""A gateway that some requests end: aiohttp and an adoption as in the real one. ``python -m ... CHANNEL HAS_CRASHED``."""

import asyncio
import os
import socket
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import uvloop
from aiohttp import web

from mmrt.actors.gateway.at_work import in_thread
from mmrt.actors.gateway.connections import Connections, Runner
from mmrt.actors.gateway.keeping.adoption import Adoption
from mmrt.actors.gateway.keeping.kept_bodies import KeptBodies
from mmrt.actors.gateway.keeping.patience import Patience
from mmrt.actors.gateway.keeping.turns import Turns


async def serve(channel: socket.socket, has_crashed: bool) -> None:
    threads = ThreadPoolExecutor(1)

    async def slow(request: web.Request) -> web.Response:
        await asyncio.sleep(0.3)
        return web.Response(text="slow")

    async def step(request: web.Request) -> web.Response:
        await asyncio.sleep(0.05)
        os.abort()

    async def thread(request: web.Request) -> web.Response:
        await asyncio.get_running_loop().run_in_executor(threads, in_thread(os.abort))
        raise AssertionError

    async def chance(request: web.Request) -> web.Response:
        """It has nothing to do with the gateway's death."""
        asyncio.get_running_loop().call_soon(os.abort)
        await asyncio.sleep(60)
        raise AssertionError

    app = web.Application()
    handlers: list[Any] = [slow, step, thread, chance]
    app.add_routes([web.get(f"/{handler.__name__}", handler) for handler in handlers])
    runner = Runner(app, Connections(10), handler_cancellation=True, access_log=None)
    await runner.setup()
    assert runner.server is not None
    Adoption(channel, runner.server, Turns(), lambda: None, has_crashed, Patience(), KeptBodies()).begin()
    await asyncio.Event().wait()


if __name__ == "__main__":
    uvloop.run(serve(socket.socket(fileno=int(sys.argv[1])), sys.argv[2] == "True"))
