"""Log-probabilities against torch's own, with guidance, and their place beside the sequence table."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mmrt.models.sampling.interface import Pairs
from mmrt.models.sampling.logprobs import log_softmax, logprobs_of
from mmrt.tests.settings import examples

VOCABULARY = 50


@settings(max_examples=examples(40), deadline=None)
@given(
    seed=st.integers(0, 999), guided=st.lists(st.integers(0, 3), unique=True), rows=st.lists(st.integers(0, 3), unique=True, min_size=1)
)
def test_rows_are_guided_and_left_as_they_were(seed: int, guided: list[int], rows: list[int]) -> None:
    rows, guided = sorted(rows), sorted(guided)
    logits = torch.randn(4 + len(guided), VOCABULARY, generator=torch.Generator().manual_seed(seed))
    before = logits.clone()
    scale = np.arange(1, 1 + len(guided), dtype=np.float32)
    pairs = Pairs(np.array(guided, np.int64), 4 + np.arange(len(guided)), scale) if guided else None
    expected = before.clone()
    for number, row in enumerate(guided):
        expected[row] = before[4 + number] + float(scale[number]) * (before[row] - before[4 + number])
    found = log_softmax(logits, np.array(rows, np.int64), pairs)
    torch.testing.assert_close(found, torch.log_softmax(expected[rows], 1))
    assert torch.equal(logits, before)


@pytest.mark.parametrize("num", [0, 1, 20])
def test_ranks_and_alternatives(num: int) -> None:
    logprobs = torch.randn(3, VOCABULARY, generator=torch.Generator().manual_seed(1)).log_softmax(1)
    falling = logprobs.argsort(1, descending=True)
    tokens = falling[torch.arange(3), torch.tensor([0, 7, 49])]
    found = logprobs_of(tokens, logprobs, num)
    assert found.rank.tolist() == [1, 8, 50]
    assert torch.equal(found.own, logprobs[torch.arange(3), tokens])
    assert torch.equal(found.ids, falling[:, :num]) and torch.equal(found.values, logprobs.gather(1, falling[:, :num]))
