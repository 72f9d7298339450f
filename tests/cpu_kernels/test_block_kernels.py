"""Kernels that convert weights when they are loaded: the bits that torch's operations give."""

import pytest
import torch

from mmrt.cpu_kernels import block_kernels, kernel, packing_kernel
from mmrt.models.checkpoint import gguf_blocks, int4, int8g

pytestmark = pytest.mark.skipif(kernel.vector_width() is None, reason="this processor has no kernels")


def some_blocks(kind: str, count: int, spread: float = 0.01) -> torch.Tensor:
    """Of any bytes, but for halves, which are finite."""
    generator = torch.Generator().manual_seed(7)
    blocks = torch.randint(0, 256, (count, gguf_blocks.BLOCKS[kind][1]), dtype=torch.uint8, generator=generator)
    for at in (208,) if kind == "Q6_K" else (0, 2):
        blocks[:, at : at + 2] = (torch.randn(count, 1, generator=generator) * spread).half().view(torch.uint8)
    return blocks


@pytest.mark.parametrize("kind", ["Q4_K", "Q5_K", "Q6_K"])
@pytest.mark.parametrize("spread", [0.01, 1e-7, 1e4])
def test_values_have_the_same_bits(kind: str, spread: float) -> None:
    blocks = some_blocks(kind, 100, spread)
    assert block_kernels.has_kernel(blocks, kind)
    assert torch.equal(block_kernels.values(blocks, kind), gguf_blocks._VALUES[kind](blocks))


@pytest.mark.parametrize(("num_rows", "num_columns"), [(32, 256), (96, 768), (64, 1024)])
def test_codes_lie_as_int4_says(num_rows: int, num_columns: int) -> None:
    rows = some_blocks("Q4_K", num_rows * num_columns // 256).view(num_rows, -1)
    targets = [torch.zeros(num_rows, num_columns // 2, dtype=torch.uint8) for _ in range(2)]
    scales = [torch.zeros(num_rows, num_columns // 32, 2, dtype=torch.bfloat16) for _ in range(2)]
    block_kernels.pack(rows, targets[0], scales[0])
    int4.pack(*gguf_blocks.block_codes(rows, "Q4_K"), targets[1], scales[1])
    assert torch.equal(*targets) and torch.equal(*scales)


def packed(values: torch.Tensor, by_kernel: bool) -> tuple[torch.Tensor, torch.Tensor]:
    target = torch.zeros(values.shape, dtype=torch.int8)
    scales = torch.zeros(values.shape[0], values.shape[1] // 32, dtype=torch.bfloat16)
    if by_kernel:
        packing_kernel.pack(values, target, scales)
    else:
        int8g.pack(*int8g.quantize(values.clone()), target, scales)
    return target, scales


@pytest.mark.parametrize(("num_rows", "num_columns"), [(32, 32), (64, 96), (32, 1024)])
@pytest.mark.parametrize("size", [1, 1e-30, 1e-38, 1e-41, 1e30, 1e38])
def test_groups_are_rounded_to_the_same_bits(num_rows: int, num_columns: int, size: float) -> None:
    values = torch.randn(num_rows, num_columns, generator=torch.Generator().manual_seed(7)) * size
    values[3], values[5, :32] = 0, size
    assert packing_kernel.has_kernel(values)
    ours, theirs = packed(values, True), packed(values, False)
    assert torch.equal(ours[0], theirs[0]) and torch.equal(ours[1], theirs[1])


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_is_seen_in_its_scale(value: float) -> None:
    values = torch.ones(64, 64)
    values[40, 33] = value
    ours, theirs = (packed(values, by_kernel)[1].isfinite() for by_kernel in (True, False))
    assert torch.equal(ours, theirs) and int((~ours).sum()) == 1


def test_memory_that_does_not_fit_is_refused() -> None:
    """Before anything is written."""
    values, target = torch.ones(32, 64), torch.zeros(32, 64, dtype=torch.int8)
    with pytest.raises(AssertionError):
        packing_kernel.pack(values, target, torch.zeros(32, 1, dtype=torch.bfloat16))
    with pytest.raises(AssertionError):
        block_kernels.pack(some_blocks("Q4_K", 31), torch.zeros(31, 128, dtype=torch.uint8), torch.zeros(31, 8, 2))
