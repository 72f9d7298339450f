"""Typed reading of a checkpoint's JSON files: every bad value is a ``CheckpointError`` naming file, field and value."""

import json
from collections.abc import Mapping
from pathlib import Path

from ..errors import CheckpointError

_SHOWN_CHARS = 300  # of a problem, from its beginning and from its end
_MISSING = object()


class JsonObject:
    """A JSON object of a file; ``where`` is its dotted place, for messages."""

    def __init__(self, data: Mapping[str, object], file: str, where: str = "") -> None:
        self._data = data
        self._file = file
        self._where = where

    @property
    def data(self) -> Mapping[str, object]:
        """The object as it was read, for what has a reader of its own."""
        return self._data

    def with_defaults(self, defaults: Mapping[str, object]) -> "JsonObject":
        """The object with these values of fields that are absent."""
        present = {field: value for field, value in self._data.items() if value is not None or field not in defaults}
        return JsonObject({**defaults, **present}, self._file, self._where)

    def _name(self, field: str) -> str:
        return f"{self._where}.{field}" if self._where else field

    def over(self, defaults: Mapping[str, object]) -> "JsonObject":
        """The object with ``defaults`` for fields that are not there."""
        return JsonObject({**defaults, **self._data}, self._file, self._where)

    def with_values(self, values: Mapping[str, object]) -> "JsonObject":
        """The object with these values in place of its own."""
        return JsonObject({**self._data, **values}, self._file, self._where)

    def error(self, field: str, problem: str) -> CheckpointError:
        """Return the error about a field; of a long value it has the beginning."""
        if len(problem) > 2 * _SHOWN_CHARS:
            problem = f"{problem[:_SHOWN_CHARS]} … {problem[-_SHOWN_CHARS:]}"
        return CheckpointError(f"{self._file}: {self._name(field)} {problem}")

    def has(self, *fields: str) -> bool:
        return any(self._data.get(field) is not None for field in fields)

    def _get(self, fields: tuple[str, ...], default: object) -> tuple[str, object]:
        for field in fields:
            value = self._data.get(field)
            if value is not None:
                return field, value
        if default is _MISSING:
            raise self.error(fields[0], "is missing")
        return fields[0], default

    def integer(self, *fields: str, default: object = _MISSING, least: int = 1, most: int = 1 << 40) -> int:
        """The first of ``fields`` that is there. Raises CheckpointError unless an integer in [least, most]."""
        field, value = self._get(fields, default)
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise self.error(field, f"is {value!r}, expected an integer from {least} to {most}")
        return value

    def number(self, *fields: str, default: object = _MISSING, least: float | None = None, most: float = 1e30) -> float:
        """As ``integer``, for a number above 0, or at least ``least``, and at most ``most``."""
        field, value = self._get(fields, default)
        low = 0.0 if least is None else least
        if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= most or (least is None and value == 0):
            limits = ("above 0" if least is None else f"of at least {least:g}") + (f", at most {most:g}" if most < 1e30 else "")
            raise self.error(field, f"is {value!r}, expected a number {limits}")
        return float(value)

    def boolean(self, *fields: str, default: object = _MISSING) -> bool:
        field, value = self._get(fields, default)
        if not isinstance(value, bool):
            raise self.error(field, f"is {value!r}, expected true or false")
        return value

    def text(self, *fields: str, default: object = _MISSING, choices: tuple[str, ...] = ()) -> str:
        field, value = self._get(fields, default)
        if not isinstance(value, str) or (choices and value not in choices):
            expected = " or ".join(repr(choice) for choice in choices) if choices else "a string"
            raise self.error(field, f"is {value!r}, expected {expected}")
        return value

    def token(self, *fields: str) -> str:
        """A token as tokenizer_config.json writes it: a string, or an object with ``content``."""
        field, value = self._get(fields, _MISSING)
        if isinstance(value, Mapping):
            value = value.get("content")
        if not isinstance(value, str):
            raise self.error(field, f"is {value!r}, expected a token")
        return value

    def tokens(self) -> dict[str, str]:
        """All fields as tokens."""
        return {field: self.token(field) for field in self._data}

    def integers(self, *fields: str, default: object = _MISSING, least: int = 0) -> tuple[int, ...]:
        field, value = self._get(fields, default)
        items = value if isinstance(value, list | tuple) else (value,)
        for item in items:
            if isinstance(item, bool) or not isinstance(item, int) or item < least:
                raise self.error(field, f"is {value!r}, expected integers of at least {least}")
        return tuple(items)

    def numbers(self, *fields: str) -> tuple[float, ...]:
        """A list of numbers above 0."""
        field, value = self._get(fields, _MISSING)
        if not isinstance(value, list | tuple) or not all(isinstance(x, int | float) and x > 0 for x in value):
            raise self.error(field, f"is {value!r}, expected numbers above 0")
        return tuple(map(float, value))

    def colour(self, *fields: str, default: object = _MISSING) -> tuple[float, float, float]:
        """Three numbers, one per colour channel."""
        field, value = self._get(fields, default)
        if not isinstance(value, list | tuple) or len(value) != 3 or not all(_is_finite(x) for x in value):
            raise self.error(field, f"is {value!r}, expected three numbers")
        return (float(value[0]), float(value[1]), float(value[2]))

    def objects(self, field: str) -> "list[JsonObject]":
        """A list of objects; an absent one reads as empty."""
        found = self._data.get(field, [])
        if not isinstance(found, list) or not all(isinstance(one, Mapping) for one in found):
            raise self.error(field, "is no list of objects")
        return [JsonObject(one, self._file, f"{self._name(field)}[{i}]") for i, one in enumerate(found)]

    def object(self, *fields: str) -> "JsonObject":
        """A nested object; an absent one reads as empty."""
        field, value = self._get(fields, {})
        if not isinstance(value, Mapping):
            raise self.error(field, f"is {value!r}, expected an object")
        return JsonObject(value, self._file, self._name(field))


def _is_finite(value: object) -> bool:
    return isinstance(value, int | float) and abs(value) < 1e30


class CheckpointFiles:
    """A checkpoint directory's JSON files, each read at most once."""

    def __init__(self, path: Path) -> None:
        if not path.is_dir():
            raise CheckpointError(f"{path}: no such model directory")
        self.path = path
        self._read: dict[str, JsonObject | None] = {}

    def optional(self, name: str) -> JsonObject | None:
        """The file ``name``, or None if there is none. Raises CheckpointError if it is not a JSON object."""
        if name not in self._read:
            self._read[name] = self._load(name)
        return self._read[name]

    def _load(self, name: str) -> JsonObject | None:
        file = self.path / name
        try:
            data = json.loads(file.read_bytes())
        except FileNotFoundError:
            return None
        except OSError as error:
            raise CheckpointError(f"{file}: {error.strerror}") from None
        except (ValueError, RecursionError) as error:
            raise CheckpointError(f"{file}: not valid JSON: {error}") from None
        if not isinstance(data, dict):
            raise CheckpointError(f"{file}: expected a JSON object, found {type(data).__name__}")
        return JsonObject(data, str(file))

    def required(self, name: str) -> JsonObject:
        found = self.optional(name)
        if found is None:
            raise CheckpointError(f"{self.path / name}: missing; a model directory must contain {name}")
        return found
