"""The front: clients and runs that do not behave, and what an earlier front has left."""

import asyncio
import errno
import io
import json
from collections.abc import Callable
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from mmrt.runtime.errors import RunError
from mmrt.serving import asgi, fleet
from mmrt.serving.card import Card
from mmrt.serving.relay import reply
from mmrt.serving.residency import State
from mmrt.shm.errors import ShmError
from mmrt.tests.serving.conftest import Tried, echo
from mmrt.tests.serving.test_several_front import streaming

Trying = Callable[..., None]
CHAT = "/v1/chat/completions"


async def raw(tried: Tried, head: str, body: bytes = b"") -> tuple[str, dict[str, str], bytes]:
    """Send bytes as they are. Returns status line, headers and body of the answer."""
    reader, writer = await asyncio.open_connection("127.0.0.1", int(tried.url.rpartition(":")[2]))
    writer.write(head.replace("\n", "\r\n").encode("latin-1") + b"\r\n\r\n" + body)
    answer = await reader.read()
    writer.close()
    head_, _, rest = answer.partition(b"\r\n\r\n")
    status, *lines = head_.decode("latin-1").split("\r\n")
    return status, dict(line.lower().split(": ", 1) for line in lines), rest


def test_headers_come_through_but_those_of_the_connection(front: Trying) -> None:
    async def test(tried: Tried) -> None:
        body = b'{"model": "a"}'
        head = (
            f"POST {CHAT} HTTP/1.1\nHost: 127.0.0.1\nConnection: close, X-Hop\nX-Hop: 1\nProxy-Authorization: x\nProxy-Connection: x\n"
            f"X-Odd: caf\xe9\nContent-Type: application/json\nContent-Length: {len(body)}"
        )
        status, _, answer = await raw(tried, head, body)
        assert status == "HTTP/1.1 200 OK", answer
        seen = json.loads(answer)["headers"]
        assert not {"x-hop", "proxy-authorization", "proxy-connection", "connection"} & set(seen)
        assert seen["x-odd"].startswith("caf"), "a header may be no UTF-8"

    front(test)


def test_a_path_reaches_the_run_as_its_client_wrote_it(front: Trying) -> None:
    """What is one segment for the front, which judges it, is no other route for the run."""

    async def test(tried: Tried) -> None:
        seen: list[str] = []

        async def note(request: web.Request) -> web.StreamResponse:
            seen.append(request.raw_path)
            return await echo(request)

        tried.run("a").handler = note
        await tried.post(CHAT)
        for method, path in (("GET", "/v1/responses/..%2F..%2Fpage%2Fstate"), ("GET", "/page/trace/..%2Fstate?model=a")):
            await raw(tried, f"{method} {path} HTTP/1.1\nHost: localhost\nConnection: close")
        assert seen == [CHAT, "/v1/responses/..%2F..%2Fpage%2Fstate", "/page/trace/..%2Fstate?model=a"]

    front(test)


def test_head_has_no_body(front: Trying) -> None:
    async def test(tried: Tried) -> None:
        await tried.post(CHAT)
        status, headers, body = await raw(tried, "HEAD /metrics?model=a HTTP/1.1\nHost: localhost\nConnection: close")
        assert status == "HTTP/1.1 200 OK" and int(headers["content-length"]) > 0 and body == b""

    front(test)


