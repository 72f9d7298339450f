"""Anthropic's Messages API as its own client sees it: bodies, answers, events, errors."""

import asyncio
import base64
import json
from typing import Any

import msgspec
import pytest

from mmrt.actors.gateway.apis.anthropic.messages import read_count, read_message
from mmrt.actors.gateway.reading.content import MediaPart, Message
from mmrt.actors.gateway.reading.ignored import collecting
from mmrt.actors.gateway.reading.prompt import PromptBuilder
from mmrt.actors.gateway.reading.template_fields import TemplateUse
from mmrt.actors.gateway.reading.thinking import Thinking
from mmrt.actors.gateway.reading.validation import ChatRequest, Limits
from mmrt.models.grammar.source import source_of_schema
from mmrt.models.media_config import VisionRules
from mmrt.runtime.errors import RequestError
from mmrt.tests.actors.gateway.description import check_described
from mmrt.tests.settings import ImportedLater

anthropic: Any = ImportedLater("anthropic")
TEXT = "Hello, größer 😀 world"
PNG = base64.b64encode(b"\x89PNG\r\n\x1a\n" + bytes(30)).decode()
USER = {"role": "user", "content": "hi"}
IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": PNG}}


def read(limits: Limits, **fields: Any) -> ChatRequest:
    body = json.dumps({"model": "tiny", "max_tokens": 9, "messages": [USER], **fields}).encode()
    asked = read_message(body, limits)
    check_described("/v1/messages", body, limits)
    return asked


def client_of(scene: Any, **more: Any) -> Any:
    plain = anthropic.DefaultAsyncHttpxClient(verify=False)
    return anthropic.AsyncAnthropic(base_url=scene.url, api_key="none", max_retries=0, timeout=20, http_client=plain, **more)


def test_an_answer(stage: Any) -> None:
    async def test(scene: Any) -> None:
        async def script(play: Any) -> None:
            play.prepare(num_prompt_tokens=20, num_cached_tokens=16)
            play.text("Hello", "stop")

        scene.controller.script = script
        async with client_of(scene) as client:
            extra = {"temperature": 0.5, "top_k": 3}  # of which the client's newest version has no arguments
            asked: Any = {"model": "tiny", "max_tokens": 32_000, "messages": [USER], "system": "Be brief."}
            answer = await client.messages.create(**asked, extra_body=extra)
        assert [block.model_dump(exclude_none=True) for block in answer.content] == [{"type": "text", "text": "Hello"}]
        assert (answer.role, answer.model, answer.stop_reason, answer.stop_sequence) == ("assistant", "tiny", "end_turn", None)
        usage = answer.usage
        assert (usage.input_tokens, usage.cache_read_input_tokens, usage.output_tokens) == (4, 16, 1)
        spec = scene.controller.play.spec
        assert answer.id == spec.generation.request_id and answer.id.startswith("msg_")
        assert (spec.max_new_tokens, spec.clamp_max_new_tokens) == (32_000, True), "more than the context"
        assert (spec.generation.sampling.temperature, spec.generation.sampling.top_k) == (0.5, 3)

    stage.run(test)


def test_a_stream(stage: Any) -> None:
    async def test(scene: Any) -> None:
        async with client_of(scene) as client:
            events = [event async for event in await client.messages.create(model="tiny", max_tokens=9, messages=[USER], stream=True)]
            async with client.messages.stream(model="tiny", max_tokens=9, messages=[USER]) as stream:
                text = "".join([text async for text in stream.text_stream])
                message = await stream.get_final_message()
        kinds = [event.type for event in events]
        deltas = [event for event in events if event.type == "content_block_delta"]
        ends = ["content_block_stop", "message_delta", "message_stop"]
        assert kinds == ["message_start", "content_block_start", *["content_block_delta"] * len(deltas), *ends]
        assert "".join(event.delta.text for event in deltas) == TEXT == text == message.content[0].text
        start, end = events[0].message, events[-2]
        assert start.stop_reason is None and start.content == [] and start.usage.output_tokens == 0 < start.usage.input_tokens
        assert (end.delta.stop_reason, end.usage.output_tokens) == ("end_turn", 5)
        assert message.stop_reason == "end_turn" and message.usage.output_tokens == 5

    stage.run(test)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("finish", "num_tokens", "stop", "expected"),
    [
        ("length", 9, "", ("max_tokens", None)),
        ("length", 8, "", ("model_context_window_exceeded", None)),
        ("stop", 1, "END", ("stop_sequence", "END")),
    ],
)
def test_the_reason_of_the_end(
    stage: Any, stream: bool, finish: Any, num_tokens: int, stop: str, expected: tuple[str, str | None]
) -> None:
    async def test(scene: Any) -> None:
        async def script(play: Any) -> None:
            play.prepare()
            play.text("Hello", finish, num_tokens, stop=stop)

        scene.controller.script = script
        async with client_of(scene) as client:
            asked: Any = {"model": "tiny", "max_tokens": 9, "messages": [USER], "stop_sequences": ["END", "\n"]}
            if stream:
                async with client.messages.stream(**asked) as events:
                    answer: Any = await events.get_final_message()
            else:
                answer = await client.messages.create(**asked)
        assert (answer.stop_reason, answer.stop_sequence, answer.content[0].text) == (*expected, "Hello")
        assert scene.controller.play.spec.generation.stop == ["END", "\n"]

    stage.run(test)


