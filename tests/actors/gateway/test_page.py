"""The page over HTTP: its files, who may see and command the run, the feed, and traces of requests."""

import asyncio
import hashlib
import json
import re
import secrets
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from aiohttp.test_utils import make_mocked_request

from mmrt.actors.gateway.page import feed as feed_module
from mmrt.actors.gateway.page import files as files_module
from mmrt.actors.gateway.page.feed import Feed
from mmrt.actors.gateway.page.files import FOLDER, HEADERS, read_files
from mmrt.actors.gateway.page.guard import Access, check_command, check_reader
from mmrt.actors.gateway.page.routes import Page
from mmrt.runtime.errors import RequestError, RunError
from mmrt.runtime.observe.flight import Kind, pack_id, pack_pair, unsigned
from mmrt.runtime.stage_table import ACTORS
from mmrt.runtime.supervisor.control import SOCKET_NAME, KillReply, KillRequest, RestartReply, RestartRequest
from mmrt.runtime.supervisor.control_server import ControlServer
from mmrt.shm.flight_recorder import FlightRecorder
from mmrt.tests.runtime.observe.trace_schema import check_trace

KEY = "a-key"
VENDOR = FOLDER / "vendor"
JSON = {"Content-Type": "application/json"}
MS = 1_000_000
REQUEST = 0xABC
REQUEST_ID = f"chatcmpl-{REQUEST:024x}"


@asynccontextmanager
async def supervisor(scene: Any, *replies: Any) -> AsyncIterator[list[Any]]:
    """A real control socket, whose end gives these replies in turn and keeps what it was asked."""
    asked: list[Any] = []
    left = list(replies)

    async def answer(request: Any, pid: int) -> Any:
        asked.append(request)
        reply = left.pop(0)
        if isinstance(reply, Exception):
            raise reply
        return reply

    server = ControlServer(scene.actor.run.path / SOCKET_NAME, answer)
    await server.start()
    try:
        yield asked
    finally:
        await server.close()
        (scene.actor.run.path / SOCKET_NAME).unlink(missing_ok=True)


# --------------------------------------------------------------------------------------------------------------- files


def test_the_files_and_their_headers(stage: Any) -> None:
    async def test(scene: Any) -> None:
        types = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml", "txt": "text/plain"}
        for path in (path for path in FOLDER.rglob("*") if path.suffix in (".html", ".css", ".js", ".svg", ".txt")):
            route = "/" if path.name == "index.html" else f"/page/{path.relative_to(FOLDER)}"
            answer = await scene.http.get(route)
            assert answer.status_code == 200 and answer.content == path.read_bytes(), route
            assert answer.headers["Content-Type"].startswith(types[path.suffix[1:]]), route
            assert {name: answer.headers[name] for name in HEADERS} == HEADERS
            assert answer.headers["X-Content-Type-Options"] == "nosniff" and answer.headers["Cache-Control"] == "no-cache"
            policy = answer.headers["Content-Security-Policy"]
            assert policy.startswith("default-src 'self';") and "unsafe" not in policy and "frame-ancestors 'none'" in policy
            again = await scene.http.get(route, headers={"If-None-Match": answer.headers["ETag"]})
            assert again.status_code == 304 and not again.content and again.headers["ETag"] == answer.headers["ETag"]
            assert (await scene.http.get(route, headers={"If-None-Match": '"another"'})).status_code == 200
            head = await scene.http.head(route)
            assert head.status_code == 200 and not head.content
            assert "set-cookie" not in answer.headers

    stage.run(test)


def test_the_page_needs_nothing_but_its_own_files() -> None:
    """No inline script or style, no handler in an attribute, no other server; and each file that it names is there."""
    names = {str(path.relative_to(FOLDER)) for path in FOLDER.rglob("*")}
    html = (FOLDER / "index.html").read_text()
    assert not re.search(r"<script(?![^>]*\bsrc=)|<style|\sstyle=|\son\w+=|javascript:", html)
    assert {link.removeprefix("/page/") for link in re.findall(r'(?:src|href)="([^"#]+)"', html)} < names
    for script in FOLDER.glob("*.js"):
        source = script.read_text()
        assert {name.removeprefix("./") for name in re.findall(r'^import .* from "(.*)";$', source, re.M)} <= names, script
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function|DOMParser", source), script
        urls = set(re.findall(r"https?://[^\s`'\"]+", source))
        assert urls <= {"https://ui.perfetto.dev.", "http://www.w3.org/2000/svg"}, script


