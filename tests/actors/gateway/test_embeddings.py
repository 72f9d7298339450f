"""Embeddings through OpenAI's client: inputs, forms of the vectors, conversations, errors."""

import asyncio
import base64
from typing import Any

import msgspec
import numpy as np
import ollama
import openai
import pytest

from mmrt.actors.gateway.apis.openai.embeddings import Embedding
from mmrt.actors.gateway.reading.ignored import collecting
from mmrt.models.text.tokenizer import Tokenizer
from mmrt.runtime.bus.messages import Prepared
from mmrt.runtime.errors import RequestError
from mmrt.tests.actors.gateway.conftest import MODEL
from mmrt.tests.actors.gateway.description import check_described

VECTOR = (3.0, 0.0, -4.0, 0.0, 0.0, 0.0, 0.0, 12.0)
PNG = base64.b64encode(b"\x89PNG\r\n\x1a\n" + bytes(30)).decode()


@pytest.fixture
def limits(limits: Any) -> Any:
    return msgspec.structs.replace(limits, hidden_size=len(VECTOR))


async def answer(play: Any) -> None:
    play.queue()
    await play.grant()
    play.compute(vector=[value * (1 + play.spec.prompt_ids[0]) for value in VECTOR], num_cached_tokens=2)


def test_texts_and_token_ids(stage: Any, tokenizer: Tokenizer) -> None:
    """Vectors have length 1, in either form."""
    ids = tokenizer.encode("the fox")

    async def test(scene: Any) -> None:
        scene.controller.script = answer
        for given, num in (("the fox", 1), (["the fox", "a dog", "x"], 3), (ids, 1), ([ids, ids[:1]], 2)):
            scene.controller.plays.clear()
            for form in ("float", "base64", None):  # without one the client asks for base64
                more = {} if form is None else {"encoding_format": form}
                found = await scene.client.embeddings.create(model=MODEL, input=given, user="me", **more)
                assert found.object == "list" and found.model == MODEL
                assert [one.index for one in found.data] == [*range(num)]
                for one in found.data:
                    vector = one.embedding
                    if form == "base64":
                        assert isinstance(vector, str)
                        vector = np.frombuffer(base64.b64decode(vector), "<f4").tolist()
                    assert vector == pytest.approx(np.array(VECTOR) / 13, abs=1e-6)
            prompts = [play.spec.prompt_ids for play in scene.controller.plays.values()]
            assert prompts[0] == (ids if num != 3 else tokenizer.encode("the fox"))
            assert {(play.spec.generation.pooling, play.spec.max_new_tokens) for play in scene.controller.plays.values()} == {
                ("last", 0)
            }
            assert found.usage.prompt_tokens == found.usage.total_tokens == sum(map(len, prompts)) // 3
        raw = await scene.http.post("/v1/embeddings", json={"input": ["a", "b"]})
        assert raw.json()["usage"]["prompt_tokens_details"] == {"cached_tokens": 4}
        assert raw.headers["X-Request-Id"].startswith("embd-") and raw.headers["Content-Type"] == "application/json"
        metrics = (await scene.http.get("/metrics")).text
        assert "\nmmrt_request_prefill_time_seconds_count 13.0\n" in metrics, "each request has a prefill, but no text"

    stage.run(test)


@pytest.mark.parametrize("is_written", [False, True])
def test_a_prompt_that_is_prefilled_again(stage: Any, is_written: bool) -> None:
    """It was preempted before the gateway has read the vector, which is overwritten, or about to be. It is told once more."""

    async def test(scene: Any) -> None:
        async def script(play: Any) -> None:
            play.prepare()
            table = scene.controller.table
            play.compute(vector=VECTOR)
            table.clear_pages(play.row)
            if is_written:
                table.vectors.write(play.row, 0, 1, np.ones(4))
                table.vectors.write(play.row, 1, 2, np.ones(4))
            play.state = Prepared(1, play.key, len(play.spec.prompt_ids), 0)
            await asyncio.sleep(0.05)
            play.compute(vector=[*reversed(VECTOR)])

        scene.controller.script = script
        found = await scene.client.embeddings.create(model=MODEL, input="the quick fox", extra_body={"pooling": "mean"})
        assert found.data[0].embedding == pytest.approx(np.array(VECTOR[::-1]) / 13, abs=1e-6)

    stage.run(test)


