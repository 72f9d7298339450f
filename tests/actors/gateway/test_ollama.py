"""Ollama's API as its own client sees it: bodies, answers, lines, the model, errors."""

import asyncio
import base64
import json
from typing import Any

import msgspec
import ollama
import pytest

from mmrt.actors.gateway.apis.ollama.requests import read_chat, read_generate
from mmrt.actors.gateway.reading.content import MediaPart, Message
from mmrt.actors.gateway.reading.ignored import collecting
from mmrt.actors.gateway.reading.prompt import PromptBuilder
from mmrt.actors.gateway.reading.template_fields import TemplateUse
from mmrt.actors.gateway.reading.thinking import Thinking
from mmrt.actors.gateway.reading.validation import ChatRequest, Limits
from mmrt.models.grammar.source import JSON_OBJECT, source_of_schema
from mmrt.runtime.errors import RequestError
from mmrt.tests.actors.gateway.description import check_described

TEXT = "Hello, größer 😀 world"
PNG = b"\x89PNG\r\n\x1a\n" + bytes(30)
IMAGE = base64.b64encode(PNG).decode()
USER = {"role": "user", "content": "hi"}


def chat(limits: Limits, **fields: Any) -> ChatRequest:
    body = json.dumps({"model": "tiny", "messages": [USER], **fields}).encode()
    asked = read_chat(body, limits)
    check_described("/api/chat", body, limits)
    return asked


def generate(limits: Limits, **fields: Any) -> ChatRequest:
    body = json.dumps({"model": "tiny", "prompt": "hi", **fields}).encode()
    asked = read_generate(body, limits)
    check_described("/api/generate", body, limits)
    return asked


def client_of(scene: Any, **more: Any) -> Any:
    return ollama.AsyncClient(scene.url, timeout=20, verify=False, **more)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("is_chat", [False, True])
def test_log_probabilities(stage: Any, is_chat: bool, stream: bool) -> None:
    """Each token has one: of a stream, those of a line's text are in it, and those without text in the last line."""

    async def test(scene: Any) -> None:
        scene.controller.script = scripted
        more = {"stream": stream, "logprobs": True, "top_logprobs": 2}
        async with client_of(scene) as client:
            asked = client.chat("tiny", [USER], **more) if is_chat else client.generate("tiny", "hi", **more)
            lines = [line async for line in await asked] if stream else [await asked]
        entries = [entry for line in lines for entry in line.logprobs or []]
        assert len(entries) == lines[-1].eval_count == 2
        assert {(entry.logprob, len(entry.top_logprobs)) for entry in entries} == {(-1.0, 2)}
        assert scene.controller.play.spec.generation.sampling.logprobs == 2

    async def scripted(play: Any) -> None:
        play.prepare(num_prompt_tokens=20)
        play.text("one")
        play.text("", "stop", num_tokens=1)

    stage.run(test)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("is_chat", [False, True])
def test_an_answer(stage: Any, is_chat: bool, stream: bool) -> None:
    async def test(scene: Any) -> None:
        async def script(play: Any) -> None:
            play.prepare(num_prompt_tokens=20)
            await asyncio.sleep(0.02)
            play.text("Hello, größer")
            await asyncio.sleep(0.02)
            play.text(" 😀 world", "length")

        scene.controller.script = script
        options = {"temperature": 0.5, "num_predict": 32_000, "stop": ["END"], "seed": 3, "num_ctx": 4096}
        async with client_of(scene) as client:
            if is_chat:
                answer = await client.chat("tiny:latest", [USER], stream=stream, options=options, keep_alive="5m")
            else:
                answer = await client.generate("tiny", "hi", system="Be brief.", stream=stream, options=options)
            lines = [line async for line in answer] if stream else [answer]
        texts = [line.message.content if is_chat else line.response for line in lines]
        assert "".join(texts) == TEXT and len(lines) > stream
        assert [line.done for line in lines] == [False] * (len(lines) - 1) + [True]
        end = lines[-1]
        assert (end.model, end.done_reason, end.prompt_eval_count, end.eval_count) == ("tiny", "length", 20, 4)
        assert end.created_at.endswith("Z") and end.load_duration == 0 < end.prompt_eval_duration
        assert end.eval_duration > 0 and end.total_duration >= end.prompt_eval_duration + end.eval_duration
        spec = scene.controller.play.spec
        assert (spec.max_new_tokens, spec.clamp_max_new_tokens) == (32_000, True)
        assert (spec.generation.sampling.temperature, spec.generation.sampling.seed, spec.generation.stop) == (0.5, 3, ["END"])

    stage.run(test)