def test_vendored_files_are_those_of_their_packages() -> None:
    """By the hashes of the table beside them; a licence for each package."""
    rows = re.findall(r"^\| `(\S+)` \|.*\| `([0-9a-f]{64})` \|$", (VENDOR / "README.md").read_text(), re.M)
    assert {name for name, _ in rows} == {path.name for path in VENDOR.iterdir() if path.suffix in (".js", ".css")}
    for name, digest in rows:
        assert hashlib.sha256((VENDOR / name).read_bytes()).hexdigest() == digest, name
        assert "Permission is hereby granted, free of charge" in (VENDOR / f"{name.split('.')[0]}.LICENSE.txt").read_text()


def test_the_limits_of_a_request(stage: Any) -> None:
    async def test(scene: Any) -> None:
        answer = await scene.http.get("/page/limits")
        assert (
            answer.json() == {"max_body_bytes": 1 << 20, "kinds": ["image", "video", "audio"]}
            and answer.headers["Cache-Control"] == "no-store"
        )

    stage.run(test)


def test_what_an_editor_leaves_beside_them_is_not_served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files_module, "FOLDER", tmp_path)
    for name in ("index.html", "app.js", ".app.js.swp", "app.js~", "notes"):
        (tmp_path / name).write_text("x")
    assert set(read_files()) == {"/", "/page/app.js"}


def test_nothing_of_it_is_there_when_it_is_off(stage: Any) -> None:
    stage.configure("server", page=False)

    async def test(scene: Any) -> None:
        async with supervisor(scene) as asked:
            for path in ("/", "/page/app.js", "/page/state", "/page/trace/1"):
                assert (await scene.http.get(path)).status_code == 404, path
            for path in ("/page/kill/decode", "/page/restart/decode"):
                assert (await scene.http.post(path, headers=JSON)).status_code == 404, path
            assert asked == []

    stage.run(test)


@pytest.mark.parametrize(
    "path",
    [
        "/page/../app.py",
        "/page/%2e%2e/routes.py",
        "/page/..%2froutes.py",
        "/page/static/app.js",
        "/page//etc/passwd",
        "/page/%2fetc%2fpasswd",
        "/page/index.html%00.js",
        "/page/app.js/",
        "/page/",
        "/index.html",
    ],
)
def test_paths_that_leave_the_folder(stage: Any, path: str) -> None:
    async def test(scene: Any) -> None:
        reader, writer = await scene.connect()
        writer.write(f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode())
        status = (await reader.read()).split(b"\r\n")[0]
        assert status in (b"HTTP/1.1 404 Not Found", b"HTTP/1.1 400 Bad Request")
        writer.close()

    stage.run(test)


def test_methods(stage: Any) -> None:
    async def test(scene: Any) -> None:
        async with supervisor(scene) as asked:
            for method, path, allowed in (
                ("POST", "/", "GET,HEAD"),
                ("DELETE", "/page/app.js", "GET,HEAD"),
                ("POST", "/page/state", "GET,HEAD"),
                ("GET", "/page/kill/decode", "POST"),
                ("PUT", "/page/restart/decode", "POST"),
            ):
                answer = await scene.http.request(method, path, headers=JSON)
                assert (answer.status_code, answer.headers["Allow"]) == (405, allowed), (method, path)
            assert asked == []

    stage.run(test)


# --------------------------------------------------------------------------------------------------------------- access

