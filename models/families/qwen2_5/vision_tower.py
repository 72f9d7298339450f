"""The vision tower that Qwen's and GLM's families share: its norms, feed-forwards, windows and merger are as the configuration says.
Weights are views, never copied; activations that are not gated are torch's everywhere.

Shapes: T patches; merge_size x merge_size patches that become a token stand together.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from ....cpu_kernels.flash_attention import prepare
from ...architecture import ModelConfig
from ...lm.decoder import AfterLayer
from ...media_config import VisionConfig
from ...towers.interface import TowerInput
from ...towers.linear import Linear
from ...towers.sequences import Sequences
from .vision_geometry import Geometry, geometry
from .vision_operations import CpuVisionOperations, Norm, TorchVisionOperations, VisionOperations, layer_norm

_ROPE_THETA = 10_000.0
_QUICK = 1.702
_MERGER_EPSILON = 1e-5  # of a merger's own norm, whatever the configuration says


class VisionTower:
    """The tower, computing where its weights lie."""

    def __init__(self, model: ModelConfig, weights: dict[str, Tensor], device: torch.device) -> None:
        """Uses those ``weights`` whose names start with ``vision.``."""
        assert model.vision is not None and model.vision_rules is not None
        config, rules = model.vision, model.vision_rules
        head_dim = config.hidden_size // config.num_heads
        self._config, self._device = config, device
        frame = rules.temporal_patch_size * rules.patch_size**2
        self._mean = (torch.tensor(rules.image_mean) * 255).repeat_interleave(frame).to(device)
        self._std = (torch.tensor(rules.image_std) * 255).repeat_interleave(frame).to(device)
        patch_embed = weights["vision.patch_embed.proj.weight"].flatten(1)
        self._patch_embed = Linear(patch_embed, weights.get("vision.patch_embed.proj.bias"))
        self._dtype = patch_embed.dtype
        self._patch_norm = Norm.of(weights, "vision.patch_norm") if config.patch_norm else None
        self._table = weights["vision.pos_embed.weight"] if config.position_side else None
        self._blocks = [_Block(config, weights, i) for i in range(config.depth)]
        self._merger = (_GatedMerger if config.merger_size else _Merger)(weights, "vision.merger")
        self._deep = [_DeepMerger(weights, f"vision.deepstack_merger_list.{i}") for i in range(len(config.deepstack_blocks))]
        # On the CPU as in transformers, so that the angles are the same.
        axis_dim = head_dim // 2
        frequencies = 1.0 / _ROPE_THETA ** (torch.arange(0, axis_dim, 2, dtype=torch.float32) / axis_dim)
        self._frequencies = frequencies.to(device)
        self.operations = operations_for(config, self._dtype, device)

    def encode(self, parts: Sequence[TowerInput], after_layer: AfterLayer | None = None) -> list[Tensor]:
        grids = [part.grid for part in parts]
        tokens = self.forward(self._normalised([part.rows for part in parts]), geometry(grids, self._config, self._device), after_layer)
        return list(torch.split(tokens, [t * h * w // self._config.merge_size**2 for t, h, w in grids]))

    def forward(self, rows: Tensor, places: Geometry, after_layer: AfterLayer | None = None) -> Tensor:
        """Embedding rows [tokens, (1 + D) out_hidden] of normalised ``rows`` [T, row size], in the weights' dtype."""
        operations, order = self.operations, places.token_order
        deep, tokens = iter(self._deep), list[Tensor]()
        patches = rows.view(len(order), -1, rows.shape[1])[order].flatten(0, 1)
        # Half of a head's pairs turn by the row, the others by the column.
        operations.begin((places.positions.unsqueeze(2) * self._frequencies).flatten(1))
        hidden = self._patch_embed(patches)
        if self._patch_norm is not None:
            hidden = operations.norm(hidden, self._patch_norm)
        if self._table is not None:
            hidden += places.interpolated(self._table).to(self._dtype)
        normed = operations.norm(hidden, self._blocks[0].norm)
        for index, block in enumerate(self._blocks):
            attended = block.attend(normed, places.frames if block.full else places.windows, operations)
            normed = operations.add_norm(attended, hidden, block.mlp_norm)
            normed = operations.add_norm(block.feed_forward(normed, operations), hidden, block.next_norm)
            if index in self._config.deepstack_blocks:
                tokens.append(next(deep)(hidden.view(len(order), -1), operations))
            if after_layer is not None:
                after_layer()
        merged = torch.cat([self._merger(normed.view(len(order), -1), operations), *tokens], 1)
        return torch.empty_like(merged).index_copy_(0, order, merged)

    def _normalised(self, parts: Sequence[NDArray[Any]]) -> Tensor:
        """All rows, one part after another; for a GPU they go through pinned memory, in stream order."""
        size = sum(len(part) for part in parts), parts[0].shape[1]
        staged = torch.empty(size, dtype=torch.uint8, pin_memory=self._device.type == "cuda")
        np.concatenate(parts, out=staged.numpy())
        pixels = staged.to(self._device, non_blocking=True).float()
        return pixels.sub_(self._mean).div_(self._std).to(self._dtype)


