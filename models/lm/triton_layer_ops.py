"""``Operations`` by fused Triton kernels. Loaded only for models on CUDA devices: see ``layer_ops``."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ...triton_kernels.kv_write import QkNorm, Rotary, rotate_and_write_kv
from ...triton_kernels.rms_norm import add_rms_norm, rms_norm
from ...triton_kernels.silu_mul import silu_mul
from ..architecture import KvPlace, LanguageConfig, RopeConfig, interleaved_axes
from .delta_pages import DeltaPages
from .experts import Experts, route, sum_by_expert, sum_by_mask
from .interface import QkNorms
from .kv_pages import KvPages
from .rope import inverse_frequencies
from .triton_attention import TritonAttention


class TritonOperations:
    """``Operations``; each but ``experts`` is one launch. Unsupported head sizes and alignments raise ValueError in the first
    forward."""

    def __init__(self, config: LanguageConfig, pages: Sequence[KvPages], states: DeltaPages | None = None) -> None:
        """``pages`` on the device. Raises: ValueError for recurrent states: there are no kernels for them."""
        if states is not None:
            raise ValueError("models with recurrent states run on a CPU only")
        self.attentions = [TritonAttention(its) for its in pages]
        self.delta = None
        self._epsilon = config.rms_norm_eps
        device = pages[0].values.device
        frequencies = [inverse_frequencies(rope, config.turned_size(index)).to(device) for index, rope in enumerate(config.ropes)]
        self._rotaries = [_rotary(rope, f) for f, rope in zip(frequencies, config.ropes, strict=True)]
        self._positions = torch.empty(3, 0, dtype=torch.int64, device=device)

    def begin(self, positions: Tensor) -> None:
        self._positions = positions.contiguous()

    def norm(self, x_NH: Tensor, weight: Tensor) -> Tensor:
        rows = x_NH.reshape(-1, x_NH.shape[-1])  # those of heads and of layers' inputs have a further axis
        return rms_norm(rows, weight, self._epsilon).view(x_NH.shape)

    def add_norm(self, x_NH: Tensor, residual_NH: Tensor, weight: Tensor) -> Tensor:
        return add_rms_norm(x_NH, residual_NH, weight, self._epsilon, out=x_NH)

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        return silu_mul(gate_up)

    def experts(self, x_NH: Tensor, logits_NE: Tensor, experts: Experts) -> Tensor:
        sums = sum_by_mask if self.attentions[0].is_decoding else sum_by_expert  # a graph has the former
        return sums(x_NH, route(logits_NE, experts.config, experts.scales), experts, experts.activate or self.silu_mul)

    def rotate_and_write(self, place: KvPlace | None, heads: Tensor, rope: int, norms: QkNorms | None) -> None:
        norm = None if norms is None else QkNorm(*norms, self._epsilon)
        if place is None:
            rotate_and_write_kv(heads, self._positions, None, None, self._rotaries[rope], norm)
            return
        attention = self.attentions[place.group]
        rotate_and_write_kv(heads, self._positions, attention.slots, attention.layers[place.layer], self._rotaries[rope], norm)


def _rotary(rope: RopeConfig, frequencies: Tensor) -> Rotary:
    """Raises: ValueError where axes neither follow one another nor take turns."""
    section = tuple(rope.axes.count(axis) for axis in range(max(rope.axes) + 1)) if rope.axes else ()
    if list(rope.axes) == sorted(rope.axes):
        return Rotary(frequencies, section, rope.factor)
    if len(section) < 3 or rope.axes != interleaved_axes(section, len(rope.axes)):
        raise ValueError(f"there is no kernel for a rotary embedding of axes {rope.axes}")
    return Rotary(frequencies, section, rope.factor, interleaved=True)
