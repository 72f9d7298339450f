"""The vision tower's operations between its matrix products, by device: the interface, and torch's version.

A norm with a bias is a LayerNorm, one without an RMSNorm.

Shapes: T patches, H hidden, I intermediate; heads are [T, num_heads, head size].
"""

from typing import NamedTuple, Protocol, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from ....cpu_kernels import layer_kernels
from ...lm.layer_ops import rms_norm
from ...lm.rope import rotate
from ...towers.sequences import Sequences, attend


class Norm(NamedTuple):
    """Weights [H]."""

    weight: Tensor
    bias: Tensor | None

    @classmethod
    def of(cls, weights: dict[str, Tensor], name: str) -> Self:
        """The tensors NAME.weight and, where there is one, NAME.bias."""
        return cls(weights[f"{name}.weight"], weights.get(f"{name}.bias"))


class VisionOperations(Protocol):
    """One forward at a time: ``begin`` first. Its epsilon is that of all norms."""

    def begin(self, angles: Tensor) -> None:
        """The angles by which heads turn, float32 [T, head size / 2]."""
        ...

    def norm(self, x: Tensor, norm: Norm) -> Tensor:
        """The norm of x [T, H]."""
        ...

    def norm_heads(self, heads: Tensor, weight: Tensor) -> None:
        """The RMSNorm of each head, with ``weight`` [head size], in place."""
        ...

    def add_norm(self, x: Tensor, residual: Tensor, norm: Norm) -> Tensor:
        """Add x to ``residual`` [T, H] in place; the norm of the sum. x may be overwritten."""
        ...

    def rotate(self, q: Tensor, k: Tensor) -> None:
        """Turn the heads in place."""
        ...

    def attend(self, q: Tensor, k: Tensor, v: Tensor, sequences: Sequences) -> Tensor:
        """Attention within each sequence: [T, num_heads, head size]."""
        ...

    def silu_mul(self, gate: Tensor, up: Tensor) -> Tensor:
        """silu(gate) x up, [T, I] each; gate may be overwritten."""
        ...


class TorchVisionOperations:
    """``VisionOperations`` one by one, in torch."""

    def __init__(self, epsilon: float, device: torch.device) -> None:
        self._number, self._epsilon = epsilon, torch.tensor(epsilon, device=device)
        self.begin(torch.empty(0, 0))

    def begin(self, angles: Tensor) -> None:
        sin = angles.sin().unsqueeze(1)
        self._rotation = angles.cos().unsqueeze(1), sin, -sin

    def norm(self, x: Tensor, norm: Norm) -> Tensor:
        return rms_norm(x, norm.weight, self._epsilon) if norm.bias is None else layer_norm(x, norm, self._number)

    def norm_heads(self, heads: Tensor, weight: Tensor) -> None:
        heads.copy_(rms_norm(heads, weight, self._epsilon))

    def add_norm(self, x: Tensor, residual: Tensor, norm: Norm) -> Tensor:
        return self.norm(residual.add_(x), norm)

    def rotate(self, q: Tensor, k: Tensor) -> None:
        rotate(q, self._rotation)
        rotate(k, self._rotation)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, sequences: Sequences) -> Tensor:
        return attend(q, k, v, sequences)

    def silu_mul(self, gate: Tensor, up: Tensor) -> Tensor:
        return F.silu(gate, inplace=True).mul_(up)


class CpuVisionOperations(TorchVisionOperations):
    """``VisionOperations`` by a decoder's kernels for a CPU where these take the tensors, else in torch."""

    @staticmethod
    def takes(dtype: torch.dtype, hidden_size: int, head_dim: int) -> bool:
        """Return whether there are kernels for such a tower."""
        return head_dim % 2 == 0 and layer_kernels.has_kernels(dtype, hidden_size, head_dim // 2)

    def norm(self, x: Tensor, norm: Norm) -> Tensor:
        if norm.bias is None and x.is_contiguous():
            return layer_kernels.norm(x, norm.weight, self._epsilon)
        return super().norm(x, norm)

    def norm_heads(self, heads: Tensor, weight: Tensor) -> None:
        rows = heads.flatten(0, 1)  # a copy of a part of a product
        layer_kernels.norm(rows, weight, self._epsilon, out=rows)
        if not heads.is_contiguous():
            heads.copy_(rows.view(heads.shape))

    def add_norm(self, x: Tensor, residual: Tensor, norm: Norm) -> Tensor:
        if norm.bias is None and x.is_contiguous() and residual.is_contiguous():
            return layer_kernels.add_norm(x, residual, norm.weight, self._epsilon)
        return super().add_norm(x, residual, norm)

    def rotate(self, q: Tensor, k: Tensor) -> None:
        cosines, sines, _ = self._rotation
        for heads in (q, k):
            turned = heads.contiguous()
            layer_kernels.rotate(turned, heads.shape[1], cosines, sines)
            if turned is not heads:
                heads.copy_(turned)


def layer_norm(x: Tensor, norm: Norm, epsilon: float) -> Tensor:
    """LayerNorm of x [T, H], on any device."""
    return F.layer_norm(x, norm.weight.shape, norm.weight, norm.bias, epsilon)
