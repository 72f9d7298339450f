"""Functions in Anthropic's Messages API: fields and blocks of a request, and calls as Anthropic's own client sees them."""

import asyncio
import json
from typing import Any

import pytest

from mmrt.actors.gateway.apis.anthropic.messages import read_count
from mmrt.actors.gateway.reading.content import MediaPart, Message
from mmrt.actors.gateway.reading.ignored import collecting
from mmrt.actors.gateway.reading.prompt import PromptBuilder
from mmrt.actors.gateway.reading.tool_messages import MAX_CALLS, Call
from mmrt.actors.gateway.reading.validation import Limits
from mmrt.models.grammar.call_form import CallForm, Function, form_of
from mmrt.models.grammar.source import JSON_OBJECT
from mmrt.runtime.errors import RequestError
from mmrt.tests.actors.gateway.test_anthropic import IMAGE, USER, client_of, read
from mmrt.tests.actors.gateway.test_tool_calls import CALL, PIECES, scripted
from mmrt.tests.settings import ImportedLater

anthropic: Any = ImportedLater("anthropic")
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
USE = {"type": "tool_use", "id": "t1", "name": "weather", "input": {"city": "Ulm"}}
RESULT = {"type": "tool_result", "tool_use_id": "t1", "content": "Rain."}
ANY = {"type": "any"}


def tool(name: Any = "weather", **more: Any) -> dict[str, Any]:
    return {"name": name, "input_schema": SCHEMA, **more}


def form(limits: Limits, **fields: Any) -> CallForm | None:
    """The form of an answer's calls; None where there is no grammar."""
    grammar = read(limits, **fields).generation.grammar
    return None if grammar is None else form_of(grammar.source)


def test_functions_and_the_choice_among_them(limits: Limits) -> None:
    tools = [tool(description="of a city", cache_control={"type": "ephemeral"}), tool("now", type="custom", eager_input_streaming=True)]
    use = read(limits, tools=tools, tool_choice={"type": "auto"}).tools
    assert use is not None and use.names == {"weather", "now"}
    assert use.shown[0] == {"type": "function", "function": {"name": "weather", "description": "of a city", "parameters": SCHEMA}}
    assert read(limits, tools=tools, tool_choice={"type": "none"}).tools is None
    weather, now = [Function(f"/{at}/input_schema", name, SCHEMA) for at, name in enumerate(("weather", "now"))]
    both = CallForm(functions=[weather, now], is_required=True, is_single=False)
    free = [Function(f"/{at}/input_schema", name, {"type": "object"}) for at, name in enumerate(("weather", "now"))]
    assert form(limits, tools=tools) is None
    assert form(limits, tools=tools, tool_choice=ANY) == both
    assert form(limits, tools=tools, tool_choice={"type": "tool", "name": "now"}) == CallForm(
        functions=[now], is_required=True, is_single=True
    )
    for kind, functions in (("auto", free), ("any", [weather, now])):
        choice = {"type": kind, "disable_parallel_tool_use": True}
        assert form(limits, tools=tools, tool_choice=choice) == CallForm(functions=functions, is_required=kind == "any", is_single=True)
    strict = [tool(strict=True), tools[1]]
    held = Function("/0/input_schema", "weather", SCHEMA, is_strict=True)
    assert form(limits, tools=strict) == CallForm(functions=[held, free[1]], is_required=False, is_single=False)
    json_object = form(limits, tools=tools, response_format={"type": "json_object"})
    assert json_object is not None and json_object.answer == JSON_OBJECT


