"""The places of faults in JSON schemas, as JSON pointers."""

from typing import Any

import pytest

from mmrt.models.errors import GrammarError
from mmrt.models.grammar.json_schema import find_fault
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
        (obj(a={"$ref": "#/$defs/x"}) | {"$defs": {"x": {"type": "array", "items": BAD}}}, "/$defs/x/items", "Invalid type"),
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
