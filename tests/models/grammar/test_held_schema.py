"""What is held of schemas as libraries write them, what is dropped and named, and which answers are possible then."""

import contextlib
import copy
import json
import random
from typing import Any

import jsonschema
import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from mmrt.models.errors import GrammarError
from mmrt.models.grammar.bounds import MAX_BLANKS, MAX_FREE_DEPTH, MAX_ITEMS, MAX_KEYS
from mmrt.models.grammar.held_schema import hold
from mmrt.models.grammar.keywords import RESTRICTING
from mmrt.models.grammar.matcher import Matchers
from mmrt.models.grammar.source import source_of_schema
from mmrt.models.grammar.text import grammar_text
from mmrt.models.grammar.vocabulary import GrammarVocabulary
from mmrt.models.text.tokenizer import Tokenizer
from mmrt.tests.settings import examples

Schema = dict[str, Any]
BOOL: Schema = {"type": "boolean"}
STRING: Schema = {"type": "string", "maxLength": 3}


def obj(required: str = "", **properties: Any) -> Schema:
    return {"type": "object", "properties": properties, **({"required": required.split()} if required else {})}


ANIMALS: Schema = {
    "Animal": obj("name", name=STRING),
    "Dog": {"allOf": [{"$ref": "#/$defs/Animal"}, obj("bark", bark=BOOL)]},
    "Cat": {"allOf": [{"$ref": "#/$defs/Animal"}], "type": "object", "properties": {"purrs": BOOL}},
    "Node": obj("v", v=BOOL, next={"anyOf": [{"$ref": "#/$defs/Node"}, {"type": "null"}]}),
    "Old": obj("v", v=BOOL, next={"title": "Next", "allOf": [{"$ref": "#/$defs/Old"}], "default": None}),
    "K": obj("k", k={"const": "k", "type": "string"}),
    "L": obj("k", k={"enum": ["l"]}, x=BOOL),
    "Key": {"enum": ["a", "b"], "title": "Key", "type": "string"},
}


def to(name: str, **more: Any) -> Schema:
    return {"$defs": ANIMALS, "$ref": f"#/$defs/{name}", **more}


def takes(matchers: Matchers, tokenizer: Tokenizer, schema: Schema, text: str, is_open: bool = False) -> bool:
    """Whether the text is a whole answer."""
    matcher = matchers.begin(grammar_text(source_of_schema(schema), is_open=is_open))
    return all(map(matcher.take, tokenizer.encode(text))) and (matcher.is_complete or matcher._matcher.is_accepting())


