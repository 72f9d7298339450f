"""Functions in Ollama's API: fields and messages of a request, and calls as Ollama's own client sees them."""

import json
from typing import Any

import pytest

from mmrt.actors.gateway.reading.content import Message
from mmrt.actors.gateway.reading.ignored import collecting
from mmrt.actors.gateway.reading.tool_messages import MAX_CALLS, Call
from mmrt.actors.gateway.reading.validation import Limits
from mmrt.models.grammar.call_form import CallForm, form_of
from mmrt.models.grammar.source import JSON_OBJECT
from mmrt.runtime.errors import RequestError
from mmrt.tests.actors.gateway.test_ollama import USER, chat, client_of
from mmrt.tests.actors.gateway.test_tool_calls import CALL, PIECES, TOOLS, scripted

ULM = {"city": "Ulm"}
CALLED = {"function": {"name": "weather", "arguments": ULM}}
RESULT = {"role": "tool", "content": "Rain.", "tool_name": "weather"}


def weather(city: str) -> str:
    """Tell the weather.

    Args:
        city: Its name.
    """
    return f"Rain in {city}."


def form(limits: Limits, **fields: Any) -> CallForm | None:
    """The form of an answer's calls; None where there is no grammar."""
    grammar = chat(limits, **fields).generation.grammar
    return None if grammar is None else form_of(grammar.source)


def test_functions(limits: Limits) -> None:
    asked = chat(limits, tools=TOOLS)
    assert asked.tools is not None and asked.tools.names == {"weather"} and asked.generation.grammar is None
    assert chat(limits, tools=[]).tools is None
    required = form(limits, tools=TOOLS, tool_choice="required", parallel_tool_calls=False)
    assert required is not None and required.is_required and required.is_single
    json_object = form(limits, tools=TOOLS, format="json")
    assert json_object is not None and json_object.answer == JSON_OBJECT


def test_calls_and_results_in_a_conversation(limits: Limits) -> None:
    """As its client sends answers back: with ids or without."""
    with_id = {"id": "c1", "type": "function", "function": {**CALLED["function"], "index": 1}}
    turns = [
        USER,
        {"role": "assistant", "content": "", "tool_calls": [CALLED, with_id]},
        RESULT,
        {**RESULT, "tool_call_id": "c1"},
        {"role": "assistant", "tool_calls": [CALLED]},
        {"role": "tool", "content": ""},
    ]
    assert chat(limits, messages=turns, tools=TOOLS).conversation.messages[1:] == (
        Message("assistant", "", calls=(Call("call_0", "weather", ULM), Call("c1", "weather", ULM))),
        Message("tool", "Rain.", "weather"),
        Message("tool", "Rain.", "weather", call_id="c1"),
        Message("assistant", "", calls=(Call("call_0", "weather", ULM),)),
        Message("tool", ""),
    )


def calling(*calls: Any) -> dict[str, Any]:
    return {"messages": [USER, {"role": "assistant", "content": "", "tool_calls": list(calls)}, RESULT]}


PATH = "messages[1].tool_calls"


