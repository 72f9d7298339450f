"""The places of faults in JSON schemas, as JSON pointers."""

from typing import Any

import pytest

from mmrt.models.errors import GrammarError
from mmrt.models.grammar.json_schema import check_schema, find_fault
from mmrt.models.grammar.matcher import Matchers
from mmrt.models.grammar.source import source_of_schema
from mmrt.models.grammar.text import grammar_text

BAD: dict[str, Any] = {"type": "strin"}


def obj(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties}


@pytest.mark.parametrize(
    ("schema", "pointer", "said"),
    [
        (BAD, "", "Invalid type: strin"),
        (obj(a=obj(b=BAD)), "/properties/a/properties/b", "Invalid type"),
        ({"type": "object", "properties": {"a/b~c": BAD}}, "/properties/a~1b~0c", "Invalid type"),
        ({"type": "array", "items": {"anyOf": [{"type": "null"}, BAD]}}, "/items/anyOf/1", "Invalid type"),
        ({"type": "array", "prefixItems": [BAD]}, "/prefixItems/0", "Invalid type"),
        ({"$defs": {"x": {"type": "string", "pattern": "("}}, "$ref": "#/$defs/x"}, "/$defs/x", "unclosed group"),
        (obj(a={"$ref": "#/$defs/x"}) | {"$defs": {"x": {"type": "object", "not": {}}}}, "/$defs/x", "Unimplemented keys"),
        (obj(a={"type": "array", "uniqueItems": True}), "/properties/a", "uniqueItems"),
        (obj(a={"type": "integer", "minimum": 3, "maximum": 1}) | {"required": ["a"]}, "/properties/a", "minimum .3. is greater"),
        (obj(a={"$ref": "http://example.com/x"}), "/properties/a", "does not fetch"),
        ({"type": "object", "additionalProperties": BAD}, "/additionalProperties", "Invalid type"),
        (obj(a={"enum": []}) | {"required": ["a"]}, "/properties/a", "anyOf is empty"),
    ],
)
def test_the_smallest_faulty_part_is_named(matchers: Matchers, schema: dict[str, Any], pointer: str, said: str) -> None:
    def error_of(part: Any) -> str:
        try:
            matchers.begin(grammar_text(source_of_schema(part)))
        except GrammarError as error:
            return error.message
        return ""

    found, error = find_fault(schema, error_of)
    assert found == pointer and said in error.replace("(3)", ".3.")


def test_the_search_is_bounded() -> None:
    tried = 0

    def error_of(part: Any) -> str:
        nonlocal tried
        tried += 1
        return "bad" if "properties" in part else ""

    assert find_fault(obj(**{f"p{i}": {} for i in range(10_000)}), error_of) == ("", "bad")
    assert tried < 300


@pytest.mark.parametrize(
    ("schema", "pointer"),
    [
        ({"type": "object", "minProperties": 2}, ""),
        (obj(a={"type": "object", "minProperties": 3, "required": ["x"]}), "/properties/a"),
        ({"allOf": [{}, {"minProperties": 2}]}, "/allOf/1"),
    ],
)
def test_properties_that_could_be_the_same_twice_are_not_promised(schema: dict[str, Any], pointer: str) -> None:
    with pytest.raises(GrammarError, match="minProperties is [23], at most [12] is supported") as caught:
        check_schema(schema)
    assert caught.value.pointer == pointer


@pytest.mark.parametrize(
    "schema",
    [obj(minProperties={"const": 9}), {"minProperties": 1}, {"const": {"minProperties": 7}}, {"minProperties": 2, "required": ["a"]}],
)
def test_other_schemas_with_that_name_are_not_refused(schema: dict[str, Any]) -> None:
    check_schema(schema)
