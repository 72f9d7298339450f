"""The checked wrappers, called once per layer."""

from math import gcd

import triton
from torch import Tensor

from ..checks import ALIGNMENT, check_aligned, check_dense, check_device, check_tensor
from ..paged_kv import FLOATS
from .config import launch
from .kernel import silu_mul_rows


def silu_mul(gate_up: Tensor, *, out: Tensor | None = None) -> Tensor:
    """silu(gate) x up in float32, rounded once (SwiGLU: Shazeer, 2020).

    gate_up [N, 2 I] float32, float16 or bfloat16: the fused projection, gate first; rows dense, I and row strides multiples of 16.
    out [N, I] likewise, allocated if not given. Raises: ValueError.
    """
    if out is None:
        out = gate_up.new_empty(gate_up.shape[0], gate_up.shape[-1] // 2)
    _check(gate_up, out)
    gate, up = gate_up.chunk(2, -1)
    return _launch(gate, up, out)


def silu_mul_pair(gate: Tensor, up: Tensor, *, out: Tensor | None = None) -> Tensor:
    """``silu_mul`` of two matrices [N, I] of any width and row strides, rows dense.

    out likewise, allocated if not given, and may be gate or up. Raises: ValueError.
    """
    if out is None:
        out = gate.new_empty(gate.shape)
    check_device("gate", gate.device)
    check_tensor("gate", gate, (None, None), FLOATS, gate.device)
    for name, tensor in (("gate", gate), ("up", up), ("out", out)):
        check_tensor(name, tensor, gate.shape, (gate.dtype,), gate.device)
        check_dense(name, tensor)
    return _launch(gate, up, out)


def _launch(gate: Tensor, up: Tensor, out: Tensor) -> Tensor:
    num_rows, size = out.shape
    if not out.numel():
        return out
    config = launch(size)
    strides = gate.stride(0), up.stride(0), out.stride(0)
    grid = num_rows, triton.cdiv(size, config.tiles["BLOCK"])
    silu_mul_rows[grid](gate, up, out, *strides, SIZE=size, STEP=gcd(ALIGNMENT, *strides), **config.arguments())
    return out


def _check(gate_up: Tensor, out: Tensor) -> None:
    check_device("gate_up", gate_up.device)
    check_tensor("gate_up", gate_up, (None, None), FLOATS, gate_up.device)
    check_tensor("out", out, (gate_up.shape[0], None), (gate_up.dtype,), gate_up.device)
    if gate_up.shape[1] != 2 * out.shape[1] or not out.shape[1] or out.shape[1] % ALIGNMENT:
        raise ValueError(
            f"gate_up has {gate_up.shape[1]} columns and out {out.shape[1]}, not twice a multiple of {ALIGNMENT} and half of it"
        )
    check_aligned("gate_up", gate_up)
    check_aligned("out", out)
