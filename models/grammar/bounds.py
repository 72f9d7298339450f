"""Ends for what a schema leaves endless: models, small ones above all, can write an array or an object for ever. Pure.

Digits of numbers end where answers are written (``matcher``).
"""

import math
from typing import Any, NamedTuple

from .keywords import IN_PLACE
from .references import values_of

MAX_ITEMS = 1024  # of an array without maxItems, where no minItems asks for more
MAX_KEYS = 256  # of an object, besides those that are required
MAX_FREE_DEPTH = 8  # of JSON of which the schema says nothing
MAX_BLANKS = 128  # in a row, in a string without maxLength, pattern and format
_MAX_MIN_LENGTH = 64  # a longer string and its blanks are too much for one grammar
_BLANKS = rf"^(?:\s{{0,{MAX_BLANKS}}}\S)*\s{{0,{MAX_BLANKS}}}$"


def _free(depth: int) -> dict[str, str]:
    return {"$ref": f"#/$defs/free{depth}"}


def _free_value(depth: int) -> dict[str, Any]:
    plain = {"type": ["null", "boolean", "number", "string"], "pattern": _BLANKS}
    if depth == 0:
        return plain
    inner = _free(depth - 1)
    array = {"type": "array", "items": inner, "maxItems": MAX_ITEMS}
    return {"anyOf": [_free(0), array, {"type": "object", "additionalProperties": inner, "maxProperties": MAX_KEYS}]}


FREE = _free(MAX_FREE_DEPTH)
FREE_JSON = {f"free{depth}": _free_value(depth) for depth in range(MAX_FREE_DEPTH + 1)}


def names_free_json(value: Any) -> bool:
    """Return whether a held schema refers to ``FREE``."""
    if value is FREE:
        return True
    children = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return any(map(names_free_json, children))


class Ends(NamedTuple):
    """How many entries an array may have, and how many keys an object."""

    items: int
    keys: int


def ends_of(schema: Any) -> Ends:
    """Return the ends for a whole schema: no part of it asks for more, as parts may hold for the same value."""
    items, names, left = MAX_ITEMS, set[str](), [schema]
    while left:
        one = left.pop()
        if isinstance(one, dict):
            least, required = one.get("minItems"), one.get("required")
            items = max(items, math.ceil(least)) if isinstance(least, int | float) else items
            names |= {name for name in required if isinstance(name, str)} if isinstance(required, list) else set()
        left += one.values() if isinstance(one, dict) else one if isinstance(one, list) else ()
    return Ends(items, MAX_KEYS + len(names))


def bound(schema: dict[str, Any], is_part: bool, ends: Ends) -> None:
    """Bound what a held schema leaves endless by itself. ``is_part``: others hold for the same value. ``ends``: of the whole."""
    kind = schema.get("type")
    kinds = kind if isinstance(kind, list) else [kind]
    if values_of(schema) is not None:
        return
    is_alone = not is_part and not IN_PLACE & schema.keys()
    if "array" in kinds:
        _bound_array(schema, is_alone, ends.items)
    if "object" in kinds and is_alone:
        _bound_object(schema, ends.keys)
    if "string" in kinds and is_alone and not {"pattern", "format", "maxLength"} & schema.keys():
        if schema.get("minLength", 0) in range(_MAX_MIN_LENGTH + 1):
            schema["pattern"] = _BLANKS


def _bound_array(schema: dict[str, Any], is_alone: bool, max_items: int) -> None:
    least = schema.get("minItems", 0)
    if isinstance(least, int) and schema.get("items") is not False:
        schema.setdefault("maxItems", max_items)
    if is_alone and "additionalItems" not in schema:
        schema.setdefault("items", FREE)


def _bound_object(schema: dict[str, Any], max_keys: int) -> None:
    properties, required = schema.get("properties", {}), schema.get("required", [])
    if schema.setdefault("additionalProperties", FREE) is False and not schema.get("patternProperties"):
        return
    if not (isinstance(properties, dict) and isinstance(required, list)) or not all(isinstance(name, str) for name in required):
        return
    if all(name in required or value is False for name, value in properties.items()):  # others cannot be counted
        schema.setdefault("maxProperties", max_keys)
