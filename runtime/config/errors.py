"""Errors of a configuration (pure): the key or value, and the limit that it breaks."""

import difflib
import math
import re
from typing import Any

import msgspec

from ..errors import ConfigError
from .toml_text import show

MAX_TEXT = 4096  # characters of a value: as many as a path has
_INTEGERS = range(-(1 << 63), 1 << 63)  # of TOML


def refuse_excess(data: dict[str, Any]) -> None:
    """Raise ConfigError for the first number that TOML does not have, and for a text that is too long, wherever it stands."""
    _refuse_excess(data, "")


def _refuse_excess(value: object, path: str) -> None:
    if isinstance(value, dict):
        for key, inner in value.items():
            _refuse_excess(inner, f"{path}.{key[:60]}" if path else key[:60])
    elif isinstance(value, list):
        for number, inner in enumerate(value):
            _refuse_excess(inner, f"{path}[{number}]")
    elif isinstance(value, str) and len(value) > MAX_TEXT:
        raise ConfigError(f"{path}: is a text of {len(value)} characters, the limit is {MAX_TEXT}")
    elif isinstance(value, int) and value not in _INTEGERS:
        raise ConfigError(f"{path}: is a number of {value.bit_length()} bits, TOML's have at most 63 and a sign")


def refuse_unknown(data: dict[str, Any], root: type[msgspec.Struct]) -> None:
    """Raise ConfigError for the first key that the configuration ``root`` does not have, and for numbers that are not finite."""
    _refuse_unknown(data, root, "", root)


def _refuse_unknown(data: dict[str, Any], section: type[msgspec.Struct], path: str, root: type[msgspec.Struct]) -> None:
    fields = {field.name: field.type for field in msgspec.structs.fields(section)}
    for key, value in data.items():
        dotted = f"{path}.{key}" if path else key
        if key not in fields:
            close = difflib.get_close_matches(key, fields, n=1, cutoff=0.6)
            hint = f"did you mean {close[0]!r}? " if close else _elsewhere(key, root)
            where = f"[{path}]" if path else "the top level"
            raise ConfigError(f"unknown key {dotted[:120]!r}: {hint}{where} has {', '.join(fields)}")
        kind = fields[key]
        if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
            if not isinstance(value, dict):
                raise ConfigError(f"{dotted} = {show(value)}: expected a table [{dotted}]")
            _refuse_unknown(value, kind, dotted, root)
        elif isinstance(value, float) and not math.isfinite(value):
            raise ConfigError(f"{dotted} = {value}: expected a finite number")


def _elsewhere(key: str, root: type[msgspec.Struct]) -> str:
    """Return a hint for a key in the wrong table: the table that it belongs to."""
    for section in msgspec.structs.fields(root):
        if isinstance(section.type, type) and any(field.name == key for field in msgspec.structs.fields(section.type)):
            return f"it belongs to [{section.name}]; "
    return ""


def explain(message: str, data: dict[str, Any], root: type[msgspec.Struct]) -> str:
    """Turn msgspec's "Expected `int` <= 65535 - at `$.server.port`" into "server.port = 70000: expected `int` <= 65535"."""
    found = re.fullmatch(r"(?s)(.*?)(?: - at `\$\.?(.*)`)", message)
    if not found:
        return message
    reason, path = found.groups()
    path = path.removesuffix("[...]")
    value: Any = data
    for key in re.findall(r"[^.\[\]]+", path):
        if isinstance(value, list):
            value = value[int(key)]
        else:
            value = value.get(key) if isinstance(value, dict) else None
    if reason.startswith("Invalid enum value"):
        reason = f"expected one of {', '.join(map(repr, _choices(path, root)))}"
    return f"{path} = {show(value)}: {reason[:1].lower()}{reason[1:]}"


def _choices(path: str, root: type[msgspec.Struct]) -> tuple[str, ...]:
    """Return the values that a Literal field takes."""
    kind: Any = root
    for key in path.split("."):
        kind = next(field.type for field in msgspec.structs.fields(kind) if field.name == key)
    choices: tuple[str, ...] = kind.__args__
    return choices
