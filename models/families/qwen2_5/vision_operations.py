"""The vision tower's operations between its matrix products, by device: the interface, and torch's version on the CPU.

Shapes: T patches, H hidden, I intermediate; heads are [T, num_heads, head size].
"""

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from ...lm.layer_ops import rms_norm
from ...lm.rope import rotate
from ...towers.sequences import Sequences, attend

EPSILON = 1e-6  # of the norms


class VisionOperations(Protocol):
    """One forward at a time: ``begin`` first."""

    def begin(self, angles: Tensor) -> None:
        """The angles by which heads turn, float32 [T, head size / 2]."""
        ...

    def norm(self, x: Tensor, weight: Tensor) -> Tensor:
        """RMS norm of x [T, H]."""
        ...

    def add_norm(self, x: Tensor, residual: Tensor, weight: Tensor) -> Tensor:
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


class CpuVisionOperations:
    """``VisionOperations`` one by one, in torch."""

    def __init__(self) -> None:
        self._epsilon = torch.tensor(EPSILON)
        self.begin(torch.empty(0, 0))

    def begin(self, angles: Tensor) -> None:
        sin = angles.sin().unsqueeze(1)
        self._rotation = angles.cos().unsqueeze(1), sin, -sin

    def norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return rms_norm(x, weight, self._epsilon)

    def add_norm(self, x: Tensor, residual: Tensor, weight: Tensor) -> Tensor:
        return rms_norm(residual.add_(x), weight, self._epsilon)

    def rotate(self, q: Tensor, k: Tensor) -> None:
        rotate(q, self._rotation)
        rotate(k, self._rotation)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, sequences: Sequences) -> Tensor:
        return attend(q, k, v, sequences)

    def silu_mul(self, gate: Tensor, up: Tensor) -> Tensor:
        return F.silu(gate, inplace=True).mul_(up)
