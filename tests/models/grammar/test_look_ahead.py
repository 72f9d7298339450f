"""Expressions without look-ahead match what Python's do with it; and those that would take too long are refused in no time."""

import re
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mmrt.models.errors import GrammarError
from mmrt.models.grammar.look_ahead import in_one, without_look_ahead
from mmrt.models.grammar.matcher import Matchers
from mmrt.models.grammar.regex_tree import check_size
from mmrt.models.grammar.source import source_of_lark, source_of_regex, source_of_schema
from mmrt.models.grammar.text import grammar_text
from mmrt.tests.settings import examples

PYDANTIC_DECIMAL = r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$"
PYDANTIC_SHORT_DECIMAL = r"^(?!^[-+.]*$)[+-]?0*(?:\d{0,8}|(?=[\d.]{1,11}0*$)\d{0,8}\.\d{0,2}0*$)"
ZOD_EMAIL = r"^(?!\.)(?!.*\.\.)([A-Za-z0-9_'+\-\.]*)[A-Za-z0-9_+-]@([A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{2,}$"
ZOD_DURATION = r"^P(?:(\d+W)|(?!.*W)(?=\d|T\d)(\d+Y)?(\d+M)?(\d+D)?(T(?=\d)(\d+H)?(\d+M)?(\d+([.,]\d+)?S)?)?)$"
ZOD_HOSTNAME = r"^(?=.{1,253}\.?$)[a-zA-Z0-9](?:[a-zA-Z0-9-]{0,61}[a-zA-Z0-9])?(?:\.[a-zA-Z0-9](?:[-0-9a-zA-Z]{0,61}[0-9a-zA-Z])?)*\.?$"
PASSWORD = r"^(?=.*[a-z])(?=.*[A-Z])(?=.*\d).{3,}$"
OTHERS = [
    r"a(?!b)",
    r"^(?!foo)",
    r"^(?!(?:a|ab)$)[ab]+$",
    r"(?=a)(?!ab)a.1",
    r"^(?!(?:.{2})+$)a*$",
    r"(^(?!a)b)a",
    r"^(?!a)|b$",
    r"(?!a)",
]
KNOWN = [PYDANTIC_DECIMAL, PYDANTIC_SHORT_DECIMAL, ZOD_EMAIL, ZOD_DURATION, ZOD_HOSTNAME, PASSWORD, *OTHERS]
ALIKE = st.text("ab1.-+@PTMWS \n", max_size=8) | st.text("a.@1", max_size=9) | st.text("PT1MWS.", max_size=8)


def matches(pattern: str, text: str) -> bool:
    """As JSON Schema's ``pattern``, by Python's library; its ``$`` also stands before a last line's end, and its classes are written
    otherwise."""
    codes = re.sub(r"\\x\{([0-9A-F]+)\}", lambda found: f"\\U{int(found[1], 16):08x}", pattern)
    return re.search(re.sub(r"(?<!\\)\$", r"\\Z", codes), text, re.ASCII) is not None


@settings(max_examples=examples(150), deadline=None)
@given(ALIKE)
def test_the_texts_are_the_same(text: str) -> None:
    for pattern in KNOWN:
        parts = without_look_ahead(pattern)
        assert parts is not None and not any("(?=" in part or "(?!" in part for part in parts)
        expected = matches(pattern, text)
        assert all(matches(part, text) for part in parts) == expected, (pattern, parts, text)
        if pattern != ZOD_HOSTNAME:
            one = in_one(pattern)
            assert one is not None and matches(one, text) == expected, (pattern, one, text)


@pytest.mark.parametrize(
    "pattern", [r"^(a(?!$)|b)*$", r"(?=\p{L})a", r"\b(?=a)", r"(?=(a)\1)a", "(?=" * 2000, "(?=a){3}", "(?=[a&&b])"]
)
def test_what_has_no_short_exact_form_is_not_guessed(pattern: str) -> None:
    assert without_look_ahead(pattern) is None and in_one(pattern) is None


@pytest.mark.parametrize(
    ("pattern", "said"),
    [
        ("a?{8000}", "8000 parts in a row that may be absent, the limit is 1000"),
        ("a?" * 8000, "8000 parts in a row"),
        ("(a|b)*{5000}", "5000 parts in a row"),
        ("(?:a*b?){3000}c", "6000 parts in a row"),
        ("(.{0,1000}){1000}", "1000000 parts, the limit is 100000|1000 parts in a row"),
        ("(a{1000}){1000}", "repeats of repeats stand for 1000000 parts"),
        ("((((([a-z]{9}){9}){9}){9}){9}){9}", "stand for 531441 parts"),
        ("b|(?=x(?:a?){1001})y", "1001 parts in a row"),
    ],
)
def test_what_would_take_too_long_is_refused_before_it_begins(pattern: str, said: str) -> None:
    def refuse() -> float:
        """Returns the processor time."""
        began_s = time.process_time()
        for source in (
            source_of_regex(pattern),
            source_of_schema({"type": "object", "properties": {"a": {"pattern": pattern}}}),
            source_of_schema({"type": "object", "patternProperties": {pattern: {}}}),
            source_of_lark(f'start: "/" /{pattern}/ "/"'),
        ):
            with pytest.raises(GrammarError, match=said):
                grammar_text(source)
        return time.process_time() - began_s

    assert any(refuse() < 1 for _ in range(5)), "a quarter of a second at most, but for what a busy machine and the collector add"


@pytest.mark.parametrize("pattern", [".{0,100000}", r"(\w+ ){1000}", r"^(\d{1,3}\.?){50}$", "a?" * 500, "(ab?){1000}", "[a-z]{40000}"])
def test_large_ones_that_are_quick_are_not_refused(matchers: Matchers, pattern: str) -> None:
    check_size(pattern)
    matchers.begin(grammar_text(source_of_regex(pattern)))


@settings(max_examples=examples(300), deadline=None)
@given(st.text("ab(){}[]|?*+,1=!<>:^$\\.-dpu", max_size=40))
def test_any_text_is_read_or_not_in_no_time(text: str) -> None:
    try:
        check_size(text)
    except GrammarError as error:
        assert "the limit is" in error.message
    without_look_ahead(text)
