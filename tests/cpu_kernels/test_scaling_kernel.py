"""Sums of int8's products as numbers: the bits of torch's operations."""

import pytest
import torch

from mmrt.cpu_kernels import kernel
from mmrt.cpu_kernels.scaling_kernel import has_kernel, scale
from mmrt.tests.models.guarded import guarded

pytestmark = pytest.mark.skipif(kernel.vector_width() is None, reason="this processor has no kernels")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("num_threads", [1, 3])
def test_sums_are_scaled_as_by_torch(dtype: torch.dtype, num_threads: int) -> None:
    """A block of columns of a wider result, whose other columns stay as they are."""
    torch.set_num_threads(num_threads)
    generator = torch.Generator().manual_seed(0)
    for num_rows, num_values in ((1, 16), (7, 48), (50, 1024)):
        sums = torch.randint(-(1 << 30), 1 << 30, (num_rows, num_values), generator=generator, dtype=torch.int32)
        less = torch.randint(-1000, 1000, (num_values,), generator=generator, dtype=torch.int32)
        steps, row_steps = (torch.rand(shape, generator=generator) for shape in ((num_values,), (num_rows, 1)))
        row_steps[0] = torch.nan if num_rows == 7 else row_steps[0]
        out = torch.full((num_rows, num_values + 32), 5.0, dtype=dtype)
        scale(guarded(sums, at_end=True), guarded(less, at_end=True), guarded(steps, at_end=True), row_steps, out[:, 16:-16])
        expected = torch.mul(sums - less, steps).mul_(row_steps).to(dtype)
        torch.testing.assert_close(out[:, 16:-16], expected, rtol=0, atol=0, equal_nan=True)
        assert (out[:, :16] == 5).all() and (out[:, -16:] == 5).all()


def test_columns_that_are_no_whole_vectors_have_no_kernel() -> None:
    assert has_kernel(32, torch.bfloat16) and not has_kernel(36, torch.bfloat16) and not has_kernel(32, torch.float16)
    zeros = torch.zeros(3, 36, dtype=torch.int32)
    with pytest.raises(AssertionError):
        scale(zeros, zeros[0], torch.ones(36), torch.ones(3, 1), torch.empty(3, 36))
