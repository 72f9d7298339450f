"""Rotary position embedding on one axis or three (M-RoPE). ``lm`` calls it once per forward and applies it in every layer."""

import torch
from torch import Tensor

from ..architecture import LanguageConfig

Rotation = tuple[Tensor, Tensor, Tensor]
"""Cosines, sines and negated sines of each token's angles, float32 [n, 1, head_dim / 2]."""


class Rope:
    """Angles of a decoder. Pair j of a head turns by position[axis(j)] x theta ** (-2j / head_dim)."""

    def __init__(self, config: LanguageConfig) -> None:
        pairs = config.head_dim // 2
        exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
        self._inverse_frequency = 1.0 / (config.rope_theta**exponents)
        section = config.mrope_section or (pairs,)
        self._axis = torch.repeat_interleave(torch.arange(len(section)), torch.tensor(section))

    def rotation(self, positions: Tensor) -> Rotation:
        """positions int64 [3, n] -> what ``rotate`` turns heads by."""
        angles = (positions[self._axis].T * self._inverse_frequency).unsqueeze(1).contiguous()
        sin = angles.sin()
        return angles.cos(), sin, -sin


def rotate(heads: Tensor, rotation: Rotation) -> None:
    """Turn ``heads`` [n, num_heads, head_dim] in place, computing in float32."""
    cos, sin, minus_sin = rotation
    values = heads.float()
    low, high = values.chunk(2, -1)
    from_low, from_high = low * sin, high * minus_sin
    torch.addcmul(from_high, low, cos, out=low)
    torch.addcmul(from_low, high, cos, out=high)
    if values is not heads:
        heads.copy_(values)
