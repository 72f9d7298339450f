"""Drawn tokens against the distribution that transformers' logits warpers leave, and the generator's promises."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mmrt.models.sampling import sampler
from mmrt.models.sampling.interface import SamplingRows
from mmrt.models.sampling.sampler import combine_guidance, sample, uniforms

NUM_DRAWS = 10_000


def rows(
    size: int, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0, seed: int = 1, first: int = 0
) -> SamplingRows:
    return SamplingRows(
        temperature=np.full(size, temperature, np.float32),
        top_k=np.full(size, top_k, np.int64),
        top_p=np.full(size, top_p, np.float32),
        min_p=np.full(size, min_p, np.float32),
        seed=np.full(size, seed, np.uint64),
        index=np.arange(first, first + size, dtype=np.int64),
    )


def reference(logits: torch.Tensor, temperature: float, top_k: int, top_p: float, min_p: float) -> np.ndarray:
    from transformers.generation import logits_process as warpers

    scores = logits[None].clone()
    active: list[Callable[..., torch.Tensor]] = [warpers.TemperatureLogitsWarper(temperature)]
    if top_k:
        active.append(warpers.TopKLogitsWarper(top_k))
    if top_p < 1:
        active.append(warpers.TopPLogitsWarper(top_p))
    if min_p:
        active.append(warpers.MinPLogitsWarper(min_p))
    for warper in active:
        scores = warper(None, scores)
    return torch.softmax(scores[0].double(), 0).numpy()


PARAMETERS = [
    (1.0, 0, 1.0, 0.0),
    (0.7, 0, 1.0, 0.0),
    (3.0, 0, 1.0, 0.0),
    (1.0, 1, 1.0, 0.0),
    (1.0, 5, 1.0, 0.0),
    (1.0, 1000, 1.0, 0.0),
    (1.0, 0, 0.8, 0.0),
    (1.3, 0, 0.3, 0.0),
    (1.0, 0, 1e-6, 0.0),
    (1.0, 0, 1.0, 0.05),
    (0.8, 12, 0.9, 0.02),
]


@pytest.mark.many
@pytest.mark.parametrize("parameters", PARAMETERS, ids=str)
@pytest.mark.parametrize("vocabulary", [50, 700])
def test_chi_square(vocabulary: int, parameters: tuple[float, int, float, float]) -> None:
    logits = torch.randn(vocabulary, generator=torch.Generator().manual_seed(vocabulary)) * 1.5
    expected = reference(logits, *parameters)
    drawn = sample(logits.expand(NUM_DRAWS, -1), rows(NUM_DRAWS, *parameters))
    counts = np.bincount(drawn, minlength=vocabulary)
    assert counts[expected == 0].sum() == 0
    # Rare tokens together, so that every cell expects at least five.
    common = expected * NUM_DRAWS >= 5
    observed = np.append(counts[common], counts[~common].sum())
    mean = np.append(expected[common], expected[~common].sum()) * NUM_DRAWS
    observed, mean = observed[mean > 0], mean[mean > 0]
    statistic, freedom = ((observed - mean) ** 2 / mean).sum(), len(mean) - 1
    assert statistic <= freedom + 4.5 * np.sqrt(2 * freedom)


def test_a_wide_nucleus_sorts_no_more_than_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows get more candidates step by step, and draw what they draw where all are sorted at once."""
    generator = torch.Generator().manual_seed(3)
    spreads = torch.tensor([9.0, 3.8, 2.5, 0.3]).unsqueeze(1)  # nuclei of some 10 ids, hundreds, thousands, nearly all
    logits = (torch.randn(4, 40_000, generator=generator) * spreads).round(decimals=1)  # many are equal
    asked, largest = list[tuple[int, int]](), sampler._largest
    monkeypatch.setattr(sampler, "_largest", lambda scores, num: asked.append((len(scores), num)) or largest(scores, num))
    for first in range(0, 40, 4):
        found = sample(logits, rows(4, top_p=0.95, first=first))
        assert asked == [(4, 128), (3, 2048), (2, 32_768), (1, 40_000)]
        monkeypatch.setattr(sampler, "_MIN_CANDIDATES", 40_000)
        assert (sample(logits, rows(4, top_p=0.95, first=first)) == found).all()
        monkeypatch.setattr(sampler, "_MIN_CANDIDATES", 128)
        asked.clear()


