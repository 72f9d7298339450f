"""Rules about single tokens against transformers' processors, beside guidance and penalties, and in step with the answer."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers.generation.logits_process import (
    MinNewTokensLengthLogitsProcessor,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
)

from mmrt.models.sampling.interface import Pairs
from mmrt.models.sampling.penalties import History
from mmrt.models.sampling.rules import MASKED, LogitRules, RowRules, change, with_companions
from mmrt.models.sampling.sampler import CpuSampler, combine_guidance
from mmrt.tests.models.test_penalties import greedy, penalties
from mmrt.tests.settings import examples

VOCABULARY = 60
Id = st.integers(0, VOCABULARY - 1)
Words = st.lists(st.lists(Id, min_size=1, max_size=3), max_size=5)
Answer = st.lists(st.integers(0, 5), max_size=12)


def rules(row: int = 0, **given: Any) -> RowRules:
    return RowRules(**{"row": row, "bias": [], "bad_words": [], "ends": [], "min_tokens": 0, "answer": [], **given})


def noise(num_rows: int, seed: int = 0) -> Tensor:
    return torch.randn(num_rows, VOCABULARY, generator=torch.Generator().manual_seed(seed))


def changed(logits: Tensor, *rows: RowRules) -> Tensor:
    result = logits.clone()
    change(result, LogitRules(rows).changes())
    return result


def infinite(logits: Tensor) -> Tensor:
    """transformers masks with minus infinity."""
    return logits.masked_fill(logits < MASKED / 2, -torch.inf)


@settings(max_examples=examples(60), deadline=None)
@given(bias=st.dictionaries(Id, st.floats(-100, 100, width=32), max_size=8), seed=st.integers(0, 99))
def test_a_bias_is_transformers(bias: dict[int, float], seed: int) -> None:
    logits = noise(3, seed)
    expected = logits.clone()
    if bias:
        process = SequenceBiasLogitsProcessor([[[id], value] for id, value in bias.items()])
        expected[1:2] = process(torch.zeros(1, 1, dtype=torch.int64), logits[1:2].clone())
    torch.testing.assert_close(changed(logits, rules(1, bias=list(bias.items()))), expected)


@settings(max_examples=examples(60), deadline=None)
@given(words=st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=3), min_size=1, max_size=5), answer=Answer)
def test_bad_words_are_transformers(words: list[list[int]], answer: list[int]) -> None:
    logits = noise(2)
    expected = logits.clone()
    ids = torch.tensor([answer], dtype=torch.int64)
    expected[1:2] = NoBadWordsLogitsProcessor(words, eos_token_id=[VOCABULARY])(ids, logits[1:2].clone())
    grown = LogitRules([rules(1, bad_words=words)])
    for id in answer:
        grown.advance(np.array([9, id]))
    result = logits.clone()
    change(result, grown.changes())
    for found in (result, changed(logits, rules(1, bad_words=words, answer=answer))):
        torch.testing.assert_close(infinite(found), expected)


@settings(max_examples=examples(40), deadline=None)
@given(ends=st.lists(Id, min_size=1, max_size=3), min_tokens=st.integers(0, 4), num_tokens=st.integers(0, 5))
def test_an_early_end_is_transformers(ends: list[int], min_tokens: int, num_tokens: int) -> None:
    logits = noise(1)
    ids = torch.zeros(1, 7 + num_tokens, dtype=torch.int64)
    expected = MinNewTokensLengthLogitsProcessor(7, min_tokens, ends)(ids, logits.clone())
    found = changed(logits, rules(ends=ends, min_tokens=min_tokens, answer=[0] * num_tokens))
    torch.testing.assert_close(infinite(found), expected)


def test_rules_touch_no_other_row() -> None:
    logits = noise(4)
    found = changed(logits, rules(1, bias=[(3, 5.0)], ends=[4], min_tokens=1), rules(2, bad_words=[[7], [8, 9]], answer=[8]))
    differing = [tuple(place) for place in (found != logits).nonzero().tolist()]
    assert differing == [(1, 3), (1, 4), (2, 7), (2, 9)]


def draw(logits: Tensor, pairs: Pairs | None, rows: Sequence[RowRules], repetition: float) -> int:
    sampler = CpuSampler(VOCABULARY)
    sampler.remember([History(np.array([5]), np.array([6]))])
    token = sampler.sample(logits.clone(), greedy(1), pairs, penalties([0], repetition), LogitRules(rows).changes())
    return int(token[0])


@settings(max_examples=examples(60), deadline=None)
@given(seed=st.integers(0, 999), scale=st.floats(0, 8), bias=st.dictionaries(Id, st.floats(-8, 8), min_size=1, max_size=20))
def test_after_guidance_and_before_penalties(seed: int, scale: float, bias: dict[int, float]) -> None:
    """And done to both members before guidance, as on a device, they give the same."""
    logits, one = noise(2, seed), np.zeros(1, np.int64)
    pairs = Pairs(one, one + 1, np.full(1, scale, np.float32))
    scales = torch.tensor([scale])
    expected = combine_guidance(logits[:1], logits[1:], scales)
    for id, value in bias.items():
        expected[0, id] += value
    before = logits.clone()
    change(before, with_companions(LogitRules([rules(bias=list(bias.items()))]).changes(), pairs))
    torch.testing.assert_close(combine_guidance(before[:1], before[1:], scales), expected, rtol=1e-3, atol=1e-3)
    penalised = RepetitionPenaltyLogitsProcessor(1.5)(torch.tensor([[5, 6]]), expected)[0]
    assert penalised.max() - penalised[draw(logits, pairs, [rules(bias=list(bias.items()))], 1.5)] < 1e-4


def test_masks_survive_guidance_and_penalties() -> None:
    logits, one = noise(2), np.zeros(1, np.int64)
    pairs = Pairs(one, one + 1, np.full(1, 20.0, np.float32))
    ends = list(range(VOCABULARY - 1))
    assert draw(logits, pairs, [rules(ends=ends, min_tokens=1)], 10.0) == VOCABULARY - 1
    before = logits.clone()
    change(before, with_companions(LogitRules([rules(ends=ends, min_tokens=1)]).changes(), pairs))
    assert int(combine_guidance(before[:1], before[1:], torch.tensor([20.0])).argmax()) == VOCABULARY - 1
