"""Keywords of JSON schemas: which llguidance holds, and other words for some that it does not. Pure."""

import re
from collections.abc import Mapping
from typing import Any

from .look_ahead import in_one, without_look_ahead
from .references import References, types_of, values_of
from .regex_tree import check_size

# As they are. Keywords in no list here are annotations, or unknown: without effect, as JSON Schema says.
KEPT = frozenset(
    "$schema type enum const required minLength maxLength minItems maxItems minProperties maxProperties minimum maximum"
    " exclusiveMinimum exclusiveMaximum multipleOf".split()
)
IN_PLACE = frozenset(("$ref", "allOf", "anyOf", "oneOf"))
_OBJECTS = frozenset(("properties", "patternProperties", "additionalProperties", "propertyNames"))
_ARRAYS = frozenset(("items", "prefixItems", "additionalItems"))
FORMATS = frozenset("date-time time date duration email hostname ipv4 ipv6 uuid uri".split())
# Of those that are not held: OpenAI documents pattern and bounds of numbers as supported under strict, and no others.
REFUSED_BY_OPENAI = frozenset(
    "format oneOf not if contains uniqueItems propertyNames dependentRequired dependentSchemas dependencies unevaluatedItems"
    " unevaluatedProperties minProperties maxProperties $dynamicRef $recursiveRef".split()
)
RESTRICTING = (KEPT - {"$schema"}) | IN_PLACE | _OBJECTS | _ARRAYS | REFUSED_BY_OPENAI | {"pattern", "nullable", "then", "else"}
_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
_MAX_BOUND = 10**18  # what has more digits the library cannot compare
_INT64 = 2**63 - 1
_MAX_DIVISOR = 2**32 - 1
_MAX_NAMES = 256
_NEVER_READ = re.compile(r"(?<!\\)(?:\\\\)*(?:\(\?<[=!]|\\[1-9]|\\k<)")  # look-behind, back-references


def pattern_parts(pattern: str) -> list[str] | None:
    """Return patterns that together are this one; None if there are none that llguidance reads. Raises: GrammarError for one that is
    too large."""
    check_size(pattern)
    return None if _NEVER_READ.search(pattern) else without_look_ahead(pattern)


def name_pattern(pattern: str) -> str | None:
    """As ``pattern_parts``, in one."""
    check_size(pattern)
    return None if _NEVER_READ.search(pattern) else in_one(pattern)


def is_number_beyond(schema: Mapping[str, Any], keyword: str) -> bool:
    """Return whether a bound of numbers, or a divisor, is one that llguidance fails on."""
    value = schema[keyword]
    if not isinstance(value, int | float) or isinstance(value, bool):
        return False
    if keyword in _BOUNDS:
        return abs(value) >= _MAX_BOUND and not (value == _INT64 and keyword == "maximum" and schema.get("type") == "integer")
    return keyword == "multipleOf" and not _has_short_digits(abs(value))


def _has_short_digits(value: float) -> bool:
    for _ in range(20):
        if isinstance(value, int) or value.is_integer():
            return value <= _MAX_DIVISOR
        value *= 10
    return False


def with_null(schema: dict[str, Any]) -> dict[str, Any]:
    """Return a schema without ``nullable``, which is no keyword of JSON Schema but of OpenAPI."""
    if "nullable" not in schema:
        return schema
    rest = {name: value for name, value in schema.items() if name != "nullable"}
    is_plain = not (IN_PLACE | {"not", "enum", "const"}) & rest.keys()
    if schema["nullable"] is not True or (is_plain and "null" in types_of(rest)):
        return rest
    if is_plain and isinstance(kind := rest["type"], str | list):
        return {**rest, "type": [*([kind] if isinstance(kind, str) else kind), "null"]}
    return {"anyOf": [rest, {"type": "null"}]}


def without_property_names(schema: dict[str, Any], references: References) -> dict[str, Any]:
    """Return a schema that says by other keywords what ``propertyNames`` says, if it can."""
    if "propertyNames" not in schema:
        return schema
    names = references.resolve(schema["propertyNames"], RESTRICTING - {"$ref"})
    rest = {name: value for name, value in schema.items() if name != "propertyNames"}
    if names is True or (isinstance(names, dict) and "string" in types_of(names) and not names.keys() & RESTRICTING - {"type"}):
        return rest
    if not isinstance(names, dict) or "patternProperties" in schema:
        return schema
    properties, others = schema.get("properties", {}), schema.get("additionalProperties", True)
    restricting = names.keys() & RESTRICTING - {"type"}
    values = values_of(names)
    if values is not None and restricting <= {"enum", "const"} and len(values) <= _MAX_NAMES and isinstance(properties, dict):
        allowed = [value for value in values if isinstance(value, str)]
        ordered = dict.fromkeys([*(name for name in properties if name in allowed), *allowed])
        named = {name: properties.get(name, others) for name in ordered}
        return {**rest, "properties": named, "additionalProperties": False}
    if restricting == {"pattern"} and isinstance(names["pattern"], str) and not properties:
        return {**rest, "patternProperties": {names["pattern"]: others}, "additionalProperties": False}
    return schema