FOREIGN = [
    ({"Host": "evil.example"}, "Host is 'evil.example'"),
    ({"Host": "evil.example:8000", "Origin": "http://evil.example:8000"}, "Host is 'evil.example:8000'"),
    ({"Host": "192.0.2.7:8000"}, "Host is '192.0.2.7:8000'"),
    ({"Origin": "https://evil.example"}, "another origin ('https://evil.example')"),
    ({"Origin": "null"}, "another origin ('null')"),
    ({"Origin": "http://localhost"}, "another origin ('http://localhost')"),
    ({"Sec-Fetch-Site": "cross-site"}, "Sec-Fetch-Site is 'cross-site'"),
    ({"Sec-Fetch-Site": "same-site"}, "Sec-Fetch-Site is 'same-site'"),
    ({"X-Forwarded-For": "127.0.0.1"}, "X-Forwarded-For: without an API key the run is not shown behind a proxy"),
    ({"X-Forwarded-Proto": "https"}, "X-Forwarded-Proto: without an API key the run is not shown behind a proxy"),
    ({"CF-Connecting-IP": "127.0.0.1"}, "CF-Connecting-IP: without an API key the run is not shown behind a proxy"),
    ({"Forwarded": "for=127.0.0.1"}, "Forwarded: without an API key the run is not shown behind a proxy"),
]


@pytest.mark.parametrize("headers, reason", FOREIGN)
def test_other_pages_and_machines_neither_see_nor_command(stage: Any, headers: dict[str, str], reason: str) -> None:
    """Even where the rest of the endpoint is open to them."""
    stage.configure("server", allow_origins=("*",), allowed_hosts=("*",))

    async def test(scene: Any) -> None:
        async with supervisor(scene) as asked:
            for answer in (
                await scene.http.get("/page/state", headers=headers),
                await scene.http.get("/page/trace/1", headers=headers),
                await scene.http.post("/page/kill/decode", json={}, headers=headers),
                await scene.http.post("/page/restart/decode", json={}, headers=headers),
            ):
                assert answer.status_code == 403 and reason in answer.json()["error"]["message"]
            assert asked == []
            assert (await scene.http.get("/v1/models", headers=headers)).status_code == 200

    stage.run(test)


@pytest.mark.parametrize("headers", [{}, {"Content-Type": "text/plain"}, {"Content-Type": "application/x-www-form-urlencoded"}])
def test_forms_command_nothing(stage: Any, headers: dict[str, str]) -> None:
    async def test(scene: Any) -> None:
        async with supervisor(scene) as asked:
            answer = await scene.http.post("/page/kill/decode", headers=headers)
            assert answer.status_code == 415 and "expected application/json" in answer.json()["error"]["message"]
            assert asked == []

    stage.run(test)


def test_the_key_is_needed_for_all_but_the_files(stage: Any) -> None:
    stage.configure("server", api_key=KEY)

    async def test(scene: Any) -> None:
        async with supervisor(scene, KillReply(7)) as asked:
            for path in ("/", "/page/app.js", "/page/style.css"):
                assert (await scene.http.get(path)).status_code == 200
            for headers in ({}, {"Authorization": "Bearer wrong"}):
                assert (await scene.http.get("/page/state", headers=headers)).status_code == 401
                assert (await scene.http.get("/page/trace/1", headers=headers)).status_code == 401
                assert (await scene.http.post("/page/kill/decode", headers={**headers, **JSON})).status_code == 401
            assert asked == []
            right = {"Authorization": f"Bearer {KEY}"}
            assert (await scene.http.get("/page/state", headers=right)).status_code == 200
            foreign = {**right, **JSON, "Origin": "https://evil.example"}
            assert (await scene.http.post("/page/kill/decode", headers=foreign)).status_code == 403
            assert (await scene.http.post("/page/kill/decode", headers={**right, **JSON})).status_code == 200
            assert asked == [KillRequest("decode")]

    stage.run(test)


def access(has_key: bool = False, is_own: bool = True) -> Access:
    return Access(has_key, "token", lambda _: is_own)


def request_from(peer: str, has_json: bool = True, **headers: str) -> Any:
    transport = SimpleNamespace(get_extra_info=lambda name, default=None: (peer, 5000) if name == "peername" else default)
    all_headers = {"Host": "localhost:8000", **({"Content-Type": "application/json"} if has_json else {}), **headers}
    return make_mocked_request("POST", "/page/kill/decode", headers=all_headers, transport=transport)


@pytest.mark.parametrize("peer", ["127.0.0.1", "127.3.2.1", "::1", "::ffff:127.0.0.1"])
@pytest.mark.parametrize(
    "host", ["localhost", "localhost:8000", "LOCALHOST", "127.0.0.1:8000", "[::1]:8000", "[::1]", "mmrt.localhost"]
)
def test_this_machine_may(peer: str, host: str) -> None:
    check_command(request_from(peer, Host=host, Origin=f"http://{host}"), access())


