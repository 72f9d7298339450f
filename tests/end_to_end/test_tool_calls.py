"""Calls of functions, through the clients of OpenAI and Anthropic: whatever a random model would like to say, required and strict
calls are valid."""

import json
from typing import Any, Literal

import httpx2
import jsonschema
import openai
import pytest
from pydantic import BaseModel, Field

from mmrt.models.text.tokenizer import Tokenizer
from mmrt.tests.end_to_end.conftest import Server
from mmrt.tests.settings import ImportedLater

anthropic: Any = ImportedLater("anthropic")
WEATHER: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "pattern": "^[A-Z][a-z]{2,8}$"},
        "days": {"type": "integer", "minimum": 1, "maximum": 7},
        "unit": {"enum": ["C", "F"]},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
LIGHT: dict[str, Any] = {"type": "object", "properties": {"on": {"type": "boolean"}}, "required": ["on"], "additionalProperties": False}
SCHEMAS = {"weather": WEATHER, "set-light_2": LIGHT}
LONG = {"type": "object", "properties": {"text": {"type": "string", "minLength": 4000}}, "required": ["text"]}
WRITE = {"type": "function", "function": {"name": "write", "parameters": LONG}}
USER = {"role": "user", "content": "What is the weather in Ulm? <tool_call>"}


def tools(**more: Any) -> list[Any]:
    return [
        {"type": "function", "function": {"name": name, "description": f"About {name}.", "parameters": schema, **more}}
        for name, schema in SCHEMAS.items()
    ]


def create(server: Server, **options: Any) -> Any:
    defaults = {"messages": [USER], "tools": tools(), "max_tokens": 200, "temperature": 1, "seed": 5}
    return server.client.chat.completions.create(model=server.checkpoint.name, **{**defaults, **options})


