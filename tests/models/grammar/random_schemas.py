"""Random JSON schemas of all kinds that grammars support, and what answers to them must be."""

import json
import random
from typing import Any

from jsonschema import Draft202012Validator

_PATTERNS = ("^[a-z]{2,5}$", "^(red|green|blue)+$", "^[A-Z][0-9]{3}$", "x", "^\\d+-\\w*$", "^.{1,6}$")
_FORMATS = ("date", "time", "date-time", "uuid", "ipv4", "email", "hostname", "uri")
_NAMES = ("name", "n", "größe", 'a"b', "x y", "_id", "items", "a/b~c", "日")
_VALUES = (1, -2.5, True, None, "yes", 'say "no"\n', "", [1, "x"], {"k": [None]})
Schema = dict[str, Any]


def random_schema(seed: int) -> Schema:
    """The schema of this number: an object, an array or a plain value, up to three levels deep; some are recursive."""
    choice = random.Random(seed)
    schema = _schema(choice, 3)
    if choice.random() < 0.2:
        leaf = _closed({"v": {"type": "boolean"}, "next": {"$ref": "#/$defs/leaf"}}, ["v"])
        schema = {"$defs": {"leaf": leaf}, **_closed({"root": {"$ref": "#/$defs/leaf"}, "rest": schema}, ["root", "rest"])}
    return schema


def check_answer(schema: Schema, text: str) -> None:
    """Raises: ValueError or jsonschema's ValidationError for a text that the schema does not allow."""
    Draft202012Validator(schema, format_checker=Draft202012Validator.FORMAT_CHECKER).validate(json.loads(text))


def _schema(choice: random.Random, depth: int) -> Schema:
    if depth and choice.random() < 0.75:
        return choice.choice((_array, _object, _object, _any_of, _all_of))(choice, depth - 1)
    return choice.choice((_integer, _number, _string, _enum, _types))(choice)


def _integer(choice: random.Random) -> Schema:
    low = choice.randrange(-1000, 1000)
    bounds = (
        {"multipleOf": choice.randrange(2, 7)},
        {"minimum": low},
        {"exclusiveMaximum": low},
        {"minimum": low, "maximum": low + 300},
    )
    return {"type": "integer", **choice.choice(bounds)}


def _number(choice: random.Random) -> Schema:
    low = choice.randrange(-100, 100) / 4
    return {"type": "number", **choice.choice(({}, {"minimum": low}, {"exclusiveMinimum": low, "maximum": low + 7.5}))}


def _string(choice: random.Random) -> Schema:
    low = choice.randrange(6)
    lengths = ({}, {"minLength": low}, {"maxLength": low + 9}, {"minLength": low, "maxLength": low + 3})
    forms = ({"pattern": choice.choice(_PATTERNS)}, {"format": choice.choice(_FORMATS)})
    return {"type": "string", **choice.choice((*lengths, *forms))}


def _enum(choice: random.Random) -> Schema:
    return {"const": choice.choice(_VALUES)} if choice.random() < 0.3 else {"enum": choice.sample(_VALUES, choice.randrange(1, 6))}


def _types(choice: random.Random) -> Schema:
    return {"type": choice.sample(["string", "integer", "boolean", "null"], 2), "title": "one of two", "default": None}


def _array(choice: random.Random, depth: int) -> Schema:
    low = choice.randrange(3)
    if choice.random() < 0.3:
        parts: Schema = {"prefixItems": [_schema(choice, 0) for _ in range(2)], "items": choice.choice((False, _schema(choice, 0)))}
        return {"type": "array", **parts, "minItems": 2, "maxItems": 4}
    return {"type": "array", "items": _schema(choice, depth), "minItems": low, "maxItems": low + choice.randrange(3)}


def _object(choice: random.Random, depth: int) -> Schema:
    if choice.random() < 0.15:
        return {
            "type": "object",
            "patternProperties": {"^k[0-9]$": _schema(choice, 0)},
            "additionalProperties": False,
            "minProperties": 1,
        }
    names = choice.sample(_NAMES, choice.randrange(1, 5))
    properties = {name: _schema(choice, depth) for name in names}
    schema = _closed(properties, choice.sample(names, choice.randrange(len(names) + 1)))
    others = choice.choice((False, False, True, _schema(choice, 0)))
    return {**schema, "additionalProperties": others}


def _any_of(choice: random.Random, depth: int) -> Schema:
    if choice.random() < 0.3:
        return {"oneOf": [_closed({"tag": {"const": tag}, "value": _schema(choice, depth)}, ["tag", "value"]) for tag in ("l", "r")]}
    return {"anyOf": [_schema(choice, depth) for _ in range(choice.randrange(1, 4))]}


def _all_of(choice: random.Random, depth: int) -> Schema:
    parts = [{"type": "object", "properties": {name: _schema(choice, depth)}, "required": [name]} for name in ("a", "b")]
    return {"allOf": parts}


def _closed(properties: Schema, required: list[str]) -> Schema:
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}