def operations_for(config: VisionConfig, dtype: torch.dtype, device: torch.device) -> VisionOperations:
    """Triton's kernels on a CUDA device for heads of a size that they have; a decoder's on a CPU; torch's operations otherwise."""
    head_dim = config.hidden_size // config.num_heads
    if device.type == "cuda":
        from .triton_vision import HEAD_DIMS, TritonVisionOperations  # Triton is imported only here: never on the CPU

        if head_dim in HEAD_DIMS:
            return TritonVisionOperations(config.norm_eps)
    else:
        prepare(head_dim, dtype)
        if CpuVisionOperations.takes(dtype, config.hidden_size, head_dim):
            return CpuVisionOperations(config.norm_eps, device)
    return TorchVisionOperations(config.norm_eps, device)


class _Merger:
    """Makes a token's row of the patches that stand together."""

    def __init__(self, weights: dict[str, Tensor], name: str) -> None:
        self._first, self._second = (Linear.of(weights, f"{name}.mlp.{i}") for i in (0, 2))
        self._norm = Norm.of(weights, f"{name}.pre_norm") if f"{name}.pre_norm.weight" in weights else None

    def __call__(self, normed: Tensor, _: VisionOperations) -> Tensor:
        """[tokens, merge_size ** 2 x hidden] -> [tokens, out_hidden]."""
        if (norm := self._norm) is not None:
            normed = layer_norm(normed.view(-1, len(norm.weight)), norm, _MERGER_EPSILON).view(normed.shape)
        return self._second(F.gelu(self._first(normed)))


class _GatedMerger:
    """As ``_Merger``: a convolution over the patches, a projection, a norm with GELU, a SwiGLU."""

    def __init__(self, weights: dict[str, Tensor], name: str) -> None:
        kernel = weights[f"{name}.downsample.weight"]
        self._num_patches = kernel.shape[2] * kernel.shape[3]
        self._downsample = Linear(kernel.flatten(1), weights[f"{name}.downsample.bias"])
        self._proj, self._gate, self._up, self._down = (
            Linear.of(weights, f"{name}.{part}") for part in ("proj", "gate_proj", "up_proj", "down_proj")
        )
        self._norm = Norm.of(weights, f"{name}.post_projection_norm")

    def __call__(self, normed: Tensor, operations: VisionOperations) -> Tensor:
        by_channel = normed.view(len(normed), self._num_patches, -1).transpose(1, 2).flatten(1)  # as the kernel's values lie
        projected = F.gelu(layer_norm(self._proj(self._downsample(by_channel)), self._norm, _MERGER_EPSILON))
        return self._down(operations.silu_mul(self._gate(projected), self._up(projected)))


class _DeepMerger:
    """Makes a row for a layer of the decoder of patches between two blocks; normed as merged."""

    def __init__(self, weights: dict[str, Tensor], name: str) -> None:
        self._norm, self._merger = Norm.of(weights, f"{name}.ln_q"), _Merger(weights, name)

    def __call__(self, merged: Tensor, operations: VisionOperations) -> Tensor:
        return self._merger(operations.norm(merged, self._norm), operations)


class _Block:
    """One block's weights, looked up once. ``next_norm`` is that of the next block's input, or of the merger's."""

    def __init__(self, config: VisionConfig, weights: dict[str, Tensor], index: int) -> None:
        prefix, following = f"vision.blocks.{index}.", f"vision.blocks.{index + 1}.norm1"
        self._head_dim = config.hidden_size // config.num_heads
        self.full = not config.window_size or index in config.full_attention_blocks
        self.norm, self.mlp_norm = (Norm.of(weights, f"{prefix}{name}") for name in ("norm1", "norm2"))
        self.next_norm = Norm.of(weights, following if index + 1 < config.depth else "vision.merger.ln_q")
        self._qkv = [Linear.of(weights, f"{prefix}attn.{name}") for name in (("q", "k", "v") if config.split_qkv else ("qkv",))]
        self._head_norms = [weights[f"{prefix}attn.{name}_norm.weight"] for name in ("q", "k")] if config.qk_norm else []
        self._proj = Linear.of(weights, f"{prefix}attn.proj")
        self._up, self._down = (Linear.of(weights, f"{prefix}mlp.{name}_proj") for name in ("up", "down"))
        self._gate = Linear.of(weights, f"{prefix}mlp.gate_proj") if config.feed_forward == "swiglu" else None
        self._activate = _quick_gelu if config.feed_forward == "quick_gelu" else _gelu_tanh

    def attend(self, normed: Tensor, sequences: Sequences, operations: VisionOperations) -> Tensor:
        """Attention within each sequence, and the output projection: [T, hidden]."""
        heads = [project(normed).view(normed.shape[0], -1, self._head_dim) for project in self._qkv]
        q, k, v = heads if len(heads) == 3 else heads[0].chunk(3, 1)
        for part, weight in zip((q, k), self._head_norms, strict=False):
            operations.norm_heads(part, weight)
        operations.rotate(q, k)
        return self._proj(operations.attend(q, k, v, sequences).flatten(1))

    def feed_forward(self, normed: Tensor, operations: VisionOperations) -> Tensor:
        """[T, hidden]."""
        inner = self._up(normed)
        if self._gate is not None:
            return self._down(operations.silu_mul(self._gate(normed), inner))
        return self._down(self._activate(inner))


def _quick_gelu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(_QUICK * x)


def _gelu_tanh(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")
