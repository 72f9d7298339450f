"""Values of fields that mmrt does not implement with which they change nothing. Pure; used by the table of fields."""

from collections.abc import Callable
from types import UnionType
from typing import Any, NamedTuple

import msgspec

from .fields import BOOLEAN, NULL, STRING, Schema
from .fields import OBJECT as ANY_OBJECT


class Harmless(NamedTuple):
    """Values that change nothing: ``is_it`` tests for one, ``words`` and ``schema`` describe them. null always changes nothing.
    ``is_done``: they say what is done anyway; otherwise they say something that has no effect."""

    is_it: Callable[[Any], bool]
    words: str
    schema: Schema
    is_done: bool = True


def number(*expected: float) -> Harmless:
    words = " or ".join(f"{one:g}" for one in expected)
    schema = {"const": expected[0]} if len(expected) == 1 else {"enum": list(expected)}
    return Harmless(lambda value: type(value) in (int, float) and value in expected, words, schema)


def one_of(*expected: object, is_done: bool = True) -> Harmless:
    words = " or ".join(msgspec.json.encode(one).decode() for one in expected)
    schema = {"enum": list(expected)}
    return Harmless(lambda value: any(type(value) is type(one) and value == one for one in expected), words, schema, is_done)


def of_type(kind: type | UnionType, words: str, schema: Schema) -> Harmless:
    """Values of a type. true and false are numbers in Python alone."""
    return Harmless(
        lambda value: isinstance(value, kind) and (kind is bool or not isinstance(value, bool)), words, schema, is_done=False
    )


NEVER = Harmless(lambda value: False, "null", NULL)
NOTHING = Harmless(lambda value: isinstance(value, list | dict) and not value, "an empty one", {"enum": [[], {}]})
EMPTY = Harmless(lambda value: isinstance(value, list | dict | str) and not value, "an empty one", {"enum": [[], {}, ""]})
FLAG = of_type(bool, "a boolean", BOOLEAN)
OBJECT = of_type(dict, "an object", ANY_OBJECT)
TEXT = of_type(str, "a string", STRING)
LIST = of_type(list, "an array", {"type": "array", "items": {}})
WHOLE = of_type(int, "an integer", {"type": "integer"})
NUMBER = of_type(int | float, "a number", {"type": "number"})


def short_text(max_chars: int) -> Harmless:
    return Harmless(
        lambda value: isinstance(value, str) and len(value) <= max_chars,
        f"a string of up to {max_chars} characters",
        {"type": "string", "maxLength": max_chars},
        is_done=False,
    )
