"""Streams of chat completions that go on without their clients, and are read again from any byte on."""

import asyncio
import json
import os
import signal
from typing import Any

import httpx2
import openai
import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st

from mmrt.actors.gateway.apis import background, reading_along
from mmrt.actors.gateway.apis.resumable import ChatState, ResumableStream, numbered
from mmrt.actors.gateway.keeping import kept_answers
from mmrt.shm.kept_records import KeptRecords
from mmrt.tests.actors.gateway.test_background import held

NAMED = {"X-Conversation-Id": "chat-1"}
STREAM = {"stream": True, "stream_options": {"include_usage": True}}


def events_of(text: str) -> list[tuple[int, str]]:
    """Ids and data."""
    found = []
    for event in text.split("\n\n")[:-1]:
        fields = dict(line.split(": ", 1) for line in event.splitlines() if not line.startswith(":"))
        found.append((int(fields["id"]), fields["data"]))
    return found


def said(events: list[tuple[int, str]], index: int = 0) -> str:
    chunks = [json.loads(data) for _, data in events if data != "[DONE]"]
    return "".join(choice["delta"].get("content") or "" for chunk in chunks for choice in chunk["choices"] if choice["index"] == index)


async def some(scene: Any, body: dict[str, Any], num_events: int, headers: Any = NAMED) -> str:
    """Ask, read so many events, and go."""
    text = ""
    async with scene.http.stream("POST", "/v1/chat/completions", json=body, headers=headers) as response:
        assert response.status_code == 200, await response.aread()
        async for part in response.aiter_text():
            text += part
            if text.count("\n\n") >= num_events:
                return text
    return text


def test_it_goes_on_without_its_client(stage: Any) -> None:
    """From any of its bytes, and behind any of its events, the rest is always the same."""

    async def test(scene: Any) -> None:
        go_on = held(scene, "Hello", ", größer", " 😀")
        first = await some(scene, scene.chat(**STREAM), 3)
        reader = asyncio.create_task(scene.http.get("/v1/stream/chat-1"))
        await asyncio.sleep(0.1)
        taken = await scene.http.post("/v1/chat/completions", json=scene.chat(**STREAM), headers=NAMED)
        assert taken.status_code == 409 and 'the stream "chat-1" is under way' in taken.json()["error"]["message"]
        go_on.set()
        live = (await reader).content
        whole = (await scene.http.get("/v1/stream/chat-1?from=0")).content
        assert live == whole and whole.startswith(first.encode())
        events = events_of(whole.decode())
        assert said(events) == "Hello, größer 😀 end" and events[-1][1] == "[DONE]" and events[-1][0] == len(whole)
        for start in range(0, len(whole) + 1, 7):
            assert (await scene.http.get(f"/v1/stream/chat-1?from={start}")).content == whole[start:]
        for number, (last, _) in enumerate(events):
            rest = await scene.http.get("/v1/stream/chat-1?from=0", headers={"Last-Event-ID": str(last)})
            assert events_of(rest.text) == events[number + 1 :]
        again = await some(scene, scene.chat(**STREAM), 99)
        assert said(events_of(again)) == said(events) and again != whole.decode(), "a new answer takes its place"

    stage.run(test)


def test_several_choices_and_an_error(stage: Any) -> None:
    async def test(scene: Any) -> None:
        async def script(play: Any) -> None:
            play.queue()
            await play.grant()
            play.prepare()
            play.text(f"I am {play.number}", "stop")

        scene.controller.script = script
        events = events_of(await some(scene, scene.chat(**STREAM, n=2), 99))
        assert {said(events, 0), said(events, 1)} == {"I am 0", "I am 1"}

        async def fail(play: Any) -> None:
            play.queue()
            await play.grant()
            play.prepare()
            play.text("Hello")
            await asyncio.sleep(0.1)
            play.fail(500, "the model failed", error_type="internal_error")

        async def fail_at_once(play: Any) -> None:
            play.queue()
            await play.grant()
            play.prepare()
            await asyncio.sleep(0.1)
            play.fail(500, "the model failed", error_type="internal_error")

        async def refuse(play: Any) -> None:
            play.fail(429, "17 requests wait", error_type="overloaded_error")

        scene.controller.script = fail
        text = await some(scene, scene.chat(**STREAM), 99)
        assert "the model failed" in text and (await scene.http.get("/v1/stream/chat-1")).text == text
        scene.controller.script = fail_at_once
        text = await some(scene, scene.chat(**STREAM), 99)
        assert "the model failed" in text and (await scene.http.get("/v1/stream/chat-1")).text == text
        scene.controller.script = refuse
        with pytest.raises(openai.RateLimitError, match="17 requests wait"):
            await scene.client.chat.completions.create(**scene.chat(stream=True), extra_headers=NAMED)
        assert (await scene.http.get("/v1/stream/chat-1")).status_code == 404

    stage.run(test)


