"""Sections ``rms_norm`` and ``silu_mul``: operations on rows, whose limit is bandwidth."""

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from mmrt.triton_kernels.rms_norm import add_rms_norm, rms_norm
from mmrt.triton_kernels.rms_norm import reference as norm_reference
from mmrt.triton_kernels.silu_mul import reference as silu_reference
from mmrt.triton_kernels.silu_mul import silu_mul, silu_mul_pair

from .case import Check, Size, Timing, require_close, require_equal, type_name
from .results import Row
from .timing import Clock, Timed

_EPSILON = 1e-6
_RELATIVE = {torch.bfloat16: 1.6e-2, torch.float16: 2e-3}
_SMALL_COPIES = 16  # of launches of a few microseconds, in one graph


def checks(device: torch.device, size: Size) -> Iterator[Check]:
    """Rows of a power of two and others."""
    num_rows, sizes = (3, (48, 64)) if size == "tiny" else (1000, (2048, 3584, 18944 // 2))
    for columns in sizes:
        for dtype in _RELATIVE:
            shape = f"{type_name(dtype)}, {num_rows} x {columns}"
            yield Check(f"rms_norm, {shape}", partial(_check_norm, device, num_rows, columns, dtype))
            yield Check(f"add_rms_norm, {shape}", partial(_check_add_norm, device, num_rows, columns, dtype))
            yield Check(f"silu_mul, {shape}", partial(_check_silu, device, num_rows, columns - columns % 16, dtype))
            yield Check(f"silu_mul of two, {shape} - 4", partial(_check_pair, device, num_rows, columns - 4, dtype))


def timings(quick: bool) -> Iterator[Timing]:
    """Hundreds of megabytes, and the few rows of a decode step."""
    yield Timing("rms_norm, 32768 x 4096", partial(_norm, 32768, 4096, 1, "traffic"))
    yield Timing("add_rms_norm, 32768 x 3584", partial(_add_norm, 32768, 3584, 1, "traffic"))
    yield Timing("silu_mul, 8192 x 18944", partial(_silu, 8192, 18944, 1, "traffic"))
    yield Timing("silu_mul of two, 5184 x 3420", partial(_pair, 5184, 3420))
    if quick:
        return
    yield Timing("add_rms_norm, 64 x 3584, in L2", partial(_add_norm, 64, 3584, _SMALL_COPIES, ""))
    yield Timing("silu_mul, 64 x 18944, in L2", partial(_silu, 64, 18944, _SMALL_COPIES, ""))


def _check_norm(device: torch.device, num_rows: int, columns: int, dtype: torch.dtype) -> float:
    x, weight = _random(num_rows, columns, dtype, device), _random(1, columns, dtype, device)[0]
    out, expected = torch.full_like(x, torch.nan), torch.empty_like(x)
    rms_norm(x, weight, _EPSILON, out=out)
    norm_reference.rms_norm(x, weight, _EPSILON, expected)
    return require_close("out", out, expected, rtol=_RELATIVE[dtype], atol=_RELATIVE[dtype] / 10)


def _check_add_norm(device: torch.device, num_rows: int, columns: int, dtype: torch.dtype) -> float:
    x, residual = _random(num_rows, columns, dtype, device), _random(num_rows, columns, dtype, device)
    weight = _random(1, columns, dtype, device)[0]
    out, expected, total = torch.full_like(x, torch.nan), torch.empty_like(x), residual.clone()
    add_rms_norm(x, residual, weight, _EPSILON, out=out)
    norm_reference.add_rms_norm(x, total, weight, _EPSILON, expected)
    require_equal("residual", residual, total)
    return require_close("out", out, expected, rtol=_RELATIVE[dtype], atol=_RELATIVE[dtype] / 10)


def _check_silu(device: torch.device, num_rows: int, columns: int, dtype: torch.dtype) -> float:
    gate_up = _random(num_rows, 2 * columns, dtype, device) * 4
    out = torch.full((num_rows, columns), torch.nan, dtype=dtype, device=device)
    expected = torch.empty_like(out)
    silu_mul(gate_up, out=out)
    silu_reference.silu_mul(gate_up, expected)
    return require_close("out", out, expected, rtol=_RELATIVE[dtype], atol=_RELATIVE[dtype] / 10)


def _check_pair(device: torch.device, num_rows: int, columns: int, dtype: torch.dtype) -> float:
    gate, up = _random(num_rows, columns, dtype, device) * 4, _random(num_rows, columns, dtype, device)
    out, expected = torch.full_like(gate, torch.nan), torch.empty_like(gate)
    silu_mul_pair(gate, up, out=out)
    silu_reference.silu_mul_pair(gate, up, expected)
    return require_close("out", out, expected, rtol=_RELATIVE[dtype], atol=_RELATIVE[dtype] / 10)


def _random(num_rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.randn(num_rows, columns, dtype=dtype, device=device)


def _norm(num_rows: int, columns: int, num_copies: int, target: str, clock: Clock) -> list[Row]:
    x, weight = _random(num_rows, columns, torch.bfloat16, clock.device), torch.ones(columns, dtype=torch.bfloat16, device=clock.device)
    timed = clock.time([partial(rms_norm, x, weight, _EPSILON, out=torch.empty_like(x))] * num_copies)
    return [_row(2 * x.nbytes, timed, target)]


def _add_norm(num_rows: int, columns: int, num_copies: int, target: str, clock: Clock) -> list[Row]:
    x, weight = _random(num_rows, columns, torch.bfloat16, clock.device), torch.ones(columns, dtype=torch.bfloat16, device=clock.device)
    residual = torch.zeros_like(x)
    timed = clock.time([partial(add_rms_norm, x, residual, weight, _EPSILON, out=torch.empty_like(x))] * num_copies)
    return [_row(4 * x.nbytes, timed, target)]


def _silu(num_rows: int, columns: int, num_copies: int, target: str, clock: Clock) -> list[Row]:
    gate_up = _random(num_rows, 2 * columns, torch.bfloat16, clock.device)
    out = torch.empty(num_rows, columns, dtype=torch.bfloat16, device=clock.device)
    timed = clock.time([partial(silu_mul, gate_up, out=out)] * num_copies)
    return [_row(3 * out.nbytes, timed, target)]


def _pair(num_rows: int, columns: int, clock: Clock) -> list[Row]:
    gate, up = (_random(num_rows, columns, torch.bfloat16, clock.device) for _ in range(2))
    return [clock.time([partial(silu_mul_pair, gate, up, out=torch.empty_like(gate))]).moved(3 * gate.nbytes)]


def _row(num_bytes: int, timed: Timed, target: str) -> Row:
    """Work that stays in the L2 cache has no rate to compare with a copy's."""
    return timed.moved(num_bytes, target=target) if target else timed.row()