def test_fewer_dimensions_have_length_1_again(stage: Any) -> None:
    async def test(scene: Any) -> None:
        scene.controller.script = answer
        found = await scene.client.embeddings.create(model=MODEL, input="a", dimensions=3, extra_body={"pooling": "mean"})
        assert scene.controller.play.spec.generation.pooling == "mean"
        length = len(scene.controller.play.spec.prompt_ids)
        assert length == 1 and found.data[0].embedding == pytest.approx([0.6, 0, -0.8], abs=1e-6)

    stage.run(test)


def test_a_conversation_with_a_picture(stage: Any, tokenizer: Tokenizer) -> None:
    image = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{PNG}"}}

    async def test(scene: Any) -> None:
        scene.controller.script = answer
        messages = [{"role": "user", "content": [image, {"type": "text", "text": "the fox"}]}]
        body = {"messages": messages, "add_generation_prompt": True}
        reply = await scene.http.post("/v1/embeddings", json=body)
        assert reply.status_code == 200, reply.text
        assert reply.json()["data"][0]["embedding"] == pytest.approx(np.array(VECTOR) / 13, abs=1e-6)
        spec = scene.controller.play.spec
        assert tokenizer.decode(spec.prompt_ids, with_control_tokens=True).startswith(
            "<|im_start|>user\n<|image_pad|>the fox<|im_end|>\n"
        )
        assert spec.items[0].kind == "image" and spec.generation.pooling == "last"

    stage.run(test)


def test_a_vector_without_length_and_one_that_is_gone(stage: Any) -> None:
    """The second is a defect: the request ends with it, and does not wait for its deadline."""

    async def test(scene: Any) -> None:
        async def script(play: Any) -> None:
            if play.number == 0:
                play.compute(vector=[0.0] * 8)
            else:
                play.compute(vector=VECTOR)
                scene.controller.table.vectors.release(play.row)

        scene.controller.script = script
        found = await scene.client.embeddings.create(model=MODEL, input="a", encoding_format="float")
        assert found.data[0].embedding == [0.0] * 8
        with pytest.raises(openai.InternalServerError):
            await scene.client.embeddings.create(model=MODEL, input="a")

    stage.run(test)


@pytest.mark.parametrize(
    ("fields", "status", "problem"),
    [
        ({}, 400, "input: is required, or messages"),
        ({"input": ""}, 400, "input: is empty"),
        ({"input": []}, 400, "input: is empty, at least one text is needed"),
        ({"input": 3}, 400, "input: expected a string, an array of strings, token ids or an array of these, got an integer"),
        ({"input": ["a", ""]}, 400, "input[1]: is empty"),
        ({"input": ["a", 3]}, 400, "input[1]: expected a string or an array of token ids, got an integer"),
        ({"input": [3, "a"]}, 400, 'input: expected token ids, got "a"'),
        ({"input": [3, 400]}, 400, "input: has the token id 400, allowed are 0 to 399"),
        ({"input": [[50], [-1]]}, 400, "input[1]: has the token id -1, allowed are 0 to 399"),
        ({"input": "a" * 60000}, 400, "input: prompt is too long"),
        ({"input": [5] * 2048}, 400, "input: prompt is too long: 2048 tokens > 2047 maximum"),
        ({"input": ["a"] * 2049}, 400, "input: has 2049 entries, the limit is 2048"),
        ({"input": "<|image_pad|>"}, 400, "input: media placeholders are not allowed in a prompt"),
        ({"input": "a", "messages": [{"role": "user", "content": "a"}]}, 400, "input: is given, and so is messages; give one"),
        ({"messages": []}, 400, "messages: is empty, at least one message is needed"),
        ({"input": "a", "add_generation_prompt": True}, 400, "add_generation_prompt: is not supported"),
        ({"input": "a", "encoding_format": "hex"}, 400, 'encoding_format: is "hex", allowed are float, base64'),
        ({"input": "a", "dimensions": 9}, 400, "dimensions: is 9, allowed are 1 to 8"),
        ({"input": "a", "dimensions": 1.5}, 400, "dimensions: expected an integer, got 1.5"),
        ({"input": "a", "pooling": "cls"}, 400, 'pooling: is "cls", allowed are last, mean'),
        ({"input": "a", "truncate_prompt_tokens": 3}, 400, "truncate_prompt_tokens: is 3, only -1 is supported"),
        ({"input": "a", "user": 3}, 400, "user: is 3, only a string"),
        ({"input": "a", "model": "other"}, 404, 'model: "other" does not exist, this server has "tiny"'),
    ],
)
def test_bad_input(limits: Any, prompts: Any, fields: dict[str, Any], status: int, problem: str) -> None:
    with collecting(is_strict=True), pytest.raises(RequestError) as error:
        Embedding().read(msgspec.json.encode(fields), limits, prompts)
    assert error.value.message.startswith(problem) and error.value.status == status


