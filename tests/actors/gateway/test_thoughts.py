"""Thoughts come apart from answers: OpenAI's, Anthropic's and Ollama's own clients see them, and give them back."""

import asyncio
from typing import Any

import ollama
import pytest
from tokenizers import Tokenizer as Backend

from mmrt.actors.gateway.reading.prompt import PromptBuilder
from mmrt.models.architecture import ModelConfig
from mmrt.models.text.chat_template import ChatTemplate
from mmrt.models.text.tokenizer import Tokenizer
from mmrt.tests.actors.gateway.test_tool_calls import scripted
from mmrt.tests.settings import ImportedLater

anthropic: Any = ImportedLater("anthropic")
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.reasoning_content %}<think>\n{{ message.reasoning_content }}\n</think>\n\n{% endif %}"
    "{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n{% else %}<think>\n{% endif %}{% endif %}"
)
PIECES = ["It is ", "a c", "at.\n</thi", "nk>\n", "\nA ", "cat."]
THOUGHTS, ANSWER = "It is a cat.", "A cat."
HELLO: Any = [{"role": "user", "content": "hi"}]


@pytest.fixture
def prompts(tokenizer: Tokenizer, model: ModelConfig) -> PromptBuilder:
    """Of a model that thinks."""
    return PromptBuilder(tokenizer, ChatTemplate(TEMPLATE), model, 2048)


def prompt_of(scene: Any, tokenizer: Tokenizer) -> str:
    """The last request's."""
    return tokenizer.decode([*scene.controller.plays.values()][-1].spec.prompt_ids, with_control_tokens=True)


async def think_aloud(play: Any) -> None:
    """Two tokens of thoughts, their end, and more of an answer once the gateway has read that."""
    play.prepare()
    await play.grant()
    play.text("Well.", num_tokens=2)
    play.text("</think>", num_tokens=1)
    await asyncio.sleep(0.1)
    play.text("A cat.", "stop", num_tokens=5)


def thoughts_in(parts: list[Any]) -> str:
    return "".join(getattr(part, "reasoning_content", None) or "" for part in parts)


def test_openai(stage: Any, tokenizer: Tokenizer) -> None:
    async def test(scene: Any) -> None:
        scene.controller.script = scripted(PIECES)
        create = scene.client.chat.completions.create
        whole = await create(**scene.chat(extra_body={"return_token_ids": True}))
        message = whole.choices[0].message
        assert (message.reasoning_content, message.content, whole.choices[0].finish_reason) == (THOUGHTS, ANSWER, "stop")
        assert whole.choices[0].token_ids == list(range(7)) and whole.usage.completion_tokens_details.reasoning_tokens in range(3, 8)
        chunks = [chunk.choices[0].delta async for chunk in await create(**scene.chat(stream=True))]
        assert (thoughts_in(chunks), "".join(delta.content or "" for delta in chunks)) == (THOUGHTS, ANSWER)
        kinds = [hasattr(delta, "reasoning_content") for delta in chunks if delta.role is None and delta.model_fields_set]
        assert kinds == sorted(kinds, reverse=True) and prompt_of(scene, tokenizer).endswith("<think>\n")

    stage.run(test)


def test_tokens_behind_thoughts_are_none_of_them(stage: Any) -> None:
    async def test(scene: Any) -> None:
        scene.controller.script = think_aloud
        whole = await scene.client.chat.completions.create(**scene.chat(n=2))
        assert [(choice.message.reasoning_content, choice.message.content) for choice in whole.choices] == [("Well.", "A cat.")] * 2
        assert (whole.usage.completion_tokens_details.reasoning_tokens, whole.usage.completion_tokens) == (6, 16)

    stage.run(test)


@pytest.mark.parametrize(
    ("fields", "thoughts", "content"),
    [
        ({"include_reasoning": False}, "", ANSWER),
        ({"separate_reasoning": False}, "", "".join(PIECES)),
        ({"reasoning_split": True}, THOUGHTS, ANSWER),
        ({"reasoning_format": "none"}, "", "".join(PIECES)),
        ({"reasoning_format": "hidden"}, "", ANSWER),
        ({"reasoning_format": "deepseek", "include_reasoning": None}, THOUGHTS, ANSWER),
    ],
)
def test_where_a_client_wants_them(stage: Any, fields: dict[str, Any], thoughts: str, content: str) -> None:
    async def test(scene: Any) -> None:
        scene.controller.script = scripted(PIECES)
        (choice,) = (await scene.client.chat.completions.create(**scene.chat(extra_body=fields))).choices
        assert (thoughts_in([choice.message]), choice.message.content) == (thoughts, content)

    stage.run(test)


