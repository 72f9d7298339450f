"""Decisions: prompts of questions, probabilities of their options, usage, errors, and clients that go."""

import asyncio
import base64
import json
import math
import threading
from typing import Any

import pytest

from mmrt.actors.gateway.apis import prefills
from mmrt.actors.gateway.apis.decisions import MAX_OPTIONS, MAX_ROWS, Decision, with_question
from mmrt.actors.gateway.apis.prefills import AT_ONCE, WITH_MEDIA_AT_ONCE
from mmrt.actors.gateway.reading.content import Conversation, MediaPart, Message
from mmrt.actors.gateway.reading.ignored import collecting
from mmrt.models.text.tokenizer import Tokenizer
from mmrt.runtime.errors import RequestError
from mmrt.tests.actors.gateway.conftest import MODEL
from mmrt.tests.actors.gateway.description import check_described

COLOURS = {"name": "colour", "question": "Which colour?", "type": "choice", "options": ["red", "green"]}
MOVES = {"question": "Does it move?", "type": "boolean"}
COUNT = {"question": "How many?", "type": "integer", "minimum": 9, "maximum": 11}
CONTEXT = [{"role": "user", "content": "the fox"}]
IMAGE = {
    "type": "image_url",
    "image_url": {"url": "data:image/png;base64," + base64.b64encode(b"\x89PNG\r\n\x1a\n" + bytes(30)).decode()},
}


def body(*questions: Any, **more: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": CONTEXT, "questions": list(questions), **more}


def test_answers(stage: Any, tokenizer: Tokenizer) -> None:
    """The probability of an option is its own over that of all options of its question; the end of an answer is a part of it."""
    logprobs = {"red": -0.5, "green": -1.5, "Yes": -3.0, "No": -0.1, "9": -1.0, "10": -1.0, "11": -2.0}
    seen: dict[str, tuple[str, int]] = {}

    async def test(scene: Any) -> None:
        async def script(play: Any) -> None:
            last = play.spec.generation.sampling.prompt_logprobs_last
            ids = play.spec.prompt_ids
            option = tokenizer.decode(ids[-last:-1])
            assert tokenizer.eos_ids == {ids[-1]} and (play.spec.max_new_tokens, play.spec.generation.pooling) == (0, None)
            seen[option] = tokenizer.decode(ids[:-last], with_control_tokens=True), last
            play.queue()
            play.prepare()
            play.compute(logprobs[option] / last, num_cached_tokens=7)

        scene.controller.script = script
        reply = await scene.http.post("/v1/decisions", json=body(COLOURS, MOVES, COUNT, user="me", priority=2))
        answer = reply.json()
        assert reply.status_code == 200, answer
        assert answer["object"] == "decisions" and answer["model"] == MODEL and answer["id"].startswith("dec-")
        assert reply.headers["X-Request-Id"] == answer["id"]
        colour, moves, count = answer["answers"]
        assert (colour["name"], colour["type"], colour["value"]) == ("colour", "choice", "red")
        expected = 1 / (1 + math.exp(-1))
        assert colour["probability"] == pytest.approx(expected, abs=1e-6)
        assert [option["value"] for option in colour["options"]] == ["red", "green"]
        assert [option["probability"] for option in colour["options"]] == pytest.approx([expected, 1 - expected], abs=1e-6)
        assert [option["logprob"] for option in colour["options"]] == pytest.approx([-0.5, -1.5], abs=1e-5)
        assert [option["num_tokens"] for option in colour["options"]] == [seen["red"][1], seen["green"][1]]
        assert (moves["name"], moves["value"]) == (None, False) and [one["text"] for one in moves["options"]] == ["Yes", "No"]
        assert [one["value"] for one in moves["options"]] == [True, False]
        weights = [1, 1, math.exp(-1)]
        assert count["value"] == 9 and count["mean"] == pytest.approx((9 + 10 + 11 * weights[2]) / sum(weights), abs=1e-5)
        assert "mean" not in colour
        own = [play.spec for play in scene.controller.plays.values()]
        assert {(spec.priority, tuple(spec.items)) for spec in own} == {(2, ())}
        num_prompts = {prompt: len(tokenizer.encode(prompt)) for prompt, _ in seen.values()}
        num_scored = sum(last for _, last in seen.values())
        usage = answer["usage"]
        assert usage["prompt_tokens"] == usage["total_tokens"] == sum(num_prompts.values()) + num_scored and len(num_prompts) == 3
        assert usage["completion_tokens"] == 0 and usage["prompt_tokens_details"] == {"cached_tokens": 21}, "once per question"
        metrics = (await scene.http.get("/metrics")).text
        assert f"mmrt_prompt_tokens_total {float(usage['prompt_tokens'])}" in metrics
        assert 'mmrt_requests_total{finished_reason="stop"} 1.0' in metrics

    stage.run(test)
    assert seen["red"][0] == "<|im_start|>user\nthe fox\nWhich colour?<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize(
    ("before", "expected"),
    [
        (Message("user", ""), Message("user", "why?")),
        (Message("user", (MediaPart("image"),)), Message("user", (MediaPart("image"), "why?"))),
        (Message("user", ("a", MediaPart("image"), "b")), Message("user", ("a", MediaPart("image"), "b", "\nwhy?"))),
        (Message("assistant", "a"), (Message("assistant", "a"), Message("user", "why?"))),
    ],
)
def test_where_a_question_stands(before: Message, expected: Any) -> None:
    system = Message("system", "s")
    found = with_question(Conversation((system, before), ()), "why?").messages
    assert found == (system, *(expected if type(expected) is tuple else [expected]))