def test_a_client_that_does_not_read_holds_no_model(front: Trying, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asgi, "SLOW_READER_S", 0.2)

    async def test(tried: Tried) -> None:
        tried.run("a").handler = streaming(*[b"data: {}\n\n" * 10_000] * 200)
        _, writer = await asyncio.open_connection("127.0.0.1", int(tried.url.rpartition(":")[2]), limit=1)
        writer.write(f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 15\r\n\r\n".encode() + b'{"stream":true}')
        await tried.until(lambda: tried.member("a").residence.num_running == 1)
        assert (await tried.post(CHAT, model="b")).status == 200
        writer.close()

    front(test, "[server]\nrequest_timeout_s = 20\n[front]\nturn_s = 0.1\n")


def test_a_client_that_goes_with_its_answer_has_gone_too_early_for_nobody() -> None:
    returned = asyncio.Event()

    async def answer(scope: Any, receive: Any, send: Any) -> None:
        await reply(send, b"{}")
        await asyncio.sleep(10)  # tidying up

    async def handle(http: web.Request) -> web.StreamResponse:
        response = await asgi.serve_asgi(http, answer)
        returned.set()
        return response

    async def test() -> None:
        app = web.Application()
        app.router.add_get("/", handle)
        runner = web.AppRunner(app, handler_cancellation=True)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        async with asyncio.timeout(5), aiohttp.ClientSession() as session:
            answer = await session.get(f"http://127.0.0.1:{runner.addresses[0][1]}/")
            assert await answer.read() == b"{}"
            await session.close()
            await returned.wait()
        await runner.cleanup()

    asyncio.run(test())


def test_a_run_that_is_lost_in_the_middle_of_a_short_answer_is_lost_before_it(front: Trying) -> None:
    async def test(tried: Tried) -> None:
        run = tried.run("a")

        async def cut(request: web.Request) -> web.StreamResponse:
            run.handler = echo
            response = web.StreamResponse(headers={"content-type": "application/json", "content-length": "100"})
            await response.prepare(request)
            await response.write(b'{"half": ')
            assert request.transport is not None
            request.transport.close()
            return response

        run.handler = cut
        answer = await tried.post(CHAT, x="y")
        assert answer.status == 200 and (await answer.json())["body"] == '{"x": "y"}'

    front(test)


def test_what_a_start_or_a_check_may_raise_costs_one_model(front: Trying, monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(tried: Tried) -> None:
        async def fail() -> None:
            tried.run("a").num_starts += 1
            raise OSError(errno.EMFILE, "Too many open files")

        monkeypatch.setattr(tried.run("a"), "start", fail)
        answer = await tried.post(CHAT)
        assert (
            answer.status == 503
            and "model 'a' cannot be loaded: " in await answer.text()
            and "Too many open files" in await answer.text()
        )
        assert tried.run("a").num_starts == 1, "it is not tried again at once"
        assert (await tried.post(CHAT, model="b")).status == 200

    front(test)

    async def no_process(*_: object, **__: object) -> None:
        raise OSError(errno.EAGAIN, "Resource temporarily unavailable")

    monkeypatch.undo()
    monkeypatch.setattr(asyncio, "create_subprocess_exec", no_process)

    async def look(tried: Tried) -> None:
        card = await fleet_look_at(tried.member("a").model, 1 << 30)
        assert card.problems == ("mmrt model check cannot be started: Resource temporarily unavailable",)

    front(look)


fleet_look_at = fleet.look_at


def test_a_run_that_an_earlier_front_was_starting_is_taken_over(front: Trying, monkeypatch: pytest.MonkeyPatch) -> None:
    async def comes_first(tried: Tried) -> None:
        run = tried.run("a")
        start = run.start

        async def lose() -> None:
            await start()  # of the earlier front
            raise RunError("a run is already up")

        monkeypatch.setattr(run, "start", lose)
        monkeypatch.setattr(run, "find", found, raising=False)
        assert (await tried.post(CHAT)).status == 200 and run.num_starts == 1

    async def comes_later(tried: Tried) -> None:
        run = tried.run("a")
        monkeypatch.setattr(run, "find", found, raising=False)
        await run.start()
        await tried.until(lambda: tried.member("a").residence.state is State.READY)
        assert (await tried.post(CHAT, model="b")).status == 200 and run.has_ended, "its memory counts"

    async def found() -> bool:
        return True

    async def cannot_be_seen(tried: Tried) -> None:
        def refuse() -> bool:
            raise ShmError("run.a cannot be used: Permission denied")

        monkeypatch.setattr(tried.run("a"), "is_there", refuse)
        assert (await tried.post(CHAT, model="b")).status == 200
        assert "Permission denied" in await (await tried.post(CHAT, model="a")).text()

    front(comes_first)
    front(comes_later)
    front(cannot_be_seen)


def test_a_run_whose_model_cannot_be_looked_at_any_more_holds_up_nobody(front: Trying) -> None:
    async def test(tried: Tried) -> None:
        run = tried.run("a")

        async def found() -> bool:
            return True

        run.find = found  # type: ignore[attr-defined]
        await tried.until(lambda: tried.member("a").problem != "")
        await run.start()
        tried.member("a").residence.retry_s = 0.0
        await tried.until(lambda: tried.member("a").residence.state is State.READY)
        assert (await tried.post(CHAT)).status == 200, "it serves on"
        assert (await tried.post(CHAT, model="b")).status == 200

    front(test, a=Card(problems=("config.json is gone",)))


def test_bodies_of_show_are_bounded_with_those_of_others(front: Trying) -> None:
    async def test(tried: Tried) -> None:
        answer = await tried.session.post(f"{tried.url}/api/show", data=io.BytesIO(b" " * (2 << 20)))
        assert answer.status == 413 and "server.max_body_mib" in await answer.text()
        assert (await tried.post("/api/show", model="a")).status == 200

    front(test, "[server]\nmax_body_mib = 1\n")
