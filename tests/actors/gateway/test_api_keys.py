"""Several API keys: OpenAI's client with a key from the file, limits, edits while the server runs, salts, and names in metrics."""

import asyncio
import hashlib
import json
import logging
import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import openai
import pytest

from mmrt.actors.gateway.keys import api_keys
from mmrt.runtime.errors import ConfigError

KEYS = {name: f"sk-{name}-0123456789abcdef" for name in ("alice", "bob", "carol", "ops")}


@pytest.fixture(autouse=True)
def _look_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api_keys, "LOOK_S", 0.01)


@pytest.fixture
def file(tmp_path: Path, stage: Any) -> Path:
    file = tmp_path / "keys.jsonl"
    file.touch(0o600)
    stage.configure("server", api_keys_file=str(file))
    return file


def write(file: Path, *keys: dict[str, Any]) -> None:
    """Replace the file, as careful programs do."""
    part = file.with_name("part")
    part.touch(0o600)
    part.write_text("".join(f"{json.dumps(key)}\n" for key in keys))
    os.replace(part, file)


def entry(name: str, **more: Any) -> dict[str, Any]:
    return {"name": name, "key": KEYS[name], **more}


def bearer(name: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {KEYS[name]}"}


async def status_of(scene: Any, name: str) -> int:
    status: int = (await scene.http.get("/v1/models", headers=bearer(name))).status_code
    return status


async def posted(scene: Any, name: str) -> int:
    status: int = (await scene.post(scene.chat(), headers=bearer(name))).status_code
    return status


async def until(status: int, ask: Callable[[], Awaitable[int]]) -> None:
    async with asyncio.timeout(10):
        while await ask() != status:  # noqa: ASYNC110  (the server tells nobody)
            await asyncio.sleep(0.01)


def test_each_key_opens_the_server_and_others_do_not(stage: Any, file: Path, caplog: pytest.LogCaptureFixture) -> None:
    write(file, entry("alice"), {"name": "bob", "sha256": hashlib.sha256(KEYS["bob"].encode()).hexdigest()})
    stage.configure("server", api_key="the-operator")
    caplog.set_level(logging.INFO)

    async def test(scene: Any) -> None:
        for name in ("alice", "bob"):
            client = scene.client.with_options(api_key=KEYS[name])
            answer = await client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "hi"}])
            assert answer.choices[0].message.content == "Hello, größer 😀 world" and answer.usage is not None
        assert (await scene.http.get("/v1/models", headers={"X-Api-Key": KEYS["bob"]})).status_code == 200
        assert (await scene.http.get("/v1/models", headers={"Authorization": "Bearer the-operator"})).status_code == 200
        with pytest.raises(openai.AuthenticationError):
            await scene.client.with_options(api_key=KEYS["carol"]).models.list()
        assert (await scene.http.get("/v1/models")).status_code == 401
        shown = (await scene.http.get("/metrics", headers=bearer("alice"))).text
        assert 'mmrt_api_key_requests_total{key="alice",status="2xx"} 1.0' in shown
        assert f'mmrt_api_key_tokens_total{{key="bob",kind="completion"}} {answer.usage.completion_tokens}.0' in shown
        assert not [key for key in KEYS.values() if key in shown]

    stage.run(test)
    assert "key alice" in caplog.text and "key bob" in caplog.text and not [key for key in KEYS.values() if key in caplog.text]