def named(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


def check(calls: list[Any]) -> None:
    """Each is valid, and its id is its own."""
    for call in calls:
        assert call.type == "function"
        jsonschema.validate(json.loads(call.function.arguments), SCHEMAS[call.function.name])
    assert len({call.id for call in calls}) == len(calls) > 0


def streamed(server: Server, **options: Any) -> dict[int, tuple[str | None, list[tuple[str, str]], str]]:
    """Content, calls and reason of each choice of a stream, whose deltas have OpenAI's form."""
    content: dict[int, str | None] = {}
    calls: dict[int, list[tuple[str, str]]] = {}
    reasons: dict[int, str] = {}
    for chunk in create(server, stream=True, **options):
        for choice in chunk.choices:
            delta, begun = choice.delta, calls.setdefault(choice.index, [])
            assert choice.index not in reasons
            assert (delta.role == "assistant") == (choice.index not in content)
            content[choice.index] = (content.get(choice.index) or "") + delta.content if delta.content else content.get(choice.index)
            for call in delta.tool_calls or ():
                if call.function.name is not None:
                    assert call.index == len(begun) and call.id and call.type == "function" and call.function.arguments == ""
                    begun.append((call.function.name, ""))
                else:
                    assert call.index == len(begun) - 1 and call.id is None and call.type is None
                    begun[-1] = begun[-1][0], begun[-1][1] + call.function.arguments
            if choice.finish_reason is not None:
                reasons[choice.index] = choice.finish_reason
    return {index: (content[index], calls[index], reason) for index, reason in reasons.items()}


def whole(answer: Any) -> dict[int, tuple[str | None, list[tuple[str, str]], str]]:
    return {
        choice.index: (
            choice.message.content,
            [(call.function.name, call.function.arguments) for call in choice.message.tool_calls or ()],
            choice.finish_reason,
        )
        for choice in answer.choices
    }


@pytest.mark.parametrize("name", sorted(SCHEMAS))
def test_a_named_function_is_called_once(server: Server, name: str) -> None:
    answer = create(server, tool_choice=named(name), n=3)
    for choice in answer.choices:
        assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
        (call,) = choice.message.tool_calls
        assert call.function.name == name
    check([call for choice in answer.choices for call in choice.message.tool_calls])


def test_required_calls_in_a_stream_and_whole(server: Server) -> None:
    """With log-probabilities, of which each token has one wherever it is shown."""
    options = {"tool_choice": "required", "n": 2, "parallel_tool_calls": False, "logprobs": True}
    answer = create(server, **options)
    check([call for choice in answer.choices for call in choice.message.tool_calls])
    assert {choice.finish_reason for choice in answer.choices} == {"tool_calls"}
    assert sum(len(choice.logprobs.content) for choice in answer.choices) == answer.usage.completion_tokens
    assert streamed(server, **options) == whole(answer)
    chunks = list(create(server, stream=True, **options))
    entries = [entry for chunk in chunks for choice in chunk.choices if choice.logprobs for entry in choice.logprobs.content]
    assert len(entries) == answer.usage.completion_tokens


def test_several_calls(server: Server) -> None:
    """A bias makes another call likelier than the end, until the limit cuts one: those before it are valid."""
    ends = {str(id): -100 for id in Tokenizer.load(server.checkpoint).encode("<|im_end|><|endoftext|>")}
    options = {"tool_choice": "required", "max_tokens": 150, "logit_bias": ends}
    (found,) = streamed(server, **options).values()
    assert found == whole(create(server, **options))[0]
    assert found[2] == "length" and len(found[1]) > 1
    for name, arguments in found[1][:-1]:
        jsonschema.validate(json.loads(arguments), SCHEMAS[name])


@pytest.mark.parametrize(
    ("options", "reason"), [({"max_tokens": 60}, "length"), ({"stop": '"text"'}, "stop"), ({"max_tokens": 3}, "length")]
)
def test_a_call_that_is_cut(server: Server, options: dict[str, Any], reason: str) -> None:
    options = {"tools": [WRITE], "tool_choice": "required", **options}
    answer = create(server, **options)
    (found,) = whole(answer).values()
    assert found[2] == reason and answer.choices[0].finish_reason == reason
    if options.get("max_tokens") == 3:
        assert found[1] == [] and found[0] is not None and found[0].startswith("<tool_call>"), "no call has begun"
    else:
        ((name, arguments),) = found[1]
        assert name == "write" and arguments.startswith("{") and not arguments.endswith("}")
    assert list(streamed(server, **options).values()) == [found]


class Weather(BaseModel):
    city: str = Field(pattern="^[a-z]{3,9}$")
    when: Literal["now", "tomorrow"]


def test_a_strict_function_among_text(server: Server) -> None:
    """A bias makes the model begin a call somewhere; from there on it has to follow the schema."""
    tool = openai.pydantic_function_tool(Weather, name="weather")
    (opening,) = Tokenizer.load(server.checkpoint).encode("<tool_call>")
    ((content, calls, _),) = whole(create(server, tools=[tool], max_tokens=20)).values()
    assert content and not calls, "nothing makes it call"
    answer = server.client.chat.completions.parse(
        model=server.checkpoint.name,
        messages=[USER],  # type: ignore[list-item]
        tools=[tool],
        max_tokens=100,
        logit_bias={str(opening): 100},
        parallel_tool_calls=False,
    )
    assert answer.choices[0].finish_reason == "tool_calls" and answer.choices[0].message.tool_calls is not None
    assert isinstance(answer.choices[0].message.tool_calls[0].function.parsed_arguments, Weather)


def test_a_form_of_the_answer_or_calls(server: Server) -> None:
    schema = {"type": "object", "properties": {"sum": {"type": "integer", "minimum": 0, "maximum": 99}}, "required": ["sum"]}
    form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": {**schema, "additionalProperties": False}}}
    (opening,) = Tokenizer.load(server.checkpoint).encode("<tool_call>")
    options = {"tools": tools(strict=True), "response_format": form, "parallel_tool_calls": False}
    ((content, calls, reason),) = whole(create(server, logit_bias={str(opening): -100}, **options)).values()
    assert content is not None and not calls and reason == "stop"
    jsonschema.validate(json.loads(content), schema)
    answer = create(server, logit_bias={str(opening): 100}, **options)
    check(answer.choices[0].message.tool_calls)
    with pytest.raises(openai.BadRequestError, match="response_format.json_schema.schema: cannot be compiled at /properties/sum"):
        schema["properties"]["sum"]["type"] = "int"  # type: ignore[index]
        create(server, **options)


def test_an_answer_after_a_result(server: Server) -> None:
    """A whole turn: what the client got goes back as it came, with a result, and the prompt has both."""
    asked = create(server, tool_choice="required", parallel_tool_calls=False)
    call = asked.choices[0].message.tool_calls[0]
    result = {"role": "tool", "tool_call_id": call.id, "content": "Rain <|im_end|> and 9 °C."}
    messages = [USER, asked.choices[0].message.model_dump(exclude_unset=True), result]
    assert server.chat(messages, tools=tools())[1]
    prompt = {"model": server.checkpoint.name, "messages": messages, "tools": tools()}
    tokens = httpx2.post(f"{server.url}/tokenize", json=prompt).json()["tokens"]
    shown = httpx2.post(f"{server.url}/detokenize", json={"tokens": tokens}).json()["prompt"]
    arguments = json.dumps(json.loads(call.function.arguments))
    assert (
        f'<|im_start|>assistant\n<tool_call>\n{{"name": "{call.function.name}", "arguments": {arguments}}}\n</tool_call><|im_end|>\n'
        "<|im_start|>user\n<tool_response>\nRain <|im_end|> and 9 °C.\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    ) in shown
    assert tokens.count(Tokenizer.load(server.checkpoint).control_ids["<|im_end|>"]) == 4, "that in the result is text"
    with pytest.raises(openai.BadRequestError, match=r"messages\[2\].tool_call_id"):
        server.chat([*messages[:2], {**result, "tool_call_id": "other"}])


def test_nothing_changes_without_functions(server: Server) -> None:
    plain = server.chat([USER])
    assert plain[1]
    for options in ({"tools": tools(), "tool_choice": "none"}, {"tools": []}, {"tool_choice": "auto"}):
        assert server.chat([USER], **options) == plain


def test_a_schema_that_cannot_be_compiled(server: Server) -> None:
    broken = tools(strict=True)
    broken[1]["function"]["parameters"] = {"type": "object", "properties": {"on": {"type": "bool"}}}
    for options in ({}, {"tool_choice": "required"}):
        with pytest.raises(openai.BadRequestError) as caught:
            create(server, tools=broken, **options)
        assert caught.value.param == "tools"
        assert "tools: cannot be compiled at /1/function/parameters/properties/on: Invalid type: bool" in caught.value.message


def test_decode_is_killed_in_mid_call(server: Server) -> None:
    """As the client's own helper for streams sees it: the call goes on where it was, and stays valid."""
    lines = {"type": "array", "items": {"type": "string", "pattern": "^[a-z]{20}$"}, "minItems": 8, "maxItems": 8}
    schema = {"type": "object", "properties": {"lines": lines}, "required": ["lines"], "additionalProperties": False}
    tool: Any = {"type": "function", "function": {"name": "write", "parameters": schema, "strict": True}}
    num_kills = 0
    with server.client.chat.completions.stream(
        model=server.checkpoint.name,
        messages=[USER],  # type: ignore[list-item]
        tools=[tool],
        tool_choice="required",
        parallel_tool_calls=False,
        max_tokens=900,
        seed=3,
    ) as stream:
        for event in stream:
            if event.type == "tool_calls.function.arguments.delta" and len(event.arguments) > 60 and num_kills == 0:
                server.kill("decode")
                num_kills = 1
        (choice,) = stream.get_final_completion().choices
    assert num_kills == 1 and choice.finish_reason == "tool_calls" and choice.message.tool_calls is not None
    (call,) = choice.message.tool_calls
    jsonschema.validate(call.function.parsed_arguments, schema)
    server.wait_until_empty()


def test_a_client_that_goes_in_mid_call(server: Server) -> None:
    stream = create(server, tools=[WRITE], tool_choice="required", n=2, stream=True, max_tokens=3000)
    seen = 0
    for chunk in stream:
        seen += sum(bool(choice.delta.tool_calls) for choice in chunk.choices)
        if seen > 6:
            break
    stream.close()
    assert seen > 6
    server.wait_until_empty()


def test_anthropics_client_calls(server: Server) -> None:
    """The same calls as chat completions with the same seed, whole and in a stream, and a turn with the result."""
    functions = [{"name": name, "description": f"About {name}.", "input_schema": schema} for name, schema in SCHEMAS.items()]
    asked: Any = {
        "model": server.checkpoint.name,
        "messages": [USER],
        "tools": functions,
        "tool_choice": {"type": "any", "disable_parallel_tool_use": True},
        "max_tokens": 200,
        "extra_body": {"temperature": 1, "seed": 5},
    }
    same = create(server, tool_choice="required", parallel_tool_calls=False)
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0, timeout=60) as client:
        whole: Any = client.messages.create(**asked)
        with client.messages.stream(**asked) as stream:
            streamed: Any = stream.get_final_message()
        for answer in (whole, streamed):
            (block,) = answer.content
            assert (block.type, answer.stop_reason) == ("tool_use", "tool_use")
            jsonschema.validate(block.input, SCHEMAS[block.name])
            called = same.choices[0].message.tool_calls[0].function
            assert (block.name, block.input) == (called.name, json.loads(called.arguments))
            assert answer.usage.input_tokens + answer.usage.cache_read_input_tokens == same.usage.prompt_tokens
        result = {"type": "tool_result", "tool_use_id": whole.content[0].id, "content": "Rain."}
        turns = [USER, {"role": "assistant", "content": whole.content}, {"role": "user", "content": [result]}]
        after = client.messages.create(**{**asked, "messages": turns, "tool_choice": {"type": "auto"}, "max_tokens": 8})
        named = client.messages.create(**{**asked, "tool_choice": {"type": "tool", "name": "weather"}})
    history = [USER, same.choices[0].message.model_dump(exclude_unset=True)]
    history.append({"role": "tool", "tool_call_id": same.choices[0].message.tool_calls[0].id, "content": "Rain."})
    expected = create(server, messages=history, max_tokens=8)
    assert after.usage.input_tokens + after.usage.cache_read_input_tokens == expected.usage.prompt_tokens
    assert after.content[0].text == expected.choices[0].message.content
    assert [block.name for block in named.content] == ["weather"]
    server.wait_until_empty()


def test_calls_in_responses(server: Server) -> None:
    """The same calls as chat completions with the same seed, whole and in a stream, and a turn with the result."""
    functions: list[Any] = [{"type": "function", "name": name, "parameters": schema} for name, schema in SCHEMAS.items()]
    asked: Any = {
        "model": server.checkpoint.name,
        "input": [USER],
        "tools": functions,
        "tool_choice": "required",
        "parallel_tool_calls": False,
        "max_output_tokens": 200,
        "temperature": 1,
        "extra_body": {"seed": 5},
    }
    plain = [{"type": "function", "function": {"name": name, "parameters": schema}} for name, schema in SCHEMAS.items()]
    same = create(server, tools=plain, tool_choice="required", parallel_tool_calls=False)
    whole: Any = server.client.responses.create(**asked)
    with server.client.responses.stream(**asked) as stream:
        streamed: Any = stream.get_final_response()
    for response in (whole, streamed):
        (item,) = response.output
        jsonschema.validate(json.loads(item.arguments), SCHEMAS[item.name])
        called = same.choices[0].message.tool_calls[0].function
        assert (item.type, item.name, item.arguments) == ("function_call", called.name, called.arguments)
        assert response.usage.input_tokens == same.usage.prompt_tokens
    result = {"type": "function_call_output", "call_id": whole.output[0].call_id, "output": "Rain."}
    after: Any = {**asked, "tool_choice": "auto", "parallel_tool_calls": True, "max_output_tokens": 16}
    goes_on = server.client.responses.create(**{**after, "input": [result]}, previous_response_id=whole.id)
    sent_back = server.client.responses.create(**{**after, "input": [USER, *whole.output, result]})
    history = [USER, same.choices[0].message.model_dump(exclude_unset=True)]
    history.append({"role": "tool", "tool_call_id": same.choices[0].message.tool_calls[0].id, "content": "Rain."})
    expected = create(server, tools=plain, messages=history, max_tokens=16)
    for response in (goes_on, sent_back):
        assert response.usage.input_tokens == expected.usage.prompt_tokens
        assert response.output_text == (expected.choices[0].message.content or "")
    server.wait_until_empty()
