"""``VisionOperations`` by fused Triton kernels. Loaded only for towers on CUDA devices: see ``vision_tower``."""

import torch
import torch.nn.functional as F
from torch import Tensor

from ....triton_kernels.rms_norm import add_rms_norm, rms_norm
from ....triton_kernels.silu_mul import silu_mul_pair
from ....triton_kernels.vision_attention import HEAD_DIMS, attend, rotate
from ...towers.sequences import Sequences
from .vision_operations import Norm, layer_norm

__all__ = ["HEAD_DIMS", "TritonVisionOperations"]


class TritonVisionOperations:
    """``VisionOperations`` for heads of ``HEAD_DIMS``: a launch each, but LayerNorms and norms of heads, which are torch's. Nothing is
    read back from the device."""

    def __init__(self, epsilon: float) -> None:
        self._epsilon = epsilon
        self.begin(torch.empty(0, 0))

    def begin(self, angles: Tensor) -> None:
        self._rotation = angles.cos(), angles.sin()

    def norm(self, x: Tensor, norm: Norm) -> Tensor:
        return rms_norm(x, norm.weight, self._epsilon) if norm.bias is None else layer_norm(x, norm, self._epsilon)

    def norm_heads(self, heads: Tensor, weight: Tensor) -> None:
        heads.copy_(F.rms_norm(heads, weight.shape, weight, self._epsilon))

    def add_norm(self, x: Tensor, residual: Tensor, norm: Norm) -> Tensor:
        if norm.bias is None:
            return add_rms_norm(x, residual, norm.weight, self._epsilon, out=x)
        return layer_norm(residual.add_(x), norm, self._epsilon)

    def rotate(self, q: Tensor, k: Tensor) -> None:
        rotate(q, k, *self._rotation)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, sequences: Sequences) -> Tensor:
        return attend(q, k, v, sequences.borders, sequences.longest)

    def silu_mul(self, gate: Tensor, up: Tensor) -> Tensor:
        return silu_mul_pair(gate, up, out=gate)
