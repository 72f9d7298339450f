"""Matchers: what may come next, where an answer may end, how a state comes back from its ids, and limits."""

import random

import numpy as np
import pytest

from mmrt.models.errors import GrammarError
from mmrt.models.grammar.call_form import CallForm, Function, source_of_calls
from mmrt.models.grammar.matcher import MAX_DIGITS, Matcher, Matchers
from mmrt.models.grammar.source import JSON_OBJECT, GrammarSource, source_of_lark, source_of_regex, source_of_schema
from mmrt.models.grammar.text import grammar_text
from mmrt.models.grammar.vocabulary import GrammarVocabulary, bits_of
from mmrt.models.text.tokenizer import Tokenizer

IMAGE = 1526  # of the model that comes with mmrt
CALL = '<tool_call>\n{"name": "f", "arguments": {"a": '


def regex(matchers: Matchers, pattern: str) -> Matcher:
    return matchers.begin(grammar_text(source_of_regex(pattern)))


def allowed(matcher: Matcher) -> set[int]:
    mask = np.empty(matcher.num_words, np.int32)
    matcher.fill(mask)
    return set(np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist())


def test_an_answer_may_end_only_where_the_grammar_is_satisfied(matchers: Matchers, vocabulary: GrammarVocabulary) -> None:
    matcher = regex(matchers, "a{2,4}")
    ends = set(np.flatnonzero(np.unpackbits((vocabulary.permitted_at_end ^ vocabulary.permitted).view(np.uint8), bitorder="little")))
    (a,) = vocabulary(b"a")
    assert len(ends) == 2
    for count, (may_end, may_go_on) in enumerate([(False, True), (False, True), (True, True), (True, True)]):
        now = allowed(matcher)
        assert (bool(ends & now), a in now, matcher.is_complete, matcher.count) == (may_end, may_go_on, False, count)
        assert matcher.take(a)
    assert matcher.is_complete and not matcher.failed


def test_control_tokens_are_never_allowed(matchers: Matchers, vocabulary: GrammarVocabulary, tokenizer: Tokenizer) -> None:
    control = set(tokenizer.control_ids.values()) | {IMAGE}
    for pattern in ("(?s:.*)x", '"[^"]*"'):
        matcher = regex(matchers, pattern)
        assert len(allowed(matcher)) > 0 and not control & allowed(matcher)
    with pytest.raises(GrammarError, match="names of control tokens"):
        matchers.begin(grammar_text(source_of_lark("start: <|im_start|>")))
    by_id = matchers.begin(grammar_text(source_of_lark(f'start: "a" <[{IMAGE}]>')))
    assert by_id.take(vocabulary(b"a")[0])
    allowed(by_id)
    assert by_id.failed
    with pytest.raises(GrammarError, match="no token of a text can follow"):
        by_id.check()


def test_a_text_with_the_name_of_a_control_token_is_cut_into_others(vocabulary: GrammarVocabulary, tokenizer: Tokenizer) -> None:
    ids = vocabulary(b"a<|im_end|>b")
    assert not set(ids) & set(tokenizer.control_ids.values()) and tokenizer.decode(ids) == "a<|im_end|>b"


def test_a_state_follows_from_the_ids_alone(matchers: Matchers, tokenizer: Tokenizer) -> None:
    grammar = grammar_text(JSON_OBJECT)
    ids = tokenizer.encode('{"colours": ["red", "größe"], "n": {"x": null}}')
    walked, states = matchers.begin(grammar), []
    for id in ids:
        states.append(allowed(walked))
        assert walked.take(id)
    jumping = matchers.begin(grammar)
    for count in (0, 7, 3, len(ids) - 1, 1):
        jumping.follow(ids[:count])
        assert (jumping.count, allowed(jumping)) == (count, states[count])
    jumping.follow(ids)
    assert jumping.is_complete and not jumping.failed
    jumping.follow([*ids[:3], ids[0]])
    jumping.follow(ids[:3])
    assert allowed(jumping) == states[3]


@pytest.mark.parametrize(
    "source",
    [
        JSON_OBJECT,
        source_of_regex("a{2,4}"),
        source_of_schema({"type": "array", "items": {"type": "string", "maxLength": 3}}),
        source_of_lark(f'start: "a" <[{IMAGE}]> | "b" /[a-z]*/'),
    ],
)
def test_a_token_is_allowed_where_the_mask_allows_it(matchers: Matchers, vocabulary: GrammarVocabulary, source: GrammarSource) -> None:
    """Behind each of some random answers, for every token."""
    for seed in range(4):
        choice, matcher = random.Random(seed), matchers.begin(grammar_text(source))
        for _ in range(6):
            one_by_one = {id for id in range(vocabulary.vocab_size) if matcher.allows(id)}
            now = allowed(matcher)
            assert one_by_one == now
            if not now or not matcher.take(choice.choice(sorted(now))) or matcher.is_complete:
                break


