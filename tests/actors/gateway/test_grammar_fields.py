"""Fields for the form of an answer: what they mean, and refusals that name field, value and limit."""

from typing import Any

import pytest

from mmrt.actors.gateway.reading.fields import Fields
from mmrt.actors.gateway.reading.grammar_fields import MAX_CHOICES, AskedGrammar, read_grammar
from mmrt.actors.gateway.reading.ignored import collecting
from mmrt.models.grammar.source import JSON_OBJECT, MAX_SOURCE_BYTES, GrammarSource
from mmrt.runtime.errors import RequestError

INTEGER = GrammarSource("json_schema", '{"type":"integer"}')
FORMAT = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "integer"}}}


def form(**changed: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {**FORMAT["json_schema"], **changed}}}  # type: ignore[dict-item]


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({}, None),
        ({"response_format": None, "structured_outputs": None, "guided_json": None}, None),
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, AskedGrammar(JSON_OBJECT, "response_format")),
        ({"response_format": FORMAT}, AskedGrammar(INTEGER, "response_format.json_schema.schema")),
        (
            form(strict=True, description="a number"),
            AskedGrammar(INTEGER._replace(is_strict=True), "response_format.json_schema.schema"),
        ),
        (form(strict=None), AskedGrammar(INTEGER, "response_format.json_schema.schema")),
        ({"guided_json": {"type": "integer"}}, AskedGrammar(INTEGER, "guided_json")),
        ({"guided_json": ' {"type": "integer"} '}, AskedGrammar(INTEGER, "guided_json")),
        ({"guided_regex": "[0-9]"}, AskedGrammar(GrammarSource("regex", "[0-9]"), "guided_regex")),
        ({"guided_choice": ["a", 'b"']}, AskedGrammar(GrammarSource("lark", 'start: "a" | "b\\""'), "guided_choice")),
        ({"guided_grammar": 'start: "x"'}, AskedGrammar(GrammarSource("lark", 'start: "x"'), "guided_grammar")),
        ({"structured_outputs": {"json": {"type": "integer"}}}, AskedGrammar(INTEGER, "structured_outputs.json")),
        ({"structured_outputs": {"json_object": True, "regex": None}}, AskedGrammar(JSON_OBJECT, "structured_outputs.json_object")),
        ({"structured_outputs": {"choice": ["a"]}}, AskedGrammar(GrammarSource("lark", 'start: "a"'), "structured_outputs.choice")),
    ],
)
def test_what_is_asked_for(body: dict[str, Any], expected: AskedGrammar | None) -> None:
    fields = Fields(body)
    assert read_grammar(fields) == expected
    fields.leave()


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"response_format": "json"}, "response_format: expected an object, got a string"),
        ({"response_format": {}}, "response_format.type: is required"),
        ({"response_format": {"type": "xml"}}, 'response_format.type: is "xml", allowed are text, json_object, json_schema'),
        ({"response_format": {"type": "json_object", "schema": {}}}, "response_format.schema: is not supported"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema: is required"),
        (form(name=None), "response_format.json_schema.name: is required"),
        (form(name="a b"), 'response_format.json_schema.name: is "a b", expected 1 to 64 letters'),
        (form(name="a" * 65), f'response_format.json_schema.name: is "{"a" * 59}…, expected 1 to 64 letters'),
        (form(strict=1), "response_format.json_schema.strict: expected true or false, got 1"),
        (form(schema=None), "response_format.json_schema.schema: is required"),
        (form(schema=[1]), "response_format.json_schema.schema: expected an object, got an array"),
        (form(more=1), "response_format.json_schema.more: is not supported"),
        (
            form(schema={"const": "a" * MAX_SOURCE_BYTES}),
            f"schema: has {MAX_SOURCE_BYTES + 12} bytes in UTF-8, allowed are 1 to {MAX_SOURCE_BYTES}",
        ),
        ({"guided_json": "{"}, "guided_json: is not valid JSON: Expecting"),
        ({"guided_json": "[" * 20_000}, "guided_json: is not valid JSON: "),
        ({"guided_json": "7"}, "guided_json: expected an object, got an integer"),
        ({"guided_json": '"abc"'}, "guided_json: expected an object, got a string"),
        (
            {"guided_json": " " * (MAX_SOURCE_BYTES + 1)},
            f"guided_json: has {MAX_SOURCE_BYTES + 1} characters, the limit is {MAX_SOURCE_BYTES}",
        ),
        ({"guided_regex": 5}, "guided_regex: expected a string, got an integer"),
        ({"guided_regex": ""}, "guided_regex: has 0 bytes"),
        ({"guided_grammar": ["x"]}, "guided_grammar: expected a string, got an array"),
        ({"guided_choice": "a"}, "guided_choice: expected an array of strings, got a string"),
        ({"guided_choice": []}, f"guided_choice: has 0 entries, allowed are 1 to {MAX_CHOICES}"),
        ({"guided_choice": ["a"] * (MAX_CHOICES + 1)}, f"guided_choice: has {MAX_CHOICES + 1} entries"),
        ({"guided_choice": ["a", ""]}, 'guided_choice[1]: is "", expected a string that is not empty'),
        ({"guided_choice": ["a", 1]}, "guided_choice[1]: is 1, expected a string"),
        ({"structured_outputs": []}, "structured_outputs: expected an object, got an array"),
        ({"structured_outputs": {}}, "structured_outputs: has 0 of json, json_object, regex, choice and grammar, expected one"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs: has 2 of json"),
        ({"structured_outputs": {"structural_tag": {}}}, "structured_outputs.structural_tag: is not supported; there are json,"),
        ({"response_format": FORMAT, "guided_regex": "a"}, "guided_regex: cannot be combined with response_format.json_schema.schema"),
        ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice: cannot be combined with guided_regex"),
    ],
)
def test_refusals(body: dict[str, Any], said: str) -> None:
    with collecting(is_strict=True), pytest.raises(RequestError) as caught:
        read_grammar(Fields(body))
    assert caught.value.status == 400 and said in caught.value.message
    assert caught.value.param is not None and caught.value.message.startswith(caught.value.param)
