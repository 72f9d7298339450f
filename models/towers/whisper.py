"""The parts of Whisper's encoder (arXiv 2212.04356, 2.2) that sound towers are made of. Weights are views, never copied."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from ..media_config import AudioConfig
from .linear import Linear
from .sequences import Sequences, attend

_LONGEST_PERIOD = 10_000.0


class EncoderLayer:
    """One layer's weights, looked up once."""

    def __init__(self, config: AudioConfig, weights: dict[str, Tensor], index: int) -> None:
        prefix = f"audio.layers.{index}."
        self._head_dim = config.hidden_size // config.num_heads
        self._norm, self._mlp_norm = (LayerNorm(weights, f"{prefix}{name}_layer_norm") for name in ("self_attn", "final"))
        self._qkv = [Linear.of(weights, f"{prefix}self_attn.{name}_proj") for name in "qkv"]
        self._out, self._up, self._down = (Linear.of(weights, prefix + name) for name in ("self_attn.out_proj", "fc1", "fc2"))

    def __call__(self, hidden: Tensor, sequences: Sequences) -> None:
        """Add the layer's output to ``hidden`` [T, hidden] in place."""
        normed = self._norm(hidden)
        q, k, v = (project(normed).view(len(normed), -1, self._head_dim) for project in self._qkv)
        hidden += self._out(attend(q, k, v, sequences).flatten(1))
        hidden += self._down(F.gelu(self._up(self._mlp_norm(hidden))))


class LayerNorm:
    """Over the columns of rows. Tensors are called NAME.weight and NAME.bias."""

    def __init__(self, weights: dict[str, Tensor], name: str) -> None:
        self._weight, self._bias = weights[f"{name}.weight"], weights[f"{name}.bias"]

    def __call__(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self._weight.shape, self._weight, self._bias)


def sinusoids(length: int, channels: int) -> Tensor:
    """float32 [length, channels]: sines, then cosines, of periods from 2 pi to 2 pi x 10,000."""
    step = math.log(_LONGEST_PERIOD) / (channels // 2 - 1)
    angles = torch.arange(length).unsqueeze(1) * torch.exp(-step * torch.arange(channels // 2).float())
    return torch.cat((angles.sin(), angles.cos()), dim=1)