def test_no_duration_is_zero(stage: Any) -> None:
    async def test(scene: Any) -> None:
        async def script(play: Any) -> None:
            play.prepare()
            play.text("Hello", "stop")

        scene.controller.script = script
        end = (await scene.http.post("/api/generate", json={"prompt": "hi", "stream": False})).json()
        assert end["eval_count"] / end["eval_duration"] > 0 and end["prompt_eval_count"] / end["prompt_eval_duration"] > 0

    stage.run(test)


def test_lines_stream_unless_the_body_says_no(stage: Any) -> None:
    async def test(scene: Any) -> None:
        answer = await scene.http.post("/api/chat", json={"messages": [USER]})
        assert answer.headers["Content-Type"] == "application/x-ndjson" and answer.text.count("\n") > 1
        answer = await scene.http.post("/api/chat", json={"messages": [USER], "stream": False})
        assert answer.headers["Content-Type"] == "application/json" and answer.json()["message"]["content"] == TEXT

    stage.run(test)


def test_a_stream_that_waits_and_fails(stage: Any) -> None:
    stage.configure("server", keep_alive_s=0.1)

    async def test(scene: Any) -> None:
        async def script(play: Any) -> None:
            await asyncio.sleep(0.3)
            play.fail(500, "a stage died", error_type="internal_error")

        scene.controller.script = script
        async with client_of(scene) as client:
            with pytest.raises(ollama.ResponseError, match="a stage died"):
                async for _ in await client.chat("tiny", [USER], stream=True):
                    pass
        answer = await scene.http.post("/api/generate", json={"prompt": "hi"})
        waiting = json.loads(answer.text.split("\n")[0])
        assert (waiting["response"], waiting["done"]) == ("", False), "a line that any client takes"

    stage.run(test)


def test_pictures_reach_the_pool(stage: Any) -> None:
    async def test(scene: Any) -> None:
        media = []

        async def script(play: Any) -> None:
            media.append(await play.grant())
            play.prepare()
            play.text("Red.", "stop")

        scene.controller.script = script
        async with client_of(scene) as client:
            assert (await client.chat("tiny", [{**USER, "images": [PNG, IMAGE]}])).message.content == "Red."
            assert (await client.generate("tiny", "What?", images=[PNG])).response == "Red."
        assert media == [[PNG, PNG], [PNG]]

    stage.run(test)


def test_the_model(stage: Any) -> None:
    async def test(scene: Any) -> None:
        async with client_of(scene) as client:
            (model,) = (await client.list()).models
            (running,) = (await client.ps()).models
            assert model.model == "tiny" and model.details.format == "safetensors" and model.modified_at is not None
            shown = await client.show("tiny:latest")
        assert (running.name, running.digest, running.context_length) == ("tiny", model.digest, 2048)
        assert (len(model.digest), model.size) == (64, 1000)
        assert shown.capabilities == ["completion", "tools", "vision", "audio"]
        architecture = shown.modelinfo["general.architecture"]
        assert architecture == model.details.family == "qwen2_5_omni"
        assert shown.modelinfo[f"{architecture}.context_length"] == 2048
        said = (await scene.http.get("/api/version")).json()
        assert tuple(map(int, said["version"].split("."))) >= (0, 14, 0), "clients demand one of Ollama's"
        assert said["mmrt"] == (await scene.http.get("/version")).json()["version"]

    stage.run(test)


