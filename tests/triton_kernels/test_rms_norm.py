from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from mmrt.tests.settings import examples
from mmrt.triton_kernels.rms_norm import add_rms_norm, reference, rms_norm

EPSILON = 1e-6
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Within one rounding of the dtype."""
    tolerance = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}[actual.dtype]
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance / 10)


def rows(num_rows: int, size: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Random rows at a stride that is a multiple of 16, as views of a wider buffer."""
    return torch.randn(num_rows, -(-size // 16) * 16 + 16, device=device).to(dtype)[:, :size]


def poisoned(like: torch.Tensor) -> torch.Tensor:
    wide = torch.full((like.shape[0], like.stride(0)), float("nan"), dtype=like.dtype, device=like.device)
    return wide[:, : like.shape[1]]


@settings(max_examples=examples(8), deadline=None, derandomize=True)
@given(num_rows=st.integers(1, 5), size=st.integers(1, 3000), dtype=st.sampled_from(DTYPES), scale=st.sampled_from([1e-3, 1.0, 300.0]))
def test_agrees_with_reference_and_torch(device: torch.device, num_rows: int, size: int, dtype: torch.dtype, scale: float) -> None:
    torch.manual_seed(size)
    x, residual = rows(num_rows, size, dtype, device) * scale, rows(num_rows, size, dtype, device)
    weight = torch.randn(size, device=device).to(dtype)
    x, residual = (poisoned(rows(num_rows, size, dtype, device)).copy_(values) for values in (x, residual))
    out, expected = poisoned(x), torch.empty_like(x)
    rms_norm(x, weight, EPSILON, out=out)
    reference.rms_norm(x, weight, EPSILON, expected)
    close(out, expected)
    close(out, F.rms_norm(x, (size,), weight, EPSILON))

    total = residual + x  # as the language model adds on the CPU
    assert add_rms_norm(x, residual, weight, EPSILON, out=out) is out
    assert torch.equal(residual, total)
    close(out, F.rms_norm(total, (size,), weight, EPSILON))


def test_weights_in_float32(device: torch.device) -> None:
    """As norms of 1 + w are kept: 1 + w in bfloat16 would lose some of w."""
    x, weight = torch.randn(2, 48, device=device).bfloat16(), 1 + 1e-3 * torch.randn(48, device=device)
    expected = F.rms_norm(x.float(), (48,), weight, EPSILON).bfloat16()
    assert torch.equal(rms_norm(x, weight, EPSILON), expected) and not torch.equal(rms_norm(x, weight.bfloat16(), EPSILON), expected)


def test_in_place(device: torch.device) -> None:
    torch.manual_seed(0)
    x, residual, weight = torch.randn(3, 96, device=device), torch.randn(3, 96, device=device), torch.randn(96, device=device)
    expected = F.rms_norm(x + residual, (96,), weight, EPSILON)
    add_rms_norm(x, residual, weight, EPSILON, out=x)
    close(x, expected)
    expected = F.rms_norm(x, (96,), weight, EPSILON)
    rms_norm(x, weight, EPSILON, out=x)
    close(x, expected)


def test_rows_of_zeros_and_no_rows(device: torch.device) -> None:
    x, weight = torch.zeros(2, 32, device=device), torch.ones(32, device=device)
    out = torch.full_like(x, float("nan"))
    rms_norm(x, weight, EPSILON, out=out)
    assert not out.any()
    rms_norm(x[:0], weight, EPSILON, out=out[:0])


def test_a_bad_row_spoils_no_other(device: torch.device) -> None:
    x, weight = torch.ones(3, 32, device=device), torch.ones(32, device=device)
    x[1] = float("nan")
    out = torch.empty_like(x)
    rms_norm(x, weight, EPSILON, out=out)
    assert out[1].isnan().all() and out[[0, 2]].isfinite().all()


def test_addresses_beyond_two_to_the_31(tmp_path: Path, device: torch.device) -> None:
    stride, num_rows = 1 << 30, 3
    if device.type == "cpu":  # a sparse file: only what is touched takes space
        buffer = torch.from_file(str(tmp_path / "rows"), shared=True, size=2 * stride + 64, dtype=torch.bfloat16)
    else:
        buffer = torch.zeros(2 * stride + 64, dtype=torch.bfloat16, device=device)
    x = buffer.as_strided((num_rows, 64), (stride, 1))
    torch.manual_seed(0)
    x.copy_(torch.randn(num_rows, 64))
    expected = F.rms_norm(x, (64,), torch.ones(64, dtype=x.dtype, device=device), EPSILON)
    rms_norm(x, torch.ones(64, dtype=x.dtype, device=device), EPSILON, out=x)
    close(x.clone(), expected)


Arguments = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
BAD: dict[str, Callable[[torch.Tensor, torch.Tensor], Arguments]] = {
    r"x has shape \[32\]": lambda x, weight: (x[0], x, weight, x),
    "x is torch.int32": lambda x, weight: (x.int(), x, weight, x),
    "16416 elements": lambda x, weight: (x.repeat(1, 513), x, weight, x),
    r"weight has shape \[16\], not \[32\]": lambda x, weight: (x, x, weight[:16], x),
    "weight is torch.float16": lambda x, weight: (x, x, weight.half(), x),
    "weight is on meta": lambda x, weight: (x, x, weight.to("meta"), x),
    "weight has stride 2": lambda x, weight: (x, x, weight.repeat(2)[::2], x),
    "residual is torch.float16": lambda x, weight: (x, x.half(), weight, x),
    "residual is on meta": lambda x, weight: (x, x.to("meta"), weight, x),
    "residual has stride 2": lambda x, weight: (x, x.repeat(1, 2)[:, ::2], weight, x),
    r"out has shape \[1, 32\]": lambda x, weight: (x, x, weight, x[:1]),
    "out has stride 33": lambda x, weight: (x, x, weight, F.pad(x, (0, 1))[:, :32]),
    "out starts 4 bytes": lambda x, weight: (x, x, weight, F.pad(x, (0, 32))[:, 1:33]),
}


@pytest.mark.parametrize("message", BAD)
def test_bad_input(device: torch.device, message: str) -> None:
    x, residual, weight, out = BAD[message](torch.zeros(2, 32, device=device), torch.ones(32, device=device))
    with pytest.raises(ValueError, match=message):
        add_rms_norm(x, residual, weight, EPSILON, out=out)


def test_out_is_made_where_it_is_not_given(device: torch.device) -> None:
    torch.manual_seed(0)
    x, residual, weight = torch.randn(3, 32, device=device), torch.randn(3, 32, device=device), torch.ones(32, device=device)
    close(rms_norm(x, weight, EPSILON), F.rms_norm(x, (32,), weight, EPSILON))
    close(add_rms_norm(x, residual.clone(), weight, EPSILON), F.rms_norm(x + residual, (32,), weight, EPSILON))