def test_calls_and_results_in_a_conversation(limits: Limits, prompts: PromptBuilder) -> None:
    """A turn with results becomes a message for each, in their order; the prompt and the count have all of it."""
    turns = [
        USER,
        {"role": "assistant", "content": [{"type": "text", "text": "Let me see."}, USE, {**USE, "id": "t2", "caller": None}]},
        {
            "role": "user",
            "content": [
                {**RESULT, "tool_use_id": "t2", "content": [{"type": "text", "text": "Sun."}]},
                {**RESULT, "is_error": False, "cache_control": {"type": "ephemeral"}},
                {"type": "text", "text": "And?"},
                IMAGE,
            ],
        },
        {"role": "assistant", "content": [{**USE, "id": "t3"}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t3"}]},
    ]
    asked = read(limits, messages=turns, tools=[tool()], system="S")
    arguments = {"city": "Ulm"}
    messages = asked.conversation.messages
    assert messages[:3] == (
        Message("system", "S"),
        Message("user", "hi"),
        Message("assistant", ("Let me see.",), calls=(Call("t1", "weather", arguments), Call("t2", "weather", arguments))),
    )
    assert messages[3:5] == (Message("tool", ("Sun.",), call_id="t2"), Message("tool", "Rain.", call_id="t1"))
    assert (messages[5].role, len(messages[5].content), len(asked.conversation.media)) == ("user", 2, 1)
    assert messages[6:] == (Message("assistant", "", calls=(Call("t3", "weather", arguments),)), Message("tool", "", call_id="t3"))
    shown = prompts.text_of(prompts.build(asked).ids)
    assert shown.index("Let me see.") < shown.index("Sun.") < shown.index("Rain.") < shown.index("And?")
    body = json.dumps({"messages": turns, "tools": [tool()], "system": "S"}).encode()
    assert prompts.build(read_count(body, limits)).ids == prompts.build(asked).ids


def test_pictures_in_results(limits: Limits, prompts: PromptBuilder) -> None:
    shot = {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "A shot:"}, IMAGE]}
    uses = [USE, {**USE, "id": "t2"}]
    results = [shot, {**shot, "tool_use_id": "t2", "content": [IMAGE]}, {"type": "text", "text": "And?"}, IMAGE]
    asked = read(limits, messages=[USER, {"role": "assistant", "content": uses}, {"role": "user", "content": results}], tools=[tool()])
    picture = MediaPart("image")
    assert asked.conversation.messages[2:] == (
        Message("tool", ("A shot:", picture), call_id="t1"),
        Message("tool", (picture,), call_id="t2"),
        Message("user", ("And?", picture)),
    )
    paths = [medium.path for medium in asked.conversation.media]
    assert paths[:2] == ["messages[2].content[0].content[1].source.data", "messages[2].content[1].content[0].source.data"]
    shown = prompts.text_of(prompts.build(asked).ids)
    assert shown.count("<|image_pad|>") == 3 and "A shot:<|image_pad|>\n</tool_response>\n<tool_response>\n<|image_pad|>" in shown


def after(*blocks: Any, role: str = "user") -> dict[str, Any]:
    return {"messages": [USER, {"role": "assistant", "content": [USE]}, {"role": role, "content": list(blocks)}]}


def calling(block: Any, *more: Any) -> dict[str, Any]:
    return {"messages": [USER, {"role": "assistant", "content": [block, *more]}, USER]}


BLOCK = "messages[1].content[0]"
RESULT_PATH = "messages[2].content[0]"


