"""Reading a JSON object field by field: every error names the field, the value (shortened) and what is allowed.

Pure. Used by the gateway's validation of requests.
"""

import math
from collections.abc import Collection, Mapping
from typing import Any

import msgspec

from ....runtime.errors import RequestError
from .ignored import is_strict, tolerate

Schema = Mapping[str, Any]  # a JSON schema
STRING: Schema = {"type": "string"}
BOOLEAN: Schema = {"type": "boolean"}
OBJECT: Schema = {"type": "object"}
AT_LEAST_ONE: Schema = {"type": "array", "minItems": 1}
NULL: Schema = {"type": "null"}

_SHOWN_CHARS = 60
_KIND_OF_TYPE = {
    dict: "an object",
    list: "an array",
    str: "a string",
    bool: "a boolean",
    int: "an integer",
    float: "a number",
    type(None): "null",
}


def show(value: object) -> str:
    """A value as a message shows it: JSON, cut to a few characters, so that no message repeats megabytes."""
    if isinstance(value, dict | list):
        return f"{_KIND_OF_TYPE[type(value)]} with {len(value)} {'entry' if len(value) == 1 else 'entries'}"
    if isinstance(value, str):
        value = value[: _SHOWN_CHARS + 1]
    elif type(value) is int and value.bit_length() > 200:
        return f"an integer of {value.bit_length()} bits"
    text = msgspec.json.encode(value).decode()
    return text if len(text) <= _SHOWN_CHARS else text[:_SHOWN_CHARS] + "…"


def kind_of(value: object) -> str:
    """The JSON name of a value's type."""
    return _KIND_OF_TYPE.get(type(value), type(value).__name__)


def refuse(path: str, problem: str, status: int = 400) -> RequestError:
    """Build an error about the field at ``path``."""
    return RequestError(f"{path}: {problem}" if path else problem, status=status, param=path or None)


class Example(dict[str, Any]):
    """An object of an example body, which takes notes on its reader (``openapi``). ``taken``: the fields that the reader takes, absent
    ones too, with the schema of their values other than null; None: that of the examples. ``is_closed``: the reader refuses others.
    ``place``: the entry of the table of fields by which it does."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        super().__init__(values)
        self.taken: dict[str, Schema | None] = {}
        self.required: set[str] = set()
        self.is_closed = False
        self.place: object = None


class Fields:
    """The fields of one object. Each ``take`` removes a field; ``leftover`` holds the fields not taken. null means absent."""

    def __init__(self, value: object, path: str = "") -> None:
        if not isinstance(value, dict):
            raise refuse(path, f"expected an object, got {kind_of(value)}")
        self._values: dict[str, Any] = dict(value)
        self._path = path
        self._example = value if isinstance(value, Example) else None

    def path(self, name: str) -> str:
        return f"{self._path}.{name}" if self._path else name

    @property
    def is_example(self) -> bool:
        return self._example is not None

    def note_place(self, place: object) -> None:
        """Note by which entry of the table of fields the object is read, if it is an example."""
        if self._example is not None:
            self._example.place = place

    @property
    def leftover(self) -> dict[str, Any]:
        return self._values

    def take(self, name: str, schema: Schema | None = None) -> Any:
        """Take the raw value, None when absent. ``schema``: of the values that the caller accepts, unless examples show them."""
        if self._example is not None:
            self._example.taken.setdefault(name, schema)
        return self._values.pop(name, None)

    def take_required(self, name: str, schema: Schema | None = None) -> Any:
        """As ``take``, and refuse its absence."""
        self.require(name)
        return self.take(name, schema)

    def require(self, name: str) -> None:
        """Refuse the absence of a field that is taken later."""
        if self._example is not None:
            self._example.required.add(name)
        if self._values.get(name) is None:
            raise refuse(self.path(name), "is required")

    def take_choice(self, name: str, allowed: Collection[str]) -> str:
        """Take one of the words ``allowed``; required."""
        value = self.take_required(name, {"enum": list(allowed)})
        if not isinstance(value, str) or value not in allowed:
            raise refuse(self.path(name), f"is {show(value)}, allowed are {', '.join(allowed)}")
        return value

    def take_str(self, name: str, max_chars: int | None = None) -> str | None:
        value = self.take(name, STRING if max_chars is None else {"type": "string", "maxLength": max_chars})
        if value is None:
            return None
        if not isinstance(value, str):
            raise refuse(self.path(name), f"expected a string, got {kind_of(value)}")
        if max_chars is not None and len(value) > max_chars:
            raise refuse(self.path(name), f"has {len(value)} characters, the limit is {max_chars}")
        return value

    def take_required_str(self, name: str) -> str:
        value = self.take_required(name, STRING)
        if not isinstance(value, str):
            raise refuse(self.path(name), f"expected a string, got {kind_of(value)}")
        return value

    def take_bool(self, name: str) -> bool:
        """Take a boolean, False when absent."""
        return bool(self.take_flag(name))

    def take_flag(self, name: str) -> bool | None:
        """Take a boolean, None when absent."""
        value = self.take(name, BOOLEAN)
        if value is not None and not isinstance(value, bool):
            raise refuse(self.path(name), f"expected true or false, got {show(value)}")
        return value

    def take_int(self, name: str, low: int, high: int) -> int | None:
        """Take a whole number, which may be written with a point."""
        value = self.take(name, {"type": "integer", "minimum": low, "maximum": high})
        if value is None:
            return None
        if isinstance(value, float) and value.is_integer():  # JSON has one kind of number
            value = int(value)
        if type(value) is not int:
            raise refuse(self.path(name), f"expected an integer, got {show(value)}")
        if not low <= value <= high:
            raise refuse(self.path(name), f"is {show(value)}, allowed are {low} to {high}")
        return value

    def take_float(self, name: str, low: float, high: float, *, low_allowed: bool = True) -> float | None:
        value = self.take(name, {"type": "number", "minimum" if low_allowed else "exclusiveMinimum": low, "maximum": high})
        if value is None:
            return None
        if type(value) not in (int, float):
            raise refuse(self.path(name), f"expected a number, got {show(value)}")
        if not low <= value <= high or (value == low and not low_allowed) or not math.isfinite(value):
            lower = f"{low:g}" if low_allowed else f"more than {low:g}"
            raise refuse(self.path(name), f"is {show(value)}, allowed are {lower} to {high:g}")
        return float(value)

    def leave(self, known: str = "") -> None:
        """Leave the fields not taken without effect. ``known`` describes the fields there are. Raises: RequestError for one whose value
        says something, with strict fields."""
        if self._example is not None:
            self._example.is_closed = is_strict()
        for name, value in self._values.items():
            if value is not None:
                tolerate(self.path(name[:_SHOWN_CHARS]), f"is not supported; {known}" if known else "is not supported")
