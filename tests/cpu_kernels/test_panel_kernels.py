"""Products of many rows are those of float64 but for rounding, whatever rows are near. ``test_row_kernels`` repeats them with AVX2."""

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from mmrt.cpu_kernels import kernel, panel_kernels
from mmrt.cpu_kernels.panel_kernels import can_multiply, multiply
from mmrt.models.lm.matrices import FloatMatrix
from mmrt.tests.models.guarded import guarded
from mmrt.tests.settings import examples

DTYPES = (torch.float32, torch.bfloat16, torch.float16)

pytestmark = pytest.mark.skipif(kernel.vector_width() is None, reason="this processor has no kernels")


def random(num_rows: int, num_columns: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(num_rows, num_columns, generator=torch.Generator().manual_seed(seed)).to(dtype)


def assert_product(found: Tensor, x: Tensor, values: Tensor) -> None:
    """A sum of float32 is off by at most some units in the last place of what it adds up."""
    added = x.double().abs() @ values.double().abs().T
    assert found.dtype == torch.float32 and found.shape == added.shape and found.is_contiguous()
    assert ((found.double() - x.double() @ values.double().T).abs() <= 2e-6 * added + 1e-30).all()


@settings(max_examples=examples(60), deadline=None)
@given(
    dtype=st.sampled_from(DTYPES),
    num_rows=st.integers(0, 20),
    num_values=st.integers(1, 150),
    vectors=st.integers(1, 140),
    num_threads=st.integers(1, 3),
    seed=st.integers(0, 99),
)
@example(torch.bfloat16, 7, 65, 65, 1, 0)  # with AVX512 the second block of columns has one vector
@example(torch.bfloat16, 7, 65, 129, 1, 0)  # with AVX2
@example(torch.float16, 6, 64, 128, 1, 0)  # everything is whole
def test_products_are_exact(dtype: torch.dtype, num_rows: int, num_values: int, vectors: int, num_threads: int, seed: int) -> None:
    torch.set_num_threads(num_threads)
    num_columns = vectors * (kernel.vector_width() or 8)
    values, x = random(num_values, num_columns, dtype, seed), random(num_rows, num_columns, seed=seed + 1)
    assert can_multiply(values)
    assert_product(multiply(x, values), x, values)


@pytest.mark.parametrize("at_end", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_nothing_beyond_matrix_and_activations_is_touched(dtype: torch.dtype, at_end: bool) -> None:
    for num_rows, num_values, num_columns in ((1, 1, 16), (7, 65, 48), (50, 31, 1040), (13, 300, 80)):
        values = guarded(random(num_values, num_columns, dtype), at_end=at_end)
        x = guarded(random(num_rows, num_columns, seed=1), at_end=at_end)
        assert_product(multiply(x, values), x, values)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_number_of_a_matrix_and_of_activations_comes_to_its_place(dtype: torch.dtype) -> None:
    """Products of whole numbers are exact in any order."""
    generator = torch.Generator().manual_seed(0)
    values = torch.randint(-9, 10, (77, 1056), generator=generator).to(dtype)
    x = torch.randint(-9, 10, (29, 1056), generator=generator).float()
    assert torch.equal(multiply(x, values), x @ values.float().T)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_is_the_same_bits_in_any_batch_and_team(dtype: torch.dtype) -> None:
    """The matrix has enough rows for several threads, blocks that do not divide evenly, and two blocks of columns."""
    values, x = random(700, 1040, dtype), random(75, 1040)
    expected = multiply(x, values)
    for num_threads in (1, 2, 3):
        torch.set_num_threads(num_threads)
        for first, last in ((0, 1), (3, 5), (1, 7), (2, 51), (5, 75), (0, 75)):
            assert torch.equal(multiply(x[first:last], values), expected[first:last]), (num_threads, first, last)


def test_an_outlier_stays_in_its_row_and_column() -> None:
    values, x = random(70, 64), random(50, 64)
    expected = multiply(x, values)
    x[7, 3], values[69, 5] = float("nan"), float("inf")
    found = multiply(x, values)
    is_hit = torch.zeros_like(found, dtype=torch.bool)
    is_hit[7] = is_hit[:, 69] = True
    assert torch.equal(found[~is_hit], expected[~is_hit]) and not found[is_hit].isfinite().any()


def test_activations_may_be_a_part_of_a_wider_tensor() -> None:
    values, wide = random(70, 64, torch.bfloat16), random(50, 200)
    assert_product(multiply(wide[:, 100:164], values), wide[:, 100:164], values)
    assert_product(multiply(wide[:, :64].T[:, :].contiguous().T, values), wide[:, :64], values)


def test_matrices_without_a_kernel() -> None:
    for values in (
        random(8, 20),  # no whole vectors
        random(32, 32).t()[:, :16],  # not contiguous
        random(8, 64, torch.float64),
        torch.zeros(8, 64, dtype=torch.int8),
        torch.zeros(0, 64),
        torch.zeros(8, 64, device="meta"),
    ):
        assert not can_multiply(values)


@pytest.mark.parametrize("num_columns", [48, 80])
def test_activations_that_do_not_fit_a_matrix_are_refused(num_columns: int) -> None:
    with pytest.raises(ValueError, match="by a matrix of 64 columns"):
        multiply(random(50, num_columns), random(70, 64))


@pytest.mark.parametrize(("dtype", "is_used"), [(torch.float32, True), (torch.bfloat16, False)])
def test_many_rows_of_float32_are_multiplied_by_it(dtype: torch.dtype, is_used: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Others have arithmetic of their own."""
    calls = []
    monkeypatch.setattr(panel_kernels, "multiply", lambda x, values: calls.append(x.shape) or multiply(x, values))
    FloatMatrix(random(70, 64, torch.bfloat16)).product(random(50, 64, dtype))
    assert calls == [(50, 64)] * is_used