@pytest.mark.parametrize("peer", ["192.0.2.1", "10.0.0.1", "fe80::1", "::ffff:10.0.0.1", "", "localhost.evil.example"])
def test_other_machines_need_a_key(peer: str) -> None:
    for check in (check_reader, check_command):
        with pytest.raises(RequestError, match=r"without an API key .* set server.api_key") as caught:
            check(request_from(peer), access())
        assert caught.value.status == 403
        check(request_from(peer), access(has_key=True))


# -------------------------------------------------------------------------------------------------------------- commands


def test_restart_and_kill(stage: Any) -> None:
    async def test(scene: Any) -> None:
        replies = (
            RestartReply(ok=True, message="decode: generation 2 serves after 0.20 s"),
            KillReply(4711),
            RestartReply(ok=False, message="video: the new process ended", log=["Traceback", "ValueError: x"]),
            RunError("prefill is being restarted already"),
        )
        async with supervisor(scene, *replies) as asked:
            restarted = await scene.http.post("/page/restart/decode", json={})
            assert restarted.status_code == 200 and restarted.json() == {"message": "decode: generation 2 serves after 0.20 s"}
            killed = await scene.http.post("/page/kill/encoder", json={})
            assert killed.json() == {"message": "encoder: pid 4711 was killed"} and killed.headers["Cache-Control"] == "no-store"
            failed = await scene.http.post("/page/restart/video", json={})
            assert failed.status_code == 500 and failed.json()["error"]["message"].endswith("ended\nTraceback\nValueError: x")
            refused = await scene.http.post("/page/restart/prefill", json={})
            assert refused.status_code == 503 and refused.json()["error"]["message"] == "prefill is being restarted already"
            assert asked == [RestartRequest("decode"), KillRequest("encoder"), RestartRequest("video"), RestartRequest("prefill")]

    stage.run(test)


@pytest.mark.parametrize("actor", ["decoder", "zygote", "supervisor", "encoder.1", "..", "decode%0a"])
def test_an_actor_that_there_is_not(stage: Any, actor: str) -> None:
    async def test(scene: Any) -> None:
        async with supervisor(scene) as asked:
            answer = await scene.http.post(f"/page/kill/{actor}", json={})
            assert answer.status_code == 404 and asked == []
            if actor != "..":
                assert f"there are {', '.join(ACTORS)}" in answer.json()["error"]["message"]

    stage.run(test)


def test_without_a_supervisor(stage: Any) -> None:
    async def test(scene: Any) -> None:
        assert (await scene.http.get("/page/state")).json()["commands"] is False
        answer = await scene.http.post("/page/kill/decode", json={})
        assert answer.status_code == 503 and "no supervisor answers" in answer.json()["error"]["message"]
        assert str(scene.actor.run.path) not in answer.text

    stage.run(test)


@pytest.mark.parametrize("verb, request_", [("kill", KillRequest("gateway")), ("restart", RestartRequest("gateway"))])
def test_the_gateway_answers_before_it_ends(stage: Any, verb: str, request_: Any) -> None:
    async def test(scene: Any) -> None:
        async with supervisor(scene, KillReply(1)) as asked:
            answer = await scene.http.post(f"/page/{verb}/gateway", json={})
            assert answer.status_code == 202 and asked == []
            await scene.until(lambda: asked == [request_])

    stage.run(test)


# ------------------------------------------------------------------------------------------------------------------ feed