def test_the_controllers_errors_name_the_field(stage: Any) -> None:
    async def test(scene: Any) -> None:
        async def script(play: Any) -> None:
            play.fail(400, "messages: it does not fit", param="messages")

        scene.controller.script = script
        with pytest.raises(openai.BadRequestError, match="input: it does not fit") as error:
            await scene.client.embeddings.create(model=MODEL, input="a")
        assert error.value.param == "input"

    stage.run(test)


@pytest.mark.parametrize("given", ["a", ["a", "b"], [50, 51], [[50], [51, 52]]])
def test_inputs_are_described(limits: Any, prompts: Any, given: Any) -> None:
    sent = msgspec.json.encode({"input": given, "pooling": "mean", "encoding_format": "base64", "dimensions": 3, "user": "me"})
    request = Embedding().read(sent, limits, prompts)
    check_described("/v1/embeddings", sent, limits)
    assert [row.pooling for row in request.rows] == ["mean"] * len(request.rows) and sum(len(row.ids) for row in request.rows) <= 3


def test_many_numbers(limits: Any, prompts: Any) -> None:
    """The limit on inputs falls as vectors grow."""
    large = msgspec.structs.replace(limits, hidden_size=8192)
    with pytest.raises(RequestError, match="input: has 513 entries, the limit is 512"):
        Embedding().read(msgspec.json.encode({"input": ["a"] * 513}), large, prompts)


def test_vectors_for_ollamas_client(stage: Any, tokenizer: Tokenizer) -> None:
    async def test(scene: Any) -> None:
        scene.controller.script = answer
        client = ollama.AsyncClient(scene.url)
        try:
            for given, num in (("the fox", 1), (["the fox", "x"], 2)):
                found = await client.embed(f"{MODEL}:latest", given, truncate=True, options={"num_ctx": 64}, keep_alive="5m")
                assert [list(one) for one in found.embeddings] == [pytest.approx(np.array(VECTOR) / 13)] * num
            num_tokens = len(tokenizer.encode("the fox")) + len(tokenizer.encode("x"))
            assert (found.model, found.prompt_eval_count, found.load_duration) == (MODEL, num_tokens, 0) and found.total_duration > 0
            assert [*(await client.embed(MODEL, "a", dimensions=3)).embeddings[0]] == pytest.approx([0.6, 0, -0.8])
            assert (await client.embeddings(MODEL, "the fox")).embedding == pytest.approx(np.array(VECTOR) / 13)
            assert {play.spec.generation.pooling for play in scene.controller.plays.values()} == {"last"}
            num_plays = len(scene.controller.plays)
            assert (await client.embed(MODEL, [])).embeddings == [] == (await client.embeddings(MODEL)).embedding
            assert len(scene.controller.plays) == num_plays, "nothing is computed without a text"
        finally:
            await client.close()
        for path, body, status, problem in (
            ("embed", {"input": 3}, 400, "input: expected a string or an array of strings, got 3"),
            ("embed", {"input": [[1]]}, 400, "input: expected a string or an array of strings, got an array with 1 entry"),
            ("embed", {"input": ["a", ""]}, 400, "input[1]: is empty"),
            ("embed", {"input": "a", "dimensions": 9}, 400, "dimensions: is 9, allowed are 0 to 8"),
            ("embed", {"input": "a", "model": "other"}, 404, "other"),
            ("embeddings", {"prompt": 3}, 400, "prompt: expected a string, got an integer"),
            ("embeddings", {"prompt": "a" * 60000}, 400, "prompt: prompt is too long"),
            ("embeddings", {"input": "a"}, 400, "input: is not supported"),
        ):
            reply = await scene.http.post(f"/api/{path}", json=body)
            assert reply.status_code == status and problem in reply.json()["error"], reply.text

    stage.run(test)
