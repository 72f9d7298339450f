"""Penalties against transformers' repetition processor, and against the other two in words."""

from typing import Any

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mmrt.models.architecture import MIN_REPETITION_PENALTY
from mmrt.models.sampling.interface import SamplingRows
from mmrt.models.sampling.penalties import Counts, History, Penalties
from mmrt.models.sampling.sampler import CpuSampler
from mmrt.tests.settings import ImportedLater, examples

theirs: Any = ImportedLater("transformers.generation.logits_process")
VOCABULARY = 60
Ids = st.lists(st.integers(0, VOCABULARY - 1), max_size=30)


def penalties(row: list[int], repetition: float = 1.0, presence: float = 0.0, frequency: float = 0.0) -> Penalties:
    size = len(row)
    return Penalties(np.array(row), *(np.full(size, value, np.float32) for value in (repetition, presence, frequency)))


def history(prompt: list[int], answer: list[int]) -> History:
    return History(np.array(prompt, np.int64), np.array(answer, np.int64))


@settings(max_examples=examples(60), deadline=None)
@given(prompt=Ids, answer=Ids, repetition=st.floats(MIN_REPETITION_PENALTY, 10), seed=st.integers(0, 99))
def test_repetition_is_transformers(prompt: list[int], answer: list[int], repetition: float, seed: int) -> None:
    logits = torch.randn(3, VOCABULARY, generator=torch.Generator().manual_seed(seed))
    expected = logits.clone()
    ids = torch.tensor([prompt + answer], dtype=torch.int64)
    if ids.numel():
        expected[1:2] = theirs.RepetitionPenaltyLogitsProcessor(float(np.float32(repetition)))(ids, logits[1:2].clone())
    Counts([history(prompt, answer)], VOCABULARY).penalise(logits, penalties([1], repetition))
    torch.testing.assert_close(logits, expected, rtol=1e-6, atol=0)


@settings(max_examples=examples(40), deadline=None)
@given(prompt=Ids, answer=Ids, presence=st.floats(-2, 2), frequency=st.floats(-2, 2))
def test_presence_counts_once_and_frequency_each_time(prompt: list[int], answer: list[int], presence: float, frequency: float) -> None:
    logits = torch.zeros(2, VOCABULARY)
    counts = Counts([history([5], []), history(prompt, answer)], VOCABULARY)
    counts.penalise(logits, penalties([1, 0], 1.0, presence, frequency))
    expected = [-(np.float32(frequency) * answer.count(id)) - np.float32(presence) * (id in answer) for id in range(VOCABULARY)]
    np.testing.assert_allclose(logits[0].numpy(), expected, rtol=1e-5, atol=1e-6)
    assert not logits[1].any(), "an id of the prompt alone is not in the answer"


def greedy(size: int) -> SamplingRows:
    zeros, ones = np.zeros(size), np.ones(size, np.float32)
    return SamplingRows(
        zeros.astype(np.float32), zeros.astype(np.int64), ones, 0 * ones, zeros.astype(np.uint64), zeros.astype(np.int64)
    )


def test_the_sampler_counts_what_it_draws() -> None:
    """Two rows with the same logits, of which the second is penalised: it takes the ids one after another."""
    sampler = CpuSampler(VOCABULARY)
    sampler.remember([history([VOCABULARY, -1], [0])])
    falling = torch.arange(VOCABULARY, 0, -1).float().expand(2, -1) / 10
    drawn = [sampler.sample(falling.clone(), greedy(2), None, penalties([1], frequency=2.0)).tolist() for _ in range(4)]
    assert drawn == [[0, 1], [0, 2], [0, 3], [0, 4]]
    sampler.remember([history([], [])])
    assert sampler.sample(falling.clone(), greedy(2), None, penalties([1], frequency=2.0)).tolist() == [0, 0], "forgotten"
