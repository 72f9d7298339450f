"""Functions in OpenAI's Responses API: fields and items of a request, and calls as OpenAI's own client sees them."""

import json
from typing import Any

import openai
import pytest

from mmrt.actors.gateway.apis.openai.responses import Exchange
from mmrt.actors.gateway.apis.openai.stored import StoredResponses
from mmrt.actors.gateway.keeping.kept_answers import KeptAnswers
from mmrt.actors.gateway.reading.content import Conversation, MediaPart, Message
from mmrt.actors.gateway.reading.ignored import collecting
from mmrt.actors.gateway.reading.tool_messages import MAX_CALLS, Call
from mmrt.actors.gateway.reading.validation import Limits
from mmrt.models.grammar.call_form import CallForm, Function, form_of
from mmrt.runtime.errors import RequestError
from mmrt.shm.kept_records import KeptRecords
from mmrt.tests.actors.gateway.test_openai_responses import IMAGE, read
from mmrt.tests.actors.gateway.test_tool_calls import CALL, PIECES, scripted

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
USER = {"role": "user", "content": "hi"}
TEXT = {"type": "input_text", "text": "Rain."}
CALLED = {
    "type": "function_call",
    "id": "fc_1",
    "call_id": "c1",
    "name": "weather",
    "arguments": '{"city": "Ulm"}',
    "status": "completed",
}
OUTPUT = {"type": "function_call_output", "call_id": "c1", "output": "Rain."}
ARGUMENTS = {"city": "Ulm"}


def tool(name: Any = "weather", **more: Any) -> dict[str, Any]:
    return {"type": "function", "name": name, "parameters": SCHEMA, **more}


def space(name: str, *names: str) -> dict[str, Any]:
    return {"type": "namespace", "name": name, "description": "Of a town.", "tools": [tool(one) for one in names]}


def form(limits: Limits, **fields: Any) -> CallForm | None:
    """The form of an answer's calls; None where there is no grammar."""
    grammar = read(limits, **fields).generation.grammar
    return None if grammar is None else form_of(grammar.source)


def test_functions_and_the_choice_among_them(limits: Limits) -> None:
    tools = [tool(description="of a city", strict=False), tool("now")]
    use = read(limits, tools=tools).tools
    assert use is not None and use.names == {"weather", "now"}
    assert use.shown[0] == {"type": "function", "function": {"name": "weather", "description": "of a city", "parameters": SCHEMA}}
    weather, now = [Function(f"/{at}/parameters", name, SCHEMA) for at, name in enumerate(("weather", "now"))]
    assert form(limits, tools=tools) is None and read(limits, tools=tools, tool_choice="none").tools is None
    both = CallForm(functions=[weather, now], is_required=True, is_single=False)
    assert form(limits, tools=tools, tool_choice="required") == both
    named = CallForm(functions=[now], is_required=True, is_single=True)
    assert form(limits, tools=tools, tool_choice={"type": "function", "name": "now"}) == named
    single = form(limits, tools=tools, parallel_tool_calls=False)
    assert single is not None and single.is_single and not single.is_required


def test_functions_of_a_namespace(limits: Limits) -> None:
    """As Codex has them, beside a search, which is left out."""
    tools = [tool(), space("town", "now", "weather"), {"type": "web_search", "external_web_access": False}]
    allowed = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "town.weather"}]}
    asked = read(limits, tools=tools, tool_choice=allowed, client_metadata={"turn_id": "1"})
    assert asked.tools is not None and asked.tools.names == {"town.weather"}
    shown = [(one["function"]["name"], one["function"].get("description")) for one in asked.tools.shown]
    assert shown == [("weather", None), ("town.now", "Of a town."), ("town.weather", None)]
    function = Function("/1/tools/1/parameters", "town.weather", SCHEMA)
    assert form(limits, tools=tools, tool_choice=allowed) == CallForm(functions=[function], is_required=True, is_single=False)
    messages = read(limits, input=[USER, {**CALLED, "namespace": "town"}, OUTPUT], tools=tools).conversation.messages
    assert messages[1].calls == (Call("c1", "town.weather", ARGUMENTS),)


def test_calls_and_results_in_a_conversation(limits: Limits) -> None:
    """Calls belong to the message of the assistant before them."""
    items = [
        USER,
        {"role": "assistant", "content": "Let me see."},
        CALLED,
        {**CALLED, "call_id": "c2", "caller": None},
        {**OUTPUT, "call_id": "c2", "output": [TEXT]},
        OUTPUT,
        {**CALLED, "call_id": "c3"},
        {**OUTPUT, "call_id": "c3", "output": []},
    ]
    assert read(limits, input=items, tools=[tool()]).conversation.messages == (
        Message("user", "hi"),
        Message("assistant", "Let me see.", calls=(Call("c1", "weather", ARGUMENTS), Call("c2", "weather", ARGUMENTS))),
        Message("tool", ("Rain.",), call_id="c2"),
        Message("tool", "Rain.", call_id="c1"),
        Message("assistant", "", calls=(Call("c3", "weather", ARGUMENTS),)),
        Message("tool", "", call_id="c3"),
    )