def record_a_request(run: Any) -> None:
    """Records of a request that has ended, and of a death, as their actors leave them."""
    now_ns = time.monotonic_ns() - 1000 * MS
    gateway, controller, decode, above = (
        FlightRecorder.create(run, name).writer(1) for name in ("gateway", "controller", "decode", "supervisor")
    )
    gateway.record(Kind.RECEIVED, now_ns, 0, REQUEST, *pack_id(REQUEST_ID), 4068)
    controller.record(Kind.SUBMITTED, now_ns + MS, 0, REQUEST, 9, 1)
    controller.record(Kind.ROW, now_ns + 2 * MS, 0, REQUEST, 0, 1)
    gateway.record(Kind.WRITTEN, now_ns + 3 * MS, MS, REQUEST, 0, 0, 4068)
    decode.record(Kind.STEP, now_ns + 5 * MS, MS, 1, 3, pack_pair(0, 3))
    above.record(Kind.EXIT, now_ns + 6 * MS, 0, 4711, ACTORS.index("decode"), 1, unsigned(-9))
    gateway.record(Kind.OVER, now_ns + 9 * MS, 0, REQUEST, 5)
    controller.record(Kind.ENDED, now_ns + 10 * MS, 0, REQUEST)


def test_the_feed(stage: Any) -> None:
    async def test(scene: Any) -> None:
        record_a_request(scene.actor.run)
        state = (await scene.http.get("/page/state")).json()
        assert [actor["name"] for actor in state["actors"]] == list(ACTORS)
        decode = next(actor for actor in state["actors"] if actor["name"] == "decode")
        assert decode["state"] == "active" and decode["generation"] == 1 and decode["pid"] and decode["restarts"] == 1
        assert decode["last_end"] == "SIGKILL"
        assert state["counts"] == {"waiting": 2, "preparing": 0, "running": 3}
        assert state["pools"]["kv"] == {"pages": 8, "used": 2, "cached": 0, "evictable": 0}
        (request,) = state["requests"]
        assert (request["key"], request["id"], request["sent_tokens"]) == (f"{REQUEST:x}", REQUEST_ID, 5)
        assert [kind for kind, *_ in request["work"]] == ["fetch"] and request["end"] - request["begin"] == pytest.approx(10)
        assert state["totals"]["tokens"] == 3  # a step of three rows
        assert [event["text"] for event in state["events"]] == ["generation 1 ended: SIGKILL"]
        later = (await scene.http.get(f"/page/state?after={state['revision']}")).json()
        assert later["requests"] == [] and later["events"] == [] and later["epoch"] == state["epoch"]

    stage.run(test)


def test_revisions_of_another_gateway_are_told_apart(stage: Any) -> None:
    """Also those of a run that is started anew, whose first gateway is again of generation 1."""

    async def test(scene: Any) -> None:
        state = (await scene.http.get("/page/state")).json()
        feed = Feed(scene.actor.run, scene.table, scene.stats.read, lambda: True, keeps_connections=True)
        assert json.loads(feed.reply(0))["epoch"] != state["epoch"]
        feed.close()

    stage.run(test)


def test_a_dead_and_a_broken_actor_in_the_feed(stage: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed_module, "SHARED_S", 0.0)

    async def test(scene: Any) -> None:
        def states() -> Any:
            return {actor["name"]: (actor["state"], actor["pid"]) for actor in answer.json()["actors"]}

        lock = next(lock for lock in scene.locks if lock.actor == "video")
        lock.release()
        answer = await scene.http.get("/page/state")
        assert states()["video"] == ("absent", None) and states()["decode"][0] == "active"
        scene.stats.publish(type(scene.stats.read())(broken={"video": "5 failures"}))
        answer = await scene.http.get("/page/state")
        assert states()["video"] == ("broken", None)

    stage.run(test)


@pytest.mark.parametrize("after", ["-1", "x", "1.5", "", "9007199254740993", "1" * 400, "１"])
def test_bad_revisions(stage: Any, after: str) -> None:
    async def test(scene: Any) -> None:
        answer = await scene.http.get("/page/state", params={"after": after})
        assert answer.status_code == 400 and "expected a whole number from 0 to" in answer.json()["error"]["message"]

    stage.run(test)


def test_more_requests_than_one_reply_holds(stage: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed_module, "SHARED_S", 0.0)
    monkeypatch.setattr(feed_module, "MAX_REQUESTS", 2)

    async def test(scene: Any) -> None:
        writer = FlightRecorder.create(scene.actor.run, "gateway").writer(1)
        for key in range(1, 6):
            writer.record(Kind.RECEIVED, time.monotonic_ns() - 1000 * MS, 0, key, *pack_id(f"chatcmpl-{key:024x}"), 0)
            await scene.http.get("/page/state")
        seen, revision = [], 0
        for _ in range(3):
            state = (await scene.http.get("/page/state", params={"after": revision})).json()
            seen += [int(request["key"], 16) for request in state["requests"]]
            revision = state["revision"]
        assert seen == [1, 2, 3, 4, 5]

    stage.run(test)


