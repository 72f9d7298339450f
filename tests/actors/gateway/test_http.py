"""The server around chat: routes, authentication, limits, hostile bytes, readiness, draining."""

import asyncio
import gzip
import json
import socket
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from aiohttp.http_parser import DeflateBuffer

from mmrt.actors.gateway import serve as serve_module
from mmrt.actors.gateway.answers.client_request import CLIENT_GONE, ClientRequest
from mmrt.actors.gateway.answers.link import Link
from mmrt.actors.gateway.answers.requests import RequestRegistry
from mmrt.actors.gateway.apis import completions as completions_module
from mmrt.actors.gateway.reading import bodies
from mmrt.actors.gateway.watching.metrics import Metrics
from mmrt.actors.host.actor import Actor
from mmrt.runtime.bus.messages import Generation, RequestSpec
from mmrt.runtime.errors import RequestError, RunError
from mmrt.runtime.stage_table import ACTORS, actors_of
from mmrt.schema.gap_buckets import NUM_BUCKETS, bucket_of
from mmrt.schema.policy_report import PolicyReport
from mmrt.shm.controller_stats import PoolUse, StatsSnapshot
from mmrt.shm.status import ActorState

POST = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n"


async def exchange(scene: Any, data: bytes) -> bytes:
    """Send raw bytes; everything that comes back until the server closes or has answered once."""
    reader, writer = await scene.connect()
    try:
        writer.write(data)
        head = await reader.readuntil(b"\r\n\r\n")
        fields = dict(line.split(b": ", 1) for line in head.lower().split(b"\r\n")[1:] if b": " in line)
        body = await reader.readexactly(int(fields.get(b"content-length", b"0")))
        return head + body
    finally:
        writer.transport.abort()


