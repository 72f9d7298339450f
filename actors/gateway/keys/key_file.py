"""The file of API keys (``server.api_keys_file``): TOML, or one JSON object a line where its name ends in ``.jsonl``.

    [[key]]
    name = "alice"                 # in logs and metrics
    key = "sk-0123456789abcdef"    # or sha256 = "…", of the key
    requests_per_minute = 60       # limits: no limit where one is missing
    tokens_per_minute = 100_000
    max_requests = 4               # at a time
    cache_salt = "team"            # keys of one salt share what is cached; without it each is alone
    may_command = false            # whether it may kill and restart processes on the page

Errors name file, line, field and limit, and quote no secret.
"""

import hashlib
import json
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from ....runtime.errors import ConfigError
from ..reading.cache_keys import key_salt
from .secret_files import read_secret

SETTING = "server.api_keys_file"
MAX_KEYS = 1000
MAX_FILE_BYTES = 1 << 20
MAX_PER_MINUTE = 1_000_000_000
MAX_AT_A_TIME = 1_000_000
JSON_LINES = (".jsonl", ".ndjson")


class ApiKey(msgspec.Struct, frozen=True, kw_only=True):
    """A key, known by its sha-256. Limits of 0 are none. ``salt`` separates its cached pages from those of others."""

    name: str
    digest: bytes
    salt: bytes
    requests_per_minute: int = 0
    tokens_per_minute: int = 0
    max_requests: int = 0
    may_command: bool = False


class _Entry(NamedTuple):
    """One key as written. ``lines``: of its fields, and of its beginning as ""."""

    fields: dict[str, Any]
    lines: Mapping[str, int]


def _is_text(pattern: str) -> Callable[[object], bool]:
    return lambda value: isinstance(value, str) and re.fullmatch(pattern, value) is not None


def _is_number(most: int) -> Callable[[object], bool]:
    return lambda value: isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= most


_FIELDS: dict[str, tuple[Callable[[object], bool], str]] = {
    "name": (_is_text(r"[A-Za-z0-9_-]{1,64}"), "1 to 64 letters, digits, hyphens and underscores"),
    "key": (_is_text(r"[!-~]{16,512}"), "16 to 512 visible ASCII characters"),
    "sha256": (_is_text(r"[0-9A-Fa-f]{64}"), "64 hexadecimal digits"),
    "requests_per_minute": (_is_number(MAX_PER_MINUTE), f"a whole number from 1 to {MAX_PER_MINUTE}"),
    "tokens_per_minute": (_is_number(MAX_PER_MINUTE), f"a whole number from 1 to {MAX_PER_MINUTE}"),
    "max_requests": (_is_number(MAX_AT_A_TIME), f"a whole number from 1 to {MAX_AT_A_TIME}"),
    "cache_salt": (_is_text(r"[^\ud800-\udfff]{1,256}"), "1 to 256 characters"),  # JSON can escape halves of characters
    "may_command": (lambda value: isinstance(value, bool), "true or false"),
}
_SECRETS = ("key", "sha256", "cache_salt")
_HEADER = re.compile(r"\s*\[\[\s*key\s*\]\]")
_ASSIGNMENT = re.compile(r"\s*([A-Za-z0-9_-]+)\s*=")


def digest_of(key: str) -> bytes:
    """Return the sha-256 of a key. Bytes of a header that are no UTF-8 count as they came."""
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def read_keys(path: Path) -> tuple[ApiKey, ...]:
    """Read the keys of a file that nobody else may read. Raises: ConfigError."""
    data = read_secret(path, SETTING, MAX_FILE_BYTES)
    try:
        return parse_keys(data.decode(), is_json=path.suffix in JSON_LINES)
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 at byte {error.start}") from None
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None