def test_viewers_that_do_not_read_hold_up_nobody(stage: Any) -> None:
    async def test(scene: Any) -> None:
        record_a_request(scene.actor.run)
        asked = b"GET /page/state HTTP/1.1\r\nHost: localhost\r\n\r\n" * 200
        viewers = [await scene.connect(receive_bytes=4096) for _ in range(5)]
        for _, writer in viewers:
            writer.write(asked)
        async with asyncio.timeout(10):
            assert (await scene.post(scene.chat())).status_code == 200
            assert (await scene.http.get("/page/state")).status_code == 200
        for _, writer in viewers:
            writer.close()

    stage.run(test)


# ---------------------------------------------------------------------------------------------------------------- traces


def test_the_trace_of_a_request(stage: Any) -> None:
    async def test(scene: Any) -> None:
        record_a_request(scene.actor.run)
        answer = await scene.http.get(f"/page/trace/{REQUEST:x}")
        assert answer.status_code == 200 and answer.headers["Content-Disposition"] == f'attachment; filename="mmrt-{REQUEST_ID}.json"'
        trace = json.loads(answer.content)
        check_trace(trace)
        names = {event["name"] for event in trace["traceEvents"]}
        assert {REQUEST_ID, "write media", "step", "generation 1 ended: SIGKILL"} <= names
        run = scene.actor.run
        assert trace["otherData"]["run"] == "" and run.run_id not in answer.text and str(run.path) not in answer.text

    stage.run(test)


@pytest.mark.parametrize("key", ["1", "abd", "zz", "ABC", "0x1", "1" * 40, "-1", "%00"])
def test_traces_of_unknown_requests(stage: Any, key: str) -> None:
    async def test(scene: Any) -> None:
        record_a_request(scene.actor.run)
        answer = await scene.http.get(f"/page/trace/{key}")
        assert answer.status_code == 404 and "is known (any more)" in answer.json()["error"]["message"]

    stage.run(test)


def test_one_trace_at_a_time(stage: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(scene: Any) -> None:
        record_a_request(scene.actor.run)
        await scene.http.get("/page/state")
        answers = await asyncio.gather(*(scene.http.get(f"/page/trace/{REQUEST:x}") for _ in range(8)))
        statuses = [answer.status_code for answer in answers]
        assert 200 in statuses and set(statuses) <= {200, 503}
        assert all(answer.headers["Retry-After"] == "1" for answer in answers if answer.status_code == 503)

    stage.run(test)


def test_a_trace_whose_client_has_gone_is_still_the_only_one(stage: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its thread cannot be stopped: others beside it would add up."""
    begun, go = [], threading.Event()

    def make_trace(*_: Any) -> bytes:
        begun.append(1)
        assert go.wait(20)
        return b"{}"

    monkeypatch.setattr(Page, "_make_trace", make_trace)

    async def test(scene: Any) -> None:
        record_a_request(scene.actor.run)
        _, writer = await scene.connect()
        writer.write(f"GET /page/trace/{REQUEST:x} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
        await scene.until(lambda: begun)
        writer.close()
        await asyncio.sleep(0.1)  # for the gateway to see it
        try:
            async with asyncio.timeout(5):
                assert (await scene.http.get(f"/page/trace/{REQUEST:x}")).status_code == 503
        finally:
            go.set()
        assert len(begun) == 1
        async with asyncio.timeout(5):
            while (await scene.http.get(f"/page/trace/{REQUEST:x}")).status_code != 200:
                pass

    stage.run(test)


def test_text_of_clients_comes_as_data(stage: Any) -> None:
    """A name with markup is data in JSON with a type that no browser interprets."""

    async def test(scene: Any) -> None:
        answer = await scene.http.post(f"/page/kill/<img src=x {secrets.token_hex(4)}>", json={})
        assert answer.status_code == 404 and answer.headers["Content-Type"] == "application/json"

    stage.run(test)
