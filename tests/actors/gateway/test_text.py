"""``/v1/completions``: a text goes on without a chat template, as OpenAI's own client sees it."""

import asyncio
import json
from typing import Any

import openai
import pytest

from mmrt.actors.gateway.reading.ignored import collecting
from mmrt.actors.gateway.reading.prompt import Prompt, PromptBuilder
from mmrt.actors.gateway.reading.validation import TEXT_TOKENS, Limits, TextRequest, read_text
from mmrt.models.architecture import ModelConfig
from mmrt.models.text.tokenizer import Tokenizer
from mmrt.runtime.errors import RequestError
from mmrt.tests.actors.gateway.description import check_described

TEXT = "Hello, größer 😀 world"


def read(limits: Limits, **fields: Any) -> TextRequest:
    body = json.dumps({"model": "tiny", **fields}).encode()
    asked = read_text(body, limits)
    check_described("/v1/completions", body, limits)
    return asked


def test_all_prompts_of_an_answer_have_room_for_their_log_probabilities(limits: Limits) -> None:
    many = {"prompt": ["a"] * 32, "n": 4, "logprobs": 20}
    assert read(limits, **many).generation.max_new_tokens is None, "16 by default, which fit"
    with pytest.raises(RequestError, match="max_tokens: is 391, the limit is 390 for 128 choices with 21 log-probabilities a token"):
        read(limits, **many, max_tokens=391)
    best = {"prompt": ["a"], "n": 1, "best_of": 128}
    assert read(limits, **best, max_tokens=2048).generation.max_new_tokens == 2048, "one a token of each"
    with pytest.raises(RequestError, match="max_tokens: is 2047, the limit is 1638 for 128 choices with 5 log-"):
        read_text(json.dumps({**best, "logprobs": 4, "max_tokens": 2047}).encode(), limits)


def test_an_answer(stage: Any, tokenizer: Tokenizer) -> None:
    async def test(scene: Any) -> None:
        answer = await scene.client.completions.create(
            model="tiny", prompt="the quick", max_tokens=9, extra_body={"return_token_ids": True}
        )
        (choice,) = answer.choices
        assert (choice.text, choice.finish_reason, choice.logprobs) == (TEXT, "stop", None)
        assert answer.object == "text_completion" and answer.id.startswith("cmpl-")
        assert choice.token_ids == list(range(answer.usage.completion_tokens))
        spec = scene.controller.play.spec
        assert spec.prompt_ids == tokenizer.encode("the quick") and spec.max_new_tokens == 9
        assert answer.usage.prompt_tokens == len(spec.prompt_ids)

    stage.run(test)


