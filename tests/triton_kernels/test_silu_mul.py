from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from mmrt.tests.settings import examples
from mmrt.triton_kernels.silu_mul import reference, silu_mul, silu_mul_pair

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def close(actual: torch.Tensor, expected: torch.Tensor, roundings: int = 1) -> None:
    tolerance = roundings * {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}[actual.dtype]
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance / 10)


@settings(max_examples=examples(8), deadline=None, derandomize=True)
@given(num_rows=st.integers(1, 5), blocks=st.integers(1, 150), dtype=st.sampled_from(DTYPES), scale=st.sampled_from([0.1, 1.0, 40.0]))
def test_agrees_with_reference_and_torch(device: torch.device, num_rows: int, blocks: int, dtype: torch.dtype, scale: float) -> None:
    torch.manual_seed(blocks)
    size = 16 * blocks
    gate_up = (torch.randn(num_rows, 2 * size + 16, device=device) * scale).to(dtype)[:, : 2 * size]
    wide = torch.full((num_rows, size + 32), float("nan"), dtype=dtype, device=device)
    out, expected = wide[:, :size], torch.empty(num_rows, size, dtype=dtype, device=device)
    silu_mul(gate_up, out=out)
    reference.silu_mul(gate_up, expected)
    close(out, expected)
    gate, up = gate_up.chunk(2, -1)
    close(out, F.silu(gate).mul_(up), roundings=3)  # as the language model does on the CPU, rounding in between
    assert wide[:, size:].isnan().all()


def test_extreme_gates(device: torch.device) -> None:
    gate = torch.tensor([-1e30, -200.0, -0.0, 0.0, 200.0, 1e30, float("inf"), float("nan")], device=device).repeat(2)
    out = torch.empty(1, 16, device=device)
    silu_mul(torch.cat((gate, torch.ones_like(gate))).unsqueeze(0), out=out)
    expected = torch.tensor([0.0, 0.0, 0.0, 0.0, 200.0, 1e30, float("inf"), float("nan")], device=device).repeat(2)
    torch.testing.assert_close(out[0], expected, equal_nan=True)


@pytest.mark.parametrize("size", [1, 7, 16, 1030, 3420])
@pytest.mark.parametrize("dtype", DTYPES)
def test_two_matrices_of_any_width(device: torch.device, size: int, dtype: torch.dtype) -> None:
    """Rows one behind another and rows apart, each matrix at a distance of its own."""
    torch.manual_seed(size)
    for distances in ((0, 0, 0), (16, 48, 32), (1, 0, 6)):
        gate, up, wide = ((torch.randn(3, size + distance, device=device) * 4).to(dtype) for distance in distances)
        gate, up, out = gate[:, :size], up[:, :size], wide.fill_(float("nan"))[:, :size]
        expected = torch.empty(3, size, dtype=dtype, device=device)
        assert silu_mul_pair(gate, up, out=out) is out
        reference.silu_mul_pair(gate, up, expected)
        close(out, expected)
        close(out, F.silu(gate).mul_(up), roundings=3)
        assert wide[:, size:].isnan().all()


def test_a_pair_and_a_fused_projection_are_the_same(device: torch.device) -> None:
    """Made, and in place of either matrix."""
    torch.manual_seed(0)
    gate_up = torch.randn(4, 96, dtype=torch.bfloat16, device=device)
    expected = silu_mul(gate_up)
    assert torch.equal(silu_mul_pair(*gate_up.chunk(2, -1)), expected)
    for place in (0, 1):
        pair = [half.clone() for half in gate_up.chunk(2, -1)]
        assert torch.equal(silu_mul_pair(*pair, out=pair[place]), expected) and torch.equal(pair[place], expected)


def test_nothing_to_do(device: torch.device) -> None:
    assert silu_mul(torch.zeros(0, 64, device=device)).shape == (0, 32)
    for shape in ((0, 7), (7, 0)):
        assert silu_mul_pair(torch.zeros(shape, device=device), torch.zeros(shape, device=device)).shape == shape


def test_addresses_beyond_two_to_the_31(tmp_path: Path, device: torch.device) -> None:
    stride = 1 << 30
    if device.type == "cpu":  # a sparse file: only what is touched takes space
        buffer = torch.from_file(str(tmp_path / "rows"), shared=True, size=2 * stride + 64, dtype=torch.bfloat16)
    else:
        buffer = torch.zeros(2 * stride + 64, dtype=torch.bfloat16, device=device)
    gate_up = buffer.as_strided((3, 64), (stride, 1))
    torch.manual_seed(0)
    gate_up.copy_(torch.randn(3, 64))
    out, expected = torch.empty(3, 32, dtype=torch.bfloat16, device=device), torch.empty(3, 32, dtype=torch.bfloat16, device=device)
    silu_mul(gate_up, out=out)
    reference.silu_mul(gate_up, expected)
    close(out, expected)
    silu_mul_pair(*gate_up[:, :62].chunk(2, -1), out=out[:, :31])
    reference.silu_mul_pair(*gate_up[:, :62].chunk(2, -1), expected[:, :31])
    close(out, expected)


BAD: dict[str, Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]] = {
    "out is torch.float16": lambda gate_up, out: (gate_up, out.half()),
    "gate_up is torch.int32": lambda gate_up, out: (gate_up.int(), out.int()),
    "gate_up has 32 columns and out 32": lambda gate_up, out: (gate_up[:, :32], out),
    r"out has shape \[32\]": lambda gate_up, out: (gate_up, out[0]),
    r"out has shape \[1, 32\]": lambda gate_up, out: (gate_up, out[:1]),
    "out 24, not twice a multiple of 16": lambda gate_up, out: (gate_up[:, :48], out[:, :24]),
    "gate_up has stride 2": lambda gate_up, out: (gate_up.repeat(1, 2)[:, ::2], out),
    "out has stride 33": lambda gate_up, out: (gate_up, F.pad(out, (0, 1))[:, :32]),
    "out is on meta": lambda gate_up, out: (gate_up, out.to("meta")),
}


@pytest.mark.parametrize("message", BAD)
def test_bad_input(device: torch.device, message: str) -> None:
    gate_up, out = BAD[message](torch.zeros(2, 64, device=device), torch.zeros(2, 32, device=device))
    with pytest.raises(ValueError, match=message):
        silu_mul(gate_up, out=out)


BAD_PAIRS: dict[str, Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor, torch.Tensor]]] = {
    "gate is torch.int32": lambda x: (x.int(), x, x),
    r"gate has shape \[7\]": lambda x: (x[0], x, x),
    "up is torch.float16": lambda x: (x, x.half(), x),
    r"up has shape \[1, 7\]": lambda x: (x, x[:1], x),
    "up is on meta": lambda x: (x, x.to("meta"), x),
    "gate has stride 2": lambda x: (x.repeat(1, 2)[:, ::2], x, x),
    "up has stride 2": lambda x: (x, x.T.contiguous().T, x),
    r"out has shape \[2, 6\]": lambda x: (x, x, x[:, :6]),
    "out is torch.bfloat16": lambda x: (x, x, x.bfloat16()),
}


@pytest.mark.parametrize("message", BAD_PAIRS)
def test_bad_pairs(device: torch.device, message: str) -> None:
    gate, up, out = BAD_PAIRS[message](torch.zeros(2, 7, device=device))
    with pytest.raises(ValueError, match=message):
        silu_mul_pair(gate, up, out=out)