def test_a_request_without_a_question_loads_the_model(stage: Any) -> None:
    """With it Ollama's clients have the model loaded, as it always is."""

    async def test(scene: Any) -> None:
        async with client_of(scene) as client:
            for answer in (await client.generate("tiny"), await client.generate("tiny", "", keep_alive=0)):
                assert (answer.model, answer.response, answer.done, answer.done_reason) == ("tiny", "", True, "load")
            answer = await client.chat("tiny", [])
            assert (answer.message.content, answer.done, answer.done_reason) == ("", True, "load")
            assert [line.done_reason async for line in await client.chat("tiny", [], stream=True)] == ["load"]
        assert (await scene.http.post("/api/chat", json={})).json()["done"] and not scene.controller.plays

    stage.run(test)


def test_curl_needs_no_content_type(stage: Any) -> None:
    """As Ollama's documents call it; other routes refuse curl's default."""

    async def test(scene: Any) -> None:
        headers, body = {"Content-Type": "application/x-www-form-urlencoded"}, json.dumps({"prompt": "hi", "stream": False})
        answer = await scene.http.post("/api/generate", content=body, headers=headers)
        assert answer.status_code == 200 and answer.json()["response"] == TEXT
        assert (await scene.http.post("/v1/completions", content=body, headers=headers)).status_code == 415

    stage.run(test)


def test_errors_have_the_shape_of_the_api(stage: Any) -> None:
    stage.configure("server", api_key="secret")

    async def test(scene: Any) -> None:
        async with client_of(scene) as client:
            with pytest.raises(ollama.ResponseError, match="API key is missing") as caught:
                await client.list()
        assert caught.value.status_code == 401
        client = client_of(scene, headers={"Authorization": "Bearer secret"})
        for asked, status, says in (
            (client.chat("llava", [USER]), 404, 'model: "llava" does not exist, this server has "tiny"'),
            (client.show("llava"), 404, 'model: "llava" does not exist'),
            (client._request(dict, "POST", "/api/show", json={"name": "llava"}), 404, 'name: "llava" does not exist'),
            (client.generate("llava", ""), 404, 'model: "llava" does not exist'),
            (client.generate("tiny", "a " * 3000), 400, "prompt: prompt is too long"),
            (client.pull("tiny"), 404, "POST /api/pull: Not Found"),
        ):
            with pytest.raises(ollama.ResponseError) as caught:
                await asked
            assert caught.value.status_code == status and says in caught.value.error
        await client.close()

    stage.run(test)


def test_what_a_body_becomes(limits: Limits, prompts: PromptBuilder) -> None:
    system = {"role": "system", "content": "S"}
    asked = chat(limits, messages=[system, {**USER, "images": [IMAGE]}])
    assert asked.conversation.messages == (Message("system", "S"), Message("user", (MediaPart("image"), "hi")))
    assert asked.conversation.media[0].path == "messages[1].images[0]"
    asked = generate(limits, system="S", images=[IMAGE])
    assert asked.conversation.messages == (Message("system", "S"), Message("user", (MediaPart("image"), "hi")))
    asked = chat(limits, messages=[USER, {"role": "assistant", "content": "The fox"}])
    assert asked.template == TemplateUse(opens_answer=False, continues=True)
    assert prompts.text_of(prompts.build(asked).ids).endswith("<|im_start|>assistant\nThe fox")


def test_options(limits: Limits) -> None:
    generation = chat(limits, options={"repeat_penalty": 1.1, "top_k": 3, "top_p": 0.5, "num_predict": -1, "stop": "a"}).generation
    sampling = generation.sampling
    assert (sampling.repetition_penalty, sampling.top_k, sampling.top_p) == (1.1, 3, 0.5)
    assert (generation.max_new_tokens, generation.stop, generation.stream) == (None, ["a"], True)
    plain = chat(limits, options={"seed": 1})
    assert chat(limits, options={"seed": 1, "num_ctx": 8, "num_gpu": 1, "mirostat": 0, "repeat_last_n": -1}) == plain


def test_whether_it_thinks(limits: Limits) -> None:
    assert chat(limits, think=False).template.thinking == Thinking("think", False)
    assert chat(limits, think="low").template.thinking == Thinking("think", True, "low")


def test_the_form_of_the_answer(limits: Limits) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    forms = [chat(limits, format=form).generation.grammar for form in ("", "json", schema)]
    assert [form and form.source for form in forms] == [None, JSON_OBJECT, source_of_schema(schema)]


