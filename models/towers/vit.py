"""A plain vision transformer over squares of one size, as SigLIP's and CLIP's: the tower of families that cut pictures into tiles. Its
weights are views, never copied; all but its products and, on a CPU, its attention is torch's.

Shapes: V views of n x n patches; a token is merge_size x merge_size patches that stand together, and follow each other in the input.
"""

from collections.abc import Callable, Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ...cpu_kernels.flash_attention import prepare
from ..architecture import ModelConfig
from ..lm.decoder import AfterLayer
from ..media_config import VisionConfig
from .interface import TowerInput
from .linear import Linear
from .sequences import Sequences, attend

_EPSILON = 1e-5  # of a merger's norm


class VisionTransformer:
    """``Tower``, computing where its weights lie."""

    def __init__(self, model: ModelConfig, weights: dict[str, Tensor], device: torch.device, places: Tensor) -> None:
        """Uses those ``weights`` whose names start with ``vision.``. ``places`` int64 [n, n]: which row of the table of positions each
        patch takes, row by row."""
        assert model.vision is not None and model.vision_rules is not None
        config, rules = model.vision, model.vision_rules
        self._config, self._device = config, device
        self._mean, self._std = (
            (torch.tensor(numbers) * 255).repeat_interleave(rules.patch_size**2).to(device)
            for numbers in (rules.image_mean, rules.image_std)
        )
        kernel = weights["vision.embeddings.patch_embedding.weight"]
        self._patch_embed = Linear(kernel.flatten(1), weights.get("vision.embeddings.patch_embedding.bias"))
        self._dtype = kernel.dtype
        table = weights["vision.embeddings.position_embedding.weight"].view(-1, config.hidden_size)
        first = weights.get("vision.embeddings.class_embedding")
        self._first = None if first is None else first.flatten() + table[0]  # the row of the whole picture, whose place is the first
        order = _merged(places, config.merge_size) + (first is not None)
        self._positions = table[order.to(device)]
        self._layers = [Layer(config, weights, f"vision.encoder.layers.{i}") for i in range(config.depth)]
        self._norms = [
            Norm(weights, name, config.norm_eps) if f"{name}.weight" in weights else None
            for name in ("vision.pre_layrnorm", "vision.post_layernorm")
        ]
        merger_norm = "vision.merger.layer_norm"
        self._merger_norm = Norm(weights, merger_norm, _EPSILON) if f"{merger_norm}.weight" in weights else None
        names = [f"vision.merger.linear_{i}" for i in (1, 2)]
        self._merger = [Linear.of(weights, name) for name in names if f"{name}.weight" in weights]
        if device.type == "cpu":
            prepare(config.hidden_size // config.num_heads, self._dtype)

    def encode(self, parts: Sequence[TowerInput], after_layer: AfterLayer | None = None) -> list[Tensor]:
        rows = np.concatenate([part.rows for part in parts])
        num_views, num_patches = sum(part.grid[0] for part in parts), len(self._positions)
        assert len(rows) == num_views * num_patches, "views of the tower's size"
        staged = torch.from_numpy(rows)
        if self._device.type == "cuda":
            staged = staged.pin_memory()
        pixels = staged.to(self._device, non_blocking=True).float().sub_(self._mean).div_(self._std).to(self._dtype)
        hidden = self._patch_embed(pixels).view(num_views, num_patches, -1).add_(self._positions)
        if self._first is not None:
            hidden = torch.cat((self._first.expand(num_views, 1, -1), hidden), 1)
        length = hidden.shape[1]
        hidden = hidden.flatten(0, 1)
        if (before := self._norms[0]) is not None:
            hidden = before(hidden)
        sequences = Sequences.of(np.full(num_views, length), self._device)
        for layer in self._layers:
            layer(hidden, sequences)
            if after_layer is not None:
                after_layer()
        if (behind := self._norms[1]) is not None:
            hidden = behind(hidden)
        num_merged = self._config.merge_size**2
        patches = hidden.view(num_views, length, -1)[:, length - num_patches :]
        tokens = self.merge(patches.reshape(-1, num_merged, hidden.shape[1]))
        return list(torch.split(tokens, [part.grid[0] * num_patches // num_merged for part in parts]))

    def merge(self, patches: Tensor) -> Tensor:
        """The row of each token, of its patches [N, merge_size^2, width]."""
        merged = patches.flatten(1)
        tokens = self._merger[0](merged if self._merger_norm is None else self._merger_norm(merged))
        for matrix in self._merger[1:]:
            tokens = matrix(F.gelu(tokens))
        return tokens


class Norm:
    """A LayerNorm; without a bias an RMSNorm."""

    def __init__(self, weights: dict[str, Tensor], name: str, epsilon: float) -> None:
        self._weight, self._bias, self._epsilon = weights[f"{name}.weight"], weights.get(f"{name}.bias"), epsilon

    def __call__(self, x: Tensor) -> Tensor:
        if self._bias is None:
            return F.rms_norm(x, self._weight.shape, self._weight, self._epsilon)
        return F.layer_norm(x, self._weight.shape, self._weight, self._bias, self._epsilon)


class Attention:
    """A norm, and what the rows behind it find in those of their sequence."""

    def __init__(self, config: VisionConfig, weights: dict[str, Tensor], name: str) -> None:
        self._head_dim = config.hidden_size // config.num_heads
        self._norm = Norm(weights, f"{name}.layer_norm1", config.norm_eps)
        self._qkv = [Linear.of(weights, f"{name}.self_attn.{part}_proj") for part in "qkv"]
        joint = [f"{name}.self_attn.{part}_norm" for part in "qk"]
        self._joint_norms = [Norm(weights, norm, 1e-6) for norm in joint if f"{norm}.weight" in weights]
        self._out = Linear.of(weights, f"{name}.self_attn.out_proj")

    def __call__(self, hidden: Tensor, sequences: Sequences) -> Tensor:
        """Of ``hidden`` [rows, width], and as large."""
        normed = self._norm(hidden)
        q, k, v = (project(normed) for project in self._qkv)
        if self._joint_norms:
            q, k = (norm(part) for norm, part in zip(self._joint_norms, (q, k), strict=True))
        q, k, v = (part.view(len(normed), -1, self._head_dim) for part in (q, k, v))
        return self._out(attend(q, k, v, sequences).flatten(1))


class Layer:
    """One layer's weights, looked up once."""

    def __init__(self, config: VisionConfig, weights: dict[str, Tensor], name: str) -> None:
        self._attention = Attention(config, weights, name)
        self._norm = Norm(weights, f"{name}.layer_norm2", config.norm_eps)
        self._up, self._down = (Linear.of(weights, f"{name}.mlp.fc{i}") for i in (1, 2))
        self._scales = [weights.get(f"{name}.lambda_{i}") for i in (1, 2)]
        self._activate = _ACTIVATIONS[config.feed_forward]

    def __call__(self, hidden: Tensor, sequences: Sequences) -> None:
        """Add to ``hidden`` [rows, width] what the layer finds."""
        self._add(hidden, self._attention(hidden, sequences), self._scales[0])
        self._add(hidden, self._down(self._activate(self._up(self._norm(hidden)))), self._scales[1])

    @staticmethod
    def _add(hidden: Tensor, found: Tensor, scale: Tensor | None) -> None:
        hidden += found if scale is None else found.mul_(scale)


def _quick_gelu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(1.702 * x)


def _gelu_tanh(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"quick_gelu": _quick_gelu, "gelu_tanh": _gelu_tanh, "gelu": F.gelu}


def _merged(places: Tensor, merge: int) -> Tensor:
    """``places`` [n, n] in the order of the tower's input."""
    side = len(places)
    return places.view(side // merge, merge, side // merge, merge).transpose(1, 2).flatten()