@pytest.mark.parametrize(
    ("source", "before", "has_end"),
    [
        (source_of_schema({"type": "integer"}), "", True),
        (source_of_schema({"type": "number"}), "-1.", True),
        (source_of_schema({"type": "array", "items": {"type": "number"}}), "[1, 2e", True),
        (JSON_OBJECT, '{"a": ', True),
        (source_of_calls(CallForm(functions=[Function("", "f", {})], is_required=True, is_single=True)), CALL, True),
        (source_of_calls(CallForm(functions=[Function("", "f", {})], is_required=False, is_single=True)), "Pi is 3.", False),
        (JSON_OBJECT, '{"', False),
        (source_of_schema({"type": "string", "pattern": r"^\d+$"}), '"', False),
        (source_of_schema({"type": "string", "pattern": r"^\d{99}$"}), '"', False),
        (source_of_regex("[0-9]+"), "", False),
        (source_of_lark("start: /[0-9]+/"), "", False),
    ],
)
def test_the_digits_of_a_json_number_end(
    matchers: Matchers, tokenizer: Tokenizer, source: GrammarSource, before: str, has_end: bool
) -> None:
    """The same where an answer is taken up again; a token is allowed where the mask allows it."""
    (one,), ids = tokenizer.encode("1"), tokenizer.encode(before)
    matcher = matchers.begin(grammar_text(source))
    matcher.follow(ids)
    for _ in range(MAX_DIGITS):
        assert one in allowed(matcher) and matcher.allows(one) and matcher.take(one)
    again = matchers.begin(grammar_text(source))
    again.follow([*ids, *[one] * MAX_DIGITS])
    for one_of_them in (matcher, again):
        assert (one in allowed(one_of_them)) == one_of_them.allows(one) == (not has_end)
        one_of_them.check()


def test_a_token_that_is_not_allowed_fails(matchers: Matchers, vocabulary: GrammarVocabulary) -> None:
    matcher = regex(matchers, "ab")
    assert not matcher.take(vocabulary(b"b")[0]) and matcher.failed and not matcher.is_complete
    with pytest.raises(GrammarError, match="doesn't satisfy the grammar"):
        matcher.check()


def test_kept_grammars_are_bounded_and_start_anew(vocabulary: GrammarVocabulary) -> None:
    matchers = Matchers(vocabulary, max_kept=2)
    (a,) = vocabulary(b"a")
    assert regex(matchers, "a").take(a)
    assert regex(matchers, "a").take(a), "an earlier answer has changed the kept start"
    for pattern in ("b", "c", "d"):
        regex(matchers, pattern)
    assert len(matchers._starts) == 2


@pytest.mark.parametrize(
    "source",
    [
        source_of_regex("(((((a{10}){10}){10}){10}){10}){10}"),
        source_of_lark("start: a0\n" + "\n".join(f"a{i}: a{i + 1} a{i + 1} | a{i + 1}" for i in range(40)) + '\na40: "x" | "xx" | '),
        source_of_schema({"allOf": [{"anyOf": [{"properties": {f"k{i}{j}": {}}} for j in range(6)]} for i in range(12)]}),
        source_of_schema({"$ref": "#"}),
        source_of_schema({"enum": [f"value number {i}" for i in range(1500)], "pattern": "(a|b)*a(a|b){500}"}),
        source_of_lark("start: " + "(" * 2000 + '"a"' + ")" * 2000),
        source_of_regex("(" * 2000 + "a" + ")" * 2000),
    ],
)
def test_a_hostile_grammar_ends_with_an_error(matchers: Matchers, source: GrammarSource) -> None:
    """At the latest within some steps, none of which takes long or much memory."""
    with pytest.raises(GrammarError):
        matcher = matchers.begin(grammar_text(source))
        for _ in range(200):
            choices = allowed(matcher)
            matcher.check()
            matcher.take(min(choices))
            matcher.check()


def test_bits(vocabulary: GrammarVocabulary) -> None:
    assert bits_of([0, 33, 31], 40).tolist() == [1 | -(2**31), 2]
    with pytest.raises(ValueError, match=r"none of the end-of-sequence ids \[99999\] is in the vocabulary of 1536"):
        GrammarVocabulary(vocabulary._tokenizer, 1536, [99999])