def test_limits_are_429_with_openais_headers(stage: Any, file: Path) -> None:
    write(file, entry("alice", requests_per_minute=2, tokens_per_minute=1000), entry("bob", tokens_per_minute=1))

    async def test(scene: Any) -> None:
        alice = scene.client.with_options(api_key=KEYS["alice"])
        asked: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
        raw = await alice.chat.completions.with_raw_response.create(**asked)
        assert raw.headers["x-ratelimit-limit-requests"] == "2" and raw.headers["x-ratelimit-remaining-requests"] == "1"
        assert raw.headers["x-ratelimit-limit-tokens"] == "1000" and raw.headers["x-ratelimit-reset-requests"].endswith("s")
        stream = await alice.chat.completions.create(**asked, stream=True)
        assert [chunk async for chunk in stream][-1].choices[0].finish_reason == "stop"
        with pytest.raises(openai.RateLimitError) as caught:
            await alice.chat.completions.create(**asked)
        assert "'alice' may use 2 requests per minute (requests_per_minute)" in caught.value.message
        assert 1 <= int(caught.value.response.headers["retry-after"]) <= 30
        assert caught.value.response.headers["x-ratelimit-remaining-requests"] == "0"
        assert (await alice.models.list()).data, "only work is limited"
        answer = await scene.post(scene.chat(), headers=bearer("bob"))
        assert answer.status_code == 200 and answer.json()["usage"]["total_tokens"] > 1
        refused = await scene.post(scene.chat(), headers=bearer("bob"))
        assert refused.status_code == 429 and refused.json()["error"]["type"] == "rate_limit_error"
        assert "1 tokens per minute (tokens_per_minute)" in refused.json()["error"]["message"]
        shown = (await scene.http.get("/metrics", headers=bearer("bob"))).text
        assert 'mmrt_api_key_refusals_total{key="alice",limit="requests_per_minute"} 1.0' in shown

    stage.run(test)


def test_requests_at_a_time(stage: Any, file: Path) -> None:
    write(file, entry("alice", max_requests=1), entry("bob"))
    ends = asyncio.Event()

    async def wait(play: Any) -> None:
        play.queue()
        await play.grant()
        play.prepare()
        await ends.wait()
        play.text("x", "stop")

    async def test(scene: Any) -> None:
        scene.controller.script = wait
        first = asyncio.create_task(scene.post(scene.chat(), headers=bearer("alice")))
        await scene.controller.first_play()
        refused = await scene.post(scene.chat(), headers=bearer("alice"))
        assert refused.status_code == 429 and "1 requests at a time (max_requests)" in refused.json()["error"]["message"]
        ends.set()
        assert (await first).status_code == 200
        assert (await scene.post(scene.chat(), headers=bearer("alice"))).status_code == 200
        # A client that goes away gives its place back.
        ends.clear()
        num_plays = len(scene.controller.plays)
        gone = asyncio.create_task(scene.post(scene.chat(), headers=bearer("alice")))
        await scene.until(lambda: len(scene.controller.plays) > num_plays)
        gone.cancel()
        ends.set()
        await until(200, lambda: posted(scene, "alice"))

    stage.run(test)


def test_an_edit_is_followed(stage: Any, file: Path) -> None:
    write(file, entry("alice"), entry("bob", max_requests=5))

    async def test(scene: Any) -> None:
        assert [await status_of(scene, name) for name in ("alice", "bob", "carol")] == [200, 200, 401]
        write(file, entry("carol"), entry("bob", requests_per_minute=1))
        await until(200, lambda: status_of(scene, "carol"))
        assert [await status_of(scene, name) for name in ("alice", "bob")] == [401, 200]
        assert [await posted(scene, "bob") for _ in range(2)] == [200, 429]

    stage.run(test)