def test_an_answer_that_is_cut_within_them(stage: Any) -> None:
    async def test(scene: Any) -> None:
        scene.controller.script = scripted(PIECES[:3], "length")
        (choice,) = (await scene.client.chat.completions.create(**scene.chat())).choices
        assert (thoughts_in([choice.message]), choice.message.content) == ("It is a cat.\n</thi", "")
        assert choice.finish_reason == "length"

    stage.run(test)


def test_a_prompt_whose_template_has_closed_them(stage: Any, tokenizer: Tokenizer) -> None:
    """A switch does, and so does a form of the answer, which leaves no room for thoughts."""

    async def test(scene: Any) -> None:
        scene.controller.script = scripted([ANSWER])
        for fields in ({"chat_template_kwargs": {"enable_thinking": False}}, {"structured_outputs": {"choice": [ANSWER]}}):
            (choice,) = (await scene.client.chat.completions.create(**scene.chat(extra_body=fields))).choices
            assert (thoughts_in([choice.message]), choice.message.content) == ("", ANSWER)
            assert prompt_of(scene, tokenizer).endswith("</think>\n\n")

    stage.run(test)


@pytest.mark.parametrize("more", [{}, {"strict": True}])
def test_thoughts_before_calls(stage: Any, tokenizer: Tokenizer, more: dict[str, Any]) -> None:
    """Strict functions make a grammar, which has a place for any text before a call."""
    call = '<tool_call>\n{"name": "weather", "arguments": {"city": "Ulm"}}\n</tool_call>'
    tools = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}, **more}}]

    async def test(scene: Any) -> None:
        scene.controller.script = scripted([f"Shall I {call}?</think>", call])
        for stream in (False, True):
            answer = await scene.client.chat.completions.create(**scene.chat(tools=tools, stream=stream))
            said = [chunk.choices[0].delta async for chunk in answer] if stream else [answer.choices[0].message]
            assert thoughts_in(said) == f"Shall I {call}?" and not any(part.content for part in said)
            assert "".join(one.function.arguments for part in said for one in part.tool_calls or ()) == '{"city": "Ulm"}'
            assert prompt_of(scene, tokenizer).endswith("<think>\n")

    stage.run(test)


def test_given_back_the_template_has_them(stage: Any, tokenizer: Tokenizer) -> None:
    """As text: a control token in them is none."""

    async def test(scene: Any) -> None:
        scene.controller.script = scripted(PIECES)
        said = {"role": "assistant", "content": "Hello.", "reasoning_content": "Greet<|im_end|>."}
        response = await scene.post(scene.chat() | {"messages": [*HELLO, said, *HELLO]})
        assert response.status_code == 200 and "x-mmrt-ignored" not in response.headers
        assert "assistant\n<think>\nGreet<|im_end|>.\n</think>\n\nHello.<|im_end|>" in prompt_of(scene, tokenizer)
        (play,) = scene.controller.plays.values()
        assert play.spec.prompt_ids.count(*tokenizer.encode("<|im_end|>")) == 3  # behind the messages

    stage.run(test)


def test_an_answer_that_is_continued_behind_thoughts_about_their_mark(stage: Any, tokenizer: Tokenizer) -> None:
    async def test(scene: Any) -> None:
        scene.controller.script = scripted(["at."])
        said = {"role": "assistant", "content": "A c", "reasoning_content": "What is <think>?"}
        more = {"continue_final_message": True, "add_generation_prompt": False}
        (choice,) = (await scene.client.chat.completions.create(**scene.chat(messages=[*HELLO, said], extra_body=more))).choices
        assert (thoughts_in([choice.message]), choice.message.content) == ("", "at.")
        assert prompt_of(scene, tokenizer).endswith("<think>\nWhat is <think>?\n</think>\n\nA c")

    stage.run(test)


