"""Sources: limits that name value and limit, and texts that mean what the client wrote."""

import json
from collections.abc import Callable
from typing import Any

import pytest

from mmrt.models.errors import GrammarError
from mmrt.models.grammar.matcher import Matchers
from mmrt.models.grammar.source import (
    MAX_DEPTH,
    MAX_SOURCE_BYTES,
    GrammarSource,
    source_of_choice,
    source_of_lark,
    source_of_regex,
    source_of_schema,
)
from mmrt.models.grammar.text import MAX_TEXT_BYTES, grammar_text
from mmrt.models.grammar.vocabulary import GrammarVocabulary
from mmrt.models.text.tokenizer import Tokenizer


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(depth - 1):
        schema = {"type": "array", "items": schema}
    return schema


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: source_of_schema(nested(MAX_DEPTH + 1)), f"is nested more than {MAX_DEPTH} levels deep"),
        (lambda: source_of_schema(nested(100_000)), f"is nested more than {MAX_DEPTH} levels deep"),
        (
            lambda: source_of_schema({"const": "é" * MAX_SOURCE_BYTES}),
            f"has {2 * MAX_SOURCE_BYTES + 12} bytes in UTF-8, allowed are 1 to",
        ),
        (lambda: source_of_schema({"maximum": 10**5000}), "Exceeds the limit .* for integer string conversion"),
        (lambda: source_of_schema({"const": float("nan")}), "Out of range float values are not JSON compliant"),
        (lambda: grammar_text(source_of_schema({"const": 10**400})), "number out of range"),
        (lambda: source_of_schema({"const": "\udc00"}), r"has the character U\+DC00"),
        (lambda: source_of_regex("a" * (MAX_SOURCE_BYTES + 1)), f"has {MAX_SOURCE_BYTES + 1} bytes"),
        (lambda: source_of_regex(""), "has 0 bytes"),
        (lambda: source_of_lark("\ud800"), r"has the character U\+D800"),
        (lambda: source_of_choice(["a" * 30_000] * 2), "has 60014 bytes"),
        (lambda: grammar_text(source_of_regex('"' * 30_000)), f"bytes as a grammar of llguidance, the limit is {MAX_TEXT_BYTES}"),
    ],
)
def test_what_is_too_large_is_refused(make: Callable[[], GrammarSource], said: str) -> None:
    with pytest.raises(GrammarError, match=said):
        make()


def reads(matchers: Matchers, tokenizer: Tokenizer, source: GrammarSource, text: str) -> bool:
    """Whether the text is a whole answer, behind which nothing can follow."""
    matcher = matchers.begin(grammar_text(source))
    return all(map(matcher.take, tokenizer.encode(text))) and matcher.is_complete


def test_the_deepest_schema_compiles(matchers: Matchers) -> None:
    matchers.begin(grammar_text(source_of_schema(nested(MAX_DEPTH))))


@pytest.mark.parametrize(
    "choice", ['say "no"', "two\nlines\\", "größe 日🙂", "/a/", "%json", "a\tb\x01", "<|im_end|>", "\u2028", "start: x"]
)
def test_a_choice_is_taken_literally(matchers: Matchers, vocabulary: GrammarVocabulary, choice: str) -> None:
    matcher = matchers.begin(grammar_text(source_of_choice(["other", choice])))
    assert all(map(matcher.take, vocabulary(choice.encode()))) and matcher.is_complete


@pytest.mark.parametrize("text", ['{"a":1,"b":[true]}', '{"a": 1, "b": [true]}', json.dumps({"a": 1, "b": [True]}, indent=4)])
def test_json_may_be_compact_or_indented(matchers: Matchers, tokenizer: Tokenizer, text: str) -> None:
    assert reads(matchers, tokenizer, source_of_schema({"type": "object"}), text)


@pytest.mark.parametrize("text", ['{  "a":1}', '{"a":1,\n\n"b":2}', ' {"a":1}', '{"a":1} ', '{"\\u0061":1}', '{"a":1,}'])
def test_json_without_end_or_in_disguise_may_not_be_written(matchers: Matchers, tokenizer: Tokenizer, text: str) -> None:
    assert not reads(matchers, tokenizer, source_of_schema({"type": "object"}), text)


def test_a_schema_does_not_change_the_options(matchers: Matchers, tokenizer: Tokenizer) -> None:
    lenient = {"type": "object", "x-guidance": {"lenient": True, "item_separator": ";", "whitespace_pattern": "x"}}
    assert reads(matchers, tokenizer, source_of_schema(lenient), '{"a": 1, "b": 2}')
    assert not reads(matchers, tokenizer, source_of_schema(lenient), '{"a": 1;"b": 2}')
