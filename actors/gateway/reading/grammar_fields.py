"""The form of an answer: OpenAI's ``response_format``, vLLM's ``structured_outputs`` and ``guided_*``. Pure."""

import json
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from ....models.errors import GrammarError
from ....models.grammar.source import (
    JSON_OBJECT,
    MAX_SOURCE_BYTES,
    GrammarSource,
    source_of_choice,
    source_of_lark,
    source_of_regex,
    source_of_schema,
)
from .field_rules import settle
from .field_table.common import NAMED_SCHEMA, RESPONSE_FORMAT, STRUCTURED_OUTPUTS
from .fields import OBJECT, STRING, Fields, Schema, kind_of, refuse, show

MAX_CHOICES = 1024
_NAME = "[a-zA-Z0-9_-]{1,64}"
_FORMATS = ("text", "json_object", "json_schema")
_SCHEMA: Schema = {"anyOf": [OBJECT, {"type": "string", "maxLength": MAX_SOURCE_BYTES}]}
_FORMS: Mapping[str, Schema] = {
    "json": _SCHEMA,
    "regex": STRING,
    "choice": {"type": "array", "items": {"type": "string", "minLength": 1}, "minItems": 1, "maxItems": MAX_CHOICES},
    "grammar": STRING,
}
_GUIDED = {"guided_json": "json", "guided_regex": "regex", "guided_choice": "choice", "guided_grammar": "grammar"}


class AskedGrammar(NamedTuple):
    """The grammar asked for; ``field`` is its path in the request, for errors. ``part``: another one that is a part of it, and is
    checked first so that its errors name its own field. ``leaves_text``: any text may come before what has a form."""

    source: GrammarSource
    field: str
    part: "AskedGrammar | None" = None
    leaves_text: bool = False


def read_grammar(fields: Fields, other: AskedGrammar | None = None) -> AskedGrammar | None:
    """Take the fields. ``other``: a grammar that a field of another API asks for. Raises: RequestError for a field that is malformed,
    too large, or given twice."""
    asked = [one for one in (other, _read_response_format(fields), _read_structured_outputs(fields)) if one is not None]
    for name, kind in _GUIDED.items():
        if (value := fields.take(name, _FORMS[kind])) is not None:
            asked.append(_read(kind, value, name))
    if len(asked) > 1:
        raise refuse(asked[1].field, f"cannot be combined with {asked[0].field}")
    return asked[0] if asked else None


def _read_response_format(fields: Fields) -> AskedGrammar | None:
    value = fields.take("response_format")
    if value is None:
        return None
    form = Fields(value, "response_format")
    kind = form.take_choice("type", _FORMATS)
    if kind != "json_schema":
        settle(form, RESPONSE_FORMAT)
        return AskedGrammar(JSON_OBJECT, "response_format") if kind == "json_object" else None
    asked = Fields(form.take_required("json_schema"), "response_format.json_schema")
    settle(form, RESPONSE_FORMAT)
    return read_named_schema(asked)


def read_named_schema(asked: Fields) -> AskedGrammar:
    """Take a schema with its name, all that is in ``asked``. Raises: RequestError."""
    asked.require("name")
    name = asked.take("name", {"type": "string", "pattern": f"^{_NAME}$"})
    if not isinstance(name, str) or re.fullmatch(_NAME, name) is None:
        raise refuse(asked.path("name"), f"is {show(name)}, expected 1 to 64 letters, digits, _ and -")
    asked.take_str("description")
    is_strict = asked.take_bool("strict")
    grammar = take_schema(asked, is_strict=is_strict)
    settle(asked, NAMED_SCHEMA)
    return grammar


def _read_structured_outputs(fields: Fields) -> AskedGrammar | None:
    value = fields.take("structured_outputs")
    if value is None:
        return None
    forms = Fields(value, "structured_outputs")
    asked = [_read(kind, form, forms.path(kind)) for kind in _FORMS if (form := forms.take(kind, _FORMS[kind])) is not None]
    if forms.take_bool("json_object"):
        asked.append(AskedGrammar(JSON_OBJECT, forms.path("json_object")))
    settle(forms, STRUCTURED_OUTPUTS)
    if len(asked) != 1:
        raise refuse("structured_outputs", f"has {len(asked)} of json, json_object, regex, choice and grammar, expected one")
    return asked[0]


def _read(kind: str, value: Any, path: str) -> AskedGrammar:
    """Read a schema, regular expression, list of texts or grammar, by vLLM's names."""
    match kind:
        case "json":
            return read_schema(value, path)
        case "choice":
            return _sized(path, lambda: source_of_choice(_checked_choices(value, path)))
    if not isinstance(value, str):
        raise refuse(path, f"expected a string, got {kind_of(value)}")
    return _sized(path, lambda: source_of_regex(value) if kind == "regex" else source_of_lark(value))


def take_schema(asked: Fields, *, is_strict: bool = False) -> AskedGrammar:
    """Take ``schema``, which is required. Raises: RequestError."""
    return read_schema(asked.take_required("schema", _SCHEMA), asked.path("schema"), is_strict=is_strict)


def read_schema(value: Any, path: str, *, is_strict: bool = False) -> AskedGrammar:
    """Read a schema: an object, or the text of one. Raises: RequestError."""
    if isinstance(value, str):
        if len(value) > MAX_SOURCE_BYTES:
            raise refuse(path, f"has {len(value)} characters, the limit is {MAX_SOURCE_BYTES}")
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise refuse(path, f"is not valid JSON: {str(error)[:200]}") from None
    if not isinstance(value, dict):
        raise refuse(path, f"expected an object, got {kind_of(value)}")
    return _sized(path, lambda: source_of_schema(value, is_strict=is_strict))


def _checked_choices(value: Any, path: str) -> list[str]:
    if not isinstance(value, list):
        raise refuse(path, f"expected an array of strings, got {kind_of(value)}")
    if not 1 <= len(value) <= MAX_CHOICES:
        raise refuse(path, f"has {len(value)} entries, allowed are 1 to {MAX_CHOICES}")
    for number, choice in enumerate(value):
        if not isinstance(choice, str) or not choice:
            raise refuse(f"{path}[{number}]", f"is {show(choice)}, expected a string that is not empty")
    return value


def _sized(path: str, make: Callable[[], GrammarSource]) -> AskedGrammar:
    try:
        return AskedGrammar(make(), path)
    except GrammarError as error:
        raise refuse(path, error.message) from None