@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        ({"stream": 1}, "stream", "expected true or false, got 1"),
        ({"top_logprobs": 3}, "top_logprobs", "is 3, but logprobs is not true"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "is 21, allowed are 0 to 20"),
        ({"options": 5}, "options", "expected an object, got an integer"),
        ({"options": {"temperature": 3}}, "options.temperature", "is 3, allowed are 0 to 2"),
        ({"options": {"num_predict": 0}}, "options.num_predict", "is 0, allowed are -2 and -1 (as many as fit), and 1 and up"),
        ({"options": {"num_predict": -3}}, "options.num_predict", "is -3, allowed are -2 to 2147483647"),
        ({"options": {"repeat_penalty": 11}}, "options.repeat_penalty", "is 11, allowed are 0.01 to 10"),
        ({"options": {"stop": ["a", ""]}}, "options.stop[1]", "has 0 characters, allowed are 1 to 256"),
        ({"options": {"num_ctx": True}}, "options.num_ctx", "is true, only a number is supported"),
        ({"keep_alive": False}, "keep_alive", "is false, only a duration is supported"),
        ({"messages": [{**USER, "images": ""}]}, "messages[0].images", "expected an array of base64 texts, got a string"),
        ({"options": {"mirostat": 2}}, "options.mirostat", "is 2, only 0 is supported"),
        ({"options": {"draft": 2}}, "options.draft", "is not supported"),
        ({"temperature": 1}, "temperature", "is not supported"),
        ({"format": "yaml"}, "format", 'is "yaml", allowed are "json" and a JSON schema'),
        ({"think": "deeply"}, "think", 'is "deeply", supported are true, false, none, minimal, low, medium, high'),
        ({"messages": {}}, "messages", "expected an array, got an object"),
        ({"messages": [{"role": "bot", "content": "a"}]}, "messages[0].role", 'is "bot", allowed are system, user, assistant, tool'),
        ({"messages": [{"role": "assistant", "content": ""}]}, "messages[0].content", "is empty; a last message of the assistant"),
        ({"messages": [{**USER, "images": IMAGE}]}, "messages[0].images", "expected an array of base64 texts, got a string"),
        ({"messages": [{**USER, "images": ["?"]}]}, "messages[0].images[0]", "is not valid base64"),
        ({"messages": [{**USER, "images": [5]}]}, "messages[0].images[0]", "expected base64 text, got 5"),
        (
            {"messages": [{**USER, "role": "system", "images": [IMAGE]}]},
            "messages[0].images[0]",
            "only messages of the user and results of calls can hold media",
        ),
    ],
)
def test_what_chat_refuses(limits: Limits, fields: dict[str, Any], param: str, says: str) -> None:
    with collecting(is_strict=True), pytest.raises(RequestError) as caught:
        chat(limits, **fields)
    assert (caught.value.param, caught.value.status) == (param, 400) and says in caught.value.message


@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        ({"prompt": None, "images": [IMAGE]}, "prompt", "is required beside images"),
        ({"prompt": 5}, "prompt", "expected a string, got an integer"),
        ({"raw": True}, "raw", "is true, only false is supported"),
        ({"suffix": "a"}, "suffix", 'is "a", only "" is supported'),
        ({"template": "a"}, "template", 'is "a", only "" is supported'),
        ({"context": [1]}, "context", "is an array with 1 entry, only an empty one is supported"),
        ({"images": ["?"]}, "images[0]", "is not valid base64"),
    ],
)
def test_what_generate_refuses(limits: Limits, fields: dict[str, Any], param: str, says: str) -> None:
    with collecting(is_strict=True), pytest.raises(RequestError) as caught:
        generate(limits, **fields)
    assert (caught.value.param, caught.value.status) == (param, 400) and says in caught.value.message


def test_a_model_without_eyes_takes_no_pictures(limits: Limits) -> None:
    with pytest.raises(RequestError, match=r"images\[0\]: the model does not take image: a .* model is served as text"):
        generate(msgspec.structs.replace(limits, kinds=()), images=[IMAGE])
