"""The front: requests wait for their model, answers come through as they are, and lists load nothing."""

import asyncio
import hashlib
import io
import json
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web

from mmrt.actors.gateway.openapi.operations import OPERATIONS
from mmrt.serving.card import Card
from mmrt.serving.front import TRIES, Front
from mmrt.serving.residency import State
from mmrt.tests.serving.conftest import NEEDS, Handler, Tried, echo

Trying = Callable[..., None]
CHAT = "/v1/chat/completions"
FOREIGN = "http://elsewhere.example"


def streaming(*pieces: bytes, pause_s: float = 0.0, content_type: str = "text/event-stream") -> Handler:
    async def handle(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": content_type, "x-request-id": "resp_1"})
        await response.prepare(request)
        for piece in pieces:
            await response.write(piece)
            await asyncio.sleep(pause_s)
        return response

    return handle


def test_the_front_has_the_routes_of_a_run(front: Trying) -> None:
    async def test(tried: Tried) -> None:
        there = {(method, path.replace("{model:.+}", "{model}")) for method, path, _ in Front.routes(_front_of(tried))}
        wanted = {(operation.method, operation.path) for operation in OPERATIONS}
        assert wanted <= there, wanted - there

    front(test)


def _front_of(tried: Tried) -> Front:
    return Front(tried.fleet._file, tried.fleet)


def test_a_request_waits_for_its_model_and_comes_through_as_it_is(front: Trying) -> None:
    async def test(tried: Tried) -> None:
        run = tried.run("b")
        run.may_start.clear()
        asking = asyncio.create_task(tried.post(CHAT, {"Authorization": "Bearer x", "Name": "v"}, model="b", max_tokens=3))
        await tried.until(lambda: tried.member("b").residence.state is State.LOADING)
        assert tried.run("a").num_starts == 0 and not asking.done()
        run.may_start.set()
        seen = await (await asking).json()
        assert json.loads(seen["body"]) == {"model": "b", "max_tokens": 3} and seen["path"] == CHAT
        assert (seen["headers"]["authorization"], seen["headers"]["name"]) == ("Bearer x", "v")
        first = await (await tried.post("/api/chat", messages=[{}])).json()
        assert first["path"] == "/api/chat" and tried.run("a").num_starts == 1, "without a name it is the first model's"
        assert tried.run("b").has_ended, "which took its place"
        assert (await tried.post("/api/chat", model="a:latest")).status == 200
        other = await tried.post(CHAT, model="c")
        assert other.status == 404 and (await other.json())["error"]["code"] == "model_not_found"
        assert "this server has a, b" in await other.text()

    front(test)


def test_streams_and_large_bodies_come_through(front: Trying) -> None:
    async def test(tried: Tried) -> None:
        tried.run("a").handler = streaming(b"data: {}\n\n", b": keep-alive\n", b"data: [DONE]\n\n", pause_s=0.02)
        answer = await tried.post(CHAT, stream=True)
        assert await answer.read() == b"data: {}\n\n: keep-alive\ndata: [DONE]\n\n" and answer.headers["x-request-id"] == "resp_1"

        async def length(request: web.Request) -> web.Response:
            return web.json_response(len(await request.content.read()))

        tried.run("a").handler = length
        large = io.BytesIO(b'{"x": "%s"}' % (b"y" * (4 << 20)))
        answer = await tried.session.post(tried.url + CHAT, data=large, headers={"content-type": "application/json"})
        assert await answer.json() == (4 << 20) + len('{"x": ""}')

    front(test)


@pytest.mark.parametrize(
    ("path", "kind", "sign", "error"),
    [
        (CHAT, "text/event-stream", b": keep-alive\n", b'data: {"error":{"message":"model \'a\' cannot be loaded: broken"'),
        ("/v1/messages", "text/event-stream", b'event: ping\ndata: {"type":"ping"}\n\n', b'event: error\ndata: {"type":"error"'),
        ("/v1/responses", "text/event-stream", b": keep-alive\n", b'event: error\ndata: {"type":"error","code":"server_error"'),
        ("/api/chat", "application/x-ndjson", b'"message":{"role":"assistant","content":""},"done":false}\n', b'{"error":"model'),
    ],
)
def test_a_stream_is_kept_alive_while_its_model_is_loaded(front: Trying, path: str, kind: str, sign: bytes, error: bytes) -> None:
    async def test(tried: Tried) -> None:
        run = tried.run("a")

        async def ask() -> tuple[aiohttp.ClientResponse, bytes]:
            run.may_start.clear()
            answer = await tried.session.post(tried.url + path, json={"stream": True, "messages": [{}]})
            begun = await answer.content.readany()
            run.may_start.set()
            return answer, begun + await answer.content.read()

        run.handler = streaming(b"the end\n\n", content_type=kind)
        answer, body = await ask()
        assert (answer.status, answer.content_type) == (200, kind)
        assert body.endswith(b"the end\n\n") and body.startswith(sign) or sign in body

        await run.die()
        await tried.until(lambda: tried.member("a").residence.state is State.ABSENT)
        refusal = {"/v1/messages": {"type": "error", "error": {"message": "too long"}}, "/api/chat": {"error": "too long"}}

        async def refuse(request: web.Request) -> web.Response:
            body = json.dumps(refusal.get(path, {"error": {"message": "too long"}}), separators=(",", ":"))
            return web.Response(text=body, content_type="application/json", status=400)

        run.handler = refuse
        answer, body = await ask()
        assert answer.status == 200 and b"too long" in body and error[:9] in body

        await run.die()
        await tried.until(lambda: tried.member("a").residence.state is State.ABSENT)
        run.problem = "broken"
        answer, body = await ask()
        assert answer.status == 200 and error in body and b"broken" in body

    front(test, "[server]\nkeep_alive_s = 0.05\n")


def test_an_answer_that_is_no_stream_keeps_its_status(front: Trying) -> None:
    async def test(tried: Tried) -> None:
        run = tried.run("a")
        run.may_start.clear()
        run.problem = "qwen9 is unknown"
        asking = asyncio.create_task(tried.post(CHAT))
        await asyncio.sleep(0.2)
        run.may_start.set()
        answer = await asking
        assert answer.status == 503 and 50 < int(answer.headers["retry-after"]) <= 60
        assert "model 'a' cannot be loaded: qwen9 is unknown" in await answer.text()
        assert (await tried.post(CHAT)).status == 503 and run.num_starts == 1, "it is not tried again for a minute"
        assert (await tried.get("/v1/models"))["data"][0]["status"] == {
            "value": "unloaded",
            "failed": True,
            "message": "qwen9 is unknown",
        }
        assert (await tried.post(CHAT, model="b")).status == 200
        tried.member("a").residence.retry_s, run.problem = 0.0, ""
        assert (await tried.post(CHAT)).status == 200

    front(test, "[server]\nkeep_alive_s = 0.05\n")


def test_what_does_not_fit_is_refused_with_the_reason_of_its_check(front: Trying) -> None:
    async def test(tried: Tried) -> None:
        answer = await tried.post(CHAT)
        assert answer.status == 503 and "cannot be loaded: memory: it takes a lot" in await answer.text()
        assert tried.run("a").num_starts == 0

    front(test, a=Card(problems=("memory: it takes a lot",)))


def test_a_request_whose_run_is_lost_gets_the_next_one(front: Trying) -> None:
    lost: list[str] = []

    async def test(tried: Tried) -> None:
        run = tried.run("a")

        async def lose(request: web.Request) -> web.Response:
            lost.append(request.path)
            run.handler = streaming(b"data: {}\n\n")
            asyncio.get_running_loop().call_soon(lambda: asyncio.ensure_future(run.die()))
            await asyncio.sleep(5)
            return web.Response()

        run.handler = lose
        answer = await tried.post(CHAT, stream=True)
        assert (answer.status, await answer.read(), run.num_starts) == (200, b"data: {}\n\n", 2) and lost

        async def always(request: web.Request) -> web.Response:
            lost.append(request.path)
            assert request.transport is not None
            request.transport.abort()
            return web.Response()

        run.handler = always
        lost.clear()
        answer = await tried.post(CHAT)
        assert answer.status == 503 and f"was lost {TRIES} times" in await answer.text() and len(lost) == 2 * TRIES

    front(test)


def test_a_gateway_whose_run_has_ended_refuses_nobody(front: Trying) -> None:
    """It lives a little longer than its supervisor, and says that it is shutting down."""

    async def test(tried: Tried) -> None:
        run = tried.run("a")

        async def refuse(request: web.Request) -> web.Response:
            run.handler = echo
            run._ended.set()
            return web.json_response({"error": {"message": "the server is shutting down"}}, status=503)

        run.handler = refuse
        answer = await tried.post(CHAT, x="y")
        assert (answer.status, run.num_starts) == (200, 2) and (await answer.json())["body"] == '{"x": "y"}'

        async def is_full(request: web.Request) -> web.Response:
            return web.json_response({"error": {"message": "too much waits"}}, status=503)

        run.handler = is_full
        assert (await tried.post(CHAT)).status == 503 and run.num_starts == 2

    front(test)


def test_a_client_that_goes_ends_its_request_also_while_it_waits(front: Trying) -> None:
    ended = asyncio.Event()

    async def endless(request: web.Request) -> web.StreamResponse:
        try:
            return await streaming(*[b"data: {}\n\n"] * 10_000, pause_s=0.01)(request)
        except (ConnectionError, asyncio.CancelledError):
            ended.set()
            raise

    async def test(tried: Tried) -> None:
        tried.run("a").handler = endless
        answer = await tried.session.post(tried.url + CHAT, json={"stream": True})
        await answer.content.readany()
        assert tried.member("a").residence.num_running == 1
        answer.close()
        await ended.wait()
        await tried.until(lambda: tried.member("a").residence.num_running == 0)
        tried.run("b").may_start.clear()
        asking = asyncio.create_task(tried.post(CHAT, model="b"))
        await tried.until(lambda: tried.member("b").num_waiting == 1)
        asking.cancel()
        await tried.until(lambda: tried.member("b").num_waiting == 0)
        assert tried.member("b").residence.waiting_since_s is None

    front(test)


def test_nobody_waits_longer_than_a_request_may_take(front: Trying) -> None:
    async def test(tried: Tried) -> None:
        tried.run("a").handler = streaming(*[b"data: {}\n\n"] * 10_000, pause_s=0.01)
        busy = await tried.session.post(tried.url + CHAT, json={"stream": True})
        await busy.content.readany()
        answer = await tried.post(CHAT, model="b")
        assert answer.status == 503
        assert "'b' was not loaded within 0.3 s: it waits for memory that a has" in await answer.text()
        busy.close()

    front(test, "[server]\nrequest_timeout_s = 0.3\n")


def test_lists_load_nothing_and_are_no_use(front: Trying) -> None:
    async def test(tried: Tried) -> None:
        await tried.until(lambda: all(member.card is not None for member in tried.fleet.members.values()))
        assert [model["name"] for model in (await tried.get("/api/tags"))["models"]] == ["a", "b"]
        assert (await tried.get("/api/ps"))["models"] == []
        listed = await tried.get("/v1/models")
        assert [(model["id"], model["max_model_len"], model["status"]["value"]) for model in listed["data"]] == [
            ("a", 100, "unloaded"),
            ("b", 100, "unloaded"),
        ]
        of_anthropic = await tried.get("/v1/models", {"anthropic-version": "2023-06-01"})
        assert [model["id"] for model in of_anthropic["data"]] == ["a", "b"] and of_anthropic["last_id"] == "b"
        assert (await tried.get("/v1/models/b"))["id"] == "b"
        shown = await (await tried.post("/api/show", model="b:latest")).json()
        assert shown["capabilities"] == ["completion", "vision"]
        assert (await tried.get("/openapi.json"))["openapi"].startswith("3.1")
        assert (await tried.get("/ready"))["models"] == {"a": "absent", "b": "absent"}
        assert (await tried.get("/health")) == {"status": "ok"}
        assert 'mmrt_front_model_state{model="b",state="absent"} 1.0' in await tried.get("/metrics")
        assert "model 'b' is not loaded" in (await tried.get("/metrics?model=b"))["error"]["message"]
        assert tried.run("a").num_starts == tried.run("b").num_starts == 0

        await tried.post(CHAT, model="b")
        used_s = tried.member("b").residence.last_used_s
        (loaded,) = (await tried.get("/api/ps"))["models"]
        assert loaded["name"] == "b" and time.strftime("%Y-") in loaded["expires_at"]
        assert (await tried.get("/metrics?model=b"))["path"] == "/metrics"
        assert tried.member("b").residence.last_used_s == used_s

    front(test)


def test_a_pinned_model_that_is_not_there_makes_the_front_not_ready(front: Trying) -> None:
    async def test(tried: Tried) -> None:
        await tried.until(lambda: tried.member("a").residence.state is State.READY)
        assert (await tried.get("/ready"))["status"] == "ready"
        answer = await tried.post(CHAT, model="b")
        assert answer.status == 503 and "it takes 1.0 GiB, which the pinned models do not leave (front.memory)" in await answer.text()
        tried.run("a").may_start.clear()
        await tried.run("a").die()
        await tried.until(lambda: tried.run("a").num_starts == 2)
        assert "not ready: a: it is loading" in (await tried.get("/ready"))["error"]["message"]
        tried.run("a").may_start.set()

    front(test, of_a="pinned = true\n")


def test_idle_models_end_and_keep_alive_is_heard_up_to_a_limit(front: Trying) -> None:
    async def ignoring(tried: Tried) -> None:
        await tried.post("/api/generate", model="a", prompt="x", keep_alive=0)
        await asyncio.sleep(0.1)
        assert tried.member("a").residence.state is State.READY, "one client does not decide for all"
        unloaded = await (await tried.post("/api/generate", model="b", keep_alive=0)).json()
        assert unloaded["done_reason"] == "unload" and tried.run("b").num_starts == 0, "nothing is loaded in order to be unloaded"

    async def hearing(tried: Tried) -> None:
        await tried.post("/api/generate", model="a", prompt="x", keep_alive="1h")
        assert tried.member("a").residence.keep_s == 50.0
        assert (await (await tried.post("/api/chat", model="a", keep_alive=0)).json())["done_reason"] == "unload"
        await tried.until(lambda: tried.member("a").residence.state is State.ABSENT)

    async def idle(tried: Tried) -> None:
        await tried.post(CHAT)
        await tried.until(lambda: tried.member("a").residence.state is State.ABSENT)
        assert (await tried.post(CHAT)).status == 200 and tried.run("a").num_starts == 2

    front(ignoring)
    front(hearing, "[front]\nmax_keep_alive_s = 50\n")
    front(idle, "[front]\nidle_s = 0.2\n")


def test_a_model_that_works_in_the_background_is_in_use(front: Trying) -> None:
    async def idle(tried: Tried) -> None:
        await tried.post(CHAT)
        tried.run("a").num_unattended = 1
        await asyncio.sleep(1.5)
        assert tried.member("a").residence.state is State.READY
        tried.run("a").num_unattended = 0
        await tried.until(lambda: tried.member("a").residence.state is State.ABSENT)

    async def turns(tried: Tried) -> None:
        await tried.post(CHAT)
        tried.run("a").num_unattended = 1
        other = asyncio.create_task(tried.post(CHAT, model="b"))
        await tried.until(lambda: tried.member("a").residence.state is State.DRAINING)
        await asyncio.sleep(1.0)
        assert not tried.run("a").has_ended, "it is not cut off"
        tried.run("a").num_unattended = 0
        assert (await other).status == 200

    front(idle, "[front]\nidle_s = 0.6\n")
    front(turns, "[front]\nturn_s = 0.05\n")


def test_models_take_turns_where_memory_is_short(front: Trying) -> None:
    async def test(tried: Tried) -> None:
        async def ask_always(name: str, count: int) -> None:
            for _ in range(count):
                assert (await tried.post(CHAT, model=name)).status == 200
                held = [member for member in tried.fleet.members.values() if member.residence.is_held]
                assert sum(member.residence.needs_bytes or 0 for member in held) <= NEEDS * 1.5

        await asyncio.gather(*(ask_always(name, 100) for name in "aabb"))
        assert tried.run("a").num_starts > 3 and tried.run("b").num_starts > 3

    front(test, "[front]\nturn_s = 0.05\n")


def test_keys_are_asked_for_and_passed_on_and_pages_of_others_are_refused(front: Trying) -> None:
    async def with_key(tried: Tried) -> None:
        assert (await tried.post(CHAT)).status == 401 and tried.run("a").num_starts == 0
        answer = await tried.post(CHAT, {"Authorization": "Bearer secret", "Origin": FOREIGN, "Cookie": "a=b"})
        seen = (await answer.json())["headers"]
        assert seen["authorization"] == "Bearer secret" and not {"origin", "cookie"} & set(seen)
        assert tried.member("a").model.config.server.api_key == "secret", "the run asks for it as well"
        assert "x-ratelimit-limit-requests" not in answer.headers

    async def without(tried: Tried) -> None:
        assert (await tried.post(CHAT, {"Origin": FOREIGN})).status == 403
        assert (await tried.post(CHAT, {"Host": "elsewhere.example"})).status == 421
        assert tried.run("a").num_starts == 0
        own = await tried.post(CHAT, {"Origin": tried.url})
        assert own.status == 200 and "origin" not in (await own.json())["headers"], "the run is at another port"

    front(with_key, '[server]\napi_key = "secret"\n')
    front(without)


def test_metrics_of_all_runs_are_told_together(front: Trying) -> None:
    text = (
        "# HELP mmrt_requests_total Ended requests.\n# TYPE mmrt_requests_total counter\n"
        'mmrt_requests_total{outcome="stop"} %d\n# HELP mmrt_up Up.\n# TYPE mmrt_up gauge\nmmrt_up 1.0\n'
    )

    def telling(number: int) -> Handler:
        async def tell(request: web.Request) -> web.Response:
            assert request.path == "/metrics" and request.headers["Authorization"] == "Bearer x"
            return web.Response(text=text % number)

        return tell

    async def test(tried: Tried) -> None:
        for at, name in enumerate("ab"):
            await tried.post(CHAT, model=name)
            tried.run(name).handler = telling(at + 3)
        told = await tried.get("/metrics", {"Authorization": "Bearer x"})
        assert told.count("# TYPE mmrt_requests_total counter\n") == 1 and told.count("# TYPE mmrt_up gauge\n") == 1
        for line in (
            'requests_total{model="a",outcome="stop"} 3.0',
            'requests_total{model="b",outcome="stop"} 4.0',
            'up{model="b"} 1.0',
        ):
            assert f"mmrt_{line}\n" in told
        assert 'mmrt_front_model_state{model="a",state="ready"} 1.0' in told
        tried.run("a").handler = streaming(b"no metrics", pause_s=0.5)
        tried.run("b").handler = telling(5)
        assert 'mmrt_requests_total{model="b",outcome="stop"} 5.0' in await tried.get("/metrics", {"Authorization": "Bearer x"})

    front(test, '[front]\nmemory = "3 GiB"\n')


def test_a_key_may_ask_all_models_together_as_often_as_it_may(front: Trying, tmp_path: Path) -> None:
    file = tmp_path / "keys.toml"
    digest = hashlib.sha256(b"secret").hexdigest()
    file.write_text(f'[[key]]\nname = "alice"\nsha256 = "{digest}"\nrequests_per_minute = 1\ntokens_per_minute = 9\n')
    file.chmod(0o600)
    key = {"Authorization": "Bearer secret"}

    async def test(tried: Tried) -> None:
        tried.run("a").handler = streaming(b"data: {}\n\n")
        answer = await tried.post(CHAT, key, model="a")
        assert (answer.status, answer.headers["x-ratelimit-remaining-requests"]) == (200, "0")
        assert "x-ratelimit-limit-tokens" not in answer.headers, "tokens are the run's to count"
        refused = await tried.post(CHAT, key, model="b")
        assert refused.status == 429 and "1 requests per minute" in await refused.text()

    front(test, f'[server]\napi_keys_file = "{file}"\n')


def test_a_stored_response_is_at_its_model(front: Trying) -> None:
    async def stored(tried: Tried, request: web.Request) -> web.StreamResponse:
        """As the runs of an earlier front have some: nobody notes who has which."""
        if request.path == "/v1/responses/resp_1" and tried.run("b").url.endswith(f":{request.url.port}"):
            return await echo(request)
        return web.json_response({"error": {"message": "there is no such response"}}, status=404)

    async def test(tried: Tried) -> None:
        for name in "ab":
            assert (await tried.post(CHAT, model=name)).status == 200
        tried.run("a").handler = tried.run("b").handler = partial(stored, tried)
        used_s = tried.member("a").residence.last_used_s
        answer = await tried.session.get(f"{tried.url}/v1/responses/resp_1?stream=true", headers={"Cookie": "a=b"})
        assert answer.status == 200 and "cookie" not in (await answer.json())["headers"]
        other = await tried.session.get(f"{tried.url}/v1/responses/resp_2")
        assert other.status == 404 and "no model that is loaded has a response 'resp_2'" in await other.text()
        await tried.run("b").die()
        await tried.until(lambda: tried.member("b").residence.state is State.ABSENT)
        assert (await tried.session.get(f"{tried.url}/v1/responses/resp_1")).status == 404
        assert tried.run("a").num_starts == tried.run("b").num_starts == 1 and tried.member("a").residence.last_used_s == used_s

    front(test, '[front]\nmemory = "3 GiB"\n')


def test_bad_bodies_load_nothing(front: Trying) -> None:
    async def test(tried: Tried) -> None:
        for body in (b"{", b"", b'{"model": 7}'):
            answer = await tried.session.post(tried.url + CHAT, data=body, headers={"content-type": "application/json"})
            assert answer.status == 400, body
        form = aiohttp.FormData({"model": "b"})
        form.add_field("file", b"x", filename="x.wav")
        answer = await tried.session.post(f"{tried.url}/v1/audio/transcriptions", data=form)
        assert answer.status == 200 and tried.run("b").num_starts == 1 and tried.run("a").num_starts == 0

    front(test)


def test_the_page_shows_and_commands_the_run_of_each_model_to_whom_the_front_lets(front: Trying) -> None:
    async def test(tried: Tried) -> None:
        assert "<title>mmrt</title>" in await tried.get("/")
        assert await tried.get("/page/limits?model=b") == {"max_body_bytes": 64 << 20, "kinds": ["image"]}
        assert "b has" not in (await tried.get("/page/state?model=b"))["unloaded"]
        kill = "/page/kill/decode?model=b"
        assert (await tried.post(kill)).status == 503
        assert tried.run("b").num_starts == 0, "to look loads nothing"
        await tried.post(CHAT, model="b")
        used_s = tried.member("b").residence.last_used_s
        proxied = {"X-Forwarded-For": "10.0.0.1"}
        for headers in ({"Origin": FOREIGN}, {"Sec-Fetch-Site": "cross-site"}, proxied):
            for answer in (
                await tried.session.get(f"{tried.url}/page/state?model=b", headers=headers),
                await tried.post(kill, headers),
            ):
                assert answer.status == 403, headers
        seen = await tried.get("/page/state?after=7&model=b", {"Origin": tried.url, "X-Mmrt-Token": tried.token} | proxied)
        assert seen["path"] == "/page/state" and not {"origin", "x-mmrt-token", "x-forwarded-for"} & set(seen["headers"])
        assert (await (await tried.post(kill, {"Origin": tried.url})).json())["path"] == "/page/kill/decode"
        assert tried.member("b").residence.last_used_s == used_s, "to look is no use"

    front(test)