def test_a_short_memory_ends_it_by_an_error(stage: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which comes behind what its client has."""

    async def test(scene: Any) -> None:
        go_on = held(scene, "Hello")
        first = await some(scene, scene.chat(**STREAM), 2)
        reader = asyncio.create_task(scene.http.get("/v1/stream/chat-1"))
        await asyncio.sleep(0.1)
        monkeypatch.setattr(kept_answers, "MAX_LOG_BYTES", 100)
        for answer in scene.controller.plays.values():
            answer.text(", lost")
        text = (await reader).text
        events = events_of(text)
        assert text.startswith(first) and "lost" not in text and "no memory to keep this answer" in events[-2][1]
        assert events[-1] == (len(text.encode()), "[DONE]")
        go_on.set()

    stage.run(test)


def test_what_is_refused(stage: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(scene: Any) -> None:
        for name in ("a b", "x" * 129, "ä/b"):
            refused = await scene.post(scene.chat(stream=True), headers={"X-Conversation-Id": name.encode()})
            assert refused.status_code == 400 and "allowed are 1 to 128 letters" in refused.json()["error"]["message"]
        whole = await scene.post(scene.chat(), headers=NAMED)
        assert whole.status_code == 200 and (await scene.http.get("/v1/stream/chat-1")).status_code == 404, "it was not streamed"
        held(scene, "Hello")
        await some(scene, scene.chat(**STREAM), 2)
        for query, says in (("from=x", "expected the number of a byte"), ("from=99999", "is 99999, the stream has")):
            refused = await scene.http.get(f"/v1/stream/chat-1?{query}")
            assert refused.status_code == 400 and says in refused.json()["error"]["message"]
        monkeypatch.setattr(background, "MAX_UNFINISHED", 1)
        refused = await scene.post(scene.chat(stream=True), headers={"X-Conversation-Id": "another"})
        assert refused.status_code == 429 and "1 answers in the background are under way" in refused.json()["error"]["message"]
        assert (await scene.http.delete("/v1/stream/chat-1")).json() == {"id": "chat-1", "object": "stream", "deleted": True}
        await asyncio.wait_for(list(scene.controller.plays.values())[-1].cancelled.wait(), 5)
        for ask in (scene.http.get, scene.http.delete):
            assert (await ask("/v1/stream/chat-1")).status_code == 404

    stage.run(test)


def test_one_counts_once_against_its_clients_limit(stage: Any) -> None:
    file = stage._run.path / "keys.toml"
    file.write_text('[[key]]\nname = "one"\nkey = "one-key-of-sixteen"\nmax_requests = 2\n')
    file.chmod(0o600)
    stage.configure("server", api_keys_file=str(file))

    async def test(scene: Any) -> None:
        go_on, key = held(scene, "Hello"), {"Authorization": "Bearer one-key-of-sixteen"}

        def ask(name: str) -> Any:
            return scene.http.post("/v1/chat/completions", json=scene.chat(**STREAM), headers={**key, "X-Conversation-Id": name})

        readers = []
        for number, name in enumerate(("a", "b"), 1):
            readers.append(asyncio.create_task(ask(name)))
            await scene.until(lambda number=number: len(scene.controller.plays) == number)
        assert (await ask("c")).status_code == 429
        go_on.set()
        assert [(await reader).status_code for reader in readers] == [200, 200]
        assert (await ask("c")).status_code == 200

    stage.run(test)


def test_who_waits_long_gets_signs_of_life_and_then_the_error(stage: Any) -> None:
    stage.configure("server", keep_alive_s=0.1)

    async def test(scene: Any) -> None:
        async def script(play: Any) -> None:
            play.queue()
            await asyncio.sleep(0.5)
            play.fail(503, "no decode serves", error_type="overloaded_error")

        scene.controller.script = script
        async with scene.http.stream("POST", "/v1/chat/completions", json=scene.chat(**STREAM), headers=NAMED) as response:
            assert response.status_code == 200
            text = (await response.aread()).decode()
        assert text.startswith(": keep-alive") and "no decode serves" in events_of(text)[0][1]
        assert (await scene.http.get("/v1/stream/chat-1")).text == text.replace(": keep-alive\n", "")

    stage.run(test)


def test_a_tenant_has_its_own(stage: Any) -> None:
    keys = "one-key-of-sixteen", "two-key-of-sixteen"
    file = stage._run.path / "keys.toml"
    file.write_text("".join(f'[[key]]\nname = "k{at}"\nkey = "{key}"\ncache_salt = "s{at}"\n' for at, key in enumerate(keys)))
    file.chmod(0o600)
    stage.configure("server", api_keys_file=str(file))

    async def test(scene: Any) -> None:
        one, two = ({"Authorization": f"Bearer {key}", **NAMED} for key in keys)
        text = await some(scene, scene.chat(**STREAM), 99, headers=one)
        assert (await scene.http.get("/v1/stream/chat-1", headers=one)).text == text
        for ask in (scene.http.get, scene.http.delete):
            assert (await ask("/v1/stream/chat-1", headers=two)).status_code == 404
        other = await some(scene, scene.chat(**STREAM), 99, headers=two)
        assert (await scene.http.get("/v1/stream/chat-1", headers=one)).text == text != other

    stage.run(test)


def test_another_gateway_goes_on(stage: Any) -> None:
    stage.answers_fd = KeptRecords.create()
    known: dict[str, Any] = {}
    texts = ["Hello", ", größer", " 😀"]

    async def before(scene: Any) -> None:
        held(scene, *texts)
        known["first"] = await some(scene, scene.chat(**STREAM), 3)
        known["play"] = scene.controller.play
        os.kill(os.getpid(), signal.SIGUSR1)  # a successor is ready
        await scene.until(lambda: scene.actor.ending)

    async def script(play: Any) -> None:
        play.go_on = asyncio.Event()
        play.queue()
        await play.grant()
        play.prepare()
        play.text("".join(texts))
        await play.go_on.wait()
        play.text(" end", "stop")

    async def after(scene: Any) -> None:
        await scene.until(lambda: scene.controller.plays)
        assert scene.controller.play.key == known["play"].key
        await scene.until(lambda: scene.actor.has_adopted)
        reader = asyncio.create_task(scene.http.get("/v1/stream/chat-1"))
        await asyncio.sleep(0.1)
        scene.controller.play.go_on.set()
        text = (await reader).text
        assert text.startswith(known["first"])
        assert said(events_of(text)) == "".join(texts) + " end" and events_of(text)[-1] == (len(text.encode()), "[DONE]")

    stage.run(before)
    stage.script = script
    stage.run(after)
    os.close(stage.answers_fd)


def test_who_reads_much_of_one_has_time_for_each_part(stage: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The time to read runs for what is written at once, so that is bounded."""
    sizes: list[int] = []
    write = web.StreamResponse.write

    async def spied(response: web.StreamResponse, data: Any) -> None:
        sizes.append(len(data))
        await write(response, data)

    async def test(scene: Any) -> None:
        held(scene, *["x" * 500_000] * 3).set()
        whole = await some(scene, scene.chat(**STREAM), 99)
        assert said(events_of(whole)) == "x" * 1_500_000 + " end", "which was written in parts, too"
        monkeypatch.setattr(web.StreamResponse, "write", spied)
        assert (await scene.http.get("/v1/stream/chat-1")).text == whole

    stage.run(test)
    assert sum(sizes) > 1_500_000 and max(sizes) == reading_along.WRITE_BYTES


def test_each_choice_is_known_by_its_own_answer() -> None:
    """The controller may have died between two Submits of one stream."""
    state, known = ChatState("chatcmpl-1", [7, 8]), list[int]()
    stream = ResumableStream(None, None, state, b"", lambda *_: True, None)  # type: ignore[arg-type]
    stream.on_known = known.append
    for number, expected in ((1, [8]), (0, [8, 7])):
        key, keeping = stream.request(number)
        assert key == expected[-1] and keeping is not None
        keeping.on_known()
        assert known == expected


def test_who_reads_one_that_is_left_to_another_gateway_is_reset(stage: Any) -> None:
    """Where connections end with their gateway: it would wait for its readers, and its successor for it."""

    async def test(scene: Any) -> None:
        held(scene, "Hello")
        readers = [asyncio.create_task(scene.post(scene.chat(**STREAM), headers=NAMED))]
        await scene.until(lambda: scene.controller.plays)
        asked = {"model": "tiny", "input": "hi", "background": True, "stream": True}
        readers.append(asyncio.create_task(scene.http.post("/v1/responses", json=asked)))
        await scene.until(lambda: len(scene.controller.plays) == 2)
        await asyncio.sleep(0.2)
        os.kill(os.getpid(), signal.SIGUSR1)
        for reader in readers:
            with pytest.raises(httpx2.TransportError):
                await asyncio.wait_for(reader, 3)

    stage.run(test)


@given(st.integers(0, 2000), st.integers(0, 2000))
def test_an_id_is_the_number_of_the_byte_behind_its_event(at: int, length: int) -> None:
    event = numbered(b"data: " + b"x" * length + b"\n\n", at)
    assert int(event.split(b"\n")[0].removeprefix(b"id: ")) == at + len(event)
