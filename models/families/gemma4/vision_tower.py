"""The vision tower of Gemma 4's small models: a transformer over the patches of a picture, whose means become rows. Weights are views
but for the first matrix, whose columns get the order of our rows.

Shapes: R patches of all parts, H hidden; a row is merge_size x merge_size patches, which follow each other in the input.
"""

from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ....cpu_kernels.flash_attention import prepare
from ...architecture import ModelConfig
from ...lm.decoder import AfterLayer
from ...lm.layer_ops import rms_norm
from ...towers.interface import TowerInput
from ...towers.linear import Linear
from ...towers.sequences import Sequences, attend
from .bounded import Bounded
from .towers_config import PooledVision

_SCALE = 1.0  # of scores
_HALF = 127.5  # of a colour's values


class VisionTower:
    """``Tower``, computing where its weights lie."""

    def __init__(self, model: ModelConfig, weights: dict[str, Tensor], device: torch.device) -> None:
        """Uses those ``weights`` whose names start with ``vision.``."""
        assert isinstance(model.vision, PooledVision)
        config = self._config = model.vision
        self._device, self._epsilon = device, torch.tensor(config.norm_eps)
        kernel, side = weights["vision.patch_embedder.input_proj.weight"], config.patch_size
        planes = kernel.view(-1, side, side, 3).permute(0, 3, 1, 2).flatten(1)  # transformers' rows have colours last
        self._patch_embed, self._dtype = Linear(planes.contiguous(), None), kernel.dtype
        self._table = weights["vision.patch_embedder.position_embedding_table"]
        exponents = torch.arange(0, config.head_dim // 2, 2, dtype=torch.float32) / (config.head_dim // 2)
        self._frequencies = 1.0 / config.theta**exponents
        self._layers = [_Layer(config, weights, f"vision.encoder.layers.{i}.") for i in range(config.depth)]
        self._standard = (weights["vision.std_bias"], weights["vision.std_scale"]) if config.is_standardised else None
        self._project = Linear(weights["vision.projection.weight"], None)
        self._ones = torch.ones(config.hidden_size, device=device)
        if device.type == "cpu":
            prepare(config.head_dim, self._dtype, _SCALE)

    def encode(self, parts: Sequence[TowerInput], after_layer: AfterLayer | None = None) -> list[Tensor]:
        rows = torch.from_numpy(np.concatenate([part.rows for part in parts])).to(self._device)
        places = torch.cat([_places(part.grid, self._config.merge_size) for part in parts])
        x, y = places.to(self._device).unbind(1)
        hidden = self._patch_embed(rows.float().div_(_HALF).sub_(1.0).to(self._dtype))
        hidden += F.embedding(x, self._table[0]) + F.embedding(y, self._table[1])
        angles = (places.unsqueeze(2) * self._frequencies).to(self._device).unsqueeze(1)  # [R, 1, 2, pairs of half a head]
        rotation = angles.cos(), angles.sin()
        lengths = np.repeat([h * w for _, h, w in (part.grid for part in parts)], [part.grid[0] for part in parts])
        sequences = Sequences.of(lengths, self._device)
        for layer in self._layers:
            layer(hidden, sequences, rotation)
            if after_layer is not None:
                after_layer()
        merged = self._config.merge_size**2
        tokens = self._project(self._pooled(hidden.view(-1, merged, hidden.shape[1])))
        return list(torch.split(tokens, [len(part.rows) // merged for part in parts]))

    def _pooled(self, patches: Tensor) -> Tensor:
        """Rows [N, H] of the patches [N, merged, H] of each, ready for the projection."""
        means = patches.float().mean(1).to(self._dtype).float() * self._config.hidden_size**0.5
        if self._standard is not None:
            bias, scale = self._standard
            means = (means - bias.float()) * scale.float()
        return rms_norm(means.to(self._dtype), self._ones, self._epsilon)


class _Layer:
    """One layer's weights, looked up once."""

    def __init__(self, config: PooledVision, weights: dict[str, Tensor], name: str) -> None:
        self._head_dim, self._epsilon = config.head_dim, torch.tensor(config.norm_eps)
        self._qkv = [Bounded(weights, f"{name}self_attn.{part}_proj") for part in "qkv"]
        self._out = Bounded(weights, f"{name}self_attn.o_proj")
        self._gate, self._up, self._down = (Bounded(weights, f"{name}mlp.{part}_proj") for part in ("gate", "up", "down"))
        norms = ("input", "post_attention", "pre_feedforward", "post_feedforward")
        self._norms = [weights[f"{name}{norm}_layernorm.weight"] for norm in norms]
        q_norm, k_norm = (weights[f"{name}self_attn.{part}_norm.weight"] for part in "qk")
        self._head_norms = q_norm, k_norm, torch.ones_like(q_norm)

    def __call__(self, hidden: Tensor, sequences: Sequences, rotation: tuple[Tensor, Tensor]) -> None:
        """Add to ``hidden`` [R, H] what the layer finds."""
        normed = self._norm(0, hidden)
        q, k, v = (
            rms_norm(project(normed).view(len(normed), -1, self._head_dim), weight, self._epsilon)
            for project, weight in zip(self._qkv, self._head_norms, strict=True)
        )
        attended = attend(_turned(q, rotation), _turned(k, rotation), v, sequences, _SCALE)
        hidden += self._norm(1, self._out(attended.flatten(1)))
        normed = self._norm(2, hidden)
        hidden += self._norm(3, self._down(F.gelu(self._gate(normed), approximate="tanh").mul_(self._up(normed))))

    def _norm(self, number: int, x: Tensor) -> Tensor:
        return rms_norm(x, self._norms[number], self._epsilon)


def _turned(heads: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    """Heads [R, heads, head_dim] whose first half is turned by x, the second by y; pairs stand half of that apart."""
    cos, sin = rotation
    low, high = heads.float().view(*heads.shape[:2], 2, 2, -1).unbind(3)
    return torch.stack((low * cos - high * sin, high * cos + low * sin), 3).flatten(2).to(heads.dtype)


def _places(grid: tuple[int, int, int], merge: int) -> Tensor:
    """x and y of the patches of a part in their order, int64 [t h w, 2]."""
    t, h, w = grid
    y = torch.arange(h).view(1, h // merge, 1, merge, 1)
    x = torch.arange(w).view(1, 1, w // merge, 1, merge)
    shape = (t, h // merge, w // merge, merge, merge)
    return torch.stack((x.expand(shape), y.expand(shape)), -1).view(-1, 2)
