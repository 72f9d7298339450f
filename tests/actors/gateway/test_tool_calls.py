"""Calls in answers, as OpenAI's own client sees them, whatever pieces their text comes in."""

import asyncio
from typing import Any

import pytest

TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Ulm"}}\n</tool_call>'
PIECES = ["Let me ", "see.\n", CALL[:8], CALL[8:30], CALL[30:57], CALL[57:70], f"{CALL[70:]}\n{CALL}"]


def scripted(pieces: list[str], finish: str = "stop") -> Any:
    async def script(play: Any) -> None:
        play.prepare()
        await play.grant()
        for piece in pieces:
            play.text(piece, num_tokens=1)
            await asyncio.sleep(0)
        play.text("", finish, num_tokens=1)

    return script


def chat(**more: Any) -> dict[str, Any]:
    return {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "tools": TOOLS, **more}


def test_a_whole_answer(stage: Any) -> None:
    async def test(scene: Any) -> None:
        scene.controller.script = scripted(PIECES)
        (choice,) = (await scene.client.chat.completions.create(**chat(logprobs=True))).choices
        assert (choice.message.content, choice.finish_reason) == ("Let me see.", "tool_calls")
        assert [(call.function.name, call.function.arguments) for call in choice.message.tool_calls] == [
            ("weather", '{"city": "Ulm"}')
        ] * 2
        assert len({call.id for call in choice.message.tool_calls}) == 2 and len(choice.logprobs.content) == len(PIECES) + 1

    stage.run(test)


def test_a_stream(stage: Any) -> None:
    """Content first, then each call's name with its id, then its arguments; ids and log-probabilities of all tokens."""

    async def test(scene: Any) -> None:
        scene.controller.script = scripted(PIECES)
        options = {"stream": True, "logprobs": True, "extra_body": {"return_token_ids": True}}
        chunks = [chunk.choices[0] async for chunk in await scene.client.chat.completions.create(**chat(**options))]
        assert "".join(chunk.delta.content or "" for chunk in chunks) == "Let me see."
        calls = [call for chunk in chunks for call in chunk.delta.tool_calls or ()]
        begun = [(call.index, call.function.name, call.function.arguments) for call in calls if call.id]
        assert begun == [(0, "weather", ""), (1, "weather", "")]
        for index in (0, 1):
            arguments = [call.function.arguments for call in calls if call.index == index]
            assert "".join(arguments) == '{"city": "Ulm"}'
        assert chunks[0].delta.role == "assistant" and chunks[0].delta.content == ""
        assert chunks[-1].finish_reason == "tool_calls" and not chunks[-1].delta.tool_calls
        num_tokens = len(PIECES) + 1
        assert [id for chunk in chunks for id in chunk.token_ids] == list(range(num_tokens))
        assert sum(len(chunk.logprobs.content) for chunk in chunks if chunk.logprobs) == num_tokens

    stage.run(test)


def test_a_stream_that_begins_with_a_call(stage: Any) -> None:
    async def test(scene: Any) -> None:
        scene.controller.script = scripted([CALL])
        chunks = [chunk.choices[0] async for chunk in await scene.client.chat.completions.create(**chat(stream=True))]
        assert (chunks[0].delta.role, chunks[0].delta.content) == ("assistant", "")
        assert chunks[1].delta.tool_calls[0].function.name == "weather" and chunks[1].delta.content is None

    stage.run(test)


@pytest.mark.parametrize(
    ("text", "finish", "content", "arguments", "reason"),
    [
        (CALL[:-17], "length", None, ['{"city": "Ul'], "length"),
        (CALL[:-17], "stop", None, ['{"city": "Ul'], "stop"),
        (CALL, "length", None, ['{"city": "Ulm"}'], "length"),
        (CALL[:20], "length", CALL[:20], [], "length"),
        (CALL.replace("weather", "other"), "stop", CALL.replace("weather", "other"), [], "stop"),
        ("No.\n", "stop", "No.\n", [], "stop"),
        ("", "stop", "", [], "stop"),
    ],
)
def test_answers_that_are_cut_or_do_not_call(
    stage: Any, text: str, finish: str, content: str | None, arguments: list[str], reason: str
) -> None:
    async def test(scene: Any) -> None:
        scene.controller.script = scripted([text], finish)
        (choice,) = (await scene.client.chat.completions.create(**chat())).choices
        assert (choice.message.content, choice.finish_reason) == (content, reason)
        assert [call.function.arguments for call in choice.message.tool_calls or ()] == arguments

    stage.run(test)


def test_without_functions_a_call_is_text(stage: Any) -> None:
    async def test(scene: Any) -> None:
        scene.controller.script = scripted(PIECES)
        for options in ({"tools": []}, {"tool_choice": "none"}):
            scene.controller.plays.clear()
            (choice,) = (await scene.client.chat.completions.create(**chat(**options))).choices
            assert (choice.message.content, choice.message.tool_calls, choice.finish_reason) == ("".join(PIECES), None, "stop")

    stage.run(test)