def test_a_failure_in_mid_stream_is_an_error_event(stage: Any) -> None:
    async def test(scene: Any) -> None:
        async def script(play: Any) -> None:
            play.prepare()
            play.text("Hello")
            await asyncio.sleep(0.05)
            play.fail(500, "a stage died", error_type="internal_error")

        scene.controller.script = script
        async with client_of(scene) as client:
            stream = await client.messages.create(model="tiny", max_tokens=9, messages=[USER], stream=True)
            with pytest.raises(anthropic.APIStatusError) as caught:
                async for _ in stream:
                    pass
        assert caught.value.body == {"type": "error", "error": {"type": "api_error", "message": "a stage died"}}

    stage.run(test)


def test_models_and_ids_of_requests(stage: Any) -> None:
    async def test(scene: Any) -> None:
        async with client_of(scene) as client:
            (model,) = [model async for model in client.models.list()]
            assert model == await client.models.retrieve("tiny")
            assert (model.id, model.display_name, model.type, model.lifecycle) == ("tiny", "tiny", "model", "active")
            assert model.max_input_tokens == 2048 and model.created_at.tzinfo is not None
            with pytest.raises(anthropic.NotFoundError):
                await client.models.retrieve("other")
            answer = await client.messages.create(model="tiny", max_tokens=9, messages=[USER])
            assert answer._request_id == answer.id
            with pytest.raises(anthropic.BadRequestError) as caught:
                await client.messages.create(model="tiny", max_tokens=0, messages=[USER])
            assert caught.value.request_id is not None and caught.value.request_id.startswith("req-")
        assert (await scene.http.get("/v1/models")).json()["object"] == "list", "OpenAI's, for other clients"

    stage.run(test)


def test_a_stream_that_waits_is_kept_alive(stage: Any) -> None:
    stage.configure("server", keep_alive_s=0.1)

    async def test(scene: Any) -> None:
        async def script(play: Any) -> None:
            await asyncio.sleep(0.3)
            play.prepare()
            play.text("Hello", "stop")

        scene.controller.script = script
        answer = await scene.http.post("/v1/messages", json={"max_tokens": 9, "messages": [USER], "stream": True})
        assert answer.text.startswith('event: ping\ndata: {"type":"ping"}\n\n') and answer.text.endswith('"message_stop"}\n\n')

    stage.run(test)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/messages", {"max_tokens": 9, "messages": [USER], "stream": True}),
        ("/v1/messages/count_tokens", {"messages": [{"role": "user", "content": [IMAGE]}]}),
    ],
)
def test_a_client_that_goes_cancels_its_request(stage: Any, path: str, body: dict[str, Any]) -> None:
    async def test(scene: Any) -> None:
        async def script(play: Any) -> None:
            play.queue()

        scene.controller.script = script
        data = json.dumps(body).encode()
        _, writer = await scene.connect()
        writer.write(f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data)
        play = await scene.controller.first_play()
        writer.transport.abort()
        async with asyncio.timeout(5):
            await play.cancelled.wait()

    stage.run(test)


def test_a_picture_reaches_the_pool(stage: Any) -> None:
    async def test(scene: Any) -> None:
        media = []

        async def script(play: Any) -> None:
            media.extend(await play.grant())
            play.prepare()
            play.text("Red.", "stop")

        scene.controller.script = script
        async with client_of(scene) as client:
            content: Any = [IMAGE, {"type": "text", "text": "What?", "cache_control": {"type": "ephemeral"}}]
            await client.messages.create(model="tiny", max_tokens=9, messages=[{"role": "user", "content": content}])
        assert media == [base64.b64decode(PNG)]

    stage.run(test)


