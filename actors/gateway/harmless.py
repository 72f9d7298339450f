"""Values of fields that mmrt does not implement with which they change nothing. Pure; used by the readers of requests."""

from collections.abc import Callable, Mapping
from types import UnionType
from typing import Any, NamedTuple

import msgspec

from .fields import BOOLEAN, STRING, Fields, Schema, refuse, show
from .fields import OBJECT as ANY_OBJECT
from .ignored import note


class Harmless(NamedTuple):
    """Values that change nothing: ``is_it`` tests for one, ``words`` and ``schema`` describe them. null always changes nothing.
    ``is_done``: they say what is done anyway; otherwise they say something that has no effect."""

    is_it: Callable[[Any], bool]
    words: str
    schema: Schema
    is_done: bool = True


def number(expected: float) -> Harmless:
    return Harmless(lambda value: type(value) in (int, float) and bool(value == expected), f"{expected:g}", {"const": expected})


def one_of(*expected: object) -> Harmless:
    words = " or ".join(msgspec.json.encode(one).decode() for one in expected)
    return Harmless(lambda value: any(type(value) is type(one) and value == one for one in expected), words, {"enum": list(expected)})


def of_type(kind: type | UnionType, words: str, schema: Schema) -> Harmless:
    """Values of a type. true and false are numbers in Python alone."""
    return Harmless(
        lambda value: isinstance(value, kind) and (kind is bool or not isinstance(value, bool)), words, schema, is_done=False
    )


NOTHING = Harmless(lambda value: isinstance(value, list | dict) and not value, "an empty one", {"enum": [[], {}]})
FLAG = of_type(bool, "a boolean", BOOLEAN)
OBJECT = of_type(dict, "an object", ANY_OBJECT)
TEXT = of_type(str, "a string", STRING)


def refuse_others(fields: Fields, harmless: Mapping[str, Harmless]) -> None:
    """Refuse every field left that would change the answer. Raises: RequestError."""
    for name, values in harmless.items():
        value = fields.take(name, values.schema)
        if value is not None and not values.is_it(value):
            raise refuse(fields.path(name), f"is {show(value)}, only {values.words} is supported")
        if value is not None and not values.is_done:
            note(fields.path(name), "mmrt does without it")
    fields.refuse_leftover()