def error_of(response: bytes) -> dict[str, Any]:
    error: dict[str, Any] = json.loads(response.split(b"\r\n\r\n", 1)[1])["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


def with_body(body: bytes, headers: bytes = b"Content-Type: application/json\r\n") -> bytes:
    return POST + headers + b"Content-Length: %d\r\n\r\n" % len(body) + body


STRANGE_HEADERS = (
    "Host", "X-Mmrt-Token", "Authorization", "X-Api-Key", "Origin", "Accept", "Content-Type", "Content-Encoding", "Traceparent",
    "Tracestate", "Sec-Fetch-Site", "Forwarded", "Anthropic-Version", "X-Request-Id", "User-Agent", "If-None-Match",
    "Access-Control-Request-Method",
)  # fmt: skip


@pytest.mark.parametrize("api_key", ["", "secret"])
def test_headers_that_are_not_utf_8_are_no_failure(stage: Any, api_key: str) -> None:
    stage.configure("server", api_key=api_key, allow_origins=("https://a.example",))

    async def test(scene: Any) -> None:
        for name in STRANGE_HEADERS:
            for asked in ("GET /v1", "GET /page/state", "GET /nothing", "OPTIONS /v1/models", "POST /v1/chat/completions"):
                host, body = b"" if name == "Host" else b"Host: localhost\r\n", b"{}" if asked.startswith("POST") else b""
                key = b"" if name == "Authorization" else b"Authorization: Bearer secret\r\n"
                length = b"Content-Length: %d\r\n" % len(body)
                head = b"%s HTTP/1.1\r\n%s%s%s%s: h\xff\r\n\r\n" % (asked.encode(), host, key, length, name.encode())
                answer = await exchange(scene, head + body)
                assert not answer.startswith(b"HTTP/1.1 5"), (name, asked, answer)
        refused = await exchange(scene, b"GET /v1 HTTP/1.1\r\nHost: h\xff\r\n\r\n")
        if not api_key:
            assert error_of(refused)["message"].startswith("Host is 'h\\udcff', which is none of this server's names")
        else:
            assert b"http://h\\\\udcff/v1" in refused, "text of the escape, in JSON"

    stage.run(test)


def test_the_small_endpoints(stage: Any) -> None:
    async def test(scene: Any) -> None:
        http = scene.http
        assert (await http.get("/health")).json() == {"status": "ok"}
        assert (await http.get("/ready")).json() == {"status": "ready"}
        assert (await http.get("/version")).json()["version"]
        models = await scene.client.models.list()
        assert [model.id for model in models.data] == ["tiny"]
        assert (await scene.client.models.retrieve("tiny")).max_model_len == 2048
        assert (await http.get("/v1/models/org/other")).status_code == 404
        for path in ("/health", "/ready", "/version", "/metrics", "/v1/models"):
            head = await http.head(path)
            assert head.status_code == 200 and head.content == b""

    stage.run(test)


def test_a_slash_at_the_end_changes_nothing(stage: Any) -> None:
    async def test(scene: Any) -> None:
        for path in ("/health", "/ready", "/version", "/v1/models", "/v1/models/tiny"):
            answers = [await scene.http.get(asked) for asked in (path, f"{path}/")]
            assert answers[0].status_code == 200 and answers[0].content == answers[1].content
        assert (await scene.http.post("/v1/chat/completions/", json=scene.chat())).status_code == 200
        assert (await scene.http.post("/v1/completions/", json={})).status_code == 400
        assert (await scene.http.get("/v1/chat/completions/")).status_code == 405
        metrics = (await scene.http.get("/metrics/")).text
        assert 'handler="/v1/models",' in metrics and 'handler="/v1/models/",' not in metrics
        assert "/, " not in (await scene.http.get("/nothing/")).json()["error"]["message"]

    stage.run(test)


def test_who_polls_for_readiness_does_not_fill_the_log(stage: Any, caplog: pytest.LogCaptureFixture) -> None:
    async def test(scene: Any) -> None:
        scene.table.writer("prefill", 2)
        for path in ("/ready", "/ready/", "/health"):
            await scene.http.get(path)
        assert (await scene.http.get("/ready")).status_code == 503

    with caplog.at_level("INFO"):
        stage.run(test)
    assert not [record.getMessage() for record in caplog.records if " after " in record.getMessage()]


def test_who_cannot_write_its_address_serves_all_the_same(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The run's file system may be full; what stands there already needs no room."""
    actor = cast(Actor, SimpleNamespace(run=SimpleNamespace(path=tmp_path)))
    serve_module._publish_endpoint(actor, "http://127.0.0.1:8000")
    file = tmp_path / serve_module.ENDPOINT_NAME
    inode = file.stat().st_ino
    serve_module._publish_endpoint(actor, "http://127.0.0.1:8000")
    assert file.stat().st_ino == inode and not caplog.text
    actor.run.path = tmp_path / "gone"  # type: ignore[misc]
    serve_module._publish_endpoint(actor, "http://127.0.0.1:8000")
    assert "endpoint is not written" in caplog.text


@pytest.mark.parametrize("api_key", ["", "secret"])
def test_help_for_people_who_open_the_api_in_a_browser(stage: Any, api_key: str) -> None:
    stage.configure("server", api_key=api_key)

    async def test(scene: Any) -> None:
        for path in ("/v1", "/v1/"):
            page = await scene.http.get(path, headers={"Accept": "text/html,application/xhtml+xml,*/*;q=0.8"})
            assert page.status_code == 200 and page.headers["Content-Type"].startswith("text/html")
            assert "/v1/chat/completions" in page.text and 'href="/"' in page.text and len(page.text) < 2000
            assert "default-src 'self'" in page.headers["Content-Security-Policy"]
            others = await scene.http.get(path)
            assert others.json()["about"].endswith(f"{scene.url}/v1") and "POST /v1/chat/completions" in others.json()["routes"]

    stage.run(test)


def test_unknown_paths_and_methods_in_the_error_shape(stage: Any) -> None:
    async def test(scene: Any) -> None:
        missing = await scene.http.get("/v1/nothing")
        assert missing.status_code == 404 and missing.json()["error"]["type"] == "not_found_error"
        for path, meant in (
            ("/chat/completions", "POST /v1/chat/completions"),
            ("/v1/v1/models", "GET /v1/models"),
            ("/v1/chat/completion", "POST /v1/chat/completions"),
            ("/api/chats", "POST /api/chat"),
        ):
            said = (await scene.http.get(path)).text
            assert f"did you mean {meant}" in said and len(said) < 400, said
        assert "did you mean" not in (await scene.http.get("/" + "zq" * 5000)).text
        wrong = await scene.http.get("/v1/chat/completions")
        assert wrong.status_code == 405 and wrong.headers["Allow"] == "POST"
        assert wrong.json()["error"]["code"] == 405

    stage.run(test)


def test_every_route_but_health_and_readiness_needs_the_key(stage: Any) -> None:
    stage.configure("server", api_key="sécret")

    async def test(scene: Any) -> None:
        routes = ["/v1/models", "/v1/models/tiny", "/version", "/metrics", "/nothing", "/v1/models/", "//health/v1/models"]
        for path in routes:
            for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "sécret".encode()}):
                answer = await scene.http.get(path, headers=headers)
                assert answer.status_code == 401, path
                assert answer.json()["error"]["type"] == "authentication_error"
        assert (await scene.post(scene.chat())).status_code == 401
        assert (await scene.http.get("/health")).status_code == 200
        assert (await scene.http.get("/ready")).status_code == 200
        assert (await scene.http.get("/ready/")).status_code == 200
        right = {"Authorization": "Bearer sécret".encode()}
        assert (await scene.http.get("/v1/models", headers=right)).status_code == 200
        other_case = {"Authorization": "bEaReR sécret".encode()}
        assert (await scene.http.get("/v1/models", headers=other_case)).status_code == 200
        assert (await scene.post(scene.chat(), headers=right)).status_code == 200

    stage.run(test)


