"""A decoder's operations between its matrix products, by device, and their version for a CPU.

They are a sum with the norm after it, SwiGLU's two halves, and everything from a layer's projection to its KV pages. Shapes: N tokens
of all sequences together, H hidden, I intermediate, D head_dim."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from ...cpu_kernels import layer_kernels
from ..architecture import KvPlace, LanguageConfig
from .attention import CpuAttention
from .delta import CpuDelta
from .delta_pages import DeltaPages
from .experts import Experts, route, sum_by_expert
from .interface import Operations, QkNorms
from .kv_pages import KvPages
from .rope import Rope, Rotation, rotate


def operations_for(config: LanguageConfig, pages: Sequence[KvPages], states: DeltaPages | None = None) -> Operations:
    """Triton's kernels where the KV pool lies on a CUDA device, those for a CPU otherwise. Raises: ValueError for states on CUDA."""
    if pages[0].values.is_cuda:
        from .triton_layer_ops import TritonOperations  # Triton is imported only here: never on the CPU

        return TritonOperations(config, pages, states)
    return CpuOperations(config, pages, states)


class CpuOperations:
    """``Operations`` by kernels where there are some, else one by one in torch."""

    def __init__(self, config: LanguageConfig, pages: Sequence[KvPages], states: DeltaPages | None = None) -> None:
        self.attentions = [CpuAttention(its) for its in pages]
        self.delta: CpuDelta | None = None
        if config.delta is not None and states is not None:
            self.delta = CpuDelta(config.delta, config.num_layers - config.num_kv_layers, config.rms_norm_eps, states)
        self._epsilon, self._kv_heads = torch.tensor(config.rms_norm_eps), [its.heads.num_kv_heads for its in pages]
        self._ropes = [Rope(rope, config.turned_size(index)) for index, rope in enumerate(config.ropes)]
        lengths = config.hidden_size, *config.widths, *(its.heads.head_dim // 2 for its in pages)
        self._has_kernels = layer_kernels.has_kernels(pages[0].dtype, *lengths)
        self._rotations: list[Rotation] = []

    def begin(self, positions: Tensor) -> None:
        self._rotations = [rope.rotation(positions) for rope in self._ropes]

    def norm(self, x_NH: Tensor, weight: Tensor) -> Tensor:
        return rms_norm(x_NH, weight, self._epsilon)

    def add_norm(self, x_NH: Tensor, residual_NH: Tensor, weight: Tensor) -> Tensor:
        if self._has_kernels and weight.dtype == x_NH.dtype:
            return layer_kernels.add_norm(x_NH, residual_NH, weight, self._epsilon)
        return self.norm(residual_NH.add_(x_NH), weight)

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        if self._has_kernels:
            return layer_kernels.silu_mul(gate_up)
        gate, up = gate_up.chunk(2, -1)
        return F.silu(gate).mul_(up)

    def experts(self, x_NH: Tensor, logits_NE: Tensor, experts: Experts) -> Tensor:
        routes = route(logits_NE, experts.config, experts.scales)
        return sum_by_expert(x_NH, routes, experts, experts.activate or self.silu_mul, alike=self.attentions[0].is_decoding)

    def rotate_and_write(self, place: KvPlace | None, heads: Tensor, rope: int, norms: QkNorms | None) -> None:
        kv_heads = 0 if place is None else self._kv_heads[place.group]
        turning = heads[:, : heads.shape[1] - kv_heads]
        if norms is not None:
            parts = torch.split(turning, [turning.shape[1] - kv_heads, kv_heads], 1)
            for part, weight in zip(parts, norms, strict=True):
                part.copy_(self.norm(part, weight))
        rotation = self._rotations[rope]
        if self._has_kernels and 2 * rotation[0].shape[-1] == heads.shape[2]:
            layer_kernels.rotate(heads, turning.shape[1], *rotation[:2])
        else:
            rotate(turning, rotation)
        if place is not None:
            self.attentions[place.group].write(place.layer, heads[:, -2 * kv_heads :].flatten(1))


def rms_norm(x: Tensor, weight: Tensor, epsilon: Tensor) -> Tensor:
    """x [..., H] / sqrt(mean(x ** 2) + epsilon) * weight, computed in float32; ``epsilon`` float32 []."""
    # F.rms_norm takes twice as many operations on a CPU.
    values = x.float()
    size = torch.linalg.vector_norm(values, dim=-1, keepdim=True)
    scale = torch.addcmul(epsilon, size, size, value=1 / x.shape[-1]).rsqrt_()
    return torch.mul(values, scale).mul_(weight.float()).to(x.dtype)
