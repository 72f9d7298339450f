"""Reading a JSON object field by field, strictly: every error names the field, the value (shortened) and what is allowed.

Pure. Used by the gateway's validation of requests.
"""

import math
from collections.abc import Collection
from typing import Any

import msgspec

from ...runtime.errors import RequestError

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


class Fields:
    """The fields of one object. Each ``take`` removes a field; ``leftover`` holds the fields not taken. null means absent."""

    def __init__(self, value: object, path: str = "") -> None:
        if not isinstance(value, dict):
            raise refuse(path, f"expected an object, got {kind_of(value)}")
        self._values: dict[str, Any] = dict(value)
        self._path = path

    def path(self, name: str) -> str:
        return f"{self._path}.{name}" if self._path else name

    @property
    def leftover(self) -> dict[str, Any]:
        return self._values

    def take(self, name: str) -> Any:
        """Take the raw value, None when absent."""
        return self._values.pop(name, None)

    def take_required(self, name: str) -> Any:
        value = self.take(name)
        if value is None:
            raise refuse(self.path(name), "is required")
        return value

    def take_choice(self, name: str, allowed: Collection[str]) -> str:
        """Take one of the words ``allowed``; required."""
        value = self.take_required(name)
        if not isinstance(value, str) or value not in allowed:
            raise refuse(self.path(name), f"is {show(value)}, allowed are {', '.join(allowed)}")
        return value

    def take_str(self, name: str, max_chars: int | None = None) -> str | None:
        value = self.take(name)
        if value is None:
            return None
        if not isinstance(value, str):
            raise refuse(self.path(name), f"expected a string, got {kind_of(value)}")
        if max_chars is not None and len(value) > max_chars:
            raise refuse(self.path(name), f"has {len(value)} characters, the limit is {max_chars}")
        return value

    def take_bool(self, name: str) -> bool:
        """Take a boolean, False when absent."""
        value = self.take(name)
        if value is not None and not isinstance(value, bool):
            raise refuse(self.path(name), f"expected true or false, got {show(value)}")
        return bool(value)

    def take_int(self, name: str, low: int, high: int) -> int | None:
        value = self.take(name)
        if value is None:
            return None
        if type(value) is not int:
            raise refuse(self.path(name), f"expected an integer, got {show(value)}")
        if not low <= value <= high:
            raise refuse(self.path(name), f"is {show(value)}, allowed are {low} to {high}")
        return value

    def take_float(self, name: str, low: float, high: float, *, low_allowed: bool = True) -> float | None:
        value = self.take(name)
        if value is None:
            return None
        if type(value) not in (int, float):
            raise refuse(self.path(name), f"expected a number, got {show(value)}")
        if not low <= value <= high or (value == low and not low_allowed) or not math.isfinite(value):
            lower = f"{low:g}" if low_allowed else f"more than {low:g}"
            raise refuse(self.path(name), f"is {show(value)}, allowed are {lower} to {high:g}")
        return float(value)

    def refuse_leftover(self, known: str = "") -> None:
        """Raise for the first field not taken whose value says something. ``known`` describes the fields there are."""
        for name, value in self._values.items():
            if value is not None:
                raise refuse(self.path(name[:_SHOWN_CHARS]), f"is not supported; {known}" if known else "is not supported")