# Schema, the keywords that are dropped, answers that are possible, and such that are not.
HELD: list[tuple[Schema, list[str], list[str], list[str]]] = [
    # annotations
    ({**BOOL, "$comment": "c", "examples": [1], "deprecated": True, "x-y": {"not": 1}, "readOnly": True}, [], ["true"], ["1"]),
    ({**STRING, "contentEncoding": "base64", "contentMediaType": "image/png", "contentSchema": {"not": {}}}, [], ['"a"'], ["1"]),
    ({"title": "anything", "example": 3, "xml": {}}, [], ["1", '{"a": [null]}'], ["x"]),
    ({"type": "array", "items": BOOL, "uniqueItems": False}, [], ["[true, true]"], ["[1]"]),
    ({"type": "array", "items": BOOL, "uniqueItems": True, "maxItems": 1}, [], ["[true]"], ["[true, true]"]),
    ({**BOOL, "minContains": 3, "then": {}, "dependentRequired": {}, "if": {"const": 1}}, [], ["true"], ["1"]),
    # formats
    *[({**STRING, "format": form}, ["/format"], ['"a"', '""'], ["1"]) for form in ("password", "color", "uri-reference", "unknown")],
    ({"type": "integer", "format": "int32"}, ["/format"], ["7"], ['"7"']),
    ({"type": "string", "format": "date"}, [], ['"2024-02-29"'], ['"2024-13-01"']),
    # names of properties
    ({"type": "object", "propertyNames": {"type": "string"}, "additionalProperties": BOOL}, [], ['{"z": true}'], ['{"z": 1}']),
    (
        {**obj(a=BOOL, c=BOOL, b=BOOL), "propertyNames": {"enum": ["a", "b", "c"]}},
        [],
        ['{"c": true, "b": true}'],
        ['{"b": true, "c": true}'],
    ),
    ({"type": "object", "propertyNames": {"enum": ["a", "b"]}, "additionalProperties": BOOL}, [], ['{"b": true}'], ['{"z": true}']),
    (
        {"type": "object", "propertyNames": to("Key"), "required": ["a"], "$defs": ANIMALS},
        [],
        ['{"a": 1}'],
        ['{"b": 1}', '{"a": 1, "c": 2}'],
    ),
    ({"type": "object", "propertyNames": {"pattern": "^x"}, "additionalProperties": BOOL}, [], ['{"xy": true}'], ['{"y": true}']),
    ({**obj(a=BOOL), "propertyNames": {"maxLength": 3}}, ["/propertyNames"], ['{"a": true}'], ['{"a": 1}']),
    # nothing, and not
    (obj(a={"not": {}}, b=BOOL), [], ["{}", '{"b": true}'], ['{"a": 1}']),
    ({**BOOL, "not": {"type": "null"}}, [], ["true"], ["null"]),
    ({"enum": ["a", "b", 1], "not": {"enum": ["b", 1.0]}}, [], ['"a"'], ['"b"', "1"]),
    ({**STRING, "not": {"pattern": "x"}}, ["/not"], ['"a"', '"x"'], ["1"]),
    ({**STRING, "nullable": True}, [], ["null", '"a"'], ["1"]),
    (to("K", nullable=True), [], ["null", '{"k": "k"}'], ["1", '{"k": "k", "x": 1}']),
    ({"enum": [1, 2], "type": "integer", "nullable": True}, [], ["null", "2"], ["3"]),
    # one of several
    (
        {"oneOf": [to("K"), to("L")], "$defs": ANIMALS},
        [],
        ['{"k": "k"}', '{"k": "l", "x": true}'],
        ['{"k": "k", "x": true}', '{"k": "m"}'],
    ),
    ({"oneOf": [{"type": "integer"}, {"type": "number", "maximum": 2}]}, ["/oneOf"], ["1", "3", "1.5"], ["2.5", '"a"']),
    ({"oneOf": [{"type": "null"}, to("Animal")], "$defs": ANIMALS}, [], ["null", '{"name": "a"}'], ["1"]),
    # conditions, counts and contents
    (
        {**obj(a=BOOL), "if": obj(a={"const": True}), "then": {"required": ["b"], "properties": {"b": BOOL}}},
        ["/if"],
        ['{"a": true, "b": true}', '{"a": false}'],
        ['{"a": 1}', '{"c": 1}'],
    ),
    ({**obj(a=BOOL, b=BOOL), "dependentRequired": {"a": ["b"]}}, ["/dependentRequired"], ['{"a": true}', '{"b": true}'], ['{"c": 1}']),
    ({**obj(a=BOOL), "dependentSchemas": {"a": obj(z=BOOL)}}, ["/dependentSchemas"], ['{"a": true, "z": true}'], ['{"c": 1}']),
    (
        {"type": "array", "items": BOOL, "contains": {"const": True}, "uniqueItems": True},
        ["/contains", "/uniqueItems"],
        ["[false]"],
        ["[1]"],
    ),
    ({**obj(a=BOOL, b=BOOL), "minProperties": 1}, [], ['{"b": true}', '{"a": true, "b": true}'], ["{}"]),
    ({**obj(a=BOOL, b=BOOL), "minProperties": 2}, ["/minProperties"], ['{"b": true}', '{"a": true, "b": true}'], ["{}"]),
    ({**obj(a=BOOL, b=BOOL), "maxProperties": 2}, [], ["{}", '{"a": true, "b": true}'], ['{"c": 1}']),
    ({**obj(a=BOOL, b=BOOL), "maxProperties": 1}, [], ["{}", '{"b": true}'], ['{"a": true, "b": true}']),
    ({**obj(a=BOOL), "maxProperties": 2, "additionalProperties": BOOL}, ["/maxProperties"], ['{"a": true, "c": true}'], ['{"c": 1}']),
    ({"type": "object", "minProperties": 3}, ["/minProperties"], ['{"a": 1}'], ["{}"]),
    ({"type": "array", "prefixItems": [BOOL], "unevaluatedItems": False}, [], ["[]", "[true]"], ["[true, 1]"]),
    # numbers
    ({"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1}, ["/minimum"], ["-5", str(2**63 - 1)], [str(2**63), "1.5"]),
    ({"type": "integer", "minimum": 0, "maximum": 2**64 - 1}, ["/maximum"], ["0", str(2**64 - 1)], ["-1"]),
    ({"type": "number", "minimum": -3.4028234663852886e38, "maximum": 3.4028234663852886e38}, ["/minimum", "/maximum"], ["1e5"], ["x"]),
    ({"type": "number", "multipleOf": 1e-17}, ["/multipleOf"], ["1.5"], ['"a"']),
    ({"type": "integer", "multipleOf": 10**400, "maximum": 10**400}, ["/multipleOf", "/maximum"], ["1"], ["1.5"]),
    ({"type": "number", "multipleOf": 0.01, "minimum": 0}, [], ["1.25"], ["1.255", "-1"]),
    # patterns
    ({"type": "string", "pattern": r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$"}, [], ['"-1.5"', '".5"'], ['"."', '"-"', '"1.5.0"']),
    ({"type": "string", "pattern": r"^(?=.*\d)(?=.*[a-z]).{3,4}$"}, [], ['"ab1"'], ['"abc"', '"a1"', '"abcd1"']),
    ({**STRING, "pattern": r"^(a)\1$"}, ["/pattern"], ['"aa"', '"b"'], ['"abcd"']),
    ({**STRING, "pattern": r"(?<=a)b"}, ["/pattern"], ['"ab"'], ["1"]),
    ({"type": "object", "patternProperties": {"^(?!x)[a-z]$": BOOL}}, [], ['{"a": true}'], ['{"x": true}', '{"a": 1}']),
    ({"type": "object", "patternProperties": {r"(?<=a)b": BOOL}}, ["/patternProperties/(?<=a)b"], ['{"ab": true}', '{"c": 1}'], ["1"]),
    (
        {"type": "object", "patternProperties": {r"(?<=a)b": BOOL}, "additionalProperties": False},
        ["/patternProperties/(?<=a)b", "/additionalProperties"],
        ['{"ab": true}'],
        ["1"],
    ),
    (
        {"type": "object", "patternProperties": {r"(?<=a)b": BOOL}, "unevaluatedProperties": False},
        ["/patternProperties/(?<=a)b", "/unevaluatedProperties"],
        ['{"ab": true}'],
        ["1"],
    ),
    (
        {"type": "object", "patternProperties": {r"(?<=a)b": BOOL, "^(?!x)[a-z]$": BOOL}},
        ["/patternProperties/(?<=a)b"],
        ['{"ab": true, "c": true}'],
        ['{"c": 1}'],
    ),
    # objects have the properties that are named
    (obj("a", a=BOOL), [], ['{"a": true}'], ['{"a": true, "b": 1}']),
    ({"type": "object"}, [], ['{"b": {"c": [1]}}'], ["1"]),
    (obj(), [], ["{}"], ['{"b": 1}']),
    ({**obj(a=BOOL), "additionalProperties": True}, [], ['{"a": true, "b": 1}'], ['{"a": 1}']),
    ({**obj(a=BOOL), "additionalProperties": BOOL}, [], ['{"b": true}'], ['{"b": 1}']),
    (obj("z", a=BOOL), [], ['{"a": true, "z": 1}'], ['{"a": true}', '{"z": 1, "b": 1}']),
    ({"type": "object", "patternProperties": {"^x": BOOL}}, [], ['{"x1": true}'], ['{"y": true}']),
    (
        obj(a=obj(b=BOOL), c={"type": "array", "items": obj(d=BOOL)}),
        [],
        ['{"a": {"b": true}, "c": [{"d": true}]}'],
        ['{"a": {"x": 1}}', '{"c": [{"x": 1}]}'],
    ),
    (to("Dog"), [], ['{"name": "a", "bark": true}'], ['{"name": "a"}', '{"name": "a", "bark": true, "x": 1}']),
    (to("Cat"), [], ['{"name": "a", "purrs": true}'], ['{"name": "a", "x": 1}']),
    (to("Animal"), [], ['{"name": "a"}'], ['{"name": "a", "bark": true}']),
    (to("Node"), [], ['{"v": true, "next": {"v": false, "next": null}}'], ['{"v": true, "next": {"v": true, "x": 1}}']),
    (to("Old"), [], ['{"v": true, "next": {"v": false}}'], ['{"v": true, "next": {"v": true, "x": 1}}']),
    (
        {"allOf": [obj("a", a=BOOL), obj("b", b=BOOL)]},
        [],
        ['{"a": true, "b": true}'],
        ['{"a": true}', '{"a": true, "b": true, "c": 1}'],
    ),
    (
        {**obj(a=BOOL), "anyOf": [obj("b", b=BOOL), obj("c", c=BOOL)]},
        [],
        ['{"a": true, "b": true}', '{"c": true}'],
        ['{"a": true}', '{"b": true, "d": 1}'],
    ),
    (
        {**obj(a=BOOL, b=BOOL), "anyOf": [{"required": ["a"]}, {"required": ["b"]}]},
        [],
        ['{"a": true}', '{"b": true}'],
        ["{}", '{"a": true, "c": 1}'],
    ),
    (
        {"anyOf": [to("Animal"), {"type": "null"}, STRING], "$defs": ANIMALS},
        [],
        ['{"name": "a"}', "null", '"a"'],
        ['{"name": "a", "x": 1}'],
    ),
    (
        {"allOf": [{"anyOf": [obj("a", a=BOOL)]}, {"anyOf": [obj("b", b=BOOL), BOOL]}]},
        [],
        ['{"a": true, "b": true}'],
        ['{"a": true, "b": true, "c": 1}'],
    ),
    ({"allOf": [obj(a=BOOL), {"additionalProperties": BOOL}]}, [], ['{"a": true, "b": true}'], ['{"b": 1}']),
    ({"allOf": [obj(a=BOOL), obj(b=BOOL)], "unevaluatedProperties": False}, [], ['{"a": true, "b": true}'], ['{"c": 1}']),
    # references
    ({"$defs": {"x": True}, "oneOf": [{"$ref": "#/$defs/x"}, STRING]}, ["/oneOf"], ["1", '"a"'], ["x"]),
    ({"$defs": {"x": True}, "$ref": "#/$defs/x", **obj(a=BOOL)}, [], ['{"a": true}'], ['{"b": 1}', "1"]),
    ({"$defs": {"x": True}, "anyOf": [{"$ref": "#/$defs/x"}], **obj(a=BOOL)}, [], ['{"a": true}'], ['{"a": 1}']),
    ({"$defs": {"x": False}, "anyOf": [{"$ref": "#/$defs/x"}, obj(a=BOOL)]}, [], ['{"a": true}'], ['{"a": 1}', "1"]),
    ({"$defs": {"x": False}, **BOOL, "not": {"$ref": "#/$defs/x"}}, [], ["true"], ["1"]),
    ({"$defs": {"x": True}, **BOOL, "not": {"$ref": "#/$defs/x", "const": 1}}, [], ["true"], ["1"]),
    (
        {"$defs": {"x": {"enum": ["a", "b"]}}, "enum": ["a", "b"], "not": {"$ref": "#/$defs/x", "const": "a"}},
        ["/not"],
        ['"b"'],
        ["1"],
    ),
    (
        {"$defs": {"x": True}, "type": "object", "propertyNames": {"$ref": "#/$defs/x", "maxLength": 1}},
        ["/propertyNames"],
        ['{"a": 1}'],
        ["1"],
    ),
    ({"$defs": {"x": True}, "anyOf": [BOOL, {**STRING, "not": {"$ref": "#/$defs/x"}}]}, [], ["true"], ['"a"']),
    (
        {"$defs": {"x": True}, "unevaluatedProperties": False, "$ref": "#/$defs/x", "type": "object"},
        ["/unevaluatedProperties"],
        ["{}"],
        ["1"],
    ),
    ({"components": {"X": BOOL}, "type": "array", "items": {"$ref": "#/components/X"}}, [], ["[true]"], ["[1]"]),
    (obj(me={"$ref": "#"}, n=BOOL), [], ['{"me": {"n": true}}'], ['{"me": {"x": 1}}']),
    (
        {"$id": "https://a.b/c", "$defs": {"x": {"$anchor": "y", **BOOL}}, "items": {"$ref": "https://a.b/c#y"}, "type": "array"},
        [],
        ["[true]"],
        ["[1]"],
    ),
]


@pytest.mark.parametrize(("schema", "dropped", "possible", "impossible"), HELD)
def test_what_is_held(
    matchers: Matchers, tokenizer: Tokenizer, schema: Schema, dropped: list[str], possible: list[str], impossible: list[str]
) -> None:
    before = copy.deepcopy(schema)
    assert [one.pointer for one in hold(schema).dropped] == dropped
    assert schema == before, "it has been changed"
    for text in possible:
        assert takes(matchers, tokenizer, schema, text), text
    for text in impossible:
        assert not takes(matchers, tokenizer, schema, text), text


def test_objects_may_be_open(matchers: Matchers, tokenizer: Tokenizer) -> None:
    for schema in (obj(a=BOOL), to("Animal"), {"allOf": [obj(a=BOOL), obj(b=BOOL)]}, {"anyOf": [obj(a=BOOL)]}):
        assert takes(matchers, tokenizer, schema, '{"name": "a", "z": 1}', is_open=True)
        assert not takes(matchers, tokenizer, schema, '{"name": "a", "z": 1}')
    closed = {"allOf": [obj(a=BOOL), obj(b=BOOL)], "unevaluatedProperties": False}
    assert not takes(matchers, tokenizer, closed, '{"z": 1}', is_open=True)
    assert takes(matchers, tokenizer, closed, '{"a": true, "b": true}', is_open=True)


@pytest.mark.parametrize(
    ("schema", "pointer", "said"),
    [
        (obj(a={**STRING, "format": "color"}), "/properties/a/format", "no grammar is known for 'color'"),
        ({"type": "array", "uniqueItems": True}, "/uniqueItems", "no grammar holds it, and strict is true"),
        (obj(a={**STRING, "not": {"const": "a"}}), "/properties/a/not", "without strict it is ignored"),
        ({"oneOf": [STRING, STRING]}, "/oneOf", "it is taken as anyOf"),
    ],
)
def test_under_strict_what_openai_refuses_is_refused(schema: Schema, pointer: str, said: str) -> None:
    with pytest.raises(GrammarError, match=said) as caught:
        grammar_text(source_of_schema(schema, is_strict=True))
    assert caught.value.pointer == pointer
    grammar_text(source_of_schema(schema))


@pytest.mark.parametrize(
    "schema",
    [
        {**BOOL, "not": {"type": "null"}, "x-y": 1, "uniqueItems": False},
        {"type": "string", "pattern": r"^(a)\1$"},
        {"type": "integer", "maximum": 2**64},
        {"oneOf": [BOOL, STRING]},
    ],
)
def test_under_strict_the_rest_is_taken(schema: Schema) -> None:
    grammar_text(source_of_schema(schema, is_strict=True))


def array(entry: str, number: int) -> str:
    return "[" + ", ".join([entry] * number) + "]"


def keys(value: str, number: int) -> str:
    return "{" + ", ".join([f'"a": {value}'] * number) + "}"


def nested(depth: int) -> str:
    return '{"a": ' + "[" * depth + "]" * depth + "}"


FREE: Schema = {"type": "object"}


@pytest.mark.parametrize(
    ("schema", "longest", "longer"),
    [
        ({"type": "array", "items": BOOL}, array("true", MAX_ITEMS), array("true", MAX_ITEMS + 1)),
        ({**FREE, "additionalProperties": BOOL}, keys("true", MAX_KEYS), keys("true", MAX_KEYS + 1)),
        (FREE, keys("1", MAX_KEYS), keys("1", MAX_KEYS + 1)),
        (FREE, nested(MAX_FREE_DEPTH), nested(MAX_FREE_DEPTH + 1)),
        ({"type": "string"}, json.dumps("a" + " " * MAX_BLANKS + "b"), json.dumps("a" + " " * (MAX_BLANKS + 1) + "b")),
        ({"type": "string"}, json.dumps("\n" * MAX_BLANKS), json.dumps("\n" * (MAX_BLANKS + 1))),
        ({"type": "array", "items": BOOL, "maxItems": 3000}, array("true", 3000), array("true", 3001)),
        ({"type": "array", "items": BOOL, "minItems": 2000}, array("true", 2000), array("true", 2001)),
        ({**FREE, "additionalProperties": BOOL, "maxProperties": 500}, keys("true", 500), keys("true", 501)),
        ({"allOf": [{"type": "array", "items": BOOL}, {"minItems": 2000}]}, array("true", 2000), array("true", 2001)),
        ({"anyOf": [{"type": "array", "items": BOOL}, BOOL], "minItems": 2000}, array("true", 2000), array("true", 2001)),
        ({"type": "string", "maxLength": 500}, json.dumps(" " * 500), json.dumps(" " * 501)),
    ],
)
def test_what_would_be_endless_ends(matchers: Matchers, tokenizer: Tokenizer, schema: Schema, longest: str, longer: str) -> None:
    assert takes(matchers, tokenizer, schema, longest) and not takes(matchers, tokenizer, schema, longer)


def test_objects_of_a_choice_have_the_keys_that_are_required_around_it(matchers: Matchers, tokenizer: Tokenizer) -> None:
    required = [f"k{number:03}" for number in range(300)]
    schema = {"required": required, "anyOf": [{"type": "object"}, BOOL]}
    assert takes(matchers, tokenizer, schema, json.dumps(dict.fromkeys(required, 1)))


# ------------------------------------------------------------------------------------------------------- schemas that are none

KEYWORDS = sorted(RESTRICTING | {"$schema", "$id", "id", "$anchor", "title", "minContains", "maxContains"})
TEXTS = ["a", "", "#", "#/$defs/x", "#/$defs/y", "#/$defs/z", "#/x", "null", "string", "array", "object", "(?<=a)b", "^(?!a)b", "date"]
PLAIN = [None, True, False, -1, 0, 1, 3, 10**30, 1.5, 2.0, *TEXTS]
BASES: list[Schema] = [{}, *({"type": kind} for kind in ("array", "string")), obj(a=BOOL), {**obj("a"), "additionalProperties": True}]
DEFINITIONS: Schema = {"x": True, "y": False}


def is_read(schema: Schema) -> None:
    """Nothing but a GrammarError is raised."""
    for is_open in (False, True):
        with contextlib.suppress(GrammarError):
            hold(schema, is_open=is_open)


@pytest.mark.many
@pytest.mark.parametrize("keyword", KEYWORDS)
def test_a_keyword_may_have_any_value(keyword: str) -> None:
    for value in (*PLAIN, [], {}):
        for base in BASES:
            schema = {**base, keyword: value}
            wholes: list[Schema] = [schema, {"not": schema}, {"properties": {"a": schema}}]
            wholes += ({choice: [schema, STRING]} for choice in ("allOf", "anyOf", "oneOf"))
            for whole in wholes:
                is_read({**whole, "$defs": DEFINITIONS})


JSON_VALUES = st.recursive(
    st.sampled_from(PLAIN),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from([*KEYWORDS, *KEYWORDS, "a", "^a"]), inner, max_size=4),
    max_leaves=12,
)


@settings(max_examples=examples(100), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.dictionaries(st.sampled_from(KEYWORDS), JSON_VALUES, max_size=5), st.just(DEFINITIONS) | JSON_VALUES)
def test_keywords_may_stand_together(schema: Schema, definitions: Any) -> None:
    is_read({**schema, "$defs": definitions})


def test_references_may_be_long_and_in_circles() -> None:
    chain = {f"a{at}": {"allOf": [{"$ref": f"#/$defs/a{at + 1}"}, obj()]} for at in range(2000)}
    circle = {"x": {"not": {"$ref": "#/$defs/x"}, "properties": {"q": BOOL}}}
    is_read({"$defs": chain, "allOf": [{"$ref": "#/$defs/a0"}, {}], "properties": {"z": BOOL}})
    is_read({"$defs": circle, "allOf": [{"$ref": "#/$defs/x"}, {}], "properties": {"z": BOOL}})
    is_read({"$defs": [BOOL], "$ref": "#/$defs/" + "9" * 5000})


# ------------------------------------------------------------------------------------------ schemas with instances of them

NAMES = st.sampled_from(["a", "b", "größe", 'q"', "x/y~z"])
LEAVES: list[tuple[Schema, st.SearchStrategy[Any]]] = [
    ({"type": "integer", "format": "int64"}, st.integers(-(10**6), 10**6)),
    ({"type": "number", "minimum": -1e40}, st.floats(-1000, 1000).map(lambda value: round(value, 3))),
    ({"type": "string", "format": "nanoid"}, st.text("ab é\n", max_size=5)),
    ({"type": "string", "pattern": r"^(?!a)(?=.*b)", "maxLength": 8}, st.text("abc", max_size=5)),
    ({"type": "string", "pattern": r"^(.)\1$"}, st.sampled_from(["aa", "ab"])),
    ({"type": "boolean", "not": {"type": "null"}, "deprecated": True}, st.booleans()),
    ({"enum": ["a", 1, None], "not": {"const": 1}, "$comment": ""}, st.sampled_from(["a", 1, None])),
    ({"type": ["string", "null"], "not": {"pattern": "z"}, "maxLength": 4}, st.none() | st.text("az", max_size=3)),
    ({"oneOf": [{"type": "integer"}, {"type": "number", "minimum": 3}]}, st.sampled_from([1, 3.5, 7])),
    ({"oneOf": [{"type": "integer", "maximum": 5}, {"type": "boolean"}], "examples": []}, st.sampled_from([1, True, 7])),
]
OF_OBJECTS: list[Schema] = [
    {},
    {"propertyNames": {"type": "string"}},
    {"propertyNames": {"maxLength": 5}},
    {"propertyNames": {"enum": ["a", "b", "größe"]}},
    {"minProperties": 1},
    {"minProperties": 2},
    {"maxProperties": 1},
    {"maxProperties": 2},
    {"dependentRequired": {"a": ["b"]}},
    {"unevaluatedProperties": False},
    {"if": {"required": ["a"]}, "then": {"required": ["b"]}, "else": {"properties": {"b": False}}},
    {"anyOf": [{"required": ["a"]}, {"required": ["b"]}]},
    {"allOf": [{"properties": {"a": True}}, {"required": ["b"]}], "x-z": 1},
    {"not": {"required": ["a", "b"]}},
]
OF_ARRAYS: list[Schema] = [{}, {"uniqueItems": True}, {"uniqueItems": False}, {"contains": {"type": "boolean"}}, {"minContains": 0}]


@st.composite
def pairs(draw: st.DrawFn, depth: int = 2) -> tuple[Schema, Any]:
    """A schema, and a value that may be an instance of it."""
    kind = draw(st.sampled_from(["leaf", "object", "object", "array"])) if depth else "leaf"
    if kind == "leaf":
        schema, values = draw(st.sampled_from(LEAVES))
        return schema, draw(values)
    if kind == "array":
        inner, value = draw(pairs(depth - 1))
        return {"type": "array", "items": inner, **draw(st.sampled_from(OF_ARRAYS))}, [value] * draw(st.integers(0, 2))
    properties, instance = {}, {}
    for name in draw(st.lists(NAMES, unique=True, max_size=3)):
        properties[name], value = draw(pairs(depth - 1))
        if draw(st.booleans()):
            instance[name] = value
    required = [name for name in instance if draw(st.booleans())]
    more = draw(st.sampled_from(OF_OBJECTS))
    return {"type": "object", "properties": properties, "required": required, **more}, instance


def is_valid(schema: Any, value: Any) -> bool:
    return bool(jsonschema.Draft202012Validator(schema).is_valid(value))


def without(schema: Any, pointers: list[str]) -> Any:
    """The schema without what is dropped. A choice of one becomes one of any."""
    schema = json.loads(json.dumps(schema))  # parts that were the same are not any more
    for pointer in pointers:
        *steps, last = (step.replace("~1", "/").replace("~0", "~") for step in pointer.split("/")[1:])
        part = schema
        for step in steps:
            part = part[int(step)] if isinstance(part, list) else part[step]
        dropped = part.pop(last)
        if last == "oneOf":
            part["anyOf"] = dropped
        if last == "if":
            part.pop("then", None), part.pop("else", None)
    return schema


def answer(matchers: Matchers, tokenizer: Tokenizer, text: str, seed: int) -> str | None:
    """An answer that the grammar leads to, by chance; None if it is long."""
    matcher, choice, ids = matchers.begin(text), random.Random(seed), list[int]()
    mask = np.empty(matcher.num_words, np.int32)
    for _ in range(200):
        matcher.fill(mask)
        allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()
        if not allowed or (matcher._matcher.is_accepting() and choice.random() < 0.3):
            break
        texts = {id: tokenizer.token_bytes[id] for id in allowed if id < len(tokenizer.token_bytes)}
        ends = [id for id, its in texts.items() if its[:1] in (b'"', b"}", b"]")]
        id = choice.choice(ends if ends and choice.random() < 0.6 else allowed)
        if not matcher.take(id) or matcher.is_complete:
            ids.append(id)
            break
        ids.append(id)
    else:
        return None
    return tokenizer.decode(ids)


FEW = settings(max_examples=examples(120), deadline=None, suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow])


@FEW
@given(pair=pairs())
def test_what_was_possible_is_possible(vocabulary: GrammarVocabulary, tokenizer: Tokenizer, pair: tuple[Schema, Any]) -> None:
    """Every instance of the whole schema, in the order of its keys."""
    schema, instance = pair
    assume(is_valid(schema, instance))
    assert takes(Matchers(vocabulary), tokenizer, schema, json.dumps(instance, ensure_ascii=False))


@FEW
@given(pair=pairs(), seed=st.integers(0, 99))
def test_what_is_possible_is_valid_without_what_is_dropped(
    vocabulary: GrammarVocabulary, tokenizer: Tokenizer, pair: tuple[Schema, Any], seed: int
) -> None:
    schema, _ = pair
    matchers = Matchers(vocabulary)
    try:
        grammar = grammar_text(source_of_schema(schema))
        matchers.begin(grammar)
    except GrammarError:
        return  # nothing is valid under it
    text = answer(matchers, tokenizer, grammar, seed)
    if text is None:
        return
    try:
        value = json.loads(text)
    except ValueError:
        return  # cut where a key was to come
    rest = without(schema, [one.pointer for one in hold(schema).dropped])
    assert is_valid(rest, value), (schema, rest, text)
