"""Products of many rows of bfloat16 are those of float64 but for rounding, whatever rows are near."""

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from mmrt.cpu_kernels import kernel, pair_kernels
from mmrt.cpu_kernels.groups import Groups
from mmrt.cpu_kernels.pair_kernels import can_multiply, multiply, multiply_groups
from mmrt.models.lm.matrices import FloatMatrix
from mmrt.tests.models.guarded import guarded
from mmrt.tests.settings import examples

pytestmark = pytest.mark.skipif(not kernel.has_bfloat16(), reason="this processor has no kernels")


def random(num_rows: int, num_columns: int, seed: int = 0) -> Tensor:
    return torch.randn(num_rows, num_columns, generator=torch.Generator().manual_seed(seed)).bfloat16()


def assert_product(found: Tensor, x: Tensor, values: Tensor, bias: Tensor | None = None) -> None:
    """A sum of float32 is off by at most some units in the last place of what it adds up; then it is rounded."""
    added = x.double().abs() @ values.double().abs().T
    expected = x.double() @ values.double().T + (0 if bias is None else bias.double())
    assert found.dtype == torch.bfloat16 and found.shape == added.shape and found.is_contiguous()
    assert ((found.double() - expected).abs() <= 2e-6 * added + expected.abs() / 250 + 1e-30).all()


@settings(max_examples=examples(60), deadline=None)
@given(
    num_rows=st.integers(0, 40),
    num_values=st.integers(1, 150),
    vectors=st.integers(1, 140),
    num_threads=st.integers(1, 3),
    has_bias=st.booleans(),
    seed=st.integers(0, 99),
)
@example(13, 65, 65, 1, True, 0)  # the second block of columns has one vector
@example(12, 64, 64, 1, False, 0)  # everything is whole
def test_products_are_exact(num_rows: int, num_values: int, vectors: int, num_threads: int, has_bias: bool, seed: int) -> None:
    torch.set_num_threads(num_threads)
    values, x = random(num_values, 32 * vectors, seed), random(num_rows, 32 * vectors, seed + 1)
    bias = random(1, num_values, seed + 2)[0] if has_bias else None
    assert can_multiply(values)
    assert_product(multiply(x, values, bias), x, values, bias)


@pytest.mark.parametrize("at_end", [False, True])
def test_nothing_beyond_matrix_activations_and_bias_is_touched(at_end: bool) -> None:
    for num_rows, num_values, num_columns in ((1, 1, 32), (13, 65, 96), (50, 31, 2080), (25, 300, 160)):
        values, x = (guarded(random(count, num_columns, count), at_end=at_end) for count in (num_values, num_rows))
        bias = guarded(random(1, num_values, 2), at_end=at_end)[0]
        assert_product(multiply(x, values, bias), x, values, bias)


def test_every_number_of_a_matrix_and_of_activations_comes_to_its_place() -> None:
    """Products of whole numbers are exact in any order; so are sums below 256 in bfloat16."""
    generator = torch.Generator().manual_seed(0)
    values = torch.randint(-1, 2, (77, 2112), generator=generator)
    x = torch.randint(-1, 2, (29, 2112), generator=generator)
    expected = x @ values.T
    assert expected.abs().max() < 256
    assert torch.equal(multiply(x.bfloat16(), values.bfloat16()), expected.bfloat16())


def test_a_row_is_the_same_bits_in_any_batch_and_team() -> None:
    """The matrix has enough rows for several threads, blocks that do not divide evenly, and two blocks of columns."""
    values, x = random(700, 2080), random(75, 2080)
    expected = multiply(x, values)
    for num_threads in (1, 2, 3):
        torch.set_num_threads(num_threads)
        for first, last in ((0, 1), (3, 5), (1, 7), (2, 51), (5, 75), (0, 75)):
            assert torch.equal(multiply(x[first:last], values), expected[first:last]), (num_threads, first, last)


def test_groups_are_the_same_bits_as_one_by_one() -> None:
    for num_columns in (64, 2080):
        values, x = random(3 * 72, num_columns), random(40, num_columns, 1)
        found = multiply_groups(x, values, Groups([25, 0, 15], [144, 0, 72], 72))
        assert torch.equal(found, torch.cat([multiply(x[:25], values[144:]), multiply(x[25:], values[72:144])]))
    with pytest.raises(ValueError, match="in groups of 40 rows"):
        multiply_groups(x[:39], values, Groups([25, 0, 15], [144, 0, 72], 72))


def test_missing_and_infinite_numbers_stay_in_their_row_and_column() -> None:
    values, x = random(70, 64), random(50, 64)
    expected = multiply(x, values)
    x[7, 3], values[69, 5] = float("nan"), float("inf")
    found = multiply(x, values)
    is_hit = torch.zeros_like(found, dtype=torch.bool)
    is_hit[7] = is_hit[:, 69] = True
    assert torch.equal(found[~is_hit], expected[~is_hit]) and not found[is_hit].isfinite().any()


def test_activations_may_be_a_part_of_a_wider_tensor() -> None:
    values, wide = random(70, 64), random(50, 200)
    assert_product(multiply(wide[:, 101:165], values), wide[:, 101:165], values)


def test_matrices_without_a_kernel() -> None:
    for values in (random(8, 48), random(32, 32).t()[:, :16], random(8, 64).float(), random(0, 64), random(8, 64).to("meta")):
        assert not can_multiply(values)


@pytest.mark.parametrize("num_columns", [32, 96])
def test_activations_that_do_not_fit_a_matrix_are_refused(num_columns: int) -> None:
    with pytest.raises(ValueError, match="by a matrix of 64 columns"):
        multiply(random(50, num_columns), random(70, 64))


@pytest.mark.parametrize("has_amx", [False, True])
def test_many_rows_of_bfloat16_are_multiplied_by_it(has_amx: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless AMX multiplies them: torch uses it."""
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: has_amx)
    calls = []
    monkeypatch.setattr(pair_kernels, "multiply", lambda x, values, bias: calls.append(x.shape) or multiply(x, values, bias))
    values = random(70, 64)
    matrix = FloatMatrix(values)
    for num_rows in (2, 50):
        assert_product(matrix.product(random(num_rows, 64)), random(num_rows, 64), values)
    assert calls == ([] if has_amx else [(50, 64)])
