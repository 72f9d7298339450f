"""A checkpoint's numbers in narrower formats: rounding, rows that are hard to scale, and numbers that a format does not have."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mmrt.models.checkpoint import int8g, narrowing
from mmrt.models.checkpoint.narrowing import narrow
from mmrt.tests.models.kept import exact, keep
from mmrt.tests.settings import examples


def quantized(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    target, scales = torch.empty(values.shape, dtype=torch.int8), torch.empty(len(values), dtype=torch.bfloat16)
    narrow(values, target, scales)
    return target, scales


@settings(max_examples=examples(60), deadline=None)
@given(
    shape=st.tuples(st.integers(1, 40), st.integers(1, 70)),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.float64]),
    magnitude=st.floats(-4, 4),
    block=st.sampled_from([1, 64, 100, 1 << 20]),
    seed=st.integers(0, 99),
)
def test_int8_is_within_half_a_step(shape: tuple[int, int], dtype: torch.dtype, magnitude: float, block: int, seed: int) -> None:
    """The largest of a row is exact but for rounding, all others are at most half a step away, in blocks of any size."""
    torch.manual_seed(seed)
    values = (torch.randn(shape) * 10**magnitude).to(dtype)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(narrowing, "_BLOCK_VALUES", block)
        target, scales = quantized(values)
    found = target.double() * scales.double().unsqueeze(1)
    error = (found - values.double()).abs()
    assert (error <= 0.501 * scales.double().unsqueeze(1)).all()
    assert (target.abs().amax(1) == 127).logical_or(values.abs().amax(1) == 0).all()


@pytest.mark.parametrize("largest", [0.0, 1e-45, 1e-38, 1e-30, 3e38])
def test_rows_that_are_hard_to_scale(largest: float) -> None:
    values = torch.tensor([[largest, -largest / 2, 0.0], [1.0, -1.0, 0.5]])
    target, scales = quantized(values)
    found = target.double() * scales.double().unsqueeze(1)
    assert (found[0] - values[0].double()).abs().max() <= max(largest / 250, 2e-36)
    assert target[1].tolist() == [127, -127, 64]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_int8_refuses_numbers_that_are_not_finite(value: float) -> None:
    values = torch.zeros(3, 4)
    values[2, 1] = value
    with pytest.raises(ValueError, match="not finite, which int8 cannot hold"):
        quantized(values)


@settings(max_examples=examples(30), deadline=None)
@given(
    shape=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    magnitude=st.floats(-4, 4),
    block=st.sampled_from([1, 5000, 1 << 20]),
    seed=st.integers(0, 99),
)
def test_int8g_is_within_half_a_step(shape: tuple[int, int], magnitude: float, block: int, seed: int) -> None:
    """As int8, of each 32 columns: an outlier makes only its neighbours coarser. Rows are where they are looked up."""
    torch.manual_seed(seed)
    values = torch.randn(32 * shape[0], 32 * shape[1]) * 10**magnitude
    values[3, 5], values[4, :32] = 1000 * values[3, 5], 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(narrowing, "_BLOCK_VALUES", block)
        kept = keep(values, "int8g")
    found = exact(kept)
    groups, error = values.view(len(values), -1, 32), (found - values.double()).abs().view(len(values), -1, 32)
    assert (error <= 0.501 * 1.004 / 127 * groups.abs().amax(2, keepdim=True)).all()
    rows = torch.randint(len(values), (3, 2))
    assert torch.equal(int8g.unpack_rows(kept["w"], kept["w.scales"], rows, torch.float64), found[rows])


@pytest.mark.parametrize("form", ["int8g", "int4"])
def test_packed_formats_refuse_numbers_that_are_not_finite(form: str) -> None:
    values = torch.zeros(32, 64)
    values[2, 40] = float("nan")
    with pytest.raises(ValueError, match=f"not finite, which {form} cannot hold"):
        keep(values, form)


def test_float16_refuses_what_it_cannot_hold() -> None:
    values = torch.zeros(3, 4)
    values[1, 2] = -65504.0
    target = torch.empty(3, 4, dtype=torch.float16)
    narrow(values, target)
    assert torch.equal(target.float(), values)
    values[1, 2] = -70000.0
    with pytest.raises(ValueError, match="has -70000, float16 holds at most 65504"):
        narrow(values, target)
    values[1, 2] = float("nan")
    with pytest.raises(ValueError, match="has nan, float16 holds at most 65504"):
        narrow(values, target)


def test_float16_holds_bfloat16_exactly_from_2_to_the_minus_17() -> None:
    """Smaller numbers are rounded to a multiple of 2^-24."""
    values = torch.tensor([2.0**e * (1 + m / 128) for e in range(-17, 16) for m in range(128)]).bfloat16().view(-1, 128)
    target = torch.empty(values.shape, dtype=torch.float16)
    narrow(values, target)
    assert torch.equal(target.double(), values.double())
    narrow(values.flip(0) * 2.0**-12, target)
    assert (target.double() - values.flip(0).double() * 2.0**-12).abs().max() <= 2.0**-25
