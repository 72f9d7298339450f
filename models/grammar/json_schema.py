"""JSON schemas as documents: their parts, by JSON pointers, and the place of a fault that llguidance only describes. Pure."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

_ONE = ("items", "additionalProperties", "additionalItems", "not", "if", "then", "else", "contains", "propertyNames")
_SEVERAL = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
_DEFINITIONS = ("$defs", "definitions")
_NAMED = (*_DEFINITIONS, "properties", "patternProperties", "dependentSchemas")
_MAX_TRIALS = 200


def find_fault(schema: Any, error_of: Callable[[Any], str]) -> tuple[str, str]:
    """Return the JSON pointer of the smallest part of a faulty schema that is faulty by itself, and its error.

    ``error_of`` returns the error of a schema, empty where there is none. At most ``_MAX_TRIALS`` parts are tried.
    """
    pointer, error, num_trials = "", error_of(schema), 0
    definitions = {name: schema[name] for name in _DEFINITIONS if isinstance(schema, dict) and name in schema}
    part, descends = schema, True
    while descends:
        descends = False
        for step, child in _children(part):
            num_trials += 1
            if num_trials > _MAX_TRIALS:
                return pointer, error
            alone = {**definitions, **child} if isinstance(child, dict) else child
            if found := error_of(alone):
                pointer, error, part, descends = pointer + step, found, child, True
                break
    return pointer, error


def _children(schema: Any) -> Iterator[tuple[str, Any]]:
    """The schemas that a schema is made of, each with its steps of a pointer."""
    if not isinstance(schema, Mapping):
        return
    for keyword in _NAMED:
        named = schema.get(keyword)
        if isinstance(named, dict):
            for name, child in named.items():
                yield f"/{keyword}/{_escape(name)}", child
    for keyword in _SEVERAL:
        several = schema.get(keyword)
        if isinstance(several, list):
            for number, child in enumerate(several):
                yield f"/{keyword}/{number}", child
    for keyword in _ONE:
        child = schema.get(keyword)
        if isinstance(child, dict):
            yield f"/{keyword}", child


def _escape(name: str) -> str:
    return name.replace("~", "~0").replace("/", "~1")
