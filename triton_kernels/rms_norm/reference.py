"""Reference for the kernel, in plain torch."""

import torch
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, epsilon: float, out: Tensor) -> None:
    """As ``op.rms_norm``."""
    values = x.float()
    factor = torch.rsqrt(values.square().mean(-1, keepdim=True) + epsilon)
    out.copy_(values * factor * weight.float())


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, epsilon: float, out: Tensor) -> None:
    """As ``op.add_rms_norm``."""
    residual.copy_(residual.float() + x.float())
    rms_norm(residual, weight, epsilon, out)