def test_tokens_are_counted_with_those_of_media(stage: Any, prompts: PromptBuilder, limits: Limits) -> None:
    async def test(scene: Any) -> None:
        async def script(play: Any) -> None:
            await play.grant()
            play.prepare(num_prompt_tokens=321)

        scene.controller.script = script
        async with client_of(scene) as client:
            count = await client.messages.count_tokens(model="tiny", messages=[USER], system="Be brief.")
            assert count.input_tokens == len(prompts.build(read(limits, system="Be brief.")).ids)
            assert not scene.controller.plays, "a text needs nobody else"
            content: Any = [IMAGE]
            count = await client.messages.count_tokens(model="tiny", messages=[{"role": "user", "content": content}])
        assert count.input_tokens == 321
        async with asyncio.timeout(5):
            await scene.controller.play.cancelled.wait()

    stage.run(test)


def test_a_refusal_of_a_count_names_the_field(stage: Any) -> None:
    async def test(scene: Any) -> None:
        async def script(play: Any) -> None:
            play.fail(422, "messages[0].content[0].source.data: is broken", param="messages[0].content[0].source.data")

        scene.controller.script = script
        async with client_of(scene) as client:
            with pytest.raises(anthropic.UnprocessableEntityError, match="source.data: is broken"):
                await client.messages.count_tokens(model="tiny", messages=[{"role": "user", "content": [IMAGE]}])  # type: ignore[typeddict-item]

    stage.run(test)


def test_the_key_is_taken_from_either_header(stage: Any) -> None:
    stage.configure("server", api_key="secret")

    async def test(scene: Any) -> None:
        asked: Any = {"model": "tiny", "max_tokens": 9, "messages": [USER]}
        async with client_of(scene) as client:
            with pytest.raises(anthropic.AuthenticationError) as caught:
                await client.messages.create(**asked)
        assert caught.value.body["error"]["type"] == "authentication_error"  # type: ignore[index]
        for key in ("api_key", "auth_token"):
            async with anthropic.AsyncAnthropic(base_url=scene.url, max_retries=0, **{key: "secret"}) as client:  # type: ignore[arg-type]
                assert (await client.messages.create(**asked)).stop_reason == "end_turn"
        both = {"Authorization": "Bearer wrong", "X-Api-Key": "secret"}
        assert (await scene.http.get("/v1/models", headers=both)).status_code == 200
        assert (await scene.http.get("/v1/models", headers={"X-Api-Key": "Bearer secret"})).status_code == 401

    stage.run(test)


def test_errors_have_the_shape_of_the_api(stage: Any) -> None:
    async def test(scene: Any) -> None:
        for path, body, status, kind, says in (
            ("/v1/messages", {"messages": [USER]}, 400, "invalid_request_error", "max_tokens: is required"),
            ("/v1/messages", {"model": "x", "max_tokens": 1, "messages": [USER]}, 404, "not_found_error", 'this server has "tiny"'),
            ("/v1/messages/nothing", {}, 404, "not_found_error", "POST /v1/messages/count_tokens"),
            ("/v1/messages", "a" * (1 << 20), 413, "request_too_large", "the limit is 1048576"),
            ("/v1/messages/count_tokens", {"messages": []}, 400, "invalid_request_error", "messages: is empty"),
        ):
            answer = await scene.http.post(path, json=body)
            error = answer.json()
            assert (answer.status_code, error["type"], error["error"]["type"]) == (status, "error", kind)
            assert says in error["error"]["message"]

    stage.run(test)


def test_what_a_body_becomes(limits: Limits) -> None:
    blocks = [
        {"type": "text", "text": "a"},
        IMAGE,
        {"type": "video", "source": {"type": "url", "url": "data:video/mp4;base64,AAAA"}, "fps": 1},
    ]
    limits = msgspec.structs.replace(limits, vision_rules=VisionRules())
    asked = read(limits, system=[{"type": "text", "text": "S"}], messages=[{"role": "user", "content": blocks}], top_k=3, seed=5)
    assert asked.conversation.messages == (Message("system", ("S",)), Message("user", ("a", MediaPart("image"), MediaPart("video"))))
    assert [(medium.kind, medium.mime, medium.path) for medium in asked.conversation.media] == [
        ("image", "image/png", "messages[0].content[1].source.data"),
        ("video", "video/mp4", "messages[0].content[2].source.url"),
    ]
    assert (asked.generation.sampling.top_k, asked.generation.sampling.seed, asked.template) == (3, 5, TemplateUse())


def test_a_last_message_of_the_assistant_is_continued(limits: Limits, prompts: PromptBuilder) -> None:
    asked = read(limits, messages=[USER, {"role": "assistant", "content": "The fox"}])
    assert asked.template == TemplateUse(opens_answer=False, continues=True)
    assert prompts.text_of(prompts.build(asked).ids).endswith("<|im_start|>assistant\nThe fox")


