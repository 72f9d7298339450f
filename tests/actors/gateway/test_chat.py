"""What OpenAI's own client sees of answers, streams, errors and usage."""

import asyncio
import base64
import json
import socket
from collections.abc import Awaitable, Callable
from typing import Any

import openai
import pytest
from aiohttp import web

from mmrt.actors.gateway import serve as serving
from mmrt.actors.gateway.answers import client_request
from mmrt.actors.gateway.apis import streams as streams_module
from mmrt.runtime.bus.messages import Cancel, Delivered, Filled, Query, Submit
from mmrt.runtime.process.listening import open_listeners

TEXT = "Hello, größer 😀 world"


def user(content: Any = "hi") -> list[Any]:
    return [{"role": "user", "content": content}]


def test_an_answer(stage: Any) -> None:
    async def test(scene: Any) -> None:
        extra = {"priority": -4}
        answer = await scene.client.chat.completions.create(
            model="tiny", messages=user(), max_tokens=9, temperature=0, extra_body=extra
        )
        (choice,) = answer.choices
        assert (choice.message.content, choice.message.role, choice.finish_reason) == (TEXT, "assistant", "stop")
        spec = scene.controller.play.spec
        usage = answer.usage
        assert usage.prompt_tokens == len(spec.prompt_ids)
        assert usage.completion_tokens == scene.controller.play.num_tokens == 5
        assert usage.total_tokens == usage.prompt_tokens + 5
        assert answer.id == spec.generation.request_id and answer.model == "tiny" and answer.system_fingerprint
        assert (spec.max_new_tokens, spec.generation.sampling.temperature, spec.priority) == (9, 0.0, -4)
        await scene.until(scene.controller.play.delivered.is_set)

    stage.run(test)


@pytest.mark.parametrize("is_chat", [True, False])
@pytest.mark.parametrize("cached", [0, 48])
def test_usage_says_how_many_prompt_tokens_were_cached(stage: Any, is_chat: bool, cached: int) -> None:
    """The controller says it when it gives pages, some time after it has said that the request fits. The answer, which takes another
    way, comes before that."""

    async def test(scene: Any) -> None:
        async def script(play: Any) -> None:
            play.prepare(77, -1)
            await play.grant()
            num_queries = scene.controller.count(Query)
            play.text("a b", "stop")
            await scene.until(lambda: scene.controller.count(Query) > num_queries)
            play.prepare(77, cached)

        scene.controller.script = script
        create = scene.client.chat.completions.create if is_chat else scene.client.completions.create
        asked = {"messages": user()} if is_chat else {"prompt": "hi"}
        answer = await create(model="tiny", **asked)
        assert (answer.usage.prompt_tokens, answer.usage.prompt_tokens_details.cached_tokens) == (77, cached)
        stream = await create(model="tiny", stream=True, stream_options={"include_usage": True}, **asked)
        chunks = [chunk async for chunk in stream]
        usage = chunks[-1].usage
        assert (usage.prompt_tokens, usage.completion_tokens, usage.prompt_tokens_details.cached_tokens) == (77, 2, cached)

    stage.run(test)


def test_openai_s_client_sends_what_changes_nothing(stage: Any) -> None:
    async def test(scene: Any) -> None:
        picture = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA", "detail": "original"}}
        answer = await scene.client.chat.completions.create(
            model="tiny",
            messages=user([picture, {"type": "text", "text": "hi"}]),
            prompt_cache_key="k",
            prompt_cache_retention="24h",
            reasoning_effort="minimal",
            verbosity="low",
            tools=[{"type": "function", "function": {"name": "f", "parameters": {}}}],
            tool_choice="none",
            extra_body={"chat_template_kwargs": {"enable_thinking": False}},
        )
        assert answer.choices[0].finish_reason == "stop"

    stage.run(test)


@pytest.mark.parametrize("options", [None, {"include_usage": True}, {"include_usage": True, "continuous_usage_stats": True}])
def test_a_stream(stage: Any, options: dict[str, bool] | None) -> None:
    async def test(scene: Any) -> None:
        more = {"stream_options": options} if options else {}
        stream = await scene.client.chat.completions.create(model="tiny", messages=user(), stream=True, **more)
        chunks = [chunk async for chunk in stream]
        choices = [chunk.choices[0] for chunk in chunks if chunk.choices]
        assert "".join(choice.delta.content or "" for choice in choices) == TEXT
        assert [choice.delta.role for choice in choices] == ["assistant"] + [None] * (len(choices) - 1)
        assert [choice.finish_reason for choice in choices] == [None] * (len(choices) - 1) + ["stop"]
        assert len({(chunk.id, chunk.created, chunk.model, chunk.system_fingerprint) for chunk in chunks}) == 1
        if options:
            assert chunks[-1].choices == [] and chunks[-1].usage.completion_tokens == 5
            continuous = "continuous_usage_stats" in options
            assert all((chunk.usage is not None) is continuous for chunk in chunks[:-1])
        else:
            assert all(chunk.usage is None for chunk in chunks)

    stage.run(test)