def test_pictures_in_results(limits: Limits) -> None:
    items = [
        USER,
        CALLED,
        {**OUTPUT, "output": [{**TEXT, "prompt_cache_breakpoint": {"mode": "explicit"}}, {**IMAGE, "prompt_cache_breakpoint": {}}]},
    ]
    conversation = read(limits, input=items, tools=[tool()]).conversation
    assert conversation.messages[2] == Message("tool", ("Rain.", MediaPart("image")), call_id="c1")
    assert [medium.path for medium in conversation.media] == ["input[2].output[1].image_url"]


def called(**changed: Any) -> dict[str, Any]:
    return {"input": [USER, {**CALLED, **changed}]}


def result(**changed: Any) -> dict[str, Any]:
    return {"input": [USER, CALLED, {**OUTPUT, **changed}]}


@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        ({"tools": {}}, "tools", "expected an array, got an object"),
        ({"tools": [{}]}, "tools[0].type", "is required"),
        ({"tools": [{"type": "mcp"}]}, "tools[0].type", 'is "mcp", allowed are function, namespace, web_search'),
        ({"tools": [{"type": "web_search"}], "tool_choice": "required"}, "tool_choice", "requires a call, but there are no tools"),
        ({"tools": [space("town", "a b")]}, "tools[0].tools[0].name", 'is "a b", expected 1 to 128 letters'),
        ({"tools": [space("t" * 64, "n" * 64)]}, "tools[0].tools[0].name", "has 129 characters with its namespace, the limit is 128"),
        ({"tools": [tool("town.now"), space("town", "now")]}, "tools[1].tools[0].name", 'is "town.now", as that of tools[0]'),
        ({"tools": [{"type": "namespace", "name": "town"}]}, "tools[0].tools", "is required"),
        ({"tools": [{"type": "namespace", "name": "town", "tools": 5}]}, "tools[0].tools", "expected an array, got an integer"),
        ({"tools": [{"type": "namespace", "name": "a b", "tools": []}]}, "tools[0].name", 'is "a b", expected'),
        ({"tools": [{**space("town"), "tools": [{"type": "custom"}]}]}, "tools[0].tools[0].type", 'is "custom", allowed are function'),
        (called(namespace="n" * 128), "input[1].namespace", "has 136 characters with its namespace, the limit is 128"),
        ({"tools": [tool("a b")]}, "tools[0].name", 'is "a b", expected 1 to 128 letters'),
        ({"tools": [tool(), tool()]}, "tools[1].name", 'is "weather", as that of tools[0]'),
        ({"tools": [tool(parameters=5)]}, "tools[0].parameters", "expected an object, got an integer"),
        ({"tools": [tool(strict=1)]}, "tools[0].strict", "expected true or false, got 1"),
        ({"tools": [tool(function={})]}, "tools[0].function", "is not supported"),
        ({"tools": [tool(defer_loading=True)]}, "tools[0].defer_loading", "is true, only false is supported"),
        ({"tools": [tool(strict=True)], "ignore_eos": True}, "ignore_eos", "cannot be combined with tools"),
        ({"tool_choice": "required"}, "tool_choice", "requires a call, but there are no tools"),
        ({"tool_choice": "any"}, "tool_choice", 'is "any", allowed are none, auto, required'),
        ({"tool_choice": {"type": "mcp"}}, "tool_choice.type", 'is "mcp", allowed are function, allowed_tools'),
        ({"tool_choice": {"type": "allowed_tools"}}, "tool_choice.mode", "is required"),
        ({"tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": 5}}, "tool_choice.tools", "expected an array"),
        ({"tool_choice": {"type": "function", "name": "x"}, "tools": [tool()]}, "tool_choice.name", 'is "x", but tools has weather'),
        ({"parallel_tool_calls": 1}, "parallel_tool_calls", "expected true or false, got 1"),
        (called(call_id=None), "input[1].call_id", "is required"),
        (called(call_id="c" * 257), "input[1].call_id", "has 257 characters, the limit is 256"),
        (called(name="a b"), "input[1].name", 'is "a b", expected'),
        (called(arguments=None), "input[1].arguments", "is required"),
        (called(arguments=5), "input[1].arguments", "expected a string, got an integer"),
        (called(more=1), "input[1].more", "is not supported"),
        ({"input": [USER, *[CALLED] * (MAX_CALLS + 1)]}, f"input[{MAX_CALLS + 1}].type", f"the limit is {MAX_CALLS}"),
        (result(call_id="c9"), "input[2].call_id", 'is "c9", no call before it has this id'),
        (result(output=5), "input[2].output", "expected a string or an array of parts, got an integer"),
        (result(output=[{"type": "input_file"}]), "input[2].output[0].type", 'is "input_file", allowed are input_text, output_text'),
        (result(output=[{"type": "input_image"}]), "input[2].output[0].image_url", "is required"),
        (result(output=[{**TEXT, "text": 5}]), "input[2].output[0].text", "expected a string, got an integer"),
        (result(output=[TEXT] * 2049), "input", "prompt is too long: 2051 tokens > 2047 maximum"),
        (result(more=1), "input[2].more", "is not supported"),
    ],
)
def test_what_is_refused(limits: Limits, fields: dict[str, Any], param: str, says: str) -> None:
    with collecting(is_strict=True), pytest.raises(RequestError) as caught:
        read(limits, **fields)
    assert (caught.value.param, caught.value.status) == (param, 400) and says in caught.value.message
    assert len(caught.value.message) < 300