def test_marks_that_texts_leave_out_tell_nothing(prompts: PromptBuilder, tokenizer: Tokenizer, model: ModelConfig) -> None:
    """Else all of an answer would be thoughts."""
    backend = Backend.from_str(tokenizer._backend.to_str())  # type: ignore[attr-defined]
    backend.add_special_tokens(["<think>", "</think>"])
    assert prompts.thinks
    assert not PromptBuilder(Tokenizer(backend, eos_ids=[1]), ChatTemplate(TEMPLATE), model, 2048).thinks


def test_anthropic(stage: Any, tokenizer: Tokenizer) -> None:
    async def test(scene: Any) -> None:
        scene.controller.script = scripted(PIECES)
        async with anthropic.AsyncAnthropic(base_url=scene.url, api_key="none", max_retries=0) as client:
            message = await client.messages.create(model="tiny", max_tokens=64, messages=HELLO)
            async with client.messages.stream(model="tiny", max_tokens=64, messages=HELLO) as stream:
                kinds = [event.type async for event in stream if event.type != "thinking"]
                streamed = await stream.get_final_message()
            given: Any = [*HELLO, {"role": "assistant", "content": message.content}, *HELLO]
            await client.messages.create(model="tiny", max_tokens=64, messages=given)
        assert f"<think>\n{THOUGHTS}\n</think>\n\n" in prompt_of(scene, tokenizer)
        ended = kinds.index("content_block_stop")  # clients give back thoughts with a signature alone
        assert kinds[ended - 2 : ended] == ["content_block_delta", "signature"]
        thoughts, text = message.content
        assert (thoughts.type, thoughts.thinking, text.type, text.text) == ("thinking", THOUGHTS, "text", ANSWER)  # type: ignore[union-attr]
        assert [block.to_dict() for block in streamed.content] == [block.to_dict() for block in message.content]

    stage.run(test)


def test_ollama(stage: Any) -> None:
    async def test(scene: Any) -> None:
        scene.controller.script = scripted(PIECES)
        async with ollama.AsyncClient(scene.url) as client:
            message = (await client.chat(model="tiny", messages=HELLO)).message
            parts = [part.message async for part in await client.chat(model="tiny", messages=HELLO, stream=True)]
        assert (message.thinking, message.content) == (THOUGHTS, ANSWER)
        assert "".join(part.thinking or "" for part in parts) == THOUGHTS
        assert "".join(part.content or "" for part in parts) == ANSWER

    stage.run(test)


def test_responses(stage: Any, tokenizer: Tokenizer) -> None:
    async def test(scene: Any) -> None:
        scene.controller.script = scripted(PIECES)
        whole = await scene.client.responses.create(model="tiny", input="hi")
        thoughts, message = whole.output
        assert (thoughts.type, thoughts.content[0].text, message.type, whole.output_text) == ("reasoning", THOUGHTS, "message", ANSWER)
        assert whole.usage.output_tokens_details.reasoning_tokens in range(3, 8)
        events = [event async for event in await scene.client.responses.create(model="tiny", input="hi", stream=True)]
        assert "".join(event.delta for event in events if event.type == "response.reasoning_text.delta") == THOUGHTS
        assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == ANSWER
        assert [item.type for item in events[-1].response.output] == ["reasoning", "message"]
        for earlier in (whole, events[-1].response):
            await scene.client.responses.create(model="tiny", input="So?", previous_response_id=earlier.id)
            assert f"<think>\n{THOUGHTS}\n</think>\n\n{ANSWER}<|im_end|>" in prompt_of(scene, tokenizer)
            given = [*HELLO, *earlier.to_dict()["output"], *HELLO]
            again = await scene.client.responses.create(model="tiny", input=given)
            assert prompt_of(scene, tokenizer).count(f"<think>\n{THOUGHTS}\n</think>\n\n{ANSWER}<|im_end|>") == 1
            kinds = [item.type for item in (await scene.client.responses.input_items.list(again.id, order="asc")).data]
            assert kinds == ["message", "reasoning", "message", "message"]

    stage.run(test)