@pytest.mark.parametrize(
    ("data", "status", "text"),
    [
        (with_body(b"{"), 400, "not valid JSON"),
        (with_body(b""), 400, "the body is empty"),
        (with_body(b"\xff\xfe"), 400, "not valid JSON"),
        (with_body(b'{"model": "\xff"}'), 400, "not UTF-8"),
        (with_body(b"[" * 100_000), 400, "nested too deeply"),
        (with_body(b"{}", b""), 400, "messages: is required"),
        (with_body(b"{}", b"Content-Type: text/plain\r\n"), 415, "expected application/json"),
        (
            with_body(gzip.compress(b"{}", mtime=0), b"Content-Encoding: gzip\r\n"),
            415,
            "Content-Encoding is 'gzip', compressed request bodies are not supported",
        ),
        (with_body(b"{}", b"Content-Encoding: identity\r\n"), 400, "messages: is required"),
        (POST + b"Content-Length: 99999999999\r\n\r\n", 413, "server.max_body_mib"),
    ],
)
def test_bad_bodies(stage: Any, data: bytes, status: int, text: str) -> None:
    async def test(scene: Any) -> None:
        response = await exchange(scene, data)
        assert response.startswith(b"HTTP/1.1 %d " % status), response
        error = error_of(response)
        assert error["code"] == status and text in error["message"]
        assert (await scene.post(scene.chat())).status_code == 200

    stage.run(test)


def test_bodies_that_are_too_large(stage: Any) -> None:
    """By their stated length, and by what arrives in chunks."""

    async def test(scene: Any) -> None:
        large = b'{"model": "' + b"x" * (1 << 20) + b'"}'

        async def in_chunks() -> Any:
            yield large[:1000]
            yield large[1000:]

        stated = await scene.http.post("/v1/chat/completions", content=large, headers={"Content-Type": "application/json"})
        chunked = await scene.http.post("/v1/chat/completions", content=in_chunks(), headers={"Content-Type": "application/json"})
        assert stated.status_code == chunked.status_code == 413
        assert "the limit is 1048576 (server.max_body_mib)" in stated.json()["error"]["message"]
        assert (await scene.post(scene.chat())).status_code == 200

    stage.run(test)