ASKED: Any = {"model": "tiny", "input": "hi", "tools": [tool()]}


def items_of(response: Any) -> list[tuple[str, str]]:
    return [("", item.content[0].text) if item.type == "message" else (item.name, item.arguments) for item in response.output]


def test_calls_whole_and_in_a_stream(stage: Any) -> None:
    async def test(scene: Any) -> None:
        scene.controller.script = scripted(PIECES)
        whole = await scene.client.responses.create(**ASKED, parallel_tool_calls=True)
        events = [event async for event in await scene.client.responses.create(**ASKED, stream=True)]
        async with scene.client.responses.stream(**ASKED) as stream:
            accumulated = await stream.get_final_response()
        for response in (whole, events[-1].response, accumulated):
            assert items_of(response) == [("", "Let me see."), *[("weather", '{"city": "Ulm"}')] * 2]
            assert response.status == "completed" and {item.status for item in response.output} == {"completed"}
            assert len({item.call_id for item in response.output[1:]}) == len({item.id for item in response.output}) - 1 == 2
            assert (response.tool_choice, response.tools[0].name) == ("auto", "weather")
        kinds = [event.type.removeprefix("response.") for event in events if not event.type.endswith(".delta")]
        call = ["output_item.added", "function_call_arguments.done", "output_item.done"]
        assert kinds == [
            "created", "in_progress", "output_item.added", "content_part.added", "output_text.done", "content_part.done",
            "output_item.done", *call, *call, "completed",
        ]  # fmt: skip
        assert [event.sequence_number for event in events] == list(range(len(events)))
        added = [event.item for event in events if event.type == "response.output_item.added"]
        assert [(item.arguments, item.status) for item in added[1:]] == [("", "in_progress")] * 2
        for index in (1, 2):
            of_item = [event for event in events if getattr(event, "output_index", None) == index and hasattr(event, "item_id")]
            assert "".join(event.delta for event in of_item[:-1]) == of_item[-1].arguments == '{"city": "Ulm"}'
            assert {event.item_id for event in of_item} == {added[index].id}

    stage.run(test)


@pytest.mark.parametrize("stream", [False, True])
def test_a_call_in_a_namespace(stage: Any, stream: bool) -> None:
    """The client gets namespace and name apart, and can send the call back."""

    async def test(scene: Any) -> None:
        asked = {**ASKED, "tools": [tool(), space("town", "now"), {"type": "web_search"}]}
        scene.controller.script = scripted([CALL.replace("weather", "town.now")])
        response = await scene.client.responses.create(**asked, stream=stream)
        if stream:
            events = [event async for event in response]
            response = events[-1].response
            assert [event.name for event in events if event.type == "response.function_call_arguments.done"] == ["now"]
        (called,) = response.output
        assert (called.namespace, called.name, called.arguments) == ("town", "now", '{"city": "Ulm"}')
        assert [one.type for one in response.tools] == ["function", "namespace"]
        result = {"type": "function_call_output", "call_id": called.call_id, "output": "Noon."}
        await scene.client.responses.create(**{**asked, "input": [USER, called.model_dump(exclude_unset=True), result]})
        sent_back = list(scene.controller.plays.values())[-1].spec.prompt_ids
        await scene.client.responses.create(**{**asked, "input": [result]}, previous_response_id=response.id)
        gone_on = list(scene.controller.plays.values())[-1].spec.prompt_ids
        prompts = [(await scene.http.post("/detokenize", json={"tokens": ids})).json()["prompt"] for ids in (sent_back, gone_on)]
        assert all(prompt.count('"town.now"') == 2 for prompt in prompts), "among the functions, and in the call"

    stage.run(test)


