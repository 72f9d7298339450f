"""A vision tower's attention by Triton's kernel, in transformers' modules. Loaded for towers on CUDA devices alone: see ``towers``.

Transformers attends one sequence after another, some hundred launches for the windows of a picture; the kernel takes them all at once.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..triton_kernels.vision_attention import attend

Rotate = Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
"""Transformers' rotary embedding: of q and k [T, H, D] by cosines and sines [T, D]."""


def attend_by_kernel(tower: Any, rotate: Rotate) -> None:
    """Give every block of a Qwen2.5 vision tower ``KernelAttention``."""
    for block in tower.blocks:
        block.attn = KernelAttention(block.attn, rotate)


class KernelAttention(torch.nn.Module):
    """Takes the place of a block's attention, whose projections it keeps."""

    def __init__(self, replaced: Any, rotate: Rotate) -> None:
        super().__init__()
        self.replaced = replaced
        self._rotate = rotate

    def forward(
        self, hidden_states: Tensor, cu_seqlens: Tensor, position_embeddings: tuple[Tensor, Tensor], max_seqlen: int, **_: Any
    ) -> Tensor:
        """hidden_states [T, hidden]; ``cu_seqlens`` int32 [S + 1], ``max_seqlen`` the longest of its sequences, known on the host."""
        q, k, v = self._projected(hidden_states)
        q, k = self._rotate(q, k, *position_embeddings)
        attended = attend(q.contiguous(), k.contiguous(), v, cu_seqlens, max_seqlen)
        output: Tensor = self.replaced.proj(attended.flatten(1))
        return output

    def _projected(self, hidden_states: Tensor) -> tuple[Tensor, ...]:
        """Queries, keys and values [T, H, D]: of one matrix, or of three."""
        shape = hidden_states.shape[0], -1, self.replaced.num_heads, self.replaced.head_dim
        if hasattr(self.replaced, "qkv"):
            return self.replaced.qkv(hidden_states).view(shape).unbind(1)  # type: ignore[no-any-return]
        return tuple(project(hidden_states).view(shape)[:, 0] for project in (self.replaced.q, self.replaced.k, self.replaced.v))
