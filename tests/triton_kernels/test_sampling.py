"""Sampling kernels against the CPU sampler, transformers' warpers and the plain reference: the same tokens, the same kept sets."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given, settings
from hypothesis import strategies as st

from mmrt.models.sampling import sampler
from mmrt.tests.settings import examples
from mmrt.tests.triton_kernels.launch_keys import count
from mmrt.triton_kernels.sampling import SamplingRows, SamplingWorkspace, config, count_tokens, kernel, reference, sample
from mmrt.triton_kernels.sampling.generator import uniform_bits

LAUNCHES = """
import json, torch
from mmrt.tests.triton_kernels.launch_keys import record
from mmrt.triton_kernels.sampling import SamplingRows, SamplingWorkspace, count_tokens, sample

found = record()
device = torch.device("cpu")
workspace = SamplingWorkspace.allocate(33, 1000, device)
for size in (1, 2, 3, 16, 33):
    counts = torch.zeros(size, 1000, dtype=torch.int32)
    out = torch.zeros(size + 1, dtype=torch.int64)[1:]
    sample(torch.zeros(2 * size, 1000), SamplingRows(size, device), workspace, counts=counts, out=out)
    for width in (1, 16, 1001):
        column = torch.zeros(size + 1, dtype=torch.int32)[1:]
        count_tokens(counts, column, torch.zeros(size, width + 1, dtype=torch.int64)[:, 1:], column, is_prompt=False)
print(json.dumps({name: len(keys) for name, keys in found.items()}))
"""

Column = float | list[float] | list[int] | torch.Tensor


def rows_of(num_rows: int, device: torch.device, **columns: Column) -> SamplingRows:
    """Row i draws from logits row i, at temperature 1 unless told otherwise, seed i."""
    rows = SamplingRows(num_rows, device)
    defaults: dict[str, Column] = {"logits_row": torch.arange(num_rows), "temperature": 1.0, "seed": torch.arange(num_rows)}
    for name, value in {**defaults, **columns}.items():
        column = getattr(rows, name)
        column.copy_(torch.as_tensor(value, dtype=column.dtype).expand(num_rows))
    return rows


def poisoned(max_rows: int, vocabulary: int, device: torch.device, max_candidates: int = 1000) -> SamplingWorkspace:
    """A workspace full of what must not be read."""
    space = SamplingWorkspace.allocate(max_rows, vocabulary, device, max_candidates)
    for name in SamplingWorkspace.__dataclass_fields__:
        value = getattr(space, name)
        if isinstance(value, torch.Tensor):
            value.fill_(float("nan") if value.is_floating_point() else 2**30)
    return space


def model_rows(rows: SamplingRows) -> sampler.SamplingRows:
    def column(name: str, dtype: type) -> np.ndarray:
        return getattr(rows, name).cpu().numpy().astype(dtype)

    return sampler.SamplingRows(
        temperature=column("temperature", np.float32),
        top_k=column("top_k", np.int64),
        top_p=column("top_p", np.float32),
        min_p=column("min_p", np.float32),
        seed=column("seed", np.uint64),
        index=column("index", np.int64),
    )


def normal(num_rows: int, vocabulary: int, device: torch.device, spread: float = 2.0, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(num_rows, vocabulary, generator=generator) * spread).to(device)


@triton.jit
def _uniforms_kernel(seed_ptr, index_ptr, out_ptr, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    tl.store(out_ptr + at, uniform_bits(tl.load(seed_ptr + at), tl.load(index_ptr + at)).to(tl.int64, bitcast=True))


def test_the_generator_is_the_models(device: torch.device) -> None:
    seed = torch.tensor([0, 0, 1, -1, 2**63 - 1, -(2**63), 12345, 7])
    index = torch.tensor([0, 1, 0, 2**62, 5, 3, 10**9, 8])
    out = torch.empty(8, dtype=torch.int64, device=device)
    _uniforms_kernel[(1,)](seed.to(device), index.to(device), out, SIZE=8)
    drawn = out.cpu().numpy().astype(np.uint64).astype(np.float64) * 2.0**-64
    expected = sampler.uniforms(seed.numpy().astype(np.uint64), index.numpy())
    np.testing.assert_array_equal(drawn, expected)
    assert [reference.uniform(s % 2**64, i) for s, i in zip(seed.tolist(), index.tolist(), strict=True)] == expected.tolist()


MIXTURE: dict[str, list[float]] = {
    "temperature": [0, 1, 0.5, 1, 2, 1, 0.7, 1, 1.3, 1, 1],
    "top_k": [0, 0, 5, 300, 0, 0, 50, 1, 0, 7, 10**9],
    "top_p": [1, 1, 1, 1, 0.5, 0.99, 0.9, 1, 1, 1e-6, 0.7],
    "min_p": [0, 0, 0, 0, 0, 0, 0.05, 0, 0.1, 0, 1],
}


def test_guided_tokens_are_those_of_the_cpu_sampler(device: torch.device) -> None:
    logits = normal(12, 300, device)
    scale = torch.tensor([0.0, 0.5, 1.5, 3.0])
    rows = rows_of(8, device, guidance=scale.repeat(2), companion_row=[8, 9, 10, 11, -1, -1, 9, 8])
    guided = logits[:8].clone().cpu()
    for i, companion in enumerate(rows.companion_row.tolist()):
        if companion >= 0:
            pair = logits[i : i + 1].cpu(), logits[companion : companion + 1].cpu()
            guided[i] = sampler.combine_guidance(*pair, rows.guidance[i : i + 1].cpu())[0]
    tokens = sample(logits, rows, poisoned(8, 300, device))
    np.testing.assert_array_equal(tokens.cpu().numpy(), sampler.sample(guided, model_rows(rows)))


def warped(logits: torch.Tensor, temperature: float, top_k: int, top_p: float, min_p: float) -> torch.Tensor:
    """Scores that transformers' warpers leave, -inf where they filter."""
    from transformers.generation import logits_process as warpers

    active: list[Callable[..., torch.Tensor]] = [warpers.TemperatureLogitsWarper(temperature)]
    if 0 < top_k < len(logits):
        active.append(warpers.TopKLogitsWarper(top_k))
    if top_p < 1:
        active.append(warpers.TopPLogitsWarper(top_p))
    if min_p:
        active.append(warpers.MinPLogitsWarper(min_p))
    scores = logits[None].clone()
    for warper in active:
        scores = warper(None, scores)
    return scores[0]