@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        ({"tools": {}}, "tools", "expected an array, got an object"),
        ({"tools": [1]}, "tools[0]", "expected an object"),
        (
            {"tools": [{"type": "bash_20250124", "name": "bash"}]},
            "tools[0].type",
            'is "bash_20250124", allowed are custom: tools that the',
        ),
        ({"tools": [{"name": "f"}]}, "tools[0].input_schema", "is required"),
        ({"tools": [tool(input_schema=5)]}, "tools[0].input_schema", "expected an object, got an integer"),
        ({"tools": [tool(input_schema={"type": "array"})]}, "tools[0].input_schema.type", 'is "array", arguments are an object'),
        ({"tools": [tool(None)]}, "tools[0].name", "is required"),
        ({"tools": [tool("a b")]}, "tools[0].name", 'is "a b", expected 1 to 128 letters'),
        ({"tools": [tool(), tool()]}, "tools[1].name", 'is "weather", as that of tools[0]'),
        ({"tools": [tool(parameters={})]}, "tools[0].parameters", "is not supported"),
        ({"tools": [tool(defer_loading=True)]}, "tools[0].defer_loading", "is true, only false is supported"),
        ({"tools": [tool(strict=True)], "ignore_eos": True}, "ignore_eos", "cannot be combined with tools"),
        ({"tool_choice": ANY}, "tool_choice", "requires a call, but there are no tools"),
        ({"tool_choice": "any"}, "tool_choice", "expected an object, got a string"),
        ({"tool_choice": {"type": "required"}}, "tool_choice.type", 'is "required", allowed are auto, any, none, tool'),
        ({"tool_choice": {"type": "auto", "name": "x"}}, "tool_choice.name", "is not supported"),
        ({"tool_choice": {"type": "auto", "disable_parallel_tool_use": 1}}, "tool_choice.disable_parallel_tool_use", "expected true"),
        ({"tool_choice": {"type": "tool"}, "tools": [tool()]}, "tool_choice.name", "is required"),
        ({"tool_choice": {"type": "tool", "name": "x"}, "tools": [tool()]}, "tool_choice.name", 'is "x", but tools has weather'),
        (calling({**USE, "id": ""}), f"{BLOCK}.id", "is empty"),
        (calling({**USE, "id": "t" * 257}), f"{BLOCK}.id", "has 257 characters, the limit is 256"),
        (calling({**USE, "name": "a b"}), f"{BLOCK}.name", 'is "a b", expected'),
        (calling({**USE, "input": None}), f"{BLOCK}.input", "is required"),
        (calling({**USE, "input": "{}"}), f"{BLOCK}.input", "expected an object, got a string"),
        (calling({**USE, "input": json.loads('{"a":' * 70 + "1" + "}" * 70)}), f"{BLOCK}.input", "nested more than 64 levels deep"),
        (calling({**USE, "caller": {"type": "code_execution_20250825"}}), f"{BLOCK}.caller", "an object with 1 entry, only"),
        (calling({**USE, "more": 1}), f"{BLOCK}.more", "is not supported"),
        (calling(*[USE] * (MAX_CALLS + 1)), "messages[1].content", f"has {MAX_CALLS + 1} blocks of type tool_use, the limit"),
        ({"messages": [{"role": "user", "content": [USE]}]}, "messages[0].content[0].type", 'is "tool_use", allowed are'),
        (after(RESULT, role="assistant"), f"{RESULT_PATH}.type", 'is "tool_result", allowed are text, image, video, audio, tool_use'),
        (after({**RESULT, "tool_use_id": None}), f"{RESULT_PATH}.tool_use_id", "is required"),
        (after({**RESULT, "tool_use_id": "t9"}), f"{RESULT_PATH}.tool_use_id", 'is "t9", no call before it has this id'),
        (after({**RESULT, "content": False}), f"{RESULT_PATH}.content", "expected a string or an array of content blocks"),
        (after({**RESULT, "content": 5}), f"{RESULT_PATH}.content", "expected a string or an array of content blocks"),
        (after({**RESULT, "content": [{"type": "image"}]}), f"{RESULT_PATH}.content[0].source", "is required"),
        (after({**RESULT, "content": [RESULT]}), f"{RESULT_PATH}.content[0].type", 'is "tool_result", allowed are text'),
        (after({**RESULT, "is_error": "yes"}), f"{RESULT_PATH}.is_error", 'is "yes", only a boolean'),
        (after({**RESULT, "content": [{"type": "text", "text": ""}] * 2049}), "messages", "prompt is too long: 2051 tokens > 2047"),
        (
            {"messages": [USER, {"role": "assistant", "content": [USE]}]},
            "messages[1].content",
            "calls weather, whose result is to follow",
        ),
    ],
)
def test_what_is_refused(limits: Limits, fields: dict[str, Any], param: str, says: str) -> None:
    with collecting(is_strict=True), pytest.raises(RequestError) as caught:
        read(limits, **fields)
    assert (caught.value.param, caught.value.status) == (param, 400) and says in caught.value.message
    assert len(caught.value.message) < 300


def blocks_of(answer: Any) -> list[tuple[Any, ...]]:
    return [(block.text,) if block.type == "text" else (block.name, block.input) for block in answer.content]


ASKED: Any = {"model": "tiny", "max_tokens": 9, "messages": [USER], "tools": [tool()]}


def test_calls_whole_and_in_a_stream(stage: Any) -> None:
    """Text first, then a block for each call, in the client's own accumulator too."""

    async def test(scene: Any) -> None:
        scene.controller.script = scripted(PIECES)
        async with client_of(scene) as client:
            whole = await client.messages.create(**ASKED)
            events = [event async for event in await client.messages.create(**ASKED, stream=True)]
            async with client.messages.stream(**ASKED) as stream:
                streamed = await stream.get_final_message()
        for answer in (whole, streamed):
            assert blocks_of(answer) == [("Let me see.",), *[("weather", {"city": "Ulm"})] * 2]
            assert (answer.stop_reason, answer.stop_sequence) == ("tool_use", None)
            ids = [block.id for block in answer.content[1:]]
            assert len(set(ids)) == 2 and all(id.startswith("toolu_") for id in ids)
        marks = [(event.type, event.index) for event in events if event.type in ("content_block_start", "content_block_stop")]
        assert marks == [(f"content_block_{mark}", index) for index in range(3) for mark in ("start", "stop")]
        starts = [event.content_block for event in events if event.type == "content_block_start"]
        assert [block.type for block in starts] == ["text", "tool_use", "tool_use"] and starts[1].input == {}
        deltas = [event for event in events if event.type == "content_block_delta"]
        for index in (1, 2):
            pieces = [event.delta.partial_json for event in deltas if event.index == index]
            assert "".join(pieces) == '{"city": "Ulm"}'

    stage.run(test)