def test_a_stream(stage: Any) -> None:
    async def test(scene: Any) -> None:
        stream = await scene.client.completions.create(
            model="tiny", prompt="the quick", stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
        choices = [chunk.choices[0] for chunk in chunks if chunk.choices]
        assert "".join(choice.text for choice in choices) == TEXT and choices[0].text, "there is no role to begin with"
        assert [choice.finish_reason for choice in choices] == [None] * (len(choices) - 1) + ["stop"]
        assert {chunk.object for chunk in chunks} == {"text_completion"}
        assert chunks[-1].choices == [] and chunks[-1].usage.completion_tokens == 5
        assert scene.controller.play.spec.max_new_tokens == TEXT_TOKENS

    stage.run(test)


def test_token_ids_and_control_tokens_are_taken_as_they_are(prompts: PromptBuilder, limits: Limits, tokenizer: Tokenizer) -> None:
    text = "<|im_start|>user\nfox<|im_end|>"
    ids = prompts.build(read(limits, prompt=text)).ids
    assert ids[0] == tokenizer.control_ids["<|im_start|>"] and ids == tokenizer.encode(text)
    for prompt in (ids, [ids], [text]):
        request = read(limits, prompt=prompt)
        assert prompts.build(request) == Prompt(ids, None, request.generation.sampling)


def test_the_companion_is_the_negative_prompt(prompts: PromptBuilder, limits: Limits, tokenizer: Tokenizer) -> None:
    prompt = prompts.build(read(limits, prompt="the quick", guidance_scale=2, negative_prompt="brown"))
    assert prompt.companion_ids == tokenizer.encode("brown")
    assert prompts.build(read(limits, prompt="the quick", negative_prompt="brown")).companion_ids is None


@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        ({}, "prompt", "is required"),
        ({"prompt": ""}, "prompt", "is empty"),
        ({"prompt": []}, "prompt", "is empty"),
        ({"prompt": [""]}, "prompt", "is empty"),
        ({"prompt": 5}, "prompt", "expected a string or an array of token ids, got an integer"),
        ({"prompt": ["a"] * 129}, "prompt", "has 129 prompts, the limit with so many choices of each is 128"),
        ({"prompt": [[1], [2]], "n": 100}, "prompt", "has 2 prompts, the limit with so many choices of each is 1"),
        ({"prompt": ["a", ""]}, "prompt[1]", "is empty"),
        ({"prompt": ["a", 1]}, "prompt[1]", "expected a string"),
        ({"prompt": [[1], [2, 400]]}, "prompt[1]", "has the token id 400, allowed are 0 to 399"),
        ({"prompt": [1, "a"]}, "prompt", 'expected token ids, got "a"'),
        ({"prompt": [1, None]}, "prompt", "expected token ids, got null"),
        ({"prompt": [1, True]}, "prompt", "expected token ids, got true"),
        ({"prompt": [7, -1]}, "prompt", "has the token id -1, allowed are 0 to 399"),
        ({"prompt": [7, 400]}, "prompt", "has the token id 400, allowed are 0 to 399"),
        ({"prompt": "a <|image_pad|>"}, "prompt", "media placeholders are not allowed in a prompt; media belong in messages"),
        ({"prompt": "a " * 3000}, "prompt", "tokens > 2047 maximum"),
        ({"prompt": [7] * 2048}, "prompt", "prompt is too long: 2048 tokens > 2047 maximum"),
        ({"prompt": "a", "guidance_scale": 2}, "negative_prompt", "is required with guidance_scale"),
        ({"prompt": "a", "guidance_scale": 2, "negative_prompt": "a " * 3000}, "negative_prompt", "tokens > 2047 maximum"),
        ({"prompt": [7, 10**300]}, "prompt", "has the token id an integer of 997 bits, allowed are 0 to 399"),
        ({"prompt": "a", "mm_processor_kwargs": {"fps": 1}}, "mm_processor_kwargs", "a text has no media"),
        ({"prompt": "a", "messages": []}, "messages", "is not supported"),
        ({"prompt": "a", "suffix": "b"}, "suffix", 'is "b", only "" is supported'),
    ],
)
def test_what_is_refused(prompts: PromptBuilder, limits: Limits, fields: dict[str, Any], param: str, says: str) -> None:
    with collecting(is_strict=True), pytest.raises(RequestError) as caught:
        prompts.build(read(limits, **fields))
    assert (caught.value.status, caught.value.param) == (400, param)
    assert caught.value.message.startswith(f"{param}: ") and says in caught.value.message


@pytest.mark.parametrize(
    ("fields", "num_logprobs"),
    [
        ({"echo": True, "logprobs": 20, "n": 30}, 30 * 21 * 2000),
        ({"prompt_logprobs": 20, "n": 30}, 30 * 21 * 2000),
        ({"prompt": [[50] * 2000] * 64, "echo": True, "logprobs": 4, "n": 2, "prompt_logprobs": 3}, 64 * 2 * (5 + 4) * 2000),
    ],
)
def test_too_many_log_probabilities_of_prompts_are_refused(
    prompts: PromptBuilder, limits: Limits, fields: dict[str, Any], num_logprobs: int
) -> None:
    with collecting(is_strict=True), pytest.raises(RequestError) as caught:
        prompts.build(read(limits, **{"prompt": [50] * 2000, **fields}))
    assert (caught.value.status, caught.value.param) == (400, "prompt")
    assert caught.value.message == f"prompt: the answer would have {num_logprobs} log-probabilities of prompts, the limit is 1048576"


