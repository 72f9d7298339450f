"""A layer's operations by kernels: against float64, and the same bits in any batch and team of threads."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mmrt.cpu_kernels import kernel, layer_kernels
from mmrt.models.lm.rope import rotate
from mmrt.tests.settings import examples

DTYPES = (torch.float32, torch.bfloat16)
EPSILON = torch.tensor(1e-6)

pytestmark = pytest.mark.skipif(kernel.vector_width() is None, reason="this processor has no kernels")


def assert_near(found: Tensor, exact: Tensor) -> None:
    """Within some units in the last place of float32, or rounded once to bfloat16."""
    tolerance = 2e-6 if found.dtype == torch.float32 else 2**-8
    assert ((found.double() - exact).abs() <= tolerance * exact.abs() + 1e-7).all()


@settings(max_examples=examples(30), deadline=None)
@given(st.sampled_from(DTYPES), st.integers(1, 5), st.integers(1, 9), st.sampled_from([1e-4, 1.0, 300.0]), st.integers(0, 99))
def test_add_norm(dtype: torch.dtype, num_rows: int, vectors: int, size: float, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    x, residual, weight = (
        (size * torch.randn(*shape, generator=generator)).to(dtype) for shape in ((num_rows, 16 * vectors),) * 2 + ((16 * vectors,),)
    )
    summed = residual + x
    found = layer_kernels.add_norm(x, residual, weight, EPSILON)
    assert torch.equal(residual, summed)
    exact = summed.double()
    assert_near(found, exact / (exact.square().mean(1, keepdim=True) + 1e-6).sqrt() * weight.double())
    assert torch.equal(layer_kernels.norm(summed, weight, EPSILON), found)
    assert layer_kernels.norm(summed, weight, EPSILON, out=summed) is summed and torch.equal(summed, found)


@settings(max_examples=examples(30), deadline=None)
@given(st.sampled_from(DTYPES), st.integers(1, 5), st.integers(1, 9), st.sampled_from([0.01, 1.0, 30.0]), st.integers(0, 99))
def test_silu_mul(dtype: torch.dtype, num_rows: int, vectors: int, size: float, seed: int) -> None:
    gate_up = (size * torch.randn(num_rows, 32 * vectors, generator=torch.Generator().manual_seed(seed))).to(dtype)
    gate, up = gate_up.double().chunk(2, 1)
    assert_near(layer_kernels.silu_mul(gate_up), gate * gate.sigmoid() * up)


def test_silu_of_huge_and_missing_numbers() -> None:
    gate_up = torch.ones(1, 32)
    gate_up[0, :10] = torch.tensor([-3e38, -90.0, 90.0, 1e4, torch.inf, torch.nan, 0.0, -1e-30, -torch.inf, 0.0])
    gate_up[0, 9] = torch.tensor(0x7FC00001, dtype=torch.int32).view(torch.float32)  # a missing number of another kind
    found = layer_kernels.silu_mul(gate_up)[0, :10]
    assert found[[5, 9]].isnan().all() and found[4] == torch.inf
    exact = torch.tensor([0.0, 0.0, 90.0, 1e4, 0.0, -5e-31, 0.0])
    torch.testing.assert_close(found[[0, 1, 2, 3, 6, 7, 8]], exact, rtol=1e-6, atol=1e-30)


def test_bfloat16_is_rounded_as_torch_rounds() -> None:
    """Sums of all numbers of bfloat16 with what is at and beside half of their last place."""
    upper = torch.arange(1 << 16, dtype=torch.int64)
    for lower in (0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF):
        values = (upper << 16 | lower).int().view(torch.float32).reshape(64, -1)
        high = values.bfloat16()
        low = (values - high.float()).bfloat16()
        residual = high.clone()
        layer_kernels.add_norm(low, residual, torch.ones(1024, dtype=torch.bfloat16), EPSILON)
        torch.testing.assert_close(residual, high + low, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rotate(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    heads = torch.randn(5, 7, 64, generator=generator).to(dtype)
    angles = torch.randn(5, 1, 32, generator=generator) * 100
    expected = heads.double()
    rotate(expected[:, :6], (angles.double().cos(), angles.double().sin(), -angles.double().sin()))
    found = heads.clone()
    layer_kernels.rotate(found, 6, angles.cos(), angles.sin())
    assert torch.equal(found[:, 6], heads[:, 6])
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=1e-5 if dtype == torch.float32 else 0.02)


def add_norm(values: Tensor) -> Tensor:
    return layer_kernels.add_norm(values.flatten(1), values.flatten(1) / 2, torch.ones(2048), EPSILON)


def silu_mul(values: Tensor) -> Tensor:
    return layer_kernels.silu_mul(values.flatten(1))


def rotated(values: Tensor) -> Tensor:
    angles = torch.arange(32.0).expand(len(values), 1, 32).contiguous()
    layer_kernels.rotate(values, 30, angles.cos(), angles.sin())
    return values


@pytest.mark.parametrize("operation", [add_norm, silu_mul, rotated])
def test_a_row_is_the_same_bits_in_any_batch_and_team(operation: Callable[[Tensor], Tensor]) -> None:
    values = torch.randn(61, 32, 64, generator=torch.Generator().manual_seed(2))
    expected = operation(values.clone())
    for num_threads in (1, 2, 3):
        torch.set_num_threads(num_threads)
        for first, last in ((0, 1), (3, 5), (1, 60), (0, 61)):
            assert torch.equal(operation(values[first:last].clone()), expected[first:last]), (num_threads, first, last)


def test_what_is_not_as_a_kernel_reads_it_is_refused() -> None:
    x = torch.ones(2, 64)
    with pytest.raises(ValueError, match="not contiguous"):
        layer_kernels.silu_mul(torch.ones(4, 128)[:, :64])
    with pytest.raises(ValueError, match="bfloat16"):
        layer_kernels.add_norm(x.bfloat16(), x, torch.ones(64), EPSILON)
    with pytest.raises(ValueError, match="64"):
        layer_kernels.add_norm(torch.ones(1, 64), x, torch.ones(64), EPSILON)
    with pytest.raises(ValueError, match="add_norm"):
        layer_kernels.add_norm(x, x.clone(), torch.ones(32), EPSILON)
    for weight, out in ((torch.ones(32), x), (torch.ones(64).bfloat16(), x), (torch.ones(64), x[:1])):
        with pytest.raises(ValueError, match="norm of"):
            layer_kernels.norm(x, weight, EPSILON, out)
    with pytest.raises(ValueError, match="no whole vectors"):
        layer_kernels.silu_mul(torch.ones(4, 40))
    with pytest.raises(ValueError, match="rotate 3 of heads"):
        layer_kernels.rotate(torch.ones(1, 2, 64), 3, torch.ones(1, 1, 32), torch.ones(1, 1, 32))
    with pytest.raises(ValueError, match="rotate 2 of heads"):
        layer_kernels.rotate(torch.ones(2, 2, 64), 2, torch.ones(1, 1, 32), torch.ones(1, 1, 32))
    assert not layer_kernels.has_kernels(torch.float32, 64, 20) and not layer_kernels.has_kernels(torch.float64, 64)
    assert layer_kernels.has_kernels(torch.bfloat16, 64, 32)
