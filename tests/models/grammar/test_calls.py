"""Grammars of calls: which answers they allow, and that each answer they lead to is read as valid calls."""

import json
import random
from typing import Any

import jsonschema
import numpy as np
import pytest

from mmrt.models.errors import GrammarError
from mmrt.models.grammar.call_form import CallForm, Function, form_of, source_of_calls
from mmrt.models.grammar.matcher import Matchers
from mmrt.models.grammar.source import (
    MAX_CALLS_BYTES,
    GrammarSource,
    source_of_choice,
    source_of_lark,
    source_of_regex,
    source_of_schema,
)
from mmrt.models.grammar.text import grammar_text, held_text, schemas_of
from mmrt.models.text.tokenizer import Tokenizer
from mmrt.models.text.tool_calls import CallReader

CITY: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 5}, "days": {"$ref": "#/$defs/days"}},
    "required": ["city"],
    "additionalProperties": False,
    "$defs": {"days": {"type": "integer", "minimum": 1, "maximum": 9}},
}
FREE: dict[str, Any] = {"type": "object"}
WEATHER, NOW = Function("/0/function/parameters", "weather", CITY), Function("/1/function/parameters", "now", FREE)


def form(**fields: Any) -> CallForm:
    return CallForm(**{"functions": [WEATHER, NOW], "is_required": False, "is_single": False, **fields})


def call(name: str = "weather", arguments: str = '{"city": "Ulm"}') -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


ONE, OTHER, WRONG, UNKNOWN = call(), call("now", '{"x": [1]}'), call(arguments='{"town": 1}'), call("then", "{}")
COMPACT, INDENTED = call(arguments='{"city":"Ulm"}'), call(arguments='{\n  "city": "Ulm"\n}')
TEXT, BOTH, AMONG, MENTION = "Hi <tool_ca <b", f"{ONE}\n{OTHER}", f"Hi.\n{ONE} and {OTHER}.", "<tool_call> is a tag"
JSON = '{"sum": 1}'
SUM = source_of_schema({"type": "object", "properties": {"sum": {"const": 1}}, "additionalProperties": False})


@pytest.mark.parametrize(
    ("form", "allowed", "refused"),
    [
        (form(is_required=True), [ONE, OTHER, BOTH], ["", TEXT, AMONG, WRONG, UNKNOWN, COMPACT, INDENTED, f"{ONE}\n", "x"]),
        (form(is_required=True, is_single=True), [ONE, OTHER], ["", TEXT, BOTH]),
        (form(functions=[NOW], is_required=True), [OTHER], [ONE]),
        (form(), ["", TEXT, ONE, BOTH, AMONG, JSON], [MENTION, WRONG, UNKNOWN, COMPACT, f"Hi {WRONG}", f"{ONE} {WRONG}"]),
        (form(is_single=True), ["", TEXT, ONE, f"Hi\n{OTHER}"], [BOTH, AMONG, MENTION]),
        (form(answer=SUM), [JSON, ONE, BOTH], ["", TEXT, AMONG, "{}x"]),
        (form(answer=SUM, is_single=True), [JSON, ONE], [BOTH]),
        (form(answer=source_of_choice(["yes", "no"])), ["no", BOTH], ["maybe", AMONG]),
        (form(answer=source_of_regex("[0-9]+")), ["42", ONE], ["x"]),
        (form(answer=source_of_lark('start: a a\na: "x" | "y"')), ["xy", ONE], ["x", JSON]),
    ],
)
def test_what_is_allowed(matchers: Matchers, tokenizer: Tokenizer, form: CallForm, allowed: list[str], refused: list[str]) -> None:
    source = source_of_calls(form)
    assert form_of(source) == form
    grammar = grammar_text(source)

    def is_allowed(text: str) -> bool:
        matcher = matchers.begin(grammar)
        if not all(matcher.take(id) for id in tokenizer.encode(text)):
            return False
        return matcher.is_complete or bool(matcher.take(tokenizer.control_ids["<|im_end|>"]))

    assert [text for text in allowed if not is_allowed(text)] == []
    assert [text for text in refused if is_allowed(text)] == []


@pytest.mark.parametrize("seed", range(6))
def test_answers_are_read_as_valid_calls(matchers: Matchers, tokenizer: Tokenizer, seed: int) -> None:
    """A walk over allowed tokens that prefers those that lead to an end."""
    matcher = matchers.begin(grammar_text(source_of_calls(form(is_required=seed % 2 == 0))))
    choice, mask, text = random.Random(seed), np.empty(matcher.num_words, np.int32), b""
    ends = {id for part in ('"', "}", "<tool_call>", "\n</") for id in tokenizer.encode(part)[:1]}
    for _ in range(400):
        matcher.fill(mask)
        matcher.check()
        allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()
        id = choice.choice([one for one in allowed if one in ends] or allowed)
        if not tokenizer.token_bytes[id]:
            break
        matcher.take(id)
        text += tokenizer.token_bytes[id]
        if text.endswith(b"</tool_call>"):
            break
    reader = CallReader(["weather", "now"])
    pieces = [piece for reading in (reader.push(text.decode()), reader.flush()) for piece in reading.calls]
    assert reader.has_calls
    for number in range(pieces[-1].number + 1):
        name, *arguments = [piece.name or piece.arguments for piece in pieces if piece.number == number]
        jsonschema.validate(json.loads("".join(arguments)), {"weather": CITY, "now": FREE}[name])


def test_errors_say_where() -> None:
    least = {"type": "object", "properties": {"a": {"type": "object", "minProperties": 3}}}
    strict = form(functions=[NOW, Function("/7/function/parameters", "f", least, is_strict=True)])
    with pytest.raises(GrammarError, match="only 1 can be promised: one more than is required, and strict is true") as caught:
        grammar_text(source_of_calls(strict))
    assert caught.value.pointer == "/7/function/parameters/properties/a/minProperties"
    assert schemas_of(source_of_calls(strict))[1] == ("/7/function/parameters", least)
    lax = form(functions=[NOW, Function("/7/function/parameters", "f", least)])
    assert [one.pointer for one in held_text(source_of_calls(lax)).dropped] == [caught.value.pointer]
    assert schemas_of(SUM) == [("", json.loads(SUM.text))] and schemas_of(GrammarSource("regex", "a")) == []


def test_functions_with_equal_schemas_share_a_grammar(matchers: Matchers, tokenizer: Tokenizer) -> None:
    """300 functions fit where a few of them are strict."""
    many = [Function(f"/{at}/function/parameters", f"f{at}" + "_" * 60, FREE if at else CITY) for at in range(300)]
    grammar = grammar_text(source_of_calls(form(functions=many)))
    assert len(json.loads(grammar)["grammars"]) == 3
    for text, is_allowed in (
        (call("f0" + "_" * 60), True),
        (call("f299" + "_" * 60, "{}"), True),
        (call("f0" + "_" * 60, "{}"), False),
    ):
        matcher = matchers.begin(grammar)
        assert all(matcher.take(id) for id in tokenizer.encode(text)) == is_allowed


def test_functions_are_limited_together() -> None:
    large = [Function("", f"f{i}", {"type": "object", "description": "x" * 30_000}) for i in range(9)]
    assert len(grammar_text(source_of_calls(form(functions=large[:8])))) < 5000
    with pytest.raises(GrammarError, match=f"bytes in UTF-8, allowed are 1 to {MAX_CALLS_BYTES}"):
        source_of_calls(form(functions=large))