def test_what_is_packed_is_never_unpacked(stage: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even what is left of a body when its answer has been sent: unpacking a little keeps the loop from everybody for long."""
    unpacked: list[bytes] = []
    monkeypatch.setattr(DeflateBuffer, "feed_data", lambda _, data, size: unpacked.append(data))

    async def test(scene: Any) -> None:
        bomb = with_body(gzip.compress(b" " * (64 << 20)), b"Content-Encoding: gzip\r\n")
        assert (await exchange(scene, bomb)).startswith(b"HTTP/1.1 415 ")
        assert (await scene.post(scene.chat())).status_code == 200

    stage.run(test)
    assert not unpacked


def test_what_is_small_is_taken_whatever_others_have_sent(stage: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RequestRegistry, "num_media_bytes", property(lambda _: 1 << 40))

    async def test(scene: Any) -> None:
        large = await scene.post(scene.chat(user="x" * 40_000))
        assert large.status_code == 503 and "too many large requests" in large.json()["error"]["message"]
        assert (await scene.post(scene.chat())).status_code == 200

    stage.run(test)


@pytest.mark.parametrize(
    "data",
    [
        b"\x00\x01\x02\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        POST + b"Transfer-Encoding: chunked\r\n\r\nZZ\r\n",
        b"POST /v1/chat/completions HTTP/1.1\r\nContent-Length: -5\r\n\r\n",
        b"POST /v1/chat/completions HTTP/1.1\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n",
        b"GET /health HTTP/1.1\r\n" + b"".join(b"X-%d: y\r\n" % i for i in range(3000)) + b"\r\n",
        b"GET /health HTTP/1.1\r\nX: " + b"y" * 100_000 + b"\r\n\r\n",
    ],
)
def test_bytes_that_are_no_http(stage: Any, data: bytes, caplog: pytest.LogCaptureFixture) -> None:
    async def test(scene: Any) -> None:
        response = await exchange(scene, data)
        assert not any(record.exc_info for record in caplog.records)
        assert response.startswith((b"HTTP/1.1 400 ", b"HTTP/1.0 400 ", b"HTTP/9.9 400 ")), response
        assert (await scene.http.get("/health")).status_code == 200

    stage.run(test)


def test_an_old_client_streams_until_the_connection_ends(stage: Any) -> None:
    async def test(scene: Any) -> None:
        reader, writer = await scene.connect()
        body = json.dumps(scene.chat(stream=True)).encode()
        writer.write(b"POST /v1/chat/completions HTTP/1.0\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        answer = await reader.read()
        assert b"200 OK" in answer and answer.endswith(b"data: [DONE]\n\n")
        writer.close()

    stage.run(test)


def test_a_body_that_never_arrives(stage: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies, "BODY_TIMEOUT_S", 0.05)

    async def test(scene: Any) -> None:
        response = await exchange(scene, POST + b"Content-Type: application/json\r\nContent-Length: 50\r\n\r\n{")
        assert response.startswith(b"HTTP/1.1 408 ") and "did not arrive" in error_of(response)["message"]

    stage.run(test)


def test_a_body_that_comes_slowly_but_comes(stage: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Longer than a body may take that does not come, but never so long without a byte."""
    monkeypatch.setattr(bodies, "BODY_TIMEOUT_S", 1.5)
    monkeypatch.setattr(bodies, "LEAST_BYTES_S", 100)

    async def test(scene: Any) -> None:
        reader, writer = await scene.connect()
        body = json.dumps(scene.chat("x" * 1000)).encode()
        writer.write(
            POST + b"Content-Type: application/json\r\nConnection: close\r\nContent-Length: %d\r\n\r\n" % len(body) + body[:-3]
        )
        for byte in body[-3:]:
            await asyncio.sleep(0.6)
            writer.write(bytes([byte]))
        assert (await reader.read()).startswith(b"HTTP/1.1 200 ")
        writer.close()

    stage.run(test)


def test_large_requests_at_once_are_bounded(stage: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies, "_INTAKE_BODIES", 1)

    async def test(scene: Any) -> None:
        reader, writer = await scene.connect()
        writer.write(POST + b"Content-Type: application/json\r\nContent-Length: 1000000\r\n\r\n{" + b" " * 950_000)
        async with asyncio.timeout(5):
            while (answer := await scene.post(scene.chat("x" * 100_000))).status_code != 503:
                pass
        assert answer.headers["Retry-After"] == "1"
        writer.transport.abort()

    stage.run(test)


def test_who_only_says_that_much_is_coming_keeps_nobody_out(stage: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies, "_INTAKE_BODIES", 1)

    async def test(scene: Any) -> None:
        _, writer = await scene.connect()
        writer.write(POST + b"Content-Type: application/json\r\nContent-Length: 1000000\r\n\r\n")
        for _ in range(20):
            assert (await scene.post(scene.chat("x" * 1000))).status_code == 200
        writer.transport.abort()

    stage.run(test)


def test_a_large_prompt_does_not_hold_up_others(stage: Any) -> None:
    """Validation and tokenization of large bodies run in a thread; an answer is the same."""

    async def test(scene: Any) -> None:
        answers = await asyncio.gather(*(scene.post(scene.chat("word " * 20_000)) for _ in range(3)), scene.http.get("/health"))
        assert [answer.status_code for answer in answers] == [400, 400, 400, 200]
        padded = scene.chat(metadata={"padding": "x" * 100_000})
        assert (await scene.post(padded)).status_code == 200

    stage.run(test)


def test_nobody_waits_for_the_threads_that_read_large_bodies(stage: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    go, begun = threading.Event(), threading.Semaphore(0)
    parse = completions_module.Completions._parse

    def slow(self: Any, read: Any, body: bytearray) -> Any:
        if len(body) > 40_000:
            begun.release()
            assert go.wait(10)
        return parse(self, read, body)

    monkeypatch.setattr(completions_module.Completions, "_parse", slow)

    async def test(scene: Any) -> None:
        large = [asyncio.create_task(scene.post(scene.chat(["x"] * 20_000))) for _ in range(4)]
        for _ in range(2):
            assert await asyncio.to_thread(begun.acquire, timeout=10)
        assert (await scene.http.get("/health")).status_code == 200
        assert (await scene.http.get("/metrics")).status_code == 200
        assert (await scene.post(scene.chat(stream=True))).text.endswith("data: [DONE]\n\n")
        assert (await scene.post(scene.chat("word " * 2000))).status_code == 400, "of middle size: by another thread"
        assert not any(task.done() for task in large)
        go.set()
        assert [answer.status_code for answer in await asyncio.gather(*large)] == [400] * 4

    stage.run(test)


def test_whoever_leaves_a_large_prompt_behind_still_counts(stage: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its body is in memory until the thread that reads it is done, however soon the client has gone."""
    go, begun = threading.Event(), threading.Semaphore(0)
    parse = completions_module.Completions._parse

    def slow(self: Any, read: Any, body: bytearray) -> Any:
        begun.release()
        assert go.wait(10)
        return parse(self, read, body)

    monkeypatch.setattr(bodies, "_INTAKE_BODIES", 1)
    monkeypatch.setattr(completions_module.Completions, "_parse", slow)

    async def test(scene: Any) -> None:
        body = json.dumps(scene.chat("x" * 950_000)).encode()
        _, writer = await scene.connect()
        writer.write(POST + b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        assert await asyncio.to_thread(begun.acquire, timeout=10)
        writer.transport.abort()
        answer = await exchange(scene, POST + b"Content-Type: application/json\r\nContent-Length: 900000\r\n\r\n" + b" " * 900_000)
        assert answer.startswith(b"HTTP/1.1 503 ")
        go.set()
        async with asyncio.timeout(5):
            while (await scene.post(scene.chat())).status_code == 503:
                pass

    stage.run(test)


def test_each_request_for_work_and_each_refusal_is_a_line_in_the_log(stage: Any, caplog: pytest.LogCaptureFixture) -> None:
    async def test(scene: Any) -> None:
        answers = [
            await scene.post(scene.chat()),
            await scene.post(scene.chat(n=0)),
            await scene.http.get("/v1/nothing"),
            await scene.http.get("/health"),
        ]
        ids = [answer.headers.get("X-Request-Id") for answer in answers]
        lines = [record.getMessage() for record in caplog.records if " after " in record.getMessage()]
        assert len({*ids}) == 4 and ids[3] is None
        for line, id, words in zip(
            lines, ids[:3], ("completions: 200 after", "n: is 0, allowed are 1 to 128", "nothing: 404 after"), strict=True
        ):
            assert id is not None and id in line and words in line
        assert "Hello" not in caplog.text

    with caplog.at_level("INFO"):
        stage.run(test)


def test_nobody_writes_lines_of_his_own_into_the_log(stage: Any, caplog: pytest.LogCaptureFixture) -> None:
    async def test(scene: Any) -> None:
        await scene.http.get("/v1/%0AINFO%20x%0D%1b[31m%C2%9b")
        await scene.post(scene.chat(**{"x\nINFO y\x1b[2J\x9b": 1}))
        lines = [record.getMessage() for record in caplog.records if " after " in record.getMessage()]
        assert len(lines) == 2 and all(line.isprintable() for line in lines), lines

    with caplog.at_level("INFO"):
        stage.run(test)


@pytest.mark.parametrize("stream", [False, True])
def test_who_goes_is_in_the_log(stage: Any, caplog: pytest.LogCaptureFixture, stream: bool) -> None:
    async def script(play: Any) -> None:
        await play.grant()

    async def test(scene: Any) -> None:
        scene.controller.script = script
        asking = asyncio.create_task(scene.post(scene.chat(stream=stream)))
        await (await scene.controller.first_play()).filled.wait()
        asking.cancel()
        for _ in range(1000):
            if " after " in caplog.text:
                break
            await asyncio.sleep(0.01)
        (line,) = [record.getMessage() for record in caplog.records if " after " in record.getMessage()]
        assert "completions: 499 after" in line and "chatcmpl-" in line and line.endswith(": its client has gone")

    with caplog.at_level("INFO"):
        stage.run(test)


def test_a_stream_that_fails_says_so_in_the_log(stage: Any, caplog: pytest.LogCaptureFixture) -> None:
    seen = asyncio.Event()

    async def script(play: Any) -> None:
        await play.grant()
        play.prepare()
        play.text("Half")
        await seen.wait()
        play.fail(500, "too bad")

    async def test(scene: Any) -> None:
        scene.controller.script = script
        received = ""
        async with scene.http.stream("POST", "/v1/chat/completions", json=scene.chat(stream=True)) as response:
            async for part in response.aiter_text():
                received += part
                if "Half" in received:
                    seen.set()
        assert "too bad" in received
        (line,) = [record.getMessage() for record in caplog.records if " after " in record.getMessage()]
        assert "completions: 200 after" in line and line.endswith(": too bad")

    with caplog.at_level("INFO"):
        stage.run(test)


def test_a_failed_request_can_be_named(stage: Any) -> None:
    async def script(play: Any) -> None:
        await play.grant()
        play.fail(422, "too bad")

    async def test(scene: Any) -> None:
        scene.controller.script = script
        answer = await scene.post(scene.chat())
        assert answer.status_code == 422 and answer.headers["X-Request-Id"].startswith("chatcmpl-")

    stage.run(test)


def test_readiness_follows_the_actors(stage: Any) -> None:
    async def test(scene: Any) -> None:
        status = scene.table.writer("decode", 2)
        answer = await scene.http.get("/ready")
        assert answer.status_code == 503 and answer.headers["Retry-After"]
        assert answer.json()["error"]["message"] == "not ready: decode"
        status.set_state(ActorState.ACTIVE)
        assert (await scene.http.get("/ready")).status_code == 200
        lock = next(lock for lock in scene.locks if lock.actor == "prefill")
        lock.release()
        assert "prefill" in (await scene.http.get("/ready")).text
        assert (await scene.http.get("/health")).status_code == 200

    stage.run(test)


def test_readiness_without_what_is_broken(stage: Any) -> None:
    """Text can be served without those who prepare media, and without nobody else."""

    async def test(scene: Any) -> None:
        scene.table.writer("decode", 2).set_state(ActorState.ACTIVE)
        video, prefill = (next(lock for lock in scene.locks if lock.actor == name) for name in ("video", "prefill"))
        scene.stats.publish(StatsSnapshot(broken={"video": "exit status 1", "encoder": "it serves again, and nobody has said so"}))
        assert (await scene.http.get("/ready")).json() == {"status": "ready"}
        video.release()
        answer = await scene.http.get("/ready")
        assert (answer.status_code, answer.json()) == (200, {"status": "ready", "degraded": ["video"]})
        assert 'mmrt_actor_broken{actor="video"} 1.0' in (await scene.http.get("/metrics")).text
        scene.stats.publish(StatsSnapshot(broken={"video": "exit status 1", "prefill": "exit status 2"}))
        prefill.release()
        answer = await scene.http.get("/ready")
        assert answer.status_code == 503 and answer.headers["Retry-After"]
        message = "not ready: video (broken: exit status 1), prefill (broken: exit status 2)"
        assert answer.json()["error"]["message"] == message

    stage.run(test)


@pytest.mark.parametrize("actors", [actors_of("2E+2P+D")])
def test_readiness_while_another_of_the_stage_serves(stage: Any) -> None:
    async def test(scene: Any) -> None:
        locks = {lock.actor: lock for lock in scene.locks}
        for name in ("prefill.1", "encoder"):  # they restart, and are not broken
            locks[name].release()
        answer = await scene.http.get("/ready")
        assert (answer.status_code, answer.json()) == (200, {"status": "ready", "degraded": ["encoder", "prefill.1"]})
        locks["encoder.1"].release()
        scene.stats.publish(StatsSnapshot(broken={"encoder.1": "exit status 1"}))
        answer = await scene.http.get("/ready")
        assert answer.status_code == 503, "the other restarts"
        assert answer.json()["error"]["message"] == "not ready: encoder, encoder.1 (broken: exit status 1), prefill.1"
        scene.stats.publish(StatsSnapshot(broken={"encoder": "exit status 1", "encoder.1": "exit status 1"}))
        assert (await scene.http.get("/ready")).json()["degraded"] == ["encoder", "encoder.1", "prefill.1"]

    stage.run(test)


def test_draining(stage: Any) -> None:
    """New requests are refused, running ones finish."""
    go = asyncio.Event()

    async def script(play: Any) -> None:
        await play.grant()
        play.prepare()
        play.text("first")
        await go.wait()
        play.text(" last", "stop")

    async def test(scene: Any) -> None:
        scene.controller.script = script
        running = asyncio.create_task(scene.post(scene.chat(stream=True)))
        await scene.controller.first_play()
        scene.actor.ending = True
        async with asyncio.timeout(5):
            while (ready := await scene.http.get("/ready")).status_code == 200:
                pass
        assert ready.status_code == 503
        refused = await scene.post(scene.chat())
        assert refused.status_code == 503 and refused.headers["Retry-After"]
        go.set()
        assert (await running).text.endswith("data: [DONE]\n\n") and '"stop"' in (await running).text

    stage.run(test)


@pytest.mark.parametrize("stream", [False, True])
def test_the_drain_s_end(stage: Any, stream: bool) -> None:
    """What has not finished by then gets an error, not silence."""
    stage.configure("supervisor", drain_s=0.1)

    async def script(play: Any) -> None:
        await play.grant()
        play.prepare()
        play.text("first")
        await asyncio.Event().wait()

    async def test(scene: Any) -> None:
        scene.controller.script = script
        running = asyncio.create_task(scene.post(scene.chat(stream=stream)))
        play = await scene.controller.first_play()
        await scene.until(lambda: play.num_tokens == 1)
        scene.actor.ending = True
        answer = await running
        assert answer.status_code == (200 if stream else 503)
        assert "shutting down" in answer.text
        await scene.until(play.cancelled.is_set)

    stage.run(test)


def test_a_port_in_use_is_a_clear_error(stage: Any) -> None:
    async def test(scene: Any) -> None: ...

    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        stage.configure("server", port=other.getsockname()[1])
        with pytest.raises(RunError, match=rf"127.0.0.1:{other.getsockname()[1]} .*server.port.*in use"):
            stage.run(test)


def test_it_listens_on_its_host_alone(stage: Any) -> None:
    async def test(scene: Any) -> None:
        port = int(scene.url.rsplit(":", 1)[1])
        with socket.socket() as elsewhere:  # another loopback address: taken only by a server on all interfaces
            elsewhere.bind(("127.0.0.2", port))

    stage.run(test)


def test_metrics(stage: Any) -> None:
    async def test(scene: Any) -> None:
        await scene.post(scene.chat())
        await scene.post(scene.chat(stream=True))
        await scene.post(scene.chat(n=0))
        text = (await scene.http.get("/metrics")).text
        samples = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
        name = 'model_name="tiny"'
        assert samples["mmrt_generation_tokens_total"] == samples[f"vllm:generation_tokens_total{{{name}}}"] == "10.0"
        assert samples[f'vllm:request_success_total{{finished_reason="stop",{name}}}'] == "2.0"
        assert samples[f"vllm:time_to_first_token_seconds_count{{{name}}}"] == "2.0"
        assert samples[f"vllm:e2e_request_latency_seconds_count{{{name}}}"] == "2.0"
        assert samples[f"vllm:num_requests_running{{{name}}}"] == "3.0"
        assert samples[f"vllm:num_requests_waiting{{{name}}}"] == "2.0"
        assert samples[f"vllm:kv_cache_usage_perc{{{name}}}"] == samples[f"vllm:gpu_cache_usage_perc{{{name}}}"] == "0.25"
        assert samples['mmrt_admission_rejections_total{reason="400"}'] == "1.0"
        assert samples['mmrt_http_requests_total{handler="/v1/chat/completions",method="POST",status="4xx"}'] == "1.0"
        assert samples['mmrt_pool_pages_used{pool="kv"}'] == "2.0"
        assert f"vllm:prompt_tokens_total{{{name}}}" in samples
        assert "_created" not in text and "python_gc" not in text
        policy = PolicyReport(name="mine.py", version="00000000000000aa", p99_s=0.25, longest_s=0.5)
        counts = {"running": 0, "overruled_total": 2, "illegal_choices_total": 3, "waiting_for": ["states"]}
        scene.stats.publish(StatsSnapshot(policy=policy, **counts))
        text = (await scene.http.get("/metrics")).text
        assert f"vllm:num_requests_running{{{name}}} 0.0" in text
        assert 'mmrt_waiting_for{resource="states"} 1.0' in text and 'mmrt_waiting_for{resource="KV pages"} 0.0' in text
        assert 'mmrt_policy{policy="mine.py",version="00000000000000aa"} 1.0' in text
        assert "mmrt_policy_call_p99_seconds 0.25" in text and "mmrt_policy_call_max_seconds 0.5" in text
        assert "mmrt_policy_overruled_total 2.0" in text and "mmrt_policy_illegal_choices_total 3.0" in text

    stage.run(test)


def test_metrics_of_the_caches(stage: Any) -> None:
    async def test(scene: Any) -> None:
        totals = {"looked_up_tokens_total": 640, "cached_tokens_total": 160, "media_queries_total": 8, "media_hits_total": 2}
        pools = {"kv": PoolUse(pages=100, used=40, cached=30, evictable=20), "embedding": PoolUse(10, 0, 9, 9)}
        scene.stats.publish(StatsSnapshot(pools=pools, **totals))
        text = (await scene.http.get("/metrics")).text
        samples = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
        name = 'model_name="tiny"'
        assert samples["mmrt_prefix_cache_queries_total"] == samples[f"vllm:prefix_cache_queries_total{{{name}}}"] == "640.0"
        assert samples["mmrt_prefix_cache_hits_total"] == samples[f"vllm:prefix_cache_hits_total{{{name}}}"] == "160.0"
        assert samples["mmrt_media_cache_queries_total"] == "8.0" and samples["mmrt_media_cache_hits_total"] == "2.0"
        assert samples['mmrt_pool_pages_cached{pool="kv"}'] == "30.0"
        assert samples['mmrt_pool_pages_evictable{pool="kv"}'] == "20.0"
        assert samples['mmrt_pool_pages_evictable{pool="embedding"}'] == "9.0"
        assert samples[f"vllm:kv_cache_usage_perc{{{name}}}"] == "0.4", "what may be evicted is not used"

    stage.run(test)


@pytest.mark.parametrize(
    ("beside", "share"),
    [
        ({"kv.1": PoolUse(100, 0)}, 0.2),
        ({"window": PoolUse(20, 18), "window.1": PoolUse(20, 2)}, 0.5),
        ({"window": PoolUse(40, 4)}, 0.4),
        ({"state": PoolUse(20, 10), "log": PoolUse(8, 6)}, 0.75),
        ({"embedding": PoolUse(10, 10), "media": PoolUse(10, 9)}, 0.4),
    ],
)
def test_the_use_of_the_kv_cache_is_that_of_the_fullest_kind_of_pool(stage: Any, beside: dict[str, PoolUse], share: float) -> None:
    async def test(scene: Any) -> None:
        scene.stats.publish(StatsSnapshot(pools={"kv": PoolUse(100, 40), **beside}))
        assert f"mmrt_kv_cache_usage_perc {share}\n" in (await scene.http.get("/metrics")).text

    stage.run(test)


def test_metrics_of_the_times_between_tokens(stage: Any) -> None:
    async def test(scene: Any) -> None:
        assert "mmrt_tbt_p99_seconds" not in (await scene.http.get("/metrics")).text, "nothing has been decoded"
        gaps = [0] * NUM_BUCKETS
        gaps[bucket_of(50_000_000)], gaps[bucket_of(200_000_000)] = 3, 1
        measured = {"tbt_objective_s": 0.1, "tbt_p99_s": 0.2, "late_share": 0.25}
        scene.stats.publish(StatsSnapshot(gaps=gaps, gaps_s=0.35, **measured))
        text = (await scene.http.get("/metrics")).text
        samples = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
        assert samples["mmrt_step_gap_seconds_count"] == "4.0" and samples["mmrt_step_gap_seconds_sum"] == "0.35"
        buckets = {name: value for name, value in samples.items() if name.startswith("mmrt_step_gap_seconds_bucket")}
        assert len(buckets) == 16 and buckets['mmrt_step_gap_seconds_bucket{le="+Inf"}'] == "4.0"
        assert buckets['mmrt_step_gap_seconds_bucket{le="0.067108864"}'] == "3.0"
        assert samples["mmrt_tbt_objective_seconds"] == "0.1"
        assert (samples["mmrt_tbt_p99_seconds"], samples["mmrt_tbt_late_share"]) == ("0.2", "0.25")

    stage.run(test)


@pytest.mark.parametrize(("status", "refused"), [(400, 1), (413, 1), (422, 1), (503, 1), (500, 0), (504, 0)])
def test_refusals_are_no_finished_requests(stage: Any, status: int, refused: int) -> None:
    async def script(play: Any) -> None:
        await play.grant()
        play.fail(status, "too bad")

    async def test(scene: Any) -> None:
        scene.controller.script = script
        assert (await scene.post(scene.chat())).status_code == status
        await scene.post(scene.chat(n=0))
        text = (await scene.http.get("/metrics")).text
        samples = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
        sums: dict[str, float] = {}
        for name, value in samples.items():
            family = name.split("{")[0]
            sums[family] = sums.get(family, 0) + float(value)
        finished = 1 - refused
        assert sums.get("mmrt_requests_total", 0) == sums.get("vllm:request_success_total", 0) == finished
        assert sums["mmrt_e2e_request_latency_seconds_count"] == finished
        assert sums["mmrt_admission_rejections_total"] == sums["vllm:admission_rejections_total"] == 1 + refused

    stage.run(test)


def test_metrics_count_prompts_of_aborted_requests_and_a_gap_for_each_token() -> None:
    metrics = Metrics("tiny", StatsSnapshot, lambda: dict.fromkeys(ACTORS, 1))
    gone = RequestError("gone", status=CLIENT_GONE)
    link = cast(Link, SimpleNamespace(tokens=None))
    request = ClientRequest(1, RequestSpec(Generation("r"), [1, 2, 3], [], 4), [], lambda: None, link, 0.0)
    request.error = gone
    metrics.on_over([request], 3, 1.0)
    assert b"\nmmrt_prompt_tokens_total 0.0" in metrics.render(), "nothing was done for it"
    request.first_text_s = 0.5
    metrics.on_over([request], 3, 1.0)
    metrics.on_text(0.4, 4)
    text = metrics.render()
    assert b"\nmmrt_prompt_tokens_total 3.0" in text
    assert b"\nmmrt_inter_token_latency_seconds_count 4.0" in text and b"\nmmrt_inter_token_latency_seconds_sum 0.4" in text


def test_web_pages_of_other_origins_need_the_key(stage: Any) -> None:
    async def test(scene: Any) -> None:
        others = [{"Origin": origin} for origin in ("https://evil.example", "null", "http://127.0.0.1:1", "http://[")]
        for headers in others:
            answer = await scene.post(scene.chat(), headers=headers)
            assert answer.status_code == 403 and answer.json()["error"]["type"] == "permission_error"
        own = str(scene.http.base_url).rstrip("/")
        assert (await scene.post(scene.chat(), headers={"Origin": own})).status_code == 200

    stage.run(test)
