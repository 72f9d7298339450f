"""A client's wish for the form of an answer. Pure and cheap: the gateway's event loop reads wishes. Nothing is compiled here."""

import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

from ..errors import GrammarError

MAX_SOURCE_BYTES = 32_768  # a row's description has room for llguidance's text of it
MAX_CALLS_BYTES = 262_144  # of functions together: descriptions and the like are not in llguidance's text
MAX_DEPTH = 64


class GrammarSource(NamedTuple):
    """``text``: a JSON schema, a regular expression, a grammar in llguidance's dialect of Lark, or a form of calls (``call_form``).
    ``is_strict``: of a schema, nothing may be dropped that OpenAI's strict mode refuses."""

    kind: Literal["json_schema", "regex", "lark", "calls"]
    text: str
    is_strict: bool = False


JSON_OBJECT = GrammarSource("json_schema", '{"type":"object"}')


def source_of_schema(schema: Mapping[str, Any], *, is_strict: bool = False) -> GrammarSource:
    """Return the source for JSON that a schema describes. Raises: GrammarError for a schema that is too deep or too long."""
    check_depth(schema)
    try:
        text = json.dumps(schema, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    except ValueError as error:  # Python's limit on the digits of an integer, or a number that is none
        raise GrammarError(str(error)) from None
    return GrammarSource("json_schema", checked(text), is_strict)


def source_of_regex(regex: str) -> GrammarSource:
    """Return the source for texts that a regular expression matches whole. Raises: GrammarError if it is empty or too long."""
    return GrammarSource("regex", checked(regex))


def source_of_lark(grammar: str) -> GrammarSource:
    """Return the source for a Lark grammar. Raises: GrammarError if it is empty or too long."""
    return GrammarSource("lark", checked(grammar))


def source_of_choice(choices: Sequence[str]) -> GrammarSource:
    """Return the source for one of these texts. Raises: GrammarError if they are too long together."""
    return GrammarSource("lark", checked("start: " + " | ".join(json.dumps(choice, ensure_ascii=False) for choice in choices)))


def checked(text: str, max_bytes: int = MAX_SOURCE_BYTES) -> str:
    """Return the text of a source. Raises: GrammarError if it is empty or too long."""
    try:
        num_bytes = len(text.encode())
    except UnicodeEncodeError as error:
        raise GrammarError(f"has the character U+{ord(text[error.start]):04X}, which is half of one") from None
    if not 1 <= num_bytes <= max_bytes:
        raise GrammarError(f"has {num_bytes} bytes in UTF-8, allowed are 1 to {max_bytes}")
    return text


def check_depth(value: object) -> None:
    """Look level by level: recursion could overflow the stack. Raises: GrammarError for a JSON value that is nested too deeply."""
    level, depth = [value], 0
    while level := [child for one in level for child in _children(one)]:
        depth += 1
        if depth > MAX_DEPTH:
            raise GrammarError(f"is nested more than {MAX_DEPTH} levels deep")


def _children(value: object) -> Sequence[object]:
    if isinstance(value, dict):
        return list(value.values())
    return value if isinstance(value, list) else ()