def test_a_stream_that_calls_at_once_and_goes_on(stage: Any) -> None:
    """No empty message precedes a call. What comes with the end of its arguments is the next item."""

    async def test(scene: Any) -> None:
        scene.controller.script = scripted([CALL[:57], f"{CALL[57:]} Done."])
        async with scene.client.responses.stream(**ASKED) as stream:
            assert items_of(await stream.get_final_response()) == [("weather", '{"city": "Ulm"}'), ("", " Done.")]

    stage.run(test)


@pytest.mark.parametrize("stream", [False, True])
def test_a_call_that_is_cut(stage: Any, stream: bool) -> None:
    async def test(scene: Any) -> None:
        scene.controller.script = scripted([f"{CALL}\n{CALL[:-17]}"], "length")
        response = await scene.client.responses.create(**ASKED, stream=stream)
        if stream:
            response = [event async for event in response][-1].response
        assert items_of(response) == [("weather", '{"city": "Ulm"}'), ("weather", '{"city": "Ul')]
        assert [item.status for item in response.output] == ["completed", "incomplete"] and response.status == "incomplete"

    stage.run(test)


def test_a_conversation_goes_on_with_results(stage: Any) -> None:
    """After an answer that called, broken arguments included, by its id and by its items: the prompts are the same."""

    async def test(scene: Any) -> None:
        create = scene.client.responses.create
        for script in (PIECES, [CALL.replace('"Ulm"', "Ulm")]):  # the latter's are no JSON
            scene.controller.script = scripted(script)
            first = await create(**ASKED)
            results = [
                {"type": "function_call_output", "call_id": item.call_id, "output": "Rain."}
                for item in first.output
                if item.type == "function_call"
            ]
            scene.controller.script = scripted(["So."])
            second = await create(**{**ASKED, "input": results}, previous_response_id=first.id)
            assert second.output_text == "So."
            prompt = list(scene.controller.plays.values())[-1].spec.prompt_ids
            await create(**{**ASKED, "input": [USER, *[item.model_dump(exclude_unset=True) for item in first.output], *results]})
            assert list(scene.controller.plays.values())[-1].spec.prompt_ids == prompt
            if script is not PIECES:
                shown = (await scene.http.post("/detokenize", json={"tokens": prompt})).json()["prompt"]
                assert "INVALID_JSON" in shown and "Rain." in shown
        with pytest.raises(openai.BadRequestError, match="no call before it has this id"):
            await create(**{**ASKED, "input": results})

    stage.run(test)


def test_items_of_kept_responses_can_be_named(stage: Any) -> None:
    """As the AI SDK sends what it got. The prompt is that with the items themselves."""

    async def test(scene: Any) -> None:
        create = scene.client.responses.create
        scene.controller.script = scripted(PIECES)
        first = await create(**ASKED)
        calls = [item for item in first.output if item.type == "function_call"]
        results = [{"type": "function_call_output", "call_id": item.call_id, "output": "Rain."} for item in calls]
        references = [{"type": "item_reference", "id": first.output[0].id}, *[{"id": item.id} for item in calls]]
        await create(**{**ASKED, "input": [USER, *references, *results]})
        prompt = list(scene.controller.plays.values())[-1].spec.prompt_ids
        await create(**{**ASKED, "input": [USER, *[item.model_dump(exclude_unset=True) for item in first.output], *results]})
        assert list(scene.controller.plays.values())[-1].spec.prompt_ids == prompt
        unstored = await create(**ASKED, store=False)
        for id in (unstored.output[0].id, f"{first.output[0].id}_9", "msg", first.id):
            with pytest.raises(openai.BadRequestError, match="is unknown: the latest 64 MiB") as caught:
                await create(**{**ASKED, "input": [USER, {"type": "item_reference", "id": id}]})
            assert caught.value.param == "input[1].id"

    stage.run(test)


def test_calls_are_kept_as_they_are() -> None:
    """Their arguments may have numbers that the records do not know."""
    stored = StoredResponses(KeptAnswers(KeptRecords.own()))
    message = Message("assistant", ("a", "b"), calls=(Call("c1", "f", {"a": [2**70, 0.5, None, {"b": "\u2603"}]}), Call("c2", "g", {})))
    conversation = Conversation((Message("user", "hi"), message), ())
    stored.put(b"", "resp_1", conversation)
    assert (found := stored.get(b"", "resp_1")) is not None and found.conversation == conversation


def test_results_of_stored_calls_are_known(limits: Limits) -> None:
    stored = StoredResponses(KeptAnswers(KeptRecords.own()))
    stored.put(b"", "resp_1", Conversation((Message("assistant", "", calls=(Call("c1", "weather", {}),)),), ()))
    body = json.dumps({"previous_response_id": "resp_1", "input": [OUTPUT]}).encode()
    messages = Exchange(stored).read(body, limits).conversation.messages
    assert messages[1:] == (Message("tool", "Rain.", call_id="c1"),)
