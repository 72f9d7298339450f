"""Attention of many queries is that of float64 but for rounding, in any batch. ``test_row_kernels`` repeats it with AVX2."""

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from mmrt.cpu_kernels import flash_attention, kernel
from mmrt.cpu_kernels.flash_attention import Attended, KeyRanges, causal, has_kernel
from mmrt.models.towers import sequences
from mmrt.models.towers.sequences import Sequences
from mmrt.tests.models.guarded import guarded
from mmrt.tests.settings import examples

DTYPES = [dtype for dtype in (torch.float32, torch.bfloat16) if has_kernel(torch.empty(64, dtype=dtype))]
# Of results in float64: a weight in bfloat16 has an error of 2^-9, its exponential one of 3e-6.
ERRORS = {torch.float32: (3e-6, 3e-6), torch.bfloat16: (8e-3, 1e-5)}

pytestmark = pytest.mark.skipif(kernel.vector_width() is None, reason="this processor has no kernels")


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def attend(q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool = False) -> Attended:
    return flash_attention.attend(q, k, v, causal(q.shape[1]) if is_causal else None)


def inputs(
    num_sequences: int,
    num_queries: int,
    num_keys: int,
    kv_heads: int,
    group: int,
    head_dim: int,
    dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor, Tensor]:
    q = random(num_sequences, num_queries, kv_heads * group, head_dim)
    k, v = (random(num_sequences, num_keys, kv_heads, head_dim, seed=seed) for seed in (1, 2))
    return q.to(dtype), k.to(dtype), v.to(dtype)


