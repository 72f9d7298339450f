"""References within a schema, and whether two schemas have no value in common. Pure."""

import json
from collections.abc import Iterable, Mapping, Set
from typing import Any
from urllib.parse import unquote

TYPES = ("null", "boolean", "integer", "number", "string", "array", "object")
_MAX_DEPTH = 8
_MAX_OPTIONS = 64
_MAX_COMPARISONS = 20_000


class References:
    """Finds what a schema's references name."""

    def __init__(self, root: Any) -> None:
        self._root = root
        self._id = str(root.get("$id") or root.get("id") or "").rstrip("#") if isinstance(root, dict) else ""
        self._anchors: dict[str, str] | None = None
        self._num_compared = 0

    def pointer_of(self, reference: Any) -> str | None:
        """Return the JSON pointer of a reference into this schema; None for others."""
        if not isinstance(reference, str):
            return None
        place, _, fragment = reference.partition("#")
        if place not in ("", self._id):
            return None
        pointer = unquote(fragment)
        if pointer and not pointer.startswith("/"):
            if self._anchors is None:
                self._anchors = dict(_anchors(self._root, ""))
            return self._anchors.get(pointer)
        return pointer

    def at(self, pointer: str) -> Any:
        """Return the schema at a pointer. Raises: LookupError."""
        value = self._root
        for step in pointer.split("/")[1:]:
            name = step.replace("~1", "/").replace("~0", "~")
            if isinstance(value, list):
                value = dict(zip(map(str, range(len(value))), value, strict=True))
            if not isinstance(value, dict):
                raise LookupError(pointer)
            value = value[name]
        if not isinstance(value, dict | bool):
            raise LookupError(pointer)
        return value

    def resolve(self, schema: Any, beside: Set[str] = frozenset()) -> Any:
        """Return the schema behind a reference, which may be a boolean; itself if it is none, names nothing here, or has one of the
        keywords ``beside`` it."""
        for _ in range(_MAX_DEPTH):
            if not isinstance(schema, dict) or "$ref" not in schema or schema.keys() & beside:
                break
            pointer = self.pointer_of(schema["$ref"])
            try:
                target = None if pointer is None else self.at(pointer)
            except LookupError:
                target = None
            if target is None:
                break
            schema = target
        return schema

    def are_apart(self, one: Any, other: Any, depth: int = _MAX_DEPTH) -> bool:
        """Return whether it is certain that no value is valid under both."""
        if one is False or other is False:
            return True
        self._num_compared += 1
        if depth == 0 or self._num_compared > _MAX_COMPARISONS or not (isinstance(one, dict) and isinstance(other, dict)):
            return False
        for first, second in ((one, other), (other, one)):
            if self._is_apart(first, second, depth - 1):
                return True
        return not types_of(one) & types_of(other) or _values_apart(one, other) or self._objects_apart(one, other, depth - 1)

    def _is_apart(self, one: Mapping[str, Any], other: Any, depth: int) -> bool:
        """Return whether a part of ``one`` that all its values are valid under is apart from ``other``."""
        target = self.resolve({"$ref": one["$ref"]}) if "$ref" in one else one
        is_found = target is not one and not (isinstance(target, dict) and "$ref" in target)
        if is_found and self.are_apart(target, other, depth):
            return True
        members = one.get("allOf")
        if isinstance(members, list) and any(self.are_apart(member, other, depth) for member in members[:_MAX_OPTIONS]):
            return True
        for keyword in ("anyOf", "oneOf"):
            options = one.get(keyword)
            if isinstance(options, list) and 0 < len(options) <= _MAX_OPTIONS:
                if all(self.are_apart(option, other, depth) for option in options):
                    return True
        return False

    def _objects_apart(self, one: Mapping[str, Any], other: Mapping[str, Any], depth: int) -> bool:
        if not types_of(one) & types_of(other) <= {"object"}:
            return False
        for name in {*_names(one.get("required")), *_names(other.get("required"))}:
            first, second = _property(one, name), _property(other, name)
            if self.are_apart(first, second, depth):
                return True
        return False


def values_of(schema: Mapping[str, Any]) -> list[Any] | None:
    """Return the values that ``const`` or ``enum`` lists; None without these."""
    if "const" in schema:
        return [schema["const"]]
    values = schema.get("enum")
    return values if isinstance(values, list) else None


def same(value: Any) -> str:
    """Return a text that is equal for equal JSON values: 1 is 1.0 and not true."""
    return json.dumps(_plain(value), sort_keys=True)


def type_of(value: Any) -> str:
    """Return the narrowest JSON type of a value."""
    if isinstance(value, float):
        return "integer" if value.is_integer() else "number"
    kinds = {bool: "boolean", int: "integer", str: "string", list: "array", dict: "object"}
    return kinds.get(type(value), "null")


def _plain(value: Any) -> Any:
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, list):
        return [_plain(one) for one in value]
    return {name: _plain(one) for name, one in value.items()} if isinstance(value, dict) else value


def types_of(schema: Mapping[str, Any] | bool) -> set[str]:
    """The types that a schema's values may have."""
    if isinstance(schema, bool):
        return set(TYPES) if schema else set()
    if (values := values_of(schema)) is not None:
        return set(map(type_of, values))
    kind = schema.get("type")
    found = {kind} if isinstance(kind, str) else {one for one in kind if isinstance(one, str)} if isinstance(kind, list) else set(TYPES)
    return found | {"integer"} if "number" in found else found


def _values_apart(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    first, second = values_of(one), values_of(other)
    return first is not None and second is not None and not set(map(same, first)) & set(map(same, second))


def _property(schema: Mapping[str, Any], name: str) -> Any:
    """The schema of a property's values, True if that is not clear."""
    properties = schema.get("properties")
    if isinstance(properties, dict) and name in properties:
        return properties[name]
    if schema.get("additionalProperties") is False and "patternProperties" not in schema:
        return False
    return True


def _names(value: Any) -> Iterable[str]:
    return [name for name in value if isinstance(name, str)] if isinstance(value, list) else []


def _anchors(value: Any, pointer: str) -> Iterable[tuple[str, str]]:
    if isinstance(value, dict):
        if isinstance(value.get("$anchor"), str):
            yield value["$anchor"], pointer
        for name, one in value.items():
            yield from _anchors(one, f"{pointer}/{name.replace('~', '~0').replace('/', '~1')}")
    elif isinstance(value, list):
        for number, one in enumerate(value):
            yield from _anchors(one, f"{pointer}/{number}")
