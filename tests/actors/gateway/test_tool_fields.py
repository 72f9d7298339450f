"""Functions, the choice among them, calls and results in a conversation; refusals that name field, value and limit."""

import json
from typing import Any

import pytest

from mmrt.actors.gateway.reading.ignored import collecting
from mmrt.actors.gateway.reading.prompt import PromptBuilder
from mmrt.actors.gateway.reading.tool_messages import INVALID_JSON, MAX_CALLS, Call
from mmrt.actors.gateway.reading.validation import ChatRequest, Limits, read_chat
from mmrt.models.grammar.call_form import CallForm, Function, form_of
from mmrt.models.grammar.source import JSON_OBJECT, MAX_SOURCE_BYTES
from mmrt.runtime.errors import RequestError
from mmrt.tests.actors.gateway.description import check_described

LIMITS = Limits(model_name="tiny", kinds=(), max_context=2048)
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
USER = {"role": "user", "content": "hi"}


def tool(name: str = "weather", **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": SCHEMA, **more}}


def read(**fields: Any) -> ChatRequest:
    body = json.dumps({"messages": [USER], **fields}).encode()
    asked = read_chat(body, LIMITS)
    check_described("/v1/chat/completions", body, LIMITS)
    return asked


def named(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


def allowed(*names: str, mode: str = "auto") -> dict[str, Any]:
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": [named(name) for name in names]}}


def call(**changed: Any) -> dict[str, Any]:
    function = {"name": "weather", "arguments": '{"city": "Ulm"}'}
    return {"id": "c1", "type": "function", "function": function | changed.pop("function", {}), **changed}


def form(**fields: Any) -> CallForm | None:
    """The form of an answer's calls; None where there is no grammar."""
    grammar = read(**fields).generation.grammar
    if grammar is None:
        return None
    assert grammar.field == "tools"
    return form_of(grammar.source)


def test_functions_are_shown_to_the_template_as_they_came() -> None:
    name = "mcp.time_now-" + "w" * 115
    use = read(tools=[tool(description="of a city", strict=True), tool() | {"function": {"name": name}}]).tools
    assert use is not None and use.names == {"weather", name}
    assert use.shown[0]["function"] == {"name": "weather", "description": "of a city", "parameters": SCHEMA}
    assert list(use.shown[0]["function"]) == ["name", "description", "parameters"]
    assert use.shown[1] == {"type": "function", "function": {"name": name}}


@pytest.mark.parametrize("fields", [{}, {"tools": []}, {"tools": [tool()], "tool_choice": "none"}, {"tool_choice": "auto"}])
def test_nothing_changes_without_functions_to_call(fields: dict[str, Any]) -> None:
    asked = read(**fields, response_format={"type": "json_object"})
    assert asked.tools is None and asked.generation.grammar is not None
    assert asked.generation.grammar.source == JSON_OBJECT and asked.generation.grammar.part is None


def test_where_a_grammar_makes_calls_valid() -> None:
    tools = [tool(), tool("now", parameters={})]
    weather, now = Function("/0/function/parameters", "weather", SCHEMA), Function("/1/function/parameters", "now", {"type": "object"})
    now_empty = Function("/1/function/parameters", "now", {"type": "object", "properties": {}})
    free = Function("/0/function/parameters", "weather", {"type": "object"})
    assert form(tools=tools) is None and form(tools=tools, tool_choice="auto", parallel_tool_calls=True) is None
    assert form(tools=tools, tool_choice="required") == CallForm(functions=[weather, now_empty], is_required=True, is_single=False)
    assert form(tools=tools, tool_choice=named("weather")) == CallForm(functions=[weather], is_required=True, is_single=True)
    assert form(tools=tools, parallel_tool_calls=False) == CallForm(functions=[free, now], is_required=False, is_single=True)
    strict = [tool(strict=True), tools[1]]
    weather = Function("/0/function/parameters", "weather", SCHEMA, is_strict=True)
    assert form(tools=strict) == CallForm(functions=[weather, now], is_required=False, is_single=False)
    asked = read(tools=strict, response_format={"type": "json_object"}).generation.grammar
    assert asked is not None and asked.part is not None and asked.part.field == "response_format"
    assert form_of(asked.source) == CallForm(functions=[weather, now], is_required=False, is_single=False, answer=JSON_OBJECT)
    required = form(tools=tools, tool_choice="required", response_format={"type": "json_object"})
    assert required is not None and required.answer is None


def test_arguments_are_open_where_the_schema_names_no_properties() -> None:
    """Without a schema there are none."""
    for parameters, schema in {
        '{"type": "object"}': {"type": "object"},
        '{"anyOf": [{"required": ["a"]}]}': {"type": "object", "anyOf": [{"required": ["a"]}]},
        "null": {"type": "object", "properties": {}},
    }.items():
        asked = form(tools=[tool(parameters=json.loads(parameters))], tool_choice="required")
        assert asked is not None and asked.functions[0].schema == schema


@pytest.mark.parametrize("mode", ["auto", "required"])
def test_a_choice_among_some_functions(mode: str) -> None:
    """All are shown, so that prompts begin alike; a grammar keeps the answer from calling others."""
    tools = [tool(), tool("now"), tool("tide", strict=True)]
    asked = read(tools=tools, tool_choice=allowed("weather", "tide", mode=mode))
    assert asked.tools is not None and [shown["function"]["name"] for shown in asked.tools.shown] == ["weather", "now", "tide"]
    assert asked.tools.names == {"weather", "tide"} and asked.generation.grammar is not None
    schema = SCHEMA if mode == "required" else {"type": "object"}
    functions = [Function("/0/function/parameters", "weather", schema), Function("/2/function/parameters", "tide", SCHEMA, True)]
    expected = CallForm(functions=functions, is_required=mode == "required", is_single=False)
    assert form_of(asked.generation.grammar.source) == expected


BAD_FIELDS: list[tuple[dict[str, Any], str, str]] = [
    ({"tools": {}}, "tools", "expected an array, got an object"),
    ({"tools": [1]}, "tools[0]", "expected an object"),
    ({"tools": [{"function": {"name": "f"}}]}, "tools[0].type", "is required"),
    ({"tools": [{"type": "custom", "custom": {}}]}, "tools[0].type", 'is "custom", allowed are function'),
    ({"tools": [{"type": "function"}]}, "tools[0].function", "is required"),
    ({"tools": [tool() | {"x": 1}]}, "tools[0].x", "is not supported"),
    ({"tools": [tool(x=1)]}, "tools[0].function.x", "is not supported"),
    ({"tools": [tool(None)]}, "tools[0].function.name", "is required"),
    ({"tools": [tool("a b")]}, "tools[0].function.name", 'is "a b", expected 1 to 128 letters, digits, _, - and .'),
    ({"tools": [tool("f" * 129)]}, "tools[0].function.name", "expected 1 to 128"),
    ({"tools": [tool(5)]}, "tools[0].function.name", "is 5, expected"),
    ({"tools": [tool(), tool()]}, "tools[1].function.name", 'is "weather", as that of tools[0]'),
    ({"tools": [tool(description=1)]}, "tools[0].function.description", "expected a string"),
    ({"tools": [tool(strict="yes")]}, "tools[0].function.strict", 'expected true or false, got "yes"'),
    ({"tools": [tool(parameters=[])]}, "tools[0].function.parameters", "expected an object, got an array"),
    ({"tools": [tool(parameters={"type": "array"})]}, "tools[0].function.parameters.type", 'is "array", arguments are an object'),
    ({"tools": [tool(parameters={"const": "x" * MAX_SOURCE_BYTES})]}, "tools[0].function.parameters", "allowed are 1 to 32768"),
    ({"tools": [tool(f"f{i}", strict=True, parameters={"const": "x" * 30_000}) for i in range(9)]}, "tools", "all functions together"),
    ({"tool_choice": "required"}, "tool_choice", "requires a call, but there are no tools"),
    ({"tool_choice": "any", "tools": [tool()]}, "tool_choice", 'is "any", allowed are none, auto, required, and objects of'),
    ({"tool_choice": 1, "tools": [tool()]}, "tool_choice", "expected an object"),
    ({"tool_choice": {"type": "mcp"}, "tools": [tool()]}, "tool_choice.type", "allowed are function, allowed_tools"),
    ({"tool_choice": {"type": "allowed_tools"}, "tools": [tool()]}, "tool_choice.allowed_tools", "is required"),
    (
        {"tool_choice": allowed("x", mode="none"), "tools": [tool()]},
        "tool_choice.allowed_tools.mode",
        'is "none", allowed are auto, requ',
    ),
    (
        {"tool_choice": allowed(), "tools": [tool()]},
        "tool_choice.allowed_tools.tools",
        "has 0 entries, allowed are 1 to 1, the number of tools",
    ),
    ({"tool_choice": allowed("x"), "tools": [tool()]}, "tool_choice.allowed_tools.tools[0].function.name", 'is "x", but tools has'),
    ({"tool_choice": {"type": "function"}, "tools": [tool()]}, "tool_choice.function", "is required"),
    ({"tool_choice": named("x")}, "tool_choice.function.name", 'is "x", but tools has no function'),
    ({"tool_choice": named("x"), "tools": [tool(), tool("b")]}, "tool_choice.function.name", 'is "x", but tools has weather, b'),
    ({"parallel_tool_calls": 1}, "parallel_tool_calls", "expected true or false, got 1"),
    ({"tools": [tool(strict=True)], "ignore_eos": True}, "ignore_eos", "cannot be combined with tools"),
]


@pytest.mark.parametrize(("fields", "param", "text"), BAD_FIELDS)
def test_bad_fields(fields: dict[str, Any], param: str, text: str) -> None:
    with collecting(is_strict=True), pytest.raises(RequestError) as caught:
        read(**fields)
    assert (caught.value.status, caught.value.param) == (400, param)
    assert text in caught.value.message and len(caught.value.message) < 300


def test_a_schema_that_is_too_deep() -> None:
    schema: dict[str, Any] = {}
    for _ in range(70):
        schema = {"properties": {"x": schema}}
    with pytest.raises(RequestError, match=r"^tools\[0\].function.parameters: is nested more than 64 levels deep$"):
        read(tools=[tool(parameters=schema)])


def test_calls_and_results_in_a_conversation() -> None:
    messages = [
        USER,
        {"role": "assistant", "content": None, "tool_calls": [call(), call(id="c2", index=1)]},
        {"role": "tool", "tool_call_id": "c2", "content": [{"type": "text", "text": "rain"}]},
        {"role": "tool", "tool_call_id": "c1", "content": ""},
        {"role": "assistant", "content": "Well.", "tool_calls": None},
    ]
    found = read(messages=messages).conversation.messages
    arguments = {"city": "Ulm"}
    assert found[1].content == "" and found[1].calls == (Call("c1", "weather", arguments), Call("c2", "weather", arguments))
    assert [(one.role, one.call_id, one.content) for one in found[2:4]] == [("tool", "c2", ("rain",)), ("tool", "c1", "")]
    assert found[4].calls == ()


@pytest.mark.parametrize(
    "text",
    ["{a", "[]", '{"a":' * 70 + "1" + "}" * 70, '{"a": "\\ud800"}', '{"a": NaN}', '{"a":' * 9999, '{"a": 1e999}'],
)
def test_arguments_that_are_no_object_stay_in_the_conversation(text: str, prompts: PromptBuilder) -> None:
    """The model may write so; its client sends the call back with a result that says what is wrong."""
    messages = [USER, {"role": "assistant", "tool_calls": [call(function={"arguments": text})]}, RESULT]
    asked = read(messages=messages)
    assert asked.conversation.messages[1].calls == (Call("c1", "weather", {INVALID_JSON: text}),)
    if len(text) < 1000:
        assert json.dumps({INVALID_JSON: text}) in prompts.text_of(prompts.build(asked).ids)


def test_empty_arguments_are_an_empty_object() -> None:
    messages = [USER, {"role": "assistant", "tool_calls": [call(function={"arguments": ""})]}, RESULT]
    assert read(messages=messages).conversation.messages[1].calls == (Call("c1", "weather", {}),)


RESULT = {"role": "tool", "tool_call_id": "c1", "content": "rain"}
BAD_CALLS: list[tuple[Any, str, str]] = [
    ({}, "", "expected an array, got an object"),
    ([call()] * (MAX_CALLS + 1), "", f"has {MAX_CALLS + 1} entries, the limit is {MAX_CALLS}"),
    ([1], "[0]", "expected an object"),
    ([call(type="custom")], "[0].type", 'is "custom", allowed are function'),
    ([call(id=None)], "[0].id", "is required"),
    ([call(id="")], "[0].id", "is empty"),
    ([call(id="c" * 257)], "[0].id", "has 257 characters, the limit is 256"),
    ([call(more=1)], "[0].more", "is not supported"),
    ([call(function={"name": "a b"})], "[0].function.name", 'is "a b", expected'),
    ([call(function={"arguments": None})], "[0].function.arguments", "is required"),
    ([call(function={"arguments": {}})], "[0].function.arguments", "expected a string"),
]


@pytest.mark.parametrize(("calls", "suffix", "text"), BAD_CALLS)
def test_bad_calls(calls: Any, suffix: str, text: str) -> None:
    with collecting(is_strict=True), pytest.raises(RequestError) as caught:
        read(messages=[USER, {"role": "assistant", "content": "x", "tool_calls": calls}])
    assert (caught.value.status, caught.value.param) == (400, f"messages[1].tool_calls{suffix}")
    assert text in caught.value.message and len(caught.value.message) < 300


@pytest.mark.parametrize(
    ("result", "param", "text"),
    [
        ({"role": "tool", "content": "x"}, "messages[2].tool_call_id", "is required"),
        (RESULT | {"tool_call_id": "c9"}, "messages[2].tool_call_id", 'is "c9", no call before it has this id'),
        (RESULT | {"content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}, "messages[2].content[0]", "image"),
        ({"role": "user", "content": "x", "tool_call_id": "c1"}, "messages[2].tool_call_id", "is not supported"),
    ],
)
def test_bad_results(result: Any, param: str, text: str) -> None:
    with collecting(is_strict=True), pytest.raises(RequestError) as caught:
        read(messages=[USER, {"role": "assistant", "tool_calls": [call()]}, result])
    assert (caught.value.status, caught.value.param) == (400, param)
    assert text in caught.value.message


def test_a_message_that_calls_is_not_continued() -> None:
    with pytest.raises(RequestError, match=r"messages\[1\].tool_calls: cannot be combined with continue_final_message"):
        read(messages=[USER, {"role": "assistant", "content": "So", "tool_calls": [call()]}], continue_final_message=True)