def parse_keys(text: str, *, is_json: bool) -> tuple[ApiKey, ...]:
    """Parse the contents of a file. Raises: ConfigError naming line, field and limit."""
    entries = list(_json_entries(text) if is_json else _toml_entries(text))
    if not 1 <= len(entries) <= MAX_KEYS:
        raise ConfigError(f"holds {len(entries)} keys, expected 1 to {MAX_KEYS}")
    names: dict[str, int] = {}
    digests: dict[bytes, int] = {}
    keys = []
    for entry in entries:
        key, line = _checked(entry), entry.lines[""]
        other, twin = names.setdefault(key.name, line), digests.setdefault(key.digest, line)
        if other != line:
            raise ConfigError(f"line {line}: name = {key.name!r} is also that of line {other}")
        if twin != line:
            raise ConfigError(f"line {line}: {key.name!r} has the same key as line {twin}")
        keys.append(key)
    return tuple(keys)


def _checked(entry: _Entry) -> ApiKey:
    fields, lines = entry
    for field, value in fields.items():
        line = lines.get(field, lines[""])
        if field not in _FIELDS:
            raise ConfigError(f"line {line}: unknown field {field[:60]!r}: a key has {', '.join(_FIELDS)}")
        is_valid, expected = _FIELDS[field]
        if not is_valid(value):
            raise ConfigError(f"line {line}: {field} = {_shown(field, value)}: expected {expected}")
    if "name" not in fields:
        raise ConfigError(f"line {lines['']}: a key without a name")
    if ("key" in fields) == ("sha256" in fields):
        raise ConfigError(f"line {lines['']}: {fields['name']!r} needs one of key and sha256, and not both")
    digest = bytes.fromhex(fields["sha256"]) if "sha256" in fields else digest_of(fields["key"])
    kept = {field: value for field, value in fields.items() if field not in _SECRETS}
    return ApiKey(digest=digest, salt=key_salt(digest, fields.get("cache_salt")), **kept)


def _shown(field: str, value: object) -> str:
    if field in _SECRETS:
        return f"a text of {len(value)} characters" if isinstance(value, str) else f"a value of type {type(value).__name__}"
    return f"a number of {value.bit_length()} bits" if isinstance(value, int) and value.bit_length() > 256 else repr(value)[:60]


def _toml_entries(text: str) -> Iterator[_Entry]:
    try:
        data = tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # ValueError itself: an integer of thousands of digits
        raise ConfigError(f"not valid TOML: {error or 'nested too deep'}") from None
    if other := [table for table in data if table != "key"]:
        raise ConfigError(f"unknown key {other[0][:60]!r}: expected tables [[key]]")
    tables = data.get("key", [])
    lines = _toml_lines(text)
    if not isinstance(tables, list) or len(lines) != len(tables) or not all(isinstance(table, dict) for table in tables):
        raise ConfigError("expected each key as a table [[key]] on lines of its own")
    return map(_Entry, tables, lines)


def _toml_lines(text: str) -> list[dict[str, int]]:
    """Return the lines of each table and its fields."""
    lines: list[dict[str, int]] = []
    for number, line in enumerate(text.split("\n"), 1):
        if _HEADER.match(line):
            lines.append({"": number})
        elif lines and (found := _ASSIGNMENT.match(line)):
            lines[-1].setdefault(found[1], number)
    return lines


def _json_entries(text: str) -> Iterator[_Entry]:
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            pairs = json.loads(line, object_pairs_hook=_Pairs)
        except (ValueError, RecursionError) as error:
            reason = error.msg if isinstance(error, json.JSONDecodeError) else "not readable"
            raise ConfigError(f"line {number}: not valid JSON: {reason}") from None
        if not isinstance(pairs, _Pairs):
            raise ConfigError(f"line {number}: expected a JSON object")
        fields = dict(pairs)
        if len(fields) != len(pairs):
            raise ConfigError(f"line {number}: a field is given twice")
        yield _Entry(fields, {"": number})


class _Pairs(list[tuple[str, Any]]):
    """A JSON object as written."""