def test_as_many_log_probabilities_of_prompts_as_loglikelihood_tasks_ask_for(prompts: PromptBuilder, limits: Limits) -> None:
    prompts.build(read(limits, prompt=[[50] * 1000] * 128, echo=True, logprobs=1, max_tokens=0))
    prompts.build(read(limits, prompt=[50] * 2000, logprobs=20, n=128))  # the answers' own do not count


def test_placeholders_as_ids_are_refused(prompts: PromptBuilder, limits: Limits, model: ModelConfig) -> None:
    assert model.image_token_id is not None
    with pytest.raises(RequestError, match="prompt: media placeholders are not allowed"):
        prompts.build(read(limits, prompt=[7, model.image_token_id]))


@pytest.mark.parametrize(("num_ids", "most"), [(9, TEXT_TOKENS), (2040, 8)])
def test_without_a_number_of_tokens_there_are_sixteen_or_what_fits(stage: Any, num_ids: int, most: int) -> None:
    async def test(scene: Any) -> None:
        await scene.client.completions.create(model="tiny", prompt=[7] * num_ids)
        assert scene.controller.play.spec.max_new_tokens == most

    stage.run(test)


def test_errors_of_the_controller_name_the_prompt(stage: Any) -> None:
    async def script(play: Any) -> None:
        play.fail(400, "messages: needs more than there is", param="messages")

    async def test(scene: Any) -> None:
        scene.controller.script = script
        for stream in (False, True):
            with pytest.raises(openai.BadRequestError, match="prompt: needs more than there is") as caught:
                await scene.client.completions.create(model="tiny", prompt="a", stream=stream)
            assert caught.value.param == "prompt"

    stage.run(test)


def test_errors_behind_the_headers_name_the_field_that_was_sent(stage: Any) -> None:
    stage.configure("server", keep_alive_s=0.05)
    waited = asyncio.Event()

    async def script(play: Any) -> None:
        play.queue()
        await waited.wait()
        play.fail(400, "max_tokens: is 2000", param="max_tokens")

    async def test(scene: Any) -> None:
        scene.controller.script = script
        body = {"prompt": "a", "max_completion_tokens": 2000, "stream": True}
        async with scene.http.stream("POST", "/v1/completions", json=body) as response:
            received = ""
            async for text in response.aiter_text():
                received += text
                waited.set()
        assert '"message":"max_completion_tokens: is 2000"' in received and '"param":"max_completion_tokens"' in received

    stage.run(test)


def test_choices_and_echoes(limits: Limits) -> None:
    output = read(limits, prompt="a", n=2, best_of=3, logprobs=5, echo=True).generation.output
    assert (output.n, output.best_of, output.logprobs, output.echo) == (2, 3, 5, True)
    assert read(limits, prompt="a", echo=True, max_tokens=0).generation.max_new_tokens == 0
    for fields, problem in (
        ({"best_of": 1, "n": 2}, "best_of: is 1, but n is 2"),
        ({"best_of": 2, "stream": True}, "best_of: is 2, but n is 1: the best are known at the end, and stream is true"),
        ({"best_of": 129}, "best_of: is 129, allowed are 1 to 128"),
        ({"logprobs": 21}, "logprobs: is 21, allowed are 0 to 20"),
        ({"logprobs": True}, "logprobs: is true, allowed are 0 to 20"),
        ({"echo": 1}, "echo: expected true or false, got 1"),
        ({"max_tokens": 0}, "max_tokens: is 0, allowed are 1 to 2147483647"),
    ):
        with collecting(is_strict=True), pytest.raises(RequestError) as caught:
            read(limits, prompt="a", **fields)
        assert caught.value.message == problem