def test_a_schema_of_the_answer(limits: Limits) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    grammar = read(limits, output_config={"format": {"type": "json_schema", "schema": schema}, "effort": "low"}).generation.grammar
    assert grammar is not None
    assert (grammar.source, grammar.field) == (source_of_schema(schema), "output_config.format.schema")
    with pytest.raises(RequestError, match="response_format: cannot be combined with output_config.format.schema"):
        read(limits, output_config={"format": {"type": "json_schema", "schema": schema}}, response_format={"type": "json_object"})


def test_fields_that_change_nothing(limits: Limits) -> None:
    plain = read(limits, seed=1)
    more = {"thinking": {"type": "adaptive"}, "service_tier": "auto", "tools": [], "tool_choice": {"type": "auto"}}
    more["context_management"] = {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}
    assert read(limits, seed=1, metadata={"user_id": "me"}, cache_control={"type": "ephemeral"}, **more) == plain
    assert read_count(json.dumps({"messages": [USER]}).encode(), limits).conversation == plain.conversation
    assert read(limits, thinking={"type": "disabled"}).template.thinking == Thinking("thinking", False)


def user(*blocks: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": list(blocks)}]}


def image(**source: Any) -> dict[str, Any]:
    return user({"type": "image", "source": source})


@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        ({"max_tokens": None}, "max_tokens", "is required"),
        ({"max_tokens": 0}, "max_tokens", "is 0, allowed are 1 to 2147483647"),
        ({"max_tokens": 1 << 31}, "max_tokens", "is 2147483648, allowed are 1 to 2147483647"),
        ({"temperature": 3}, "temperature", "is 3, allowed are 0 to 2"),
        ({"stop_sequences": ["a"] * 17}, "stop_sequences", "has 17 entries, the limit is 16"),
        ({"stop_sequences": ["a", ""]}, "stop_sequences[1]", "has 0 characters, allowed are 1 to 256"),
        ({"stop": ["a"]}, "stop", "is not supported"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "is not supported"),
        ({"return_token_ids": True}, "return_token_ids", "only false is supported"),
        ({"n": 2}, "n", "is 2, only 1 is supported"),
        ({"container": "x"}, "container", "is not supported"),
        ({"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}}, "context_management", "only {"),
        ({"context_management": {"edits": 5}}, "context_management", "is an object with 1 entry, only"),
        ({"context_management": {"more": 1}}, "context_management", "is an object with 1 entry, only"),
        ({"system": 5}, "system", "expected a string or an array of content blocks, got an integer"),
        ({"system": [IMAGE]}, "system[0]", "only messages of the user and results of calls can hold media"),
        ({"messages": None}, "messages", "is required"),
        ({"messages": [USER] * 2049}, "messages", "prompt is too long: 2049 tokens > 2047 maximum"),
        ({"messages": [{"role": "tool", "content": "a"}]}, "messages[0].role", 'is "tool", allowed are user, assistant, system'),
        ({"messages": [{**USER, "name": "me"}]}, "messages[0].name", "is not supported"),
        ({"messages": [{"role": "assistant", "content": ""}]}, "messages[0].content", "is empty; a last message of the assistant"),
        (user({"type": "text", "text": 1}), "messages[0].content[0].text", "expected a string, got an integer"),
        (
            user({"type": "document"}),
            "messages[0].content[0].type",
            'is "document", allowed are text, image, video, audio, tool_result',
        ),
        (user({"type": "image"}), "messages[0].content[0].source", "is required"),
        (image(type="file"), "messages[0].content[0].source.type", 'is "file", allowed are base64, url'),
        (image(type="url", url="https://a/b.png"), "messages[0].content[0].source.url", "remote media is off"),
        (
            image(type="base64", media_type=f"image/{'x' * 95}", data=PNG),
            "messages[0].content[0].source.media_type",
            "has 101 characters, the limit is 100",
        ),
        (image(type="base64", media_type="image/png", data=5), "messages[0].content[0].source.data", "expected base64 text, got 5"),
        (image(type="base64", media_type="image/png", data="?"), "messages[0].content[0].source.data", "is not valid base64"),
        (user({**IMAGE, "fps": 1}), "messages[0].content[0].fps", "is not supported"),
        ({"output_config": {"format": {"type": "text"}}}, "output_config.format.type", 'is "text", allowed are json_schema'),
        ({"output_config": {"effort": "huge"}}, "output_config.effort", 'is "huge"'),
    ],
)
def test_what_is_refused(limits: Limits, fields: dict[str, Any], param: str, says: str) -> None:
    with collecting(is_strict=True), pytest.raises(RequestError) as caught:
        read(limits, **fields)
    assert (caught.value.param, caught.value.status) == (param, 400) and says in caught.value.message
