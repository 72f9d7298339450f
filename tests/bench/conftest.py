"""A toy OpenAI-compatible server whose streams each test scripts, byte by byte."""

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager, ExitStack, asynccontextmanager, contextmanager
from typing import Any

import pytest
import uvloop
from aiohttp import web

Script = Callable[[web.StreamResponse, dict[str, Any]], Awaitable[None]]
ToyServer = Callable[[Script], AbstractAsyncContextManager[str]]


def chunk(text: str, completion_tokens: int, finish: str | None = None) -> bytes:
    data = {
        "choices": [{"index": 0, "delta": {"content": text}, "finish_reason": finish}],
        "usage": {"prompt_tokens": 7, "completion_tokens": completion_tokens},
    }
    return b"data: " + json.dumps(data).encode() + b"\n\n"


async def honest_stream(response: web.StreamResponse, body: dict[str, Any]) -> None:
    """A token per chunk, as many as asked for; a prompt has three tokens and two per word."""
    content = body["messages"][0]["content"]
    text = content if isinstance(content, str) else content[-1]["text"]
    await response.write(chunk("", 0))
    for index in range(body["max_tokens"]):
        await response.write(chunk(f" w{index}", index + 1))
        await asyncio.sleep(0.002)
    await response.write(chunk("", body["max_tokens"], "length"))
    usage = {"prompt_tokens": 3 + 2 * len(text.split()), "completion_tokens": body["max_tokens"]}
    await response.write(b"data: " + json.dumps({"choices": [], "usage": usage}).encode() + b"\n\ndata: [DONE]\n\n")


@pytest.fixture
def honest() -> Script:
    return honest_stream


@pytest.fixture
def toy_server() -> ToyServer:
    """``async with toy_server(script) as url``: a real server on a free port. Asked for more than 10,000 tokens it answers 400."""

    @asynccontextmanager
    async def serve(script: Script) -> AsyncIterator[str]:
        async def models(request: web.Request) -> web.Response:
            return web.json_response({"object": "list", "data": [{"id": "toy"}]})

        async def chat(request: web.Request) -> web.StreamResponse:
            body = await request.json()
            if body["max_tokens"] > 10_000:
                return web.json_response({"error": {"message": "max_tokens is too large"}}, status=400)
            response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
            await response.prepare(request)
            await script(response, body)
            return response

        app = web.Application(client_max_size=64 << 20)
        app.add_routes([web.get("/v1/models", models), web.post("/v1/chat/completions", chat)])
        runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.5)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        try:
            host, port = runner.addresses[0][:2]
            yield f"http://{host}:{port}"
        finally:
            await runner.cleanup()

    return serve


@pytest.fixture
def start_server(toy_server: ToyServer) -> Iterator[Callable[[Script], str]]:
    """``start_server(script)`` is the URL of a server in a thread with a loop of its own, for tests of what has one too.

    A loop of uvloop's, as the gateway's is: asyncio's never closes a connection that it has accepted right before the server closes.
    """

    @contextmanager
    def running(script: Script) -> Iterator[str]:
        urls: list[str] = []
        ready, loop, stop = threading.Event(), uvloop.new_event_loop(), asyncio.Event()

        async def serve() -> None:
            async with toy_server(script) as url:
                urls.append(url)
                ready.set()
                await stop.wait()

        thread = threading.Thread(target=lambda: loop.run_until_complete(serve()))
        thread.start()
        try:
            assert ready.wait(10)
            yield urls[0]
        finally:
            loop.call_soon_threadsafe(stop.set)
            thread.join()
            loop.close()

    with ExitStack() as stack:
        yield lambda script: stack.enter_context(running(script))