def exact(q: Tensor, k: Tensor, v: Tensor, hidden: Tensor | None = None, scale: float = 0.0) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp in float64, of the keys that are not ``hidden`` [N, M]."""
    group = q.shape[2] // k.shape[2]
    keys, values = (tensor.repeat_interleave(group, 2).transpose(1, 2).double() for tensor in (k, v))
    scores = q.double().transpose(1, 2) @ keys.transpose(2, 3) * (scale or q.shape[3] ** -0.5)
    if hidden is not None:
        scores = scores.masked_fill(hidden, -torch.inf)
    return (scores.softmax(3).nan_to_num() @ values).transpose(1, 2), scores.logsumexp(3).transpose(1, 2)


def assert_exact(found: Attended, q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> None:
    hidden = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool).triu(1) if is_causal else None
    assert_close(found, *exact(q, k, v, hidden), q.dtype)


def assert_close(found: Attended, output: Tensor, log_sum_exp: Tensor, dtype: torch.dtype) -> None:
    assert found.output.dtype == torch.float32 and found.output.is_contiguous()
    torch.testing.assert_close(found.output.double(), output, rtol=0, atol=ERRORS[dtype][0])
    torch.testing.assert_close(found.log_sum_exp.double(), log_sum_exp, rtol=0, atol=ERRORS[dtype][1])


@settings(max_examples=examples(80), deadline=None)
@given(
    num_sequences=st.integers(1, 3),
    num_queries=st.integers(1, 220),
    num_keys=st.integers(1, 560),
    kv_heads=st.integers(1, 3),
    group=st.integers(1, 3),
    vectors=st.integers(1, 4),
    is_causal=st.booleans(),
    num_threads=st.integers(1, 3),
    dtype=st.sampled_from(DTYPES),
)
@example(1, 192, 256, 1, 1, 4, False, 1, DTYPES[0])  # one whole block of queries and of keys
@example(1, 193, 257, 2, 4, 4, False, 2, DTYPES[0])  # one more of each
@example(1, 1, 1, 1, 1, 1, True, 1, DTYPES[0])
@example(2, 70, 300, 1, 1, 5, False, 1, DTYPES[0])
@example(1, 70, 70, 1, 2, 16, True, 3, DTYPES[0])
@example(1, 193, 257, 2, 4, 3, False, 2, DTYPES[-1])
@example(1, 70, 70, 1, 2, 16, True, 3, DTYPES[-1])
def test_any_shape(
    num_sequences: int,
    num_queries: int,
    num_keys: int,
    kv_heads: int,
    group: int,
    vectors: int,
    is_causal: bool,
    num_threads: int,
    dtype: torch.dtype,
) -> None:
    torch.set_num_threads(num_threads)
    head_dim = max(vectors, dtype.itemsize % 4) * (kernel.vector_width() or 8)  # of bfloat16 two vectors at least
    tensors = inputs(num_sequences, num_queries, num_queries if is_causal else num_keys, kv_heads, group, head_dim, dtype)
    assert_exact(attend(*tensors, is_causal=is_causal), *tensors, is_causal)


@settings(max_examples=examples(40), deadline=None)
@given(
    num_queries=st.integers(1, 300),
    num_keys=st.integers(1, 700),
    group=st.integers(1, 3),
    window=st.integers(1, 400),
    ahead=st.integers(-300, 700),
    head_dim=st.sampled_from([16, 64, 512]),
    num_threads=st.integers(1, 3),
    dtype=st.sampled_from(DTYPES),
)
@example(200, 600, 1, 300, 0, 512, 1, DTYPES[0])  # blocks of half as many keys
@example(7, 256, 2, 256, 256, 16, 1, DTYPES[0])  # a key less for each query, from a whole block on
@example(20, 100, 1, 1, 100, 16, 1, DTYPES[0])  # no key for any
@example(20, 100, 1, 30, 90, 16, 1, DTYPES[0])  # nor for some
@example(20, 30, 1, 5, -10, 16, 1, DTYPES[0])
@example(200, 600, 1, 300, 0, 512, 1, DTYPES[-1])
@example(20, 100, 1, 30, 90, 48, 1, DTYPES[-1])
def test_ranges_of_keys(
    num_queries: int, num_keys: int, group: int, window: int, ahead: int, head_dim: int, num_threads: int, dtype: torch.dtype
) -> None:
    """Query i stands behind ``ahead`` + i keys, as in a prompt: some see no key, others the last one."""
    torch.set_num_threads(num_threads)
    q, k, v = inputs(1, num_queries, num_keys, 2, group, max(head_dim, 16 * (dtype.itemsize % 4)), dtype)
    ends = (torch.arange(num_queries) + ahead + 1).clamp(0, num_keys)
    firsts = (torch.arange(num_queries) + ahead + 1 - window).clamp(min=0)
    keys = torch.arange(num_keys)
    hidden = (keys < firsts.unsqueeze(1)) | (keys >= ends.unsqueeze(1))
    scale = 0.7 / q.shape[3] ** 0.5
    found = flash_attention.attend(q, k, v, KeyRanges.of(firsts, ends), scale)
    assert_close(found, *exact(q, k, v, hidden, scale), dtype)
    assert not found.output[0, hidden.all(1)].any()
    torch.set_num_threads(1)
    some = slice(num_queries // 3, num_queries // 3 + num_queries // 2 + 1)
    beside = flash_attention.attend(q[:, some], k, v, KeyRanges.of(firsts[some], ends[some]), scale)
    assert all(torch.equal(part, whole[:, some]) for part, whole in zip(beside, found, strict=True))


def test_ranges_that_do_not_fit_are_refused() -> None:
    q, k, v = inputs(1, 5, 6, 2, 2, 32)
    rising = torch.arange(5)
    for firsts, ends in ((rising.flip(0), rising), (rising, rising.flip(0)), (rising - 1, rising), (rising[:4], rising)):
        with pytest.raises(ValueError, match="are no ranges that rise"):
            KeyRanges.of(firsts, ends)
    for ranges in (KeyRanges.of(rising, rising + 3), causal(4), causal(6)):
        with pytest.raises(ValueError, match="do not fit each other"):
            flash_attention.attend(q, k, v, ranges)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_long_prompt(dtype: torch.dtype) -> None:
    tensors = inputs(1, 1100, 1100, 2, 2, 64, dtype)
    assert_exact(attend(*tensors, is_causal=True), *tensors, True)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("is_causal", [False, True])
def test_a_query_is_the_same_bits_beside_any_others_and_in_any_team(is_causal: bool, dtype: torch.dtype) -> None:
    q, k, v = inputs(1, 700, 700, 2, 2, 64, dtype)
    torch.set_num_threads(1)
    expected = attend(q, k, v, is_causal=is_causal)
    for num_threads in (1, 2, 3):
        torch.set_num_threads(num_threads)
        assert all(map(torch.equal, attend(q, k, v, is_causal=is_causal), expected))
        for last in (1, 2, 7, 195, 517):
            found = attend(q[:, :last], k[:, :last], v[:, :last], is_causal=True) if is_causal else attend(q[:, :last], k, v)
            assert all(torch.equal(part, whole[:, :last]) for part, whole in zip(found, expected, strict=True))
    alone = attend(q[:, :, :2], k[:, :, :1], v[:, :, :1], is_causal=is_causal)
    assert torch.equal(alone.output, expected.output[:, :, :2])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("at_end", [False, True])
def test_nothing_beyond_the_tensors_is_touched(at_end: bool, dtype: torch.dtype) -> None:
    for num_queries, num_keys, head_dim, is_causal in (
        (7, 7, 32, True),
        (193, 31, 48, False),
        (5, 300, 64, False),
        (259, 259, 32, True),
    ):
        q, k, v = (guarded(tensor, at_end=at_end) for tensor in inputs(1, num_queries, num_keys, 1, 2, head_dim, dtype))
        assert_exact(attend(q, k, v, is_causal=is_causal), q, k, v, is_causal)


@pytest.mark.parametrize("dtype", DTYPES)
def test_tensors_that_lie_among_others(dtype: torch.dtype) -> None:
    """As a product leaves queries, keys and values, or in another order."""
    q, k, v = inputs(2, 50, 50, 2, 2, 64, dtype)
    expected = attend(q, k, v)
    among = torch.cat((q, k, v), 2)
    assert all(map(torch.equal, attend(*among.split((4, 2, 2), 2)), expected))
    turned = [tensor.transpose(1, 3).contiguous().transpose(1, 3) for tensor in (q, k, v)]
    assert all(map(torch.equal, attend(*turned), expected))


@pytest.mark.parametrize("dtype", DTYPES)
def test_scores_of_any_size(dtype: torch.dtype) -> None:
    """A single key of a far larger score is all that counts, wherever it lies; equal ones are a mean."""
    _, k, v = inputs(1, 1, 600, 1, 1, 64, dtype)
    q = torch.zeros(1, 1, 1, 64, dtype=dtype)
    q[..., 0] = 1e4
    for place in (0, 15, 16, 255, 256, 599):
        keys = k.clone()
        keys[..., 0] = 0.0
        keys[0, place, 0, 0] = 1.0
        torch.testing.assert_close(attend(q, keys, v).output[0, 0], v[0, place].float(), rtol=1e-6, atol=0)
    torch.testing.assert_close(attend(torch.zeros_like(q), k, v).output[0, 0], v[0].float().mean(0), rtol=0, atol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_a_query_may_not_see_weighs_nothing(dtype: torch.dtype) -> None:
    """Not even where a later value is as large as a number can be."""
    q, k, v = inputs(1, 24, 24, 1, 2, 32, dtype)
    v[:, :19] = 0.0
    v[:, 20] = 3e38
    found = attend(q, k, v, is_causal=True).output
    assert not found[:, :19].any() and found[:, 19:].any()
    for last in range(1, 24):
        assert torch.equal(attend(q[:, :last], k[:, :last], v[:, :last], is_causal=True).output, found[:, :last])


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_missing_number_of_a_query_or_a_key_spoils_what_attends_to_it_alone(dtype: torch.dtype) -> None:
    q, k, v = inputs(2, 90, 90, 2, 1, 32, dtype)
    expected = attend(q, k, v, is_causal=True).output
    k[1, 50, 1, 3] = torch.nan
    q[0, 7, 0, 0] = torch.nan
    found = attend(q, k, v, is_causal=True).output
    spoiled = torch.zeros(2, 90, 2, dtype=torch.bool)
    spoiled[1, 50:, 1] = spoiled[0, 7, 0] = True
    assert found[spoiled].isnan().all() and torch.equal(found[~spoiled], expected[~spoiled])


def test_what_does_not_fit_is_refused() -> None:
    q, k, v = inputs(1, 5, 6, 2, 2, 32)
    for bad in (
        (q, k, v[:, :5]),
        (q[:, :, :3], k, v),
        (q, k[:, :0], v[:, :0]),
        (q.double(), k, v),
        (q, k.bfloat16(), v),
        (q[..., :16], k, v),
    ):
        with pytest.raises(ValueError, match=r"queries, keys and values are torch\.\w+ \[1, "):
            attend(*bad)
    with pytest.raises(ValueError, match=r"\[1, 5, 4, 32\], torch.float32 \[1, 4, 2, 32\]"):
        attend(q, k[:, :4], v[:, :4], is_causal=True)
    assert has_kernel(q) and not any(map(has_kernel, (q.half(), q[..., :4], q.bfloat16()[..., :16], torch.empty(1, 528))))


def test_towers_attend_within_sequences_with_and_without_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = np.array([64, 64, 32, 64, 7, 7])
    q, k, v = (random(int(lengths.sum()), 4, 48, seed=seed) for seed in range(3))
    runs = Sequences.of(lengths, torch.device("cpu"))
    found = sequences.attend(q, k, v, runs)
    monkeypatch.setattr(sequences.flash_attention, "has_kernel", lambda q: False)
    torch.testing.assert_close(found, sequences.attend(q, k, v, runs), rtol=0, atol=2e-6)
