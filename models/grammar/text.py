"""llguidance's text for a client's wish. The gateway's grammar process makes it, and compiles it once; decode compiles it again."""

import json

from llguidance import LLMatcher

from ..errors import GrammarError
from .json_schema import check_schema
from .source import GrammarSource

MAX_TEXT_BYTES = 49_152  # of the 65,536 of a row's description


def grammar_text(source: GrammarSource) -> str:
    """Return llguidance's text. It is not compiled: that finds the other errors.

    Raises: GrammarError if it is too long, or for a schema with keywords whose meaning a grammar cannot hold.
    """
    text = _text(source)
    if (num_bytes := len(text.encode())) > MAX_TEXT_BYTES:
        raise GrammarError(f"has {num_bytes} bytes as a grammar of llguidance, the limit is {MAX_TEXT_BYTES}")
    return text


def _text(source: GrammarSource) -> str:
    if source.kind == "regex":
        return LLMatcher.grammar_from_regex(source.text)
    if source.kind == "lark":
        return LLMatcher.grammar_from_lark(source.text)
    check_schema(json.loads(source.text))
    return schema_text(source.text)


def schema_text(schema: str) -> str:
    """Return llguidance's text for a JSON schema.

    Between the parts of a JSON text may stand a space, or a line's end with an indentation: a model that likes spaces must not write
    them for ever. Escapes of printable characters are off, so that no key can be written in two ways.

    Raises: GrammarError for a text that llguidance cannot read, say with a number beyond float64.
    """
    try:
        return LLMatcher.grammar_from_json_schema(
            schema,
            overrides={
                "whitespace_flexible": True,
                "whitespace_pattern": r" |\n[ \t]{0,40}",
                "item_separator": ",",
                "key_separator": ":",
                "lenient": False,
                "coerce_one_of": False,
                "json_allow_general_unicode_escapes": False,
            },
        )
    except ValueError as error:
        raise GrammarError(str(error)) from None
