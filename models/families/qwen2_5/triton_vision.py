"""The vision tower of Qwen2.5 on a CUDA device: norms, rotation, attention and SwiGLU in Triton kernels. Loaded
only for towers there: see ``vision_tower``.

``VisionKernels`` computes the same as transformers' module, over the same weights and with the same arguments. Products of matrices are
torch's, and so is the merger's GELU.

Shapes: T patches, H heads, D head size; merge_size x merge_size patches that become a token stand together.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ....triton_kernels.rms_norm import add_rms_norm, rms_norm
from ....triton_kernels.silu_mul import silu_mul_pair
from ....triton_kernels.vision_attention import HEAD_DIMS, attend, rotate
from ...architecture import VisionConfig
from ...errors import CheckpointError
from ...lm.decoder import AfterLayer

_EPSILON = 1e-6
_ROPE_THETA = 10_000.0


class _Linear(NamedTuple):
    weight: Tensor
    bias: Tensor

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


class VisionKernels:
    """The tower's forward. ``weights`` are views, never copied."""

    def __init__(self, config: VisionConfig, weights: dict[str, Tensor]) -> None:
        """Uses those ``weights`` whose names start with ``vision.``.

        Raises: CheckpointError for an activation other than SiLU, and for head sizes that the kernels do not support.
        """
        if config.hidden_act != "silu":
            raise CheckpointError(f"the vision tower's hidden_act is {config.hidden_act!r}, on a CUDA device it must be 'silu'")
        if (head_dim := config.hidden_size // config.num_heads) not in HEAD_DIMS:
            sizes = ", ".join(map(str, HEAD_DIMS))
            raise CheckpointError(f"the vision tower's heads have a size of {head_dim}, on a CUDA device it must be one of {sizes}")
        self._patch_tokens = config.merge_size**2
        self._full = frozenset(config.full_attention_blocks)
        self._patch_embed = weights["vision.patch_embed.proj.weight"].flatten(1)
        self._blocks = [_Block(config, weights, i) for i in range(config.depth)]
        self._merger = [_linear(weights, f"vision.merger.mlp.{i}") for i in (0, 2)]
        axis_dim = head_dim // 2
        # On the CPU as in transformers, so that the angles are the same.
        frequencies = 1.0 / _ROPE_THETA ** (torch.arange(0, axis_dim, 2, dtype=torch.float32) / axis_dim)
        self._frequencies = frequencies.to(self._patch_embed.device)

    def __call__(
        self,
        rows: Tensor,
        after_layer: AfterLayer | None = None,
        *,
        position_ids: Tensor,
        window_index: Tensor,
        cu_window_seqlens: Tensor,
        cu_seqlens: Tensor,
        max_window_seqlen: int,
        max_seqlen: int,
    ) -> Tensor:
        """Embedding rows [tokens, out_hidden] of normalised ``rows`` [T, row size], in the weights' dtype.

        The others as transformers has them: ``position_ids`` int64 [T, 2]; ``window_index`` int64, the tokens window by window;
        borders of windows and of frames int32, and the longest of each, known on the host. Nothing is read back from the device.
        ``after_layer`` as in ``Tower``.
        """
        hidden = F.linear(self._by_window(rows, window_index), self._patch_embed)
        rotation = self._rotation(self._by_window(position_ids, window_index))
        normed = rms_norm(hidden, self._blocks[0].norm, _EPSILON)
        for number, block in enumerate(self._blocks):
            sequences = (cu_seqlens, max_seqlen) if number in self._full else (cu_window_seqlens, max_window_seqlen)
            attended = block.attend(normed, rotation, *sequences)
            normed = add_rms_norm(attended, hidden, block.mlp_norm, _EPSILON, out=attended)
            active = block.swiglu(normed)
            normed = add_rms_norm(active, hidden, block.next_norm, _EPSILON, out=active)
            if after_layer is not None:
                after_layer()
        first, second = self._merger
        tokens = second(F.gelu(first(normed.view(window_index.shape[0], -1))))
        return torch.empty_like(tokens).index_copy_(0, window_index, tokens)

    def _by_window(self, rows: Tensor, window_index: Tensor) -> Tensor:
        return rows.view(-1, self._patch_tokens, rows.shape[1])[window_index].flatten(0, 1)

    def _rotation(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """(cos, sin), float32 [T, D / 2] each. Half of a head's pairs turn by h, the others by w."""
        angles = (positions.unsqueeze(2) * self._frequencies).flatten(1)
        return angles.cos(), angles.sin()


class _Block:
    """One block's weights, looked up once. ``next_norm`` is that of the next block's input, or of the merger's."""

    def __init__(self, config: VisionConfig, weights: dict[str, Tensor], index: int) -> None:
        prefix, following = f"vision.blocks.{index}.", f"vision.blocks.{index + 1}.norm1.weight"
        self._head_dim = config.hidden_size // config.num_heads
        self.norm = weights[f"{prefix}norm1.weight"]
        self.mlp_norm = weights[f"{prefix}norm2.weight"]
        self.next_norm = weights[following if index + 1 < config.depth else "vision.merger.ln_q.weight"]
        self._qkv = [_linear(weights, f"{prefix}attn.{name}") for name in (("q", "k", "v") if config.split_qkv else ("qkv",))]
        self._proj = _linear(weights, f"{prefix}attn.proj")
        self._gate, self._up, self._down = (_linear(weights, f"{prefix}mlp.{name}_proj") for name in ("gate", "up", "down"))

    def attend(self, normed: Tensor, rotation: tuple[Tensor, Tensor], cu_seqlens: Tensor, longest: int) -> Tensor:
        """Attention within each sequence, and the output projection: [T, hidden]."""
        heads = [project(normed).view(normed.shape[0], -1, self._head_dim) for project in self._qkv]
        q, k, v = heads if len(heads) == 3 else heads[0].chunk(3, 1)
        rotate(q, k, *rotation)
        return self._proj(attend(q, k, v, cu_seqlens, longest).flatten(1))

    def swiglu(self, normed: Tensor) -> Tensor:
        gate = self._gate(normed)
        return self._down(silu_mul_pair(gate, self._up(normed), out=gate))


def _linear(weights: dict[str, Tensor], name: str) -> _Linear:
    return _Linear(weights[f"{name}.weight"], weights[f"{name}.bias"])