def test_text_that_looks_like_a_control_token_stays_text(limits: Any, prompts: Any, tokenizer: Tokenizer) -> None:
    question = {"question": "<|im_end|>?", "type": "choice", "options": ["<|im_end|>", "b"]}
    sent = json.dumps(body(question, COLOURS, MOVES, COUNT, user="me", priority=2, cache_salt="a")).encode()
    request = Decision().read(sent, limits, prompts)
    check_described("/v1/decisions", sent, limits)
    assert request.rows[0].ids.count(1) == 1, "the end of the user's message"
    assert list(request.rows[0].scored).count(1) == 1 and tokenizer.decode(request.rows[0].scored) == "<|im_end|>"


@pytest.mark.parametrize("has_media", [False, True])
def test_many_options_take_turns(stage: Any, has_media: bool) -> None:
    """The controller has some of them at a time; the media of all are the same."""
    most, limit = 0, WITH_MEDIA_AT_ONCE if has_media else AT_ONCE

    async def test(scene: Any) -> None:
        running = 0

        async def script(play: Any) -> None:
            nonlocal running, most
            running += 1
            most = max(most, running)
            if has_media:
                assert (await play.grant())[0].startswith(b"\x89PNG")
            await scene.until(lambda: len(scene.controller.plays) >= limit)
            await asyncio.sleep(0.005)
            play.compute(-1.0)
            running -= 1

        scene.controller.script = script
        many = {"question": "How many?", "type": "integer", "minimum": -5, "maximum": 44}
        context = [{"role": "user", "content": [IMAGE]}] if has_media else CONTEXT
        reply = await scene.http.post("/v1/decisions", json=body(many, messages=context))
        assert [one["value"] for one in reply.json()["answers"][0]["options"]] == [*range(-5, 45)]
        assert len(scene.controller.plays) == 50
        metrics = (await scene.http.get("/metrics")).text
        assert f'mmrt_media_items_total{{kind="image"}} {float(has_media)}' in metrics

    stage.run(test)
    assert most == limit


def test_one_that_fails_ends_all(stage: Any) -> None:
    async def test(scene: Any) -> None:
        async def script(play: Any) -> None:
            play.queue()
            if play.number == 1:
                await scene.until(lambda: len(scene.controller.plays) == 3)
                play.fail(400, "messages: it has too many tokens", param="messages")

        scene.controller.script = script
        reply = await scene.http.post("/v1/decisions", json=body(COUNT))
        assert reply.status_code == 400 and reply.json()["error"]["param"] == "messages"
        await scene.until(lambda: sum(play.cancelled.is_set() for play in scene.controller.plays.values()) == 2)
        assert 'mmrt_admission_rejections_total{reason="400"} 1.0' in (await scene.http.get("/metrics")).text

    stage.run(test)


def test_a_client_that_goes_cancels_all(stage: Any) -> None:
    async def test(scene: Any) -> None:
        async def script(play: Any) -> None:
            play.prepare()

        scene.controller.script = script
        asking = asyncio.create_task(scene.http.post("/v1/decisions", json=body(COUNT)))
        await scene.until(lambda: len(scene.controller.plays) == 3)
        asking.cancel()
        await scene.until(lambda: all(play.cancelled.is_set() for play in scene.controller.plays.values()))
        assert 'mmrt_requests_total{finished_reason="abort"} 1.0' in (await scene.http.get("/metrics")).text

    stage.run(test)


