"""The checked wrappers: before attention, before the MLP, and before the output head. Called twice per layer."""

import torch
from torch import Tensor

from ..checks import check_aligned, check_device, check_tensor
from ..paged_kv import FLOATS
from .config import LARGEST_SIZE, launch
from .kernel import norm_row


def rms_norm(x: Tensor, weight: Tensor, epsilon: float, *, out: Tensor | None = None) -> Tensor:
    """x / sqrt(mean(x^2) + epsilon) * weight over the last axis, in float32 (Zhang and Sennrich, 2019).

    x [N, H] float32, float16 or bfloat16, rows dense, strides multiples of 16; weight [H] in x's dtype or float32; out as x, allocated
    if not given, and may be x. Raises: ValueError.
    """
    if out is None:
        out = torch.empty_like(x)
    _check(x, weight, out=out)
    return _launch(x, x, weight, epsilon, out, add=False)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, epsilon: float, *, out: Tensor | None = None) -> Tensor:
    """residual += x, then ``rms_norm(residual, weight, epsilon)``, in one launch.

    Shapes and dtypes as there; ``out`` may be ``x``. The sum is rounded first, as in two separate steps. Raises: ValueError.
    """
    if out is None:
        out = torch.empty_like(x)
    _check(x, weight, residual=residual, out=out)
    return _launch(x, residual, weight, epsilon, out, add=True)


def _launch(x: Tensor, residual: Tensor, weight: Tensor, epsilon: float, out: Tensor, *, add: bool) -> Tensor:
    num_rows, size = x.shape
    if not num_rows:
        return out
    norm_row[(num_rows,)](
        x,
        residual,
        weight,
        out,
        epsilon,
        x.stride(0),
        residual.stride(0),
        out.stride(0),
        SIZE=size,
        ADD=add,
        **launch(size).arguments(),
    )
    return out


def _check(x: Tensor, weight: Tensor, **others: Tensor) -> None:
    check_device("x", x.device)
    check_tensor("x", x, (None, None), FLOATS, x.device)
    check_aligned("x", x)
    if not 0 < x.shape[1] <= LARGEST_SIZE:
        raise ValueError(f"rows of x have {x.shape[1]} elements, not between 1 and {LARGEST_SIZE}")
    check_tensor("weight", weight, x.shape[1:], (x.dtype, torch.float32), x.device)
    check_aligned("weight", weight)
    for name, tensor in others.items():
        check_tensor(name, tensor, x.shape, (x.dtype,), x.device)
        check_aligned(name, tensor)
