"""The JSON schema of a route's requests, made by its reader: it reads examples, and notes each field that it takes (``fields``).

So a field that a reader takes is in the schema, with the limits that the reader checks; one that it refuses is there as null.
Relations between fields are not there, such as that ``top_logprobs`` needs ``logprobs``. Pure.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, TypeGuard

import msgspec

from ....runtime.config.sections import MediaSection
from ..reading.fields import NULL, OBJECT, Example, Schema
from ..reading.json_body import Body
from ..reading.validation import Limits

_NAMES_OF_TYPES = {bool: "boolean", int: "integer", float: "number", str: "string"}


def schema_of(read: Callable[[Body, Limits], object], bodies: Iterable[Mapping[str, Any]], limits: Limits) -> Schema:
    """Return the schema of what ``read`` takes. ``bodies``: valid ones, which show at least one value of each field whose reader does
    not say its schema, and each type of the objects that differ by ``type``.

    Raises:
        RequestError: a body is not valid.
        ValueError: the bodies do not show a field.
    """
    examples = [example_of(body) for body in bodies]
    limits = msgspec.structs.replace(limits, media=MediaSection())  # those of the run may allow fewer media than the examples have
    for example in examples:
        read(example, limits)
    return _of_values(examples, "")


def example_of(value: Any) -> Any:
    if isinstance(value, Mapping):
        return Example({name: example_of(inner) for name, inner in value.items()})
    return [example_of(inner) for inner in value] if isinstance(value, list) else value


def _of_values(values: Sequence[Any], path: str, sizes: Schema = MappingProxyType({})) -> Schema:
    """Return the schema of a place where these values stand. ``sizes``: of arrays."""
    schemas: list[Schema] = []
    if arrays := [value for value in values if isinstance(value, list)]:
        entries = [entry for array in arrays for entry in array]
        schemas.append({"type": "array", **({"items": _of_values(entries, f"{path}[]")} if entries else {}), **sizes})
    groups: dict[object, list[Example]] = {}
    for value in values:
        if isinstance(value, Example):
            groups.setdefault((value.get("type"), frozenset(value.required)), []).append(value)
        elif not isinstance(value, list):
            schemas.append({"type": _NAMES_OF_TYPES[type(value)]})
    _check_types([value for group in groups.values() for value in group], path)
    return _any_of([*schemas, *(_of_objects(group, path, is_alone=len(groups) == 1) for group in groups.values())])


def _check_types(objects: Sequence[Example], path: str) -> None:
    allowed = {kind for one in objects for kind in (one.taken.get("type") or {}).get("enum", ())}
    if missing := allowed - {one.get("type") for one in objects}:
        raise ValueError(f"{path}: no example is of type {', '.join(sorted(missing))}")


def _of_objects(objects: Sequence[Example], path: str, is_alone: bool) -> Schema:
    """Return the schema of objects of one type that require the same fields."""
    is_closed = all(one.is_closed for one in objects)
    names = dict.fromkeys(name for one in objects for name, schema in one.taken.items() if not (is_closed and schema is NULL))
    if not names:
        return OBJECT
    kind = None if is_alone else objects[0].get("type")
    required = [name for name in names if name in objects[0].required or (name == "type" and kind is not None)]
    properties = {}
    for name in names:
        if name == "type" and not is_alone:
            schema: Schema = NULL if kind is None else {"const": kind}
        else:
            schema = _of_field(objects, name, f"{path}.{name}")
        properties[name] = schema if name in required or schema is NULL else _or_null(schema)
    more = {"additionalProperties": NULL} if is_closed else {}
    return {"type": "object", "properties": properties, **({"required": required} if required else {}), **more}


def _of_field(objects: Sequence[Example], name: str, path: str) -> Schema:
    """Return the schema of a field: what readers say, and what they read of it in turn."""
    takers = [(one.taken[name], one.get(name)) for one in objects if name in one.taken]
    said = [schema for schema, _ in takers if schema is not None and not _is_size(schema)]
    sizes = {key: limit for schema, _ in takers if _is_size(schema) for key, limit in schema.items()}
    shown = [value for schema, value in takers if value is not None and (schema is None or _is_size(schema) or _is_read(value))]
    if not (said or shown):
        raise ValueError(f"{path}: no example shows it")
    if name == "type" and not said:
        return {"enum": list(dict.fromkeys(shown))}
    return _any_of([*said, *([_of_values(shown, path, sizes)] if shown else [])])


def _is_size(schema: Schema | None) -> TypeGuard[Schema]:
    """Return whether a schema is about the size of an array alone, whose entries the examples show."""
    return schema is not None and schema.get("type") == "array" and "items" not in schema


def _is_read(value: Any) -> bool:
    """Return whether a reader has taken fields of it or of its entries."""
    return any(map(_is_read, value)) if isinstance(value, list) else isinstance(value, Example) and bool(value.taken)


def _any_of(schemas: Iterable[Schema]) -> Schema:
    different: list[Schema] = []
    for schema in schemas:
        different += [one for one in schema.get("anyOf", [schema]) if one not in different]
    return different[0] if len(different) == 1 else {"anyOf": different}


def _or_null(schema: Schema) -> Schema:
    if "anyOf" in schema:
        return {"anyOf": [*schema["anyOf"], NULL]}
    if "enum" in schema:
        return {**schema, "enum": [*schema["enum"], None]}
    if "const" in schema:
        return {"enum": [schema["const"], None]}
    if "type" not in schema:
        return schema
    kinds = schema["type"]
    return {**schema, "type": [*([kinds] if isinstance(kinds, str) else kinds), "null"]}