def test_ties_at_the_kth_are_kept_as_transformers_keeps_them() -> None:
    logits = torch.tensor([1.0, 3.0, 2.0, 2.0, 2.0, 0.0] + [-1.0] * 300)
    drawn = sample(logits.expand(4000, -1), rows(4000, top_k=2))
    assert set(drawn.tolist()) == set(np.flatnonzero(reference(logits, 1.0, 2, 1.0, 0.0))) == {1, 2, 3, 4}
    flat = torch.zeros(1000)
    assert len(set(sample(flat.expand(4000, -1), rows(4000, top_k=3)).tolist())) > 900


def test_greedy_takes_the_lowest_of_equals() -> None:
    logits = torch.tensor([[0.0, 7.0, 7.0], [5.0, 5.0, 5.0]])
    assert sample(logits, rows(2, temperature=0)).tolist() == [1, 0]


@pytest.mark.parametrize("top_p", [0.5, 1.0])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_broken_logits_still_give_a_token(temperature: float, top_p: float) -> None:
    logits = torch.full((4, 300), float("nan"))
    logits[1], logits[2], logits[3] = float("inf"), float("-inf"), torch.randn(300)
    drawn = sample(logits, rows(4, temperature, top_p=top_p))
    assert ((drawn >= 0) & (drawn < 300)).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_do_not_depend_on_their_batch(dtype: torch.dtype) -> None:
    """In bfloat16 many logits are equal."""
    logits = torch.randn(12, 4000, generator=torch.Generator().manual_seed(0)).to(dtype).float()
    mixed = SamplingRows(
        temperature=np.array([0, 1, 0.5, 1, 2, 1, 0, 1, 1, 0.9, 1, 1], np.float32),
        top_k=np.array([0, 0, 5, 300, 0, 0, 3, 1, 0, 40, 0, 0], np.int64),
        top_p=np.array([1, 1, 1, 1, 0.5, 0.99, 1, 1, 1, 0.9, 1, 1], np.float32),
        min_p=np.array([0, 0, 0, 0, 0, 0, 0, 0, 0.1, 0.01, 0, 0], np.float32),
        seed=np.arange(12, dtype=np.uint64) % 3,
        index=np.arange(12, dtype=np.int64) // 2,
    )
    for number in range(20):
        mixed.index[:] = np.arange(12) // 2 + number
        together = sample(logits, mixed)
        for i in range(12):
            alone = SamplingRows(*(getattr(mixed, name)[i : i + 1] for name in SamplingRows.__dataclass_fields__))
            assert sample(logits[i : i + 1], alone)[0] == together[i]


def test_draws_are_functions_of_seed_and_index() -> None:
    seeds = np.array([0, 0, 1, 2**64 - 1], np.uint64)
    index = np.array([0, 1, 0, 2**62], np.int64)
    first = uniforms(seeds, index)
    np.testing.assert_array_equal(first, uniforms(seeds, index))
    assert len(set(first)) == 4 and ((first >= 0) & (first < 1)).all()


@pytest.mark.parametrize("along", ["index", "seed"])
def test_uniforms_are_uniform_and_uncorrelated(along: str) -> None:
    count = np.arange(100_000)
    fixed = np.full(count.size, 7)
    seed, index = (fixed, count) if along == "index" else (count, fixed)
    draws = uniforms(seed.astype(np.uint64), index.astype(np.int64))
    observed = np.bincount((draws * 100).astype(int), minlength=100)
    assert ((observed - 1000) ** 2 / 1000).sum() < 99 + 4 * np.sqrt(2 * 99)
    assert abs(np.corrcoef(draws[1:], draws[:-1])[0, 1]) < 0.015


def test_guidance() -> None:
    conditional, unconditional = torch.randn(3, 9), torch.randn(3, 9)
    scale = torch.tensor([0.0, 1.0, 2.5])
    guided = combine_guidance(conditional, unconditional, scale)
    expected = unconditional + scale[:, None] * (conditional - unconditional)
    torch.testing.assert_close(guided, expected)
    torch.testing.assert_close(guided[0], unconditional[0], rtol=0, atol=0)
    torch.testing.assert_close(guided[1], conditional[1])


@given(
    temperature=st.floats(1e-3, 100),
    top_k=st.integers(0, 400),
    top_p=st.floats(1e-4, 1),
    min_p=st.floats(0, 1),
    seed=st.integers(0, 2**63),
)
def test_any_parameters_draw_a_possible_token(temperature: float, top_k: int, top_p: float, min_p: float, seed: int) -> None:
    logits = torch.randn(300, generator=torch.Generator().manual_seed(seed)) * 3
    token = sample(logits[None], rows(1, temperature, top_k, top_p, min_p, seed))[0]
    assert 0 <= token < 300
    rank = int((logits > logits[token]).sum())
    assert top_k == 0 or rank < top_k
    assert torch.exp((logits[token] - logits.max()) / temperature) >= min_p * (1 - 1e-5)