@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        ({"tools": [{}]}, "tools[0].type", "is required"),
        ({"tools": {}}, "tools", "expected an array, got an object"),
        ({"tools": TOOLS, "tool_choice": "some"}, "tool_choice", 'is "some", allowed are none, auto, required'),
        ({"messages": [USER, {**USER, "tool_calls": [CALLED]}]}, "messages[1].tool_calls", "only an empty one is supported"),
        ({"messages": [USER, {**USER, "tool_name": "x"}]}, "messages[1].tool_name", 'is "x", only "" is supported'),
        ({"messages": [USER, {**RESULT, "tool_name": 5}]}, "messages[1].tool_name", "expected a string, got an integer"),
        ({"messages": calling(CALLED)["messages"][:2]}, "messages[1].content", "calls weather, whose result is to follow"),
        (calling(5), f"{PATH}[0]", "expected an object, got an integer"),
        (calling({}), f"{PATH}[0].function", "is required"),
        (calling({"function": {"name": "a b", "arguments": {}}}), f"{PATH}[0].function.name", 'is "a b", expected'),
        (calling({"function": {"name": "f"}}), f"{PATH}[0].function.arguments", "is required"),
        (calling({"function": {"name": "f", "arguments": "{}"}}), f"{PATH}[0].function.arguments", "expected an object, got a string"),
        (calling({**CALLED, "id": "c" * 257}), f"{PATH}[0].id", "has 257 characters, the limit is 256"),
        (calling({**CALLED, "more": 1}), f"{PATH}[0].more", "is not supported"),
        (calling(*[CALLED] * (MAX_CALLS + 1)), PATH, f"has {MAX_CALLS + 1} entries, the limit is {MAX_CALLS}"),
    ],
)
def test_what_is_refused(limits: Limits, fields: dict[str, Any], param: str, says: str) -> None:
    with collecting(is_strict=True), pytest.raises(RequestError) as caught:
        chat(limits, **fields)
    assert (caught.value.param, caught.value.status) == (param, 400) and says in caught.value.message


def calls_of(lines: list[Any]) -> list[tuple[str, Any]]:
    return [(call.function.name, call.function.arguments) for line in lines for call in line.message.tool_calls or ()]


@pytest.mark.parametrize("stream", [False, True])
def test_a_turn(stage: Any, stream: bool) -> None:
    """The client makes the function's schema, and sends what it got back."""

    async def test(scene: Any) -> None:
        scene.controller.script = scripted(PIECES)
        messages: list[Any] = [USER]
        async with client_of(scene) as client:
            answer = await client.chat("tiny", messages, tools=[weather], stream=stream)
            lines = [line async for line in answer] if stream else [answer]
            assert "".join(line.message.content for line in lines) == "Let me see."
            assert calls_of(lines) == [("weather", ULM)] * 2
            assert (lines[-1].done, lines[-1].done_reason) == (True, "stop")
            if stream:
                assert [len(line.message.tool_calls or ()) for line in lines][-3:] == [1, 1, 0], "each call is a line"
            called = next(line for line in lines if line.message.tool_calls)
            messages += [called.message, *[{**RESULT, "content": weather(**arguments)} for _, arguments in calls_of([called])]]
            scene.controller.script = scripted(["So."])
            assert (await client.chat("tiny", messages, tools=[weather])).message.content == "So."
        prompt = list(scene.controller.plays.values())[-1].spec.prompt_ids
        shown = (await scene.http.post("/detokenize", json={"tokens": prompt})).json()["prompt"]
        assert '<tool_call>\n{"name": "weather", "arguments": {"city": "Ulm"}}\n</tool_call>' in shown
        assert "<tool_response>\nRain in Ulm.\n</tool_response>" in shown

    stage.run(test)


@pytest.mark.parametrize(
    ("pieces", "finish", "expected"),
    [
        ([CALL[:57], f"{CALL[57:]} Done."], "stop", [("", [ULM]), (" Done.", []), ("", [])]),
        ([CALL[:-17]], "length", [("", [{"INVALID_JSON": '{"city": "Ul'}]), ("", [])]),
        ([CALL.replace('"Ulm"', "Ulm")], "stop", [("", [{"INVALID_JSON": '{"city": Ulm}'}]), ("", [])]),
    ],
)
def test_lines_with_calls(stage: Any, pieces: list[str], finish: str, expected: list[tuple[str, list[Any]]]) -> None:
    async def test(scene: Any) -> None:
        scene.controller.script = scripted(pieces, finish)
        answer = await scene.http.post("/api/chat", json={"messages": [USER], "tools": TOOLS})
        messages = [json.loads(line)["message"] for line in answer.text.splitlines()]
        calls = [[call["function"]["arguments"] for call in message.get("tool_calls", ())] for message in messages]
        assert [(message["content"], found) for message, found in zip(messages, calls, strict=True)] == expected
        ids = [call["id"] for message in messages for call in message.get("tool_calls", ())]
        assert all(id.startswith("call_") for id in ids) and len(set(ids)) == len(ids) == 1

    stage.run(test)