def test_the_wire_format_of_a_stream(stage: Any) -> None:
    async def test(scene: Any) -> None:
        response = await scene.post(scene.chat(stream=True, stream_options={"include_usage": True}))
        assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
        assert response.headers["server"] == "mmrt"
        events = response.text.split("\n\n")
        assert events[-2:] == ["data: [DONE]", ""]
        chunks = [json.loads(event.removeprefix("data: ")) for event in events[:-2]]
        assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
        assert chunks[0]["choices"] == [
            {"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
        ]
        assert [chunk["usage"] for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)

    stage.run(test)


def test_media_reach_their_pages(stage: Any) -> None:
    image, sound = bytes(range(256)) * 40, b"RIFF" * 2000
    content = [
        {"type": "text", "text": "what is"},
        {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{base64.b64encode(image).decode()}"}},
        {"type": "input_audio", "input_audio": {"data": base64.b64encode(sound).decode(), "format": "wav"}},
    ]
    found: list[bytes] = []

    async def script(play: Any) -> None:
        found.extend(await play.grant())
        play.prepare(1000)
        play.text("a cat", "length")

    async def test(scene: Any) -> None:
        scene.controller.script = script
        answer = await scene.client.chat.completions.create(model="tiny", messages=user(content))
        assert answer.choices[0].finish_reason == "length"
        assert answer.usage.prompt_tokens == 1000
        assert found == [image, sound]
        spec = scene.controller.play.spec
        assert [(item.kind, item.num_bytes, item.mime) for item in spec.items] == [
            ("image", len(image), "image/png"),
            ("audio", len(sound), "audio/wav"),
        ]
        assert [id for id in spec.prompt_ids if id in (2, 3, 4)] == [2, 4]

    stage.run(test)


def test_guidance_makes_a_companion(stage: Any) -> None:
    async def test(scene: Any) -> None:
        extra = {"guidance_scale": 3.0, "negative_prompt": "blurry"}
        await scene.client.chat.completions.create(model="tiny", messages=user(), extra_body=extra)
        spec = scene.controller.play.spec
        assert spec.generation.sampling.guidance_scale == 3.0
        assert spec.companion_ids is not None and spec.companion_ids != spec.prompt_ids

    stage.run(test)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("status", "kind"),
    [(400, openai.BadRequestError), (429, openai.RateLimitError), (503, openai.InternalServerError)],
)
def test_a_refusal_before_the_text_is_an_http_status(stage: Any, stream: bool, status: int, kind: type[Exception]) -> None:
    async def script(play: Any) -> None:
        play.queue()
        play.fail(status, "no room", param="messages", retry_after_s=3 if status == 503 else None)

    async def test(scene: Any) -> None:
        scene.controller.script = script
        with pytest.raises(kind) as caught:
            await scene.client.chat.completions.create(model="tiny", messages=user(), stream=stream)
        error: Any = caught.value
        assert error.body == {"message": "no room", "type": "invalid_request_error", "param": "messages", "code": status}
        assert error.response.headers.get("Retry-After") == {400: None, 429: "1", 503: "3"}[status]
        await scene.until(scene.controller.play.delivered.is_set)

    stage.run(test)


def test_a_failure_in_mid_stream_is_an_error_event_and_done(stage: Any) -> None:
    seen = asyncio.Event()

    async def script(play: Any) -> None:
        await play.grant()
        play.prepare()
        play.text("Hel")
        await seen.wait()
        play.fail(500, "the model failed", error_type="internal_error")

    async def test(scene: Any) -> None:
        scene.controller.script = script
        text = ""
        with pytest.raises(openai.APIError, match="the model failed"):
            async for chunk in await scene.client.chat.completions.create(model="tiny", messages=user(), stream=True):
                text += chunk.choices[0].delta.content or ""
                if text:
                    seen.set()
        assert text == "Hel"
        seen.clear()
        received = ""
        async with scene.http.stream("POST", "/v1/chat/completions", json=scene.chat(stream=True)) as response:
            assert response.status_code == 200
            async for part in response.aiter_text():
                received += part
                if "Hel" in received:
                    seen.set()
        *_, error, done, end = received.split("\n\n")
        assert json.loads(error.removeprefix("data: "))["error"]["code"] == 500
        assert (done, end) == ("data: [DONE]", "")

    stage.run(test)


@pytest.mark.parametrize(("finish", "code"), [("error", 500), ("grammar", 400)])
def test_an_error_of_decode_is_an_error_event(stage: Any, finish: str, code: int) -> None:
    async def script(play: Any) -> None:
        await play.grant()
        play.prepare()
        play.text("Hel")
        play.text("", finish)

    async def test(scene: Any) -> None:
        scene.controller.script = script
        for stream in (False, True):
            assert f'"code":{code}' in (await scene.post(scene.chat(stream=stream))).text

    stage.run(test)


def test_headers_and_keep_alive_while_nothing_happens(stage: Any) -> None:
    """In the queue nothing is sent until keep_alive_s; from then on the client sees signs of life, and errors are events."""
    stage.configure("server", keep_alive_s=0.05)
    go = asyncio.Event()

    async def script(play: Any) -> None:
        play.queue()
        await go.wait()
        play.fail(503, "no room after all")

    async def test(scene: Any) -> None:
        scene.controller.script = script
        async with scene.http.stream("POST", "/v1/chat/completions", json=scene.chat(stream=True)) as response:
            assert response.status_code == 200
            received = ""
            async for text in response.aiter_text():
                received += text
                if received.count(": keep-alive\n") == 2:
                    go.set()
        assert '"code":503' in received and received.endswith("data: [DONE]\n\n")

    stage.run(test)


@pytest.fixture
def writes(monkeypatch: pytest.MonkeyPatch) -> Callable[[bytes], Awaitable[None]]:
    """Waits for the next piece of a stream with these bytes in it."""
    seen: asyncio.Queue[bytes] = asyncio.Queue()
    write = web.StreamResponse.write

    def noted(response: web.StreamResponse, data: bytes) -> Awaitable[None]:
        seen.put_nowait(data)
        return write(response, data)

    async def wait(part: bytes) -> None:
        while part not in await seen.get():
            pass

    monkeypatch.setattr(web.StreamResponse, "write", noted)
    return wait


def test_a_comment_is_no_event_for_sloppy_readers(stage: Any, writes: Callable[[bytes], Awaitable[None]]) -> None:
    """Some take every empty line for the end of an event, and end a stream at one without data. Ollama's lines have no comments."""
    stage.configure("server", keep_alive_s=0.02)

    async def script(play: Any) -> None:
        for _ in range(2):
            await writes(b": keep-alive")
        await play.grant()
        play.prepare()
        play.text("some")
        await writes(b": keep-alive")
        play.text(" more", "stop")

    async def test(scene: Any) -> None:
        scene.controller.script = script
        for path, body in (
            ("/v1/chat/completions", scene.chat(stream=True)),
            ("/v1/completions", {"prompt": "hi", "stream": True}),
            ("/v1/responses", {"input": "hi", "stream": True}),
        ):
            received = (await scene.http.post(path, json=body)).text
            blocks = received.removesuffix("\n\n").split("\n\n")
            assert received.count(": keep-alive\n") >= 3
            assert all(sum(line.startswith("data: ") for line in block.split("\n")) == 1 for block in blocks), received

    stage.run(test)


def test_openai_s_client_streams_over_keep_alives(stage: Any, writes: Callable[[bytes], Awaitable[None]]) -> None:
    stage.configure("server", keep_alive_s=0.02)

    async def script(play: Any) -> None:
        await writes(b"keep-alive")
        await play.grant()
        play.prepare()
        await writes(b"keep-alive")
        play.text("late", "stop")

    async def test(scene: Any) -> None:
        scene.controller.script = script
        stream = await scene.client.chat.completions.create(model="tiny", messages=user(), stream=True)
        assert "".join([chunk.choices[0].delta.content or "" async for chunk in stream]) == "late"

    stage.run(test)


@pytest.mark.parametrize("stream", [False, True])
def test_token_ids_on_demand(stage: Any, stream: bool) -> None:
    async def test(scene: Any) -> None:
        answer = await scene.post(scene.chat(stream=stream, return_token_ids=True))
        if stream:
            events = [json.loads(event[6:]) for event in answer.text.split("\n\n")[:-2]]
            ids = [id for event in events for id in event["choices"][0].get("token_ids") or []]
        else:
            ids = answer.json()["choices"][0]["token_ids"]
        assert ids == [0, 1, 2, 3, 4]
        scene.controller.plays.clear()
        assert "token_ids" not in (await scene.post(scene.chat(stream=stream))).text

    stage.run(test)


async def hang(play: Any) -> None:
    play.queue()
    await asyncio.Event().wait()


async def hang_in_text(play: Any) -> None:
    await play.grant()
    play.prepare()
    play.text("some text")
    await asyncio.Event().wait()


@pytest.mark.parametrize("script", [hang, hang_in_text])
@pytest.mark.parametrize("stream", [False, True])
def test_a_disconnect_cancels(stage: Any, stream: bool, script: Any) -> None:
    async def test(scene: Any) -> None:
        scene.controller.script = script
        reader, writer = await scene.connect()
        body = json.dumps(scene.chat(stream=stream)).encode()
        writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        play = await scene.controller.first_play()
        if script is hang_in_text and stream:
            await reader.readuntil(b"some text")
        writer.transport.abort()
        await scene.until(play.cancelled.is_set)

    stage.run(test)


@pytest.mark.parametrize("stream", [False, True])
def test_the_deadline_ends_a_request(stage: Any, stream: bool) -> None:
    stage.configure("server", request_timeout_s=2)  # the text must come within it

    async def test(scene: Any) -> None:
        scene.controller.script = hang_in_text
        response = await scene.post(scene.chat(stream=stream))
        assert response.status_code == (200 if stream else 504)
        assert "server.request_timeout_s" in response.text
        assert not stream or response.text.endswith("data: [DONE]\n\n")
        assert stream or response.headers["X-Should-Retry"] == "false"
        await scene.until(scene.controller.play.cancelled.is_set)

    stage.run(test)


def test_a_client_that_does_not_read_is_dropped(stage: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    async def flood(play: Any) -> None:
        await play.grant()
        play.prepare()
        while True:
            play.text("x" * 60_000)
            await asyncio.sleep(0.001)

    async def test(scene: Any) -> None:
        scene.controller.script = flood
        monkeypatch.setattr(client_request, "MAX_PENDING_BYTES", 100_000)
        reader, writer = await scene.connect(receive_bytes=4096)
        body = json.dumps(scene.chat(stream=True)).encode()
        writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        writer.transport.pause_reading()
        play = await scene.controller.first_play()
        await scene.until(play.cancelled.is_set)
        writer.transport.resume_reading()
        with pytest.raises(ConnectionResetError):
            while await reader.read(1 << 16):
                pass
        writer.close()

    stage.run(test)


def test_a_client_that_does_not_read_the_end_is_dropped(
    stage: Any, writes: Callable[[bytes], Awaitable[None]], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its whole answer is written, and stands in buffers: more than the kernel takes, less than makes a write wait."""
    monkeypatch.setattr(streams_module, "SLOW_READER_S", 0.2)

    async def script(play: Any) -> None:
        await play.grant()
        play.prepare()
        for num_chars, finish in ((60_000, None), (10_000, None), (20_000, "stop")):
            play.text("x" * num_chars, finish)
            await writes(b"xxx")  # each is written apart; together they would make a write wait, which is another case

    async def test(scene: Any) -> None:
        scene.controller.script = script
        reader, writer = await scene.connect(receive_bytes=4096)
        body = json.dumps(scene.chat(stream=True)).encode()
        writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        writer.transport.pause_reading()
        await scene.until(lambda: "reads too slowly" in caplog.text)
        writer.transport.resume_reading()
        with pytest.raises(ConnectionResetError):
            while await reader.read(1 << 16):
                pass
        writer.close()

    def little_room(*address: Any) -> list[socket.socket]:
        listeners = open_listeners(*address)
        for listener in listeners:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        return listeners

    monkeypatch.setattr(serving, "open_listeners", little_room)
    caplog.set_level("INFO")
    stage.run(test)


def test_every_chunk_counts_the_media(stage: Any) -> None:
    """Though headers go out before they are known; and the role comes with the first text, where clients take the time of it."""
    stage.configure("server", keep_alive_s=0.5)
    waited = [asyncio.Event(), asyncio.Event()]

    async def script(play: Any) -> None:
        play.queue()
        await waited[0].wait()
        play.prepare(77)
        await waited[1].wait()  # it has arrived by then: text takes another way, and would overtake it
        play.text("a", "stop")

    async def test(scene: Any) -> None:
        scene.controller.script = script
        options = {"include_usage": True, "continuous_usage_stats": True}
        async with scene.http.stream("POST", "/v1/chat/completions", json=scene.chat(stream=True, stream_options=options)) as response:
            received = ""
            async for text in response.aiter_text():
                received += text
                if ": keep-alive" in text:
                    assert "data:" not in received
                    waited[waited[0].is_set()].set()
        chunks = [json.loads(line.removeprefix("data: ")) for line in received.splitlines() if line.startswith("data: {")]
        assert {chunk["usage"]["prompt_tokens"] for chunk in chunks} == {77}
        assert chunks[0]["choices"][0]["delta"]["role"] == "assistant"

    stage.run(test)


@pytest.mark.parametrize("field", ["max_tokens", "max_completion_tokens"])
def test_an_error_names_the_field_that_was_sent(stage: Any, field: str) -> None:
    async def script(play: Any) -> None:
        play.fail(400, "max_tokens: is 2000, the context has room for 9", param="max_tokens")

    async def test(scene: Any) -> None:
        scene.controller.script = script
        for stream in (False, True):
            error = (await scene.post(scene.chat(stream=stream, **{field: 2000}))).json()["error"]
            assert (error["param"], error["message"]) == (field, f"{field}: is 2000, the context has room for 9")

    stage.run(test)


def test_repeated_and_overlapping_deltas_change_nothing(stage: Any) -> None:
    """As after a restart of the detokenizer in mid-stream, and with an end that is sent twice."""

    async def script(play: Any) -> None:
        await play.grant()
        play.prepare()
        play.text("Hello", num_tokens=1)
        play.text(", größ", num_tokens=1)
        play.offset = play.num_tokens = 0
        play.text("Hello, größer 😀", num_tokens=4)
        play.text(" world", "stop", num_tokens=1)
        play.offset = play.num_tokens = 0
        play.text(TEXT, "stop", num_tokens=5)

    async def test(scene: Any) -> None:
        scene.controller.script = script
        for stream in (False, True):
            scene.controller.plays.clear()
            response = await scene.post(scene.chat(stream=stream))
            if stream:
                events = [json.loads(event[6:]) for event in response.text.split("\n\n")[:-2]]
                text = "".join(event["choices"][0]["delta"].get("content", "") for event in events)
            else:
                text = response.json()["choices"][0]["message"]["content"]
                assert response.json()["usage"]["completion_tokens"] == 5
            assert text == TEXT

    stage.run(test)


def test_many_requests_over_a_bus_that_loses_messages(stage: Any, lossy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_request, "RESEND_S", 0.02)
    monkeypatch.setattr(client_request, "MAX_RESEND_S", 0.04)
    monkeypatch.setattr(client_request, "QUERY_S", 0.05)

    async def test(scene: Any) -> None:
        scene.controller.loses = lossy
        responses = await asyncio.gather(*(scene.post(scene.chat(f"number {i}", stream=i % 2 == 0)) for i in range(24)))
        assert all(response.status_code == 200 and "größer" in response.text for response in responses)
        for kind in (Submit, Filled, Query, Delivered):
            assert scene.controller.count(kind)
        assert scene.controller.count(Cancel) == 0
        assert len(scene.controller.plays) == 24

    stage.run(test)


def test_the_controller_may_be_away_for_a_while(stage: Any) -> None:
    async def test(scene: Any) -> None:
        sent = asyncio.Event()

        def send(message: Any) -> Any:
            sent.set()
            return scene.actor.bus.hold(message)

        scene.actor.hold = send
        scene.controller.stop()
        waiting = asyncio.create_task(scene.post(scene.chat()))
        await sent.wait()
        scene.controller.start()
        assert (await waiting).status_code == 200

    stage.run(test)


def test_a_request_that_the_controller_has_lost_is_an_error(stage: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_request, "QUERY_S", 0.05)

    async def test(scene: Any) -> None:
        scene.controller.script = hang
        waiting = asyncio.create_task(scene.post(scene.chat()))
        await scene.controller.first_play()
        await scene.until(lambda: scene.controller.count(Submit) > 0)
        scene.controller.plays.clear()
        response = await waiting
        assert response.status_code == 500 and "lost" in response.json()["error"]["message"]
        assert response.headers["Retry-After"] == "1" and "X-Should-Retry" not in response.headers

    stage.run(test)
