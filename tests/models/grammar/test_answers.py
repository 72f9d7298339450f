"""Whatever the logits are, an answer follows its grammar: matchers, masks and the sampler, over random schemas."""

import numpy as np
import pytest
import torch

from mmrt.actors.decode.grammar_rows import GrammarRows
from mmrt.models.errors import GrammarError
from mmrt.models.grammar.call_form import CallForm, Function, source_of_calls
from mmrt.models.grammar.matcher import Matchers
from mmrt.models.grammar.source import source_of_regex, source_of_schema
from mmrt.models.grammar.text import grammar_text
from mmrt.models.grammar.vocabulary import GrammarVocabulary
from mmrt.models.sampling.interface import Pairs, SamplingRows
from mmrt.models.sampling.sampler import CpuSampler
from mmrt.models.text.tokenizer import Tokenizer
from mmrt.models.text.tool_calls import CallReader
from mmrt.schema.rows import EndCode
from mmrt.tests.models.grammar.random_schemas import Schema, check_answer, random_schema

BATCH = 8
MAX_TOKENS = 400


def endings(vocabulary: GrammarVocabulary, tokenizer: Tokenizer) -> torch.Tensor:
    """What is added to logits, so that strings, numbers and arrays do not go on for ever."""
    texts = [*tokenizer.token_bytes, *[b""] * vocabulary.vocab_size][: vocabulary.vocab_size]
    return torch.tensor([4.0 if text[:1] in (b'"', b"}", b"]", b",") else 3.0 if not text else 0.0 for text in texts])


def rows_of(size: int, index: int) -> SamplingRows:
    """Greedy rows and rows that draw, with filters and without."""
    number = np.arange(size)
    ones = np.ones(size, np.float32)
    top_k = np.where(number % 4 == 1, 5, 0)
    temperature = np.where(number % 3 == 0, 0, ones).astype(np.float32)
    return SamplingRows(temperature, top_k, 0.9 * ones, 0.01 * ones, number.astype(np.uint64), np.full(size, index))


def answers(texts: list[str], matchers: Matchers, bias: torch.Tensor, seed: int) -> list[list[int] | None]:
    """Ids drawn for each grammar, None where the answer is not at its end after so many tokens. Half of the rows are guided pairs."""
    size, vocabulary = len(texts), len(bias)
    generator = torch.Generator().manual_seed(seed)
    grammars = GrammarRows(range(size), [matchers.begin(text) for text in texts])
    sampler, ids, open_rows = CpuSampler(vocabulary), [list[int]() for _ in range(size)], set(range(size))
    pairs = Pairs(np.arange(size // 2), size + np.arange(size // 2), np.full(size // 2, 2.5, np.float32))
    for index in range(MAX_TOKENS):
        logits = torch.randn(size + size // 2, vocabulary, generator=generator) * 3 + bias
        tokens = sampler.sample(logits, rows_of(size, index), pairs, masks=grammars).numpy()
        end = np.zeros(size, np.int64)
        grammars.take(tokens, end)
        for row in sorted(open_rows):
            assert end[row] in (EndCode.NONE, EndCode.STOP), (texts[row], end[row])
            ids[row].append(int(tokens[row]))
            if end[row] == EndCode.STOP:
                open_rows.remove(row)
        if not open_rows:
            break
    return [None if row in open_rows else its for row, its in enumerate(ids)]


@pytest.mark.parametrize("num_schemas", [16, pytest.param(80, marks=pytest.mark.slow)])
def test_no_answer_is_invalid(num_schemas: int, matchers: Matchers, vocabulary: GrammarVocabulary, tokenizer: Tokenizer) -> None:
    bias = endings(vocabulary, tokenizer)
    schemas: list[tuple[Schema, str]] = []
    num_refused = num_whole = seed = 0
    while len(schemas) < num_schemas:
        schema, seed = random_schema(seed), seed + 1
        try:
            text = grammar_text(source_of_schema(schema))
            matchers.begin(text)
        except GrammarError:
            num_refused += 1
            continue
        schemas.append((schema, text))
    assert num_refused < num_schemas / 4
    for start in range(0, num_schemas, BATCH):
        batch = schemas[start : start + BATCH]
        for (schema, _), ids in zip(batch, answers([text for _, text in batch], matchers, bias, start), strict=True):
            if ids is not None:
                num_whole += 1
                text = tokenizer.decode(ids)
                assert text == tokenizer.decode(ids[:-1], with_control_tokens=True) + tokenizer.decode(ids[-1:])
                check_answer(schema, text)
    assert num_whole >= 0.8 * num_schemas


def compiles(schema: Schema, matchers: Matchers) -> bool:
    try:
        matchers.begin(grammar_text(source_of_schema(schema)))
    except GrammarError:
        return False
    return True


def test_no_call_is_invalid(matchers: Matchers, vocabulary: GrammarVocabulary, tokenizer: Tokenizer) -> None:
    """Required ones, with guidance and everything else that draws tokens: each has arguments of its function's schema."""
    schemas, seed = list[Schema](), 0
    while len(schemas) < 3 * BATCH:
        schema, seed = random_schema(seed), seed + 1
        if schema.get("type") == "object" and compiles(schema, matchers):
            schemas.append(schema)
    names = [f"f{number}" for number in range(3)]
    texts = [
        grammar_text(
            source_of_calls(
                CallForm(functions=[*map(Function, names, names, schemas[at : at + 3])], is_required=True, is_single=bool(at % 2))
            )
        )
        for at in range(0, len(schemas), 3)
    ]
    num_calls = 0
    for at, ids in enumerate(answers(texts, matchers, endings(vocabulary, tokenizer), seed=9)):
        if ids is None:
            continue
        reader = CallReader(names)
        content, pieces = reader.push(tokenizer.decode(ids))
        assert reader.has_calls and reader.flush() == ("", []) and not content
        for number in range(pieces[-1].number + 1):
            name, *arguments = [piece.name or piece.arguments for piece in pieces if piece.number == number]
            check_answer(schemas[3 * at + names.index(name)], "".join(arguments))
            num_calls += 1
    assert num_calls >= BATCH / 2


@pytest.mark.parametrize("logit", [torch.nan, -torch.inf])
def test_logits_that_are_no_numbers_break_no_grammar(matchers: Matchers, vocabulary: GrammarVocabulary, logit: float) -> None:
    """The token is an allowed one, or the answer ends."""
    texts = map(grammar_text, [source_of_schema({"enum": ["a"]}), *map(source_of_regex, ("[^a-z]{5,}", "...", "(?s:.*)x"))])
    grammars = GrammarRows(range(1, 5), [matchers.begin(text) for text in texts])
    logits, end = torch.full((5, vocabulary.vocab_size), logit), np.zeros(5, np.int64)
    grammars.take(CpuSampler(vocabulary.vocab_size).sample(logits, rows_of(5, 0), masks=grammars).numpy(), end)
    assert end[0] == EndCode.NONE and set(end) <= {EndCode.NONE, EndCode.STOP, EndCode.ERROR}
    assert np.isnan(logit) or EndCode.ERROR in end
