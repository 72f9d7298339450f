"""Rows in groups, each by rows of its own of a matrix: the bits that each group has alone, whatever the team."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from mmrt.cpu_kernels import int4_kernels, int8_kernels, int8g_kernels, kernel, panel_kernels, row_kernels
from mmrt.cpu_kernels.groups import Groups
from mmrt.tests.models.kept import keep

pytestmark = pytest.mark.skipif(kernel.vector_width() is None, reason="this processor has no kernels")

COLUMNS = 512  # enough weights for several threads
SIZES = [3, 1, 0, 9, 5, 60, 2]
FIRSTS = [480, 0, 96, 192, 960, 288, 640]  # of the matrix's rows, of which each has 160 (in int4 and int8g) or fewer
NUM_VALUES = 1120
Product = Callable[[Tensor, "Groups | slice"], Tensor]


def _matrix() -> Tensor:
    return torch.randn(NUM_VALUES, COLUMNS, generator=torch.Generator().manual_seed(0))


def _floats(dtype: torch.dtype, module: object) -> Product:
    values = _matrix().to(dtype)

    def product(x: Tensor, of: Groups | slice) -> Tensor:
        if isinstance(of, slice):
            return module.multiply(x, values[of])  # type: ignore[attr-defined]
        return module.multiply_groups(x, values, of)  # type: ignore[attr-defined]

    return product


def _packed(form: str) -> Product:
    kernels = {"int8g": int8g_kernels, "int4": int4_kernels}[form]
    packed, scales = keep(_matrix(), form).values()

    def product(x: Tensor, of: Groups | slice) -> Tensor:
        if isinstance(of, slice):
            return kernels.multiply(x, packed[of], scales[of])
        return kernels.multiply_groups(x, packed, scales, of)

    return product


def _int8(codes: torch.dtype) -> Product:
    generator = torch.Generator().manual_seed(1)
    values = torch.randint(-127, 128, (NUM_VALUES, COLUMNS), generator=generator, dtype=torch.int8)
    added = torch.randint(-1000, 1000, (NUM_VALUES,), generator=generator, dtype=torch.int32)
    steps = torch.rand(NUM_VALUES, generator=generator)

    def product(x: Tensor, of: Groups | slice) -> Tensor:
        whole, row_steps = (x.clamp(-2, 2) * 32 + 64).to(codes), x[:, :1].contiguous()
        if isinstance(of, slice):
            return int8_kernels.multiply(whole, values[of], added[of], steps[of], row_steps)
        return int8_kernels.multiply_groups(whole, values, added, steps, row_steps, of)

    return product


DTYPES = (torch.float32, torch.bfloat16, torch.float16)
PRODUCTS: dict[str, tuple[Callable[[], Product], int]] = {
    **{f"rows-{dtype}": (lambda dtype=dtype: _floats(dtype, row_kernels), 157) for dtype in DTYPES},  # type: ignore[misc]
    **{f"panels-{dtype}": (lambda dtype=dtype: _floats(dtype, panel_kernels), 157) for dtype in DTYPES},  # type: ignore[misc]
    "int8": (lambda: _int8(torch.uint8), 157),
    "int8-full": (lambda: _int8(torch.int8), 157),
    "int8g": (lambda: _packed("int8g"), 160),
    "int4": (lambda: _packed("int4"), 160),
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_each_group_has_the_bits_that_it_has_alone(name: str) -> None:
    """Blocks and parts of threads end within groups' rows of the matrix, and some groups begin beyond others."""
    make, num_values = PRODUCTS[name]
    product, x = make(), torch.randn(sum(SIZES), COLUMNS, generator=torch.Generator().manual_seed(2))
    parts = zip(x.split(SIZES), FIRSTS, strict=True)
    torch.set_num_threads(1)
    expected = torch.cat([product(rows, slice(first, first + num_values)) for rows, first in parts if len(rows)])
    for num_threads in (1, 2, 3, 7):
        torch.set_num_threads(num_threads)
        found = product(x, Groups(SIZES, FIRSTS, num_values))
        assert found.dtype == torch.float32 and found.is_contiguous()
        assert torch.equal(found, expected), num_threads
    for order in ([6, 5, 4, 3, 2, 1, 0], [3, 0, 5]):
        groups = Groups([SIZES[index] for index in order], [FIRSTS[index] for index in order], num_values)
        rows, outs = x.split(SIZES), expected.split(SIZES)
        assert torch.equal(product(torch.cat([rows[index] for index in order]), groups), torch.cat([outs[index] for index in order]))
    assert product(x[:0], Groups([], [], num_values)).shape == (0, num_values)


@pytest.mark.parametrize("name", PRODUCTS)
@pytest.mark.parametrize(
    ("sizes", "firsts", "columns"), [([4], [0], 512), ([3], [992], 512), ([3], [-32], 512), ([3], [0], 64)], ids=str
)
def test_groups_that_do_not_fit_are_refused(name: str, sizes: list[int], firsts: list[int], columns: int) -> None:
    make, num_values = PRODUCTS[name]
    with pytest.raises(ValueError, match=r"activations \[3, "):
        make()(torch.zeros(3, columns), Groups(sizes, firsts, num_values))


def test_rows_that_are_doubled() -> None:
    groups = Groups([2, 0, 3, 1], [0, 10, 20, 30], 10).doubled([1, 2, 4, 5])
    assert groups.sizes.tolist() == [3, 0, 5, 2] and groups.firsts.tolist() == [0, 10, 20, 30]
    assert groups.starts.tolist() == [0, 3, 3, 8]