def test_a_file_that_could_not_be_read_for_a_moment_is_read_again(
    stage: Any, file: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    write(file, entry("alice"))
    trials = []

    def fail(path: Path) -> Any:
        trials.append(path)
        raise ConfigError("cannot be read: Too many open files")

    async def test(scene: Any) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(api_keys, "read_keys", fail)
            write(file, entry("bob"))
            async with asyncio.timeout(10):
                while len(trials) < 3:  # noqa: ASYNC110  (the server tells nobody)
                    await asyncio.sleep(0.01)
            assert await status_of(scene, "alice") == 200
        await until(401, lambda: status_of(scene, "alice"))
        assert await status_of(scene, "bob") == 200

    stage.run(test)
    assert caplog.text.count("Too many open files") == 1


@pytest.mark.parametrize("harm", ["syntax", "mode", "gone"])
def test_a_broken_edit_keeps_the_keys_and_is_told(stage: Any, file: Path, harm: str, caplog: pytest.LogCaptureFixture) -> None:
    write(file, entry("alice"))
    harms: dict[str, Callable[[], object]] = {
        "syntax": lambda: file.write_text(f"{json.dumps(entry('bob'))}\n{{"),
        "mode": lambda: file.chmod(0o644),
        "gone": file.unlink,
    }

    async def test(scene: Any) -> None:
        assert stage.statuses[-1] == "active"
        harms[harm]()
        await scene.until(lambda: stage.statuses[-1] != "active")
        said = {"syntax": "line 2: not valid JSON", "mode": "has mode 0644", "gone": "No such file"}[harm]
        assert str(file) in stage.statuses[-1] and said in stage.statuses[-1]
        assert stage.statuses[-1].endswith("; the keys read before stay valid") and stage.statuses[-1] in caplog.text
        assert [await status_of(scene, name) for name in ("alice", "bob")] == [200, 401]
        write(file, entry("bob"))
        await until(200, lambda: status_of(scene, "bob"))
        assert stage.statuses[-1] == "active" and await status_of(scene, "alice") == 401

    stage.run(test)


def test_a_gateway_that_starts_with_a_broken_file_has_the_keys_of_the_last(stage: Any, file: Path) -> None:
    file.write_text("{")

    async def first(scene: Any) -> None:
        assert (await status_of(scene, "alice")) == 200

    with pytest.raises(ConfigError, match="line 1: not valid JSON"):
        stage.run(first)
    write(file, entry("alice"))
    stage.run(first)
    file.write_text("{")

    async def next_one(scene: Any) -> None:
        assert [await status_of(scene, name) for name in ("alice", "bob")] == [200, 401]
        assert "the keys that the last gateway had read stay valid" in stage.statuses[-1]
        kept = (scene.actor.run.path / api_keys.KEPT_NAME).read_bytes()
        assert KEYS["alice"].encode() not in kept

    stage.run(next_one)


def test_a_standby_that_waited_has_the_keys_of_now(stage: Any, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api_keys.ApiKeys, "follow", lambda _: asyncio.sleep(60))
    write(file, entry("alice"))
    stage.wait_for_role = lambda: write(file, entry("bob"))

    async def test(scene: Any) -> None:
        assert [await status_of(scene, name) for name in ("alice", "bob")] == [401, 200]

    stage.run(test)


def test_keys_do_not_share_what_is_cached(stage: Any, file: Path) -> None:
    write(file, entry("alice"), entry("bob", cache_salt="team"), entry("carol", cache_salt="team"))

    async def test(scene: Any) -> None:
        async def salt(name: str, **more: Any) -> bytes:
            scene.controller.plays.clear()
            assert (await scene.post(scene.chat(**more), headers=bearer(name))).status_code == 200
            return bytes(scene.controller.play.spec.salt)

        assert await salt("bob") == await salt("carol") != await salt("alice")
        assert await salt("bob", cache_salt="x") == await salt("carol", cache_salt="x") != await salt("alice", cache_salt="x")
        assert await salt("alice", cache_salt="x") != await salt("alice")

    stage.run(test)


def test_only_some_keys_command_processes(stage: Any, file: Path) -> None:
    write(file, entry("alice"), entry("ops", may_command=True))

    async def test(scene: Any) -> None:
        assert (await scene.http.get("/page/state", headers=bearer("alice"))).status_code == 200
        for verb in ("kill", "restart"):
            refused = await scene.http.post(f"/page/{verb}/decode", headers=bearer("alice"), json={})
            assert refused.status_code == 403
            assert "'alice' may neither kill nor restart processes (may_command)" in refused.json()["error"]["message"]
            allowed = await scene.http.post(f"/page/{verb}/decode", headers=bearer("ops"), json={})
            assert allowed.status_code == 503, "no supervisor is here to ask"

    stage.run(test)


def test_prompts_without_answers_count(stage: Any, file: Path) -> None:
    """With what has been computed where a request fails, and under the key's own salt."""
    write(file, entry("alice", tokens_per_minute=100))

    async def test(scene: Any) -> None:
        async def script(play: Any) -> None:
            if play.number < 2:
                play.compute(vector=[1.0])
            else:
                await scene.until(lambda: all(one.delivered.is_set() for one in list(scene.controller.plays.values())[:2]))
                play.fail(500, "it crashed", error_type="internal_error")

        scene.controller.script = script
        body = {"input": [[50] * 7, [50] * 5, [50] * 3]}
        reply = await scene.http.post("/v1/embeddings", json=body, headers=bearer("alice"))
        assert reply.status_code == 500
        metrics = (await scene.http.get("/metrics", headers=bearer("alice"))).text
        assert 'mmrt_api_key_tokens_total{key="alice",kind="prompt"} 12.0' in metrics
        assert {play.spec.salt for play in scene.controller.plays.values()} != {b""}

    stage.run(test)