async def weather(city: str) -> str:
    """Tell the weather.

    Args:
        city: Its name.
    """
    return f"Rain in {city}."


@pytest.mark.parametrize("stream", [False, True])
def test_the_clients_own_tool_runner(stage: Any, stream: bool) -> None:
    """It asks for a thread first, which is not supported, and goes on without one."""

    async def test(scene: Any) -> None:
        answers = iter([PIECES, ["Take an umbrella."]])

        async def script(play: Any) -> None:
            await scripted(next(answers))(play)

        scene.controller.script = script
        asked: Any = {"model": "tiny", "max_tokens": 9, "messages": [USER], "tools": [anthropic.beta_async_tool(weather)]}
        async with client_of(scene) as client:
            runner = client.beta.messages.tool_runner(**asked, stream=stream)
            messages = [await one.get_final_message() if stream else one async for one in runner]
        assert [message.stop_reason for message in messages] == ["tool_use", "end_turn"]
        assert messages[-1].content[0].text == "Take an umbrella."
        prompt = list(scene.controller.plays.values())[-1].spec.prompt_ids
        shown = (await scene.http.post("/detokenize", json={"tokens": prompt})).json()["prompt"]
        assert shown.count("<tool_response>\nRain in Ulm.\n</tool_response>") == 2

    stage.run(test)


def test_a_stream_that_calls_at_once_and_goes_on(stage: Any) -> None:
    """No empty block precedes a call. What comes with the end of its arguments is the next block."""

    async def test(scene: Any) -> None:
        scene.controller.script = scripted([CALL[:57], f"{CALL[57:]} Done."])
        async with client_of(scene) as client, client.messages.stream(**ASKED) as stream:
            assert blocks_of(await stream.get_final_message()) == [("weather", {"city": "Ulm"}), (" Done.",)]

    stage.run(test)


@pytest.mark.parametrize(
    ("text", "finish", "blocks", "reason"),
    [
        (CALL[:-17], "length", [("weather", {"INVALID_JSON": '{"city": "Ul'})], "max_tokens"),
        (CALL.replace('"Ulm"', "Ulm"), "stop", [("weather", {"INVALID_JSON": '{"city": Ulm}'})], "tool_use"),
        (CALL.replace('"Ulm"', "1e999"), "stop", [("weather", {"city": float("inf")})], "tool_use"),
        (CALL, "length", [("weather", {"city": "Ulm"})], "max_tokens"),
        (CALL.replace("weather", "other"), "stop", [(CALL.replace("weather", "other"),)], "end_turn"),
        ("", "stop", [("",)], "end_turn"),
    ],
)
def test_answers_that_are_cut_broken_or_do_not_call(stage: Any, text: str, finish: str, blocks: Any, reason: str) -> None:
    async def test(scene: Any) -> None:
        scene.controller.script = scripted([text], finish)
        async with client_of(scene) as client:
            asked = {**ASKED, "max_tokens": 2}
            answer = await client.messages.create(**asked)
            events = [event async for event in await client.messages.create(**asked, stream=True)]
        assert (blocks_of(answer), answer.stop_reason) == (blocks, reason)
        assert events[-2].delta.stop_reason == reason
        assert [event.type for event in events].count("content_block_start") == 1

    stage.run(test)


def test_deep_arguments_are_text(stage: Any) -> None:
    """The model may write more levels than a reader of JSON takes: no error of ours."""

    async def test(scene: Any) -> None:
        arguments = '{"a":' * 5000 + "1" + "}" * 5000
        scene.controller.script = scripted([f'<tool_call>\n{{"name": "weather", "arguments": {arguments}}}\n</tool_call>'])
        async with client_of(scene) as client:
            async with asyncio.timeout(20):
                answer = await client.messages.create(**ASKED)
        assert blocks_of(answer) == [("weather", {"INVALID_JSON": arguments})]

    stage.run(test)
