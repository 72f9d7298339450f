"""Several choices of one answer: requests of their own, one stream, one usage, and one end."""

import asyncio
import json
import threading
from typing import Any

import openai
import pytest

from mmrt.actors.gateway.answers.logprobs import TextLogprobs
from mmrt.actors.gateway.answers.token_table import Tokens
from mmrt.actors.gateway.apis import streams
from mmrt.models.text.tokenizer import Tokenizer
from mmrt.runtime.bus.sampling import Sampling
from mmrt.tests.actors.gateway.conftest import Play


async def count_up(play: Play) -> None:
    """Choice i says i + 1 words; the first ends first."""
    play.queue()
    play.prepare(num_cached_tokens=play.number)
    for word in range(play.number + 1):
        play.text(f"{play.number}.{word} ")
        await asyncio.sleep(0.02)
    play.text("", "stop" if play.number else "length")


def test_choices_of_an_answer(stage: Any) -> None:
    async def test(scene: Any) -> None:
        scene.controller.script = count_up
        answer = await scene.client.chat.completions.create(**scene.chat(n=3, seed=5, stop=["x"]))
        assert [(choice.index, choice.message.content, choice.finish_reason) for choice in answer.choices] == [
            (0, "0.0 ", "length"),
            (1, "1.0 1.1 ", "stop"),
            (2, "2.0 2.1 2.2 ", "stop"),
        ]
        specs = [play.spec for play in scene.controller.plays.values()]
        assert answer.usage.prompt_tokens == len(specs[0].prompt_ids) and answer.usage.completion_tokens == 1 + 2 + 3
        assert answer.usage.prompt_tokens_details.cached_tokens == 0, "what choices find of each other does not count"
        assert specs[0].generation.sampling.seed == 5 and len({spec.generation.sampling.seed for spec in specs}) == 3
        ids = {spec.generation.request_id for spec in specs}
        assert len(ids) == 3 and all(id.startswith(answer.id) for id in ids)
        assert {tuple(spec.prompt_ids) for spec in specs} == {tuple(specs[0].prompt_ids)}
        assert {tuple(spec.generation.stop) for spec in specs} == {("x",)}
        seeds = [spec.generation.sampling.seed for spec in specs]
        scene.controller.plays.clear()
        await scene.client.chat.completions.create(**scene.chat(n=3, seed=5))
        assert [play.spec.generation.sampling.seed for play in scene.controller.plays.values()] == seeds

    stage.run(test)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_a_stream_of_choices(stage: Any, path: str) -> None:
    async def test(scene: Any) -> None:
        scene.controller.script = count_up
        asked = {"stream": True, "n": 3, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
        body = scene.chat(**asked) if "chat" in path else {"prompt": "fox", **asked}
        lines = (await scene.http.post(path, json=body)).text.split("\n\n")
        assert lines[-2:] == ["data: [DONE]", ""]
        chunks = [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]
        *chunks, usage = chunks
        assert usage["choices"] == [] and usage["usage"]["completion_tokens"] == 6
        assert [chunk["usage"]["completion_tokens"] for chunk in chunks] == sorted(c["usage"]["completion_tokens"] for c in chunks)
        choices = [chunk["choices"][0] for chunk in chunks]
        for index in range(3):
            own = [choice for choice in choices if choice["index"] == index]
            texts = [choice["delta"].get("content", "") if "chat" in path else choice["text"] for choice in own]
            assert "".join(texts) == "".join(f"{index}.{word} " for word in range(index + 1))
            assert [choice["finish_reason"] for choice in own[:-1]] == [None] * (len(own) - 1)
            assert own[-1]["finish_reason"] == ("stop" if index else "length")
            if "chat" in path:
                assert [choice["delta"].get("role") for choice in own] == ["assistant"] + [None] * (len(own) - 1)
        order = [choice["index"] for choice in choices]
        assert order != sorted(order), "choices take turns"

    stage.run(test)


def test_one_that_fails_ends_all(stage: Any) -> None:
    async def fail_second(play: Play) -> None:
        play.queue()
        play.prepare()
        play.text("word")
        if play.number == 1:
            play.fail(500, "out of luck", error_type="internal_error")
        await asyncio.sleep(60)

    async def test(scene: Any) -> None:
        scene.controller.script = fail_second
        with pytest.raises(openai.InternalServerError, match="out of luck"):
            await scene.client.chat.completions.create(**scene.chat(n=3))
        first, second, third = scene.controller.plays.values()
        await asyncio.gather(first.cancelled.wait(), second.delivered.wait(), third.cancelled.wait())
        scene.controller.plays.clear()
        with pytest.raises(openai.APIError, match="out of luck"):
            async for _ in await scene.client.chat.completions.create(**scene.chat(n=3, stream=True)):
                pass
        text = (await scene.http.get("/metrics")).text
        assert 'mmrt_requests_total{finished_reason="error"} 2.0' in text, "an answer is one request"

    stage.run(test)


def test_a_client_that_goes_ends_all(stage: Any) -> None:
    async def talk(play: Play) -> None:
        play.prepare()
        while True:
            play.text("word ")
            await asyncio.sleep(0.02)

    async def test(scene: Any) -> None:
        scene.controller.script = talk
        stream = await scene.client.chat.completions.create(**scene.chat(n=4, stream=True))
        seen = set()
        async for chunk in stream:
            seen.add(chunk.choices[0].index)
            if len(seen) == 4:
                break
        await stream.close()
        await asyncio.gather(*(play.cancelled.wait() for play in scene.controller.plays.values()))

    stage.run(test)


def test_the_best_of_several(stage: Any) -> None:
    """By the sum of log-probabilities; all are computed, and all count."""

    async def rate(play: Play) -> None:
        play.prepare()
        play.logprob = [-3.0, -1.0, -2.0, -0.6][play.number]
        play.text(f"answer {play.number}", "stop", num_tokens=4 if play.number == 3 else 2)

    async def test(scene: Any) -> None:
        scene.controller.script = rate
        answer = await scene.client.completions.create(model="tiny", prompt="fox", n=2, best_of=4)
        assert [(choice.index, choice.text, choice.logprobs) for choice in answer.choices] == [
            (0, "answer 1", None),
            (1, "answer 3", None),
        ]
        assert answer.usage.completion_tokens == 2 + 2 + 2 + 4
        assert {play.spec.generation.sampling.logprobs for play in scene.controller.plays.values()} == {0}
        scene.controller.plays.clear()
        answer = await scene.client.completions.create(model="tiny", prompt="fox", n=1, best_of=4, logprobs=1)
        assert answer.choices[0].text == "answer 1" and answer.choices[0].logprobs.token_logprobs == [-1.0, -1.0]

    stage.run(test)


def test_log_probabilities_go_with_the_text(stage: Any) -> None:
    async def talk(play: Play) -> None:
        play.prepare()
        play.text("one two", num_tokens=2)
        await asyncio.sleep(0.05)
        play.text("", num_tokens=2)  # an incomplete character
        play.text("three", num_tokens=1)
        await asyncio.sleep(0.05)
        play.text("", "stop", num_tokens=1)

    async def test(scene: Any) -> None:
        scene.controller.script = talk
        stream = await scene.client.chat.completions.create(**scene.chat(stream=True, logprobs=True, top_logprobs=3))
        choices = [chunk.choices[0] async for chunk in stream]
        lengths = [len(choice.logprobs.content) if choice.logprobs else None for choice in choices]
        assert lengths == [None, 2, 3, 1], "role, two texts, and the token that ends the answer"
        assert all(len(entry.top_logprobs) == 3 for choice in choices[1:] for entry in choice.logprobs.content)

    stage.run(test)


@pytest.mark.parametrize("stream", [False, True])
def test_several_prompts(stage: Any, stream: bool) -> None:
    """Their choices come one prompt after another; ``usage`` counts each prompt once."""

    async def test(scene: Any) -> None:
        scene.controller.script = count_up
        prompts = ["fox", [7, 8, 9]]
        answer = await scene.client.completions.create(
            model="tiny",
            prompt=prompts,
            n=2,
            stream=stream,
            echo=True,
            **({"stream_options": {"include_usage": True}} if stream else {}),
        )
        answers = [one async for one in answer] if stream else [answer]
        texts = {index: "" for index in range(4)}
        for one in answers:
            for choice in one.choices:
                texts[choice.index] += choice.text
        specs = [play.spec for play in scene.controller.plays.values()]
        assert specs[0].prompt_ids == specs[1].prompt_ids and specs[2].prompt_ids == specs[3].prompt_ids == [7, 8, 9]
        assert [texts[index] for index in (0, 1)] == ["fox0.0 ", "fox1.0 1.1 "] and texts[3].endswith("3.0 3.1 3.2 3.3 ")
        usage = answers[-1].usage
        assert usage.prompt_tokens == len(specs[0].prompt_ids) + 3 and usage.completion_tokens == 1 + 2 + 3 + 4
        assert usage.prompt_tokens_details.cached_tokens == 0 + 2, "of the first choice of each"
        assert len({spec.generation.request_id for spec in specs}) == 4

    stage.run(test)


def test_the_best_of_each_prompt(stage: Any) -> None:
    async def rate(play: Play) -> None:
        play.prepare()
        play.logprob = [-3.0, -1.0, -2.0, -4.0][play.number]
        play.text(f"answer {play.number}", "stop", num_tokens=1)

    async def test(scene: Any) -> None:
        scene.controller.script = rate
        answer = await scene.client.completions.create(model="tiny", prompt=["fox", "the"], best_of=2)
        assert [(choice.index, choice.text) for choice in answer.choices] == [(0, "answer 1"), (1, "answer 2")]

    stage.run(test)


async def say_one_word(play: Play) -> None:
    play.prepare()
    play.text("word", "length", num_tokens=1)


@pytest.mark.parametrize("stream", [False, True])
def test_other_answers_go_on_while_a_long_echo_is_made(stage: Any, monkeypatch: pytest.MonkeyPatch, stream: bool) -> None:
    """One that has begun waits for another to end."""
    has_begun, is_other_done, has_waited = threading.Event(), threading.Event(), list[bool]()
    make = TextLogprobs.prompt

    def wait_for_other(format: TextLogprobs, tokens: Tokens) -> dict[str, Any]:
        has_begun.set()
        has_waited.append(is_other_done.wait(10))
        return make(format, tokens)

    monkeypatch.setattr(TextLogprobs, "prompt", wait_for_other)

    async def test(scene: Any) -> None:
        scene.controller.script = say_one_word
        body = {"prompt": [50] * 600, "echo": True, "logprobs": 2, "max_tokens": 1, "stream": stream}
        long = asyncio.create_task(scene.http.post("/v1/completions", json=body))
        await scene.until(has_begun.is_set)
        assert (await scene.post(scene.chat())).json()["choices"][0]["message"]["content"] == "word"
        is_other_done.set()
        text = (await long).text
        data = json.loads(text.split("\n\n")[0].removeprefix("data: "))
        assert len(data["choices"][0]["logprobs"]["tokens"]) == 600 + 1 and has_waited == [True]

    stage.run(test)


@pytest.mark.parametrize("max_tokens", [0, 1])
@pytest.mark.parametrize("is_long", [False, True])
def test_a_choice_that_ends_before_the_prompt_is_there(
    stage: Any, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, max_tokens: int, is_long: bool
) -> None:
    """The first choice alone has the log-probabilities of the prompt; the others need not wait for it otherwise."""
    monkeypatch.setattr(streams, "LOOP_TOKENS", 2 if is_long else 100)

    async def test(scene: Any) -> None:
        async def script(play: Play) -> None:
            play.prepare()
            await scene.until(lambda: len(scene.controller.plays) == 3)
            first, *others = scene.controller.plays.values()
            if play is first:
                await asyncio.gather(*(other.delivered.wait() for other in others))
            if max_tokens:
                play.text("word", "length", num_tokens=1)
            else:
                play.compute()

        scene.controller.script = script
        body = {"prompt": "the fox", "echo": True, "logprobs": 1, "max_tokens": max_tokens, "n": 3, "stream": True}
        lines = (await scene.http.post("/v1/completions", json=body)).text.split("\n\n")
        choices = [json.loads(line.removeprefix("data: "))["choices"][0] for line in lines[:-2]]
        ids = tokenizer.encode("the fox")
        for index in range(3):
            own = [choice for choice in choices if choice["index"] == index]
            assert "".join(choice["text"] for choice in own) == "the fox" + "word" * max_tokens
            logprobs = [one for choice in own if choice["logprobs"] for one in choice["logprobs"]["token_logprobs"]]
            assert logprobs == [None] + [-2.0] * (len(ids) - 1) + [-1.0] * max_tokens
            assert [choice["finish_reason"] for choice in own if choice["finish_reason"]] == ["length"]

    stage.run(test)


def test_an_echo_alone_is_not_sampled(stage: Any) -> None:
    async def test(scene: Any) -> None:
        fields = {"temperature": 1, "logprobs": 2, "best_of": 2, "guidance_scale": 2, "negative_prompt": "the", "stop": ["x"]}
        body = {"prompt": ["fox", "the fox"], "echo": True, "max_tokens": 0, "prompt_logprobs": 1, **fields}
        answer = (await scene.http.post("/v1/completions", json=body)).json()
        assert [(choice["text"], choice["finish_reason"]) for choice in answer["choices"]] == [("fox", "length"), ("the fox", "length")]
        assert answer["usage"]["completion_tokens"] == 0
        for choice in answer["choices"]:
            assert choice["logprobs"]["token_logprobs"] == [None] + [-2.0] * (len(choice["prompt_logprobs"]) - 1)
        specs = [play.spec for play in scene.controller.plays.values()]
        assert len(specs) == 4 and {spec.max_new_tokens for spec in specs} == {0} and {spec.companion_ids for spec in specs} == {None}
        assert {(spec.generation.sampling.logprobs, spec.generation.sampling.temperature) for spec in specs} == {
            (None, Sampling().temperature)
        }
        assert [spec.generation.sampling.prompt_logprobs for spec in specs] == [2, None, 2, None]

    stage.run(test)


def test_long_chunks_are_written_in_parts(stage: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of which a client has its own time to read."""
    monkeypatch.setattr(streams, "WRITE_BYTES", 7)

    async def test(scene: Any) -> None:
        stream = await scene.client.chat.completions.create(**scene.chat(stream=True))
        assert "".join([chunk.choices[0].delta.content or "" async for chunk in stream]) == "Hello, größer 😀 world"

    stage.run(test)