def test_tokens_are_the_cpu_samplers_and_kept_sets_are_transformers(device: torch.device) -> None:
    logits = normal(11, 1500, device)
    rows = rows_of(11, device, index=torch.arange(11) // 5, **MIXTURE)
    workspace = poisoned(11, 1500, device)
    tokens = sample(logits, rows, workspace)
    np.testing.assert_array_equal(tokens.cpu().numpy(), sampler.sample(logits.cpu(), model_rows(rows)))
    for i in range(1, 11):
        kept = warped(logits[i].cpu(), *(getattr(rows, name)[i].item() for name in MIXTURE))
        weights = torch.exp(kept - kept.max()).double()
        mass, least = float(weights.sum()), float(weights[weights > 0].min())
        # One more or one fewer of them would change the mass by at least the least weight.
        tolerance = max(least / 4, 1e-6 * mass)
        assert float(workspace.kept[i]) * 2.0**-40 == pytest.approx(mass, abs=tolerance, rel=0)


def test_a_larger_vocabulary_in_larger_tiles(device: torch.device) -> None:
    logits = normal(1, 33_001, device, spread=3.0)
    rows = rows_of(1, device, temperature=0.8, top_k=50, top_p=0.9, min_p=0.02, seed=9)
    tokens = sample(logits, rows, poisoned(1, 33_001, device))
    np.testing.assert_array_equal(tokens.cpu().numpy(), sampler.sample(logits.cpu(), model_rows(rows)))


def test_equal_scores_are_kept_and_drawn_as_the_reference_does(device: torch.device) -> None:
    logits = torch.tensor([1.0, 3.0, 2.0, 2.0, 2.0, 0.0] + [-1.0] * 40, device=device).expand(4, -1)
    rows = rows_of(4, device, top_k=[2, 3, 0, 0], top_p=[1, 0.8, 0.65, 1])
    workspace = poisoned(4, 46, device)
    assert sample(logits, rows, workspace).tolist() == reference.sample(logits, rows).tolist()
    # Top-k keeps all that equal the second; top-p cuts through equals.
    weight = 1 + 3 * np.exp(-1), 1 + 2 * np.exp(-1), 1 + 3 * np.exp(-1)
    np.testing.assert_allclose(workspace.kept[:3].cpu().numpy() * 2.0**-40, weight, rtol=1e-6)


def test_greedy_takes_the_lowest_of_equals(device: torch.device) -> None:
    logits = torch.zeros(3, 2100, device=device)
    logits[0, [1500, 2050]] = 7.0
    logits[1] = -3.0
    logits[2, 2099] = 0.5
    assert sample(logits, rows_of(3, device, temperature=0), poisoned(3, 2100, device)).tolist() == [1500, 0, 2099]


@given(
    vocabulary=st.sampled_from([1, 31, 33, 257, 1025]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    spread=st.floats(0.01, 8),
    seed=st.integers(0, 1000),
)
@settings(max_examples=examples(3), derandomize=True, deadline=None)
def test_all_at_once_is_as_the_reference(vocabulary: int, dtype: torch.dtype, spread: float, seed: int) -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    generator = np.random.default_rng(seed)
    # Rows of logits do not follow each other in memory, and are used in any order.
    logits = normal(6, vocabulary + 5, device, spread, seed).to(dtype)[:, :vocabulary]
    counts = torch.from_numpy(generator.integers(0, 3, (2, vocabulary), dtype=np.int32)).to(device)
    counts[0, ::3] |= kernel.IN_PROMPT
    rows = rows_of(
        7,
        device,
        logits_row=torch.from_numpy(np.append(generator.permutation(6), -1)),
        companion_row=[-1, 0, 5, -1, -1, 2, 0],
        guidance=[1, 2, 0.5, 1, 1, 1.5, 1],
        counts_row=[0, -1, 1, 0, -1, 1, 0],
        repetition=[1.3, 1, 0.8, 1, 1, 1.1, 1],
        presence=[0.5, 0, 0, -0.5, 0, 1, 0],
        frequency=[0.1, 0, 1, 0, 0, -0.2, 0],
        temperature=[0.8, 1, 1.2, 0, 1, 2, 1],
        top_k=[10, 0, 0, 0, 3, 0, 0],
        top_p=[0.9, 0.8, 1, 1, 1, 1, 1],
        min_p=[0, 0, 0.02, 0, 0.1, 0.05, 0],
        seed=torch.from_numpy(generator.integers(-(2**63), 2**63, 7)),
        index=torch.from_numpy(generator.integers(0, 2**40, 7)),
    )
    tokens = sample(logits, rows, poisoned(7, vocabulary, device), counts=counts)
    expected = reference.sample(logits, rows, counts=counts)
    assert tokens.tolist() == expected.tolist()
    assert tokens[6] == -1


def test_neither_tiles_nor_candidates_change_a_token(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    logits = normal(3, 1500, device, spread=0.7)
    rows = rows_of(3, device, **{name: [values[i] for i in (0, 4, 6)] for name, values in MIXTURE.items()})
    first, second = poisoned(3, 1500, device), poisoned(3, 1500, device, max_candidates=16)
    tokens = sample(logits, rows, first)
    monkeypatch.setattr(config, "tile_size", lambda vocabulary: 512)
    smaller = SamplingWorkspace.allocate(3, 1500, device)
    for workspace in (smaller, second):
        if workspace is second:
            monkeypatch.undo()
        torch.testing.assert_close(sample(logits, rows, workspace), tokens, rtol=0, atol=0)
        torch.testing.assert_close(workspace.kept, first.kept, rtol=0, atol=0)


@pytest.mark.parametrize("top_p", [0.5, 1.0])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_broken_logits_still_give_a_token(device: torch.device, temperature: float, top_p: float) -> None:
    logits = normal(5, 300, device)
    logits[0], logits[1], logits[2] = float("nan"), float("inf"), float("-inf")
    logits[3, ::2] = float("nan")
    tokens = sample(logits, rows_of(5, device, temperature=temperature, top_p=top_p), poisoned(5, 300, device))
    assert ((tokens >= 0) & (tokens < 300)).all()
    assert tokens[2] == 0
    assert tokens[3] % 2 == 1


def test_rows_beyond_two_billion_elements(device: torch.device) -> None:
    """Addresses are 64 bits wide: 4 GiB of address space of which two rows are touched."""
    vocabulary = 90
    far = torch.empty(2**31 + vocabulary, dtype=torch.bfloat16, device=device).as_strided((2, vocabulary), (2**31, 1))
    near = normal(2, vocabulary, device).bfloat16()
    far.copy_(near)
    counts = torch.empty(2**31 + vocabulary, dtype=torch.int32, device=device).as_strided((2, vocabulary), (2**31, 1))
    counts.fill_(0)
    counts[1, 5] = 3
    rows = rows_of(2, device, counts_row=1, frequency=0.5, top_k=20)
    tokens = sample(far, rows, poisoned(2, vocabulary, device), counts=counts)
    assert tokens.tolist() == reference.sample(near, rows, counts=counts).tolist()


def test_tokens_are_counted(device: torch.device) -> None:
    counts = torch.zeros(4, 37, dtype=torch.int32, device=device)
    tokens = torch.randint(-1, 40, (3, 1100), generator=torch.Generator().manual_seed(0)).to(device)
    length = torch.tensor([1100, 0, 5], dtype=torch.int32, device=device)
    target = torch.tensor([3, 1, 0], dtype=torch.int32, device=device)
    count_tokens(counts, target, tokens, length, is_prompt=False)
    for row, (at, end) in enumerate(zip(target.tolist(), length.tolist(), strict=True)):
        ids = tokens[row, :end]
        assert counts[at].tolist() == torch.bincount(ids[(ids >= 0) & (ids < 37)], minlength=37).tolist()
    count_tokens(counts, target, tokens[:, :9], torch.tensor([2, 0, -1], dtype=torch.int32, device=device), is_prompt=True)
    marked = (counts & kernel.IN_PROMPT) != 0
    assert set(marked[3].nonzero().flatten().tolist()) == {t for t in tokens[0, :2].tolist() if 0 <= t < 37}
    assert not marked[:3].any()
    target[:] = -1
    count_tokens(counts.fill_(7), target, tokens, length, is_prompt=False)
    assert (counts == 7).all()


@pytest.mark.slow  # by day in test_warm_up
def test_no_step_compiles_after_the_first() -> None:
    kernels = ["prepare_kernel", "measure_kernel", "gather_kernel", "draw_kernel", "count_kernel"]
    assert count(LAUNCHES) == dict.fromkeys(kernels, 1)


def _bad(device: torch.device) -> dict[str, Callable[[], object]]:
    logits, rows, space = normal(3, 64, device), rows_of(3, device), SamplingWorkspace.allocate(3, 64, device, 8)
    table = torch.zeros(2, 64, dtype=torch.int32, device=device)
    column = torch.zeros(3, dtype=torch.int32, device=device)
    meta = torch.device("meta")
    return {
        "dimensions": lambda: sample(logits[0], rows, space),
        "dtype": lambda: sample(logits.double(), rows, space),
        "strides": lambda: sample(normal(64, 3, device).T, rows, space),
        "vocabulary": lambda: sample(logits[:, :60], rows, space),
        "rows": lambda: sample(logits, rows_of(4, device), space),
        "rows device": lambda: sample(logits, SamplingRows(3, meta), space),
        "workspace device": lambda: sample(logits, rows, SamplingWorkspace.allocate(3, 64, meta)),
        "counts dtype": lambda: sample(logits, rows, space, counts=table.long()),
        "counts device": lambda: sample(logits, rows, space, counts=table.to(meta)),
        "counts strides": lambda: sample(logits, rows, space, counts=table.repeat(1, 2)[:, ::2]),
        "counts dimensions": lambda: sample(logits, rows, space, counts=table[0]),
        "counts vocabulary": lambda: sample(logits, rows, space, counts=table[:, :60]),
        "out dtype": lambda: sample(logits, rows, space, out=column),
        "out shape": lambda: sample(logits, rows, space, out=column[:2].long()),
        "out device": lambda: sample(logits, rows, space, out=column.long().to(meta)),
        "no rows": lambda: SamplingRows(0, device),
        "other rows": lambda: rows.copy_(SamplingRows(4, device)),
        "no workspace": lambda: SamplingWorkspace.allocate(0, 64, device),
        "large vocabulary": lambda: SamplingWorkspace.allocate(1, 2**18 + 1, meta),
        "tokens dtype": lambda: count_tokens(table, column, column[:, None], column, is_prompt=True),
        "tokens dimensions": lambda: count_tokens(table, column, column.long(), column, is_prompt=True),
        "num_tokens": lambda: count_tokens(table, column, column[:, None].long(), column.long(), is_prompt=True),
        "counts_rows": lambda: count_tokens(table, column[:2], column[:, None].long(), column, is_prompt=True),
        "count table": lambda: count_tokens(table.long(), column, column[:, None].long(), column, is_prompt=True),
    }


@pytest.mark.parametrize("what", list(_bad(torch.device("cpu"))))
def test_what_does_not_fit_is_refused(device: torch.device, what: str) -> None:
    with pytest.raises(ValueError, match=r"^(logits|rows|workspace|counts|out|tokens|counts_rows|num_tokens) .*not "):
        _bad(device)[what]()


def test_rows_travel_in_one_copy(device: torch.device) -> None:
    host, rows = rows_of(5, torch.device("cpu"), **{name: values[:5] for name, values in MIXTURE.items()}), SamplingRows(5, device)
    rows.copy_(host)
    for name in MIXTURE:
        assert getattr(rows, name).tolist() == getattr(host, name).tolist()
    rows.clear()
    assert rows.logits_row.tolist() == [-1] * 5 and rows.top_p.tolist() == [1.0] * 5