def question(**changes: Any) -> dict[str, Any]:
    return {name: value for name, value in (COLOURS | changes).items() if value is not ...}


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"questions": ...}, "questions: is required"),
        ({"questions": {}}, "questions: expected an array, got an object"),
        ({"questions": []}, "questions: has 0 entries, allowed are 1 to 128"),
        ({"questions": [1]}, "questions[0]: expected an object, got an integer"),
        ({"questions": [question(type=...)]}, "questions[0].type: is required"),
        ({"questions": [question(type="text")]}, 'questions[0].type: is "text", allowed are choice, boolean, integer'),
        ({"questions": [question(question="")]}, "questions[0].question: is empty"),
        ({"questions": [question(question=...)]}, "questions[0].question: is required"),
        ({"questions": [question(question="a" * 16385)]}, "questions[0].question: has 16385 characters, the limit is 16384"),
        ({"questions": [question(name="a" * 65)]}, "questions[0].name: has 65 characters, the limit is 64"),
        ({"questions": [COLOURS, COLOURS]}, 'questions: two have the name "colour"'),
        ({"questions": [question(options=...)]}, "questions[0].options: is required"),
        ({"questions": [question(options="red")]}, "questions[0].options: expected an array of strings, got a string"),
        ({"questions": [question(options=["a"])]}, "questions[0].options: has 1 entries, allowed are 2 to 128"),
        ({"questions": [question(options=["a", 1])]}, "questions[0].options[1]: expected a string, got an integer"),
        ({"questions": [question(options=["a", ""])]}, "questions[0].options[1]: has 0 characters, allowed are 1 to 256"),
        ({"questions": [question(options=["a", "a"])]}, 'questions[0].options[1]: is "a", as another option is'),
        ({"questions": [MOVES | {"options": ["a", "b", "c"]}]}, "questions[0].options: has 3 entries, allowed are 2, for true"),
        ({"questions": [MOVES | {"minimum": 1}]}, "questions[0].minimum: is not supported; the fields of a question are name,"),
        ({"questions": [COUNT | {"minimum": None}]}, "questions[0].minimum: is required"),
        ({"questions": [COUNT | {"minimum": True}]}, "questions[0].minimum: expected an integer, got true"),
        ({"questions": [COUNT | {"maximum": 9}]}, "questions[0].maximum: is 9, with minimum 9 allowed are 10 to 136"),
        ({"questions": [COUNT | {"maximum": 10**6}]}, "questions[0].maximum: is 1000000, with minimum 9 allowed are 10 to 136"),
        (
            {"questions": [COUNT | {"maximum": 8 + MAX_OPTIONS}] * (1 + MAX_ROWS // MAX_OPTIONS)},
            "questions: have 1152 options together, the limit is 1024",
        ),
        ({"messages": ...}, "messages: is required"),
        ({"messages": []}, "messages: is empty, at least one message is needed"),
        ({"messages": [{"role": "user", "content": "a " * 3000}]}, "messages: prompt is too long: "),
        ({"temperature": 1}, "temperature: is not supported"),
        ({"stream": True}, "stream: is not supported"),
        ({"priority": 10**7}, "priority: is 10000000, allowed are -1000000 to 1000000"),
        ({"cache_salt": ""}, 'cache_salt: "" has 0 bytes in UTF-8, allowed are 1 to 256'),
    ],
)
def test_bad_input(limits: Any, prompts: Any, fields: dict[str, Any], problem: str) -> None:
    sent = {name: value for name, value in (body(COLOURS) | fields).items() if value is not ...}
    with collecting(is_strict=True), pytest.raises(RequestError) as error:
        Decision().read(json.dumps(sent).encode(), limits, prompts)
    assert error.value.message.startswith(problem) and error.value.status == 400


def test_an_error_over_http(stage: Any) -> None:
    async def test(scene: Any) -> None:
        reply = await scene.http.post("/v1/decisions", json=body(question(type="text")))
        assert reply.status_code == 400 and reply.json()["error"]["param"] == "questions[0].type"
        assert not scene.controller.plays and 'reason="400"} 1.0' in (await scene.http.get("/metrics")).text

    stage.run(test)


def test_a_few_bytes_with_many_prompts_hold_nobody_up(stage: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are made in a thread: 500 bytes can ask for 1,024."""
    threads, read = list[str](), Decision.read

    def noting(*given: Any) -> Any:
        threads.append(threading.current_thread().name)
        return read(*given)

    monkeypatch.setattr(Decision, "read", noting)

    async def test(scene: Any) -> None:
        scene.controller.script = compute
        assert (await scene.http.post("/v1/decisions", json=body(MOVES))).status_code == 200
        assert [name.partition("_")[0] for name in threads] == ["intake"]

    async def compute(play: Any) -> None:
        play.compute()

    stage.run(test)


def test_prompts_that_are_too_long_together(limits: Any, prompts: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefills, "MAX_PROMPT_TOKENS", 50)
    questions = [{**MOVES, "question": "a" * 1000}] * 3
    with pytest.raises(RequestError, match="questions: makes prompts of more than 2048 tokens together"):
        Decision().read(json.dumps(body(*questions)).encode(), limits, prompts)


def test_the_server_ends(stage: Any) -> None:
    stage.configure("supervisor", drain_s=0.2)

    async def test(scene: Any) -> None:
        async def script(play: Any) -> None:
            play.prepare()

        scene.controller.script = script
        running = asyncio.create_task(scene.http.post("/v1/decisions", json=body(COUNT)))
        await scene.until(lambda: len(scene.controller.plays) == 3)
        scene.actor.ending = True
        reply = await running
        assert reply.status_code == 503 and "shutting down" in reply.text and reply.headers["Retry-After"]
        await scene.until(lambda: all(play.cancelled.is_set() for play in scene.controller.plays.values()))

    stage.run(test)
