"""Rotary position embedding on one axis or three (M-RoPE). ``lm`` calls it once per forward and applies it in every layer."""

import torch
from torch import Tensor

from ..architecture import RopeConfig

Rotation = tuple[Tensor, Tensor, Tensor]
"""Cosines, sines and negated sines of each token's angles, float32 [n, 1, pairs]."""


class Rope:
    """Angles of heads, as ``RopeConfig`` says."""

    def __init__(self, config: RopeConfig, head_dim: int) -> None:
        self._inverse_frequency, self._factor = inverse_frequencies(config, head_dim), config.factor
        self._axis = torch.tensor(config.axes or (0,) * (head_dim // 2))

    def rotation(self, positions: Tensor) -> Rotation:
        """positions int64 [3, n] -> what ``rotate`` turns heads by."""
        angles = (positions[self._axis].T * self._inverse_frequency).unsqueeze(1).contiguous()
        cos, sin = angles.cos(), angles.sin()
        if self._factor != 1.0:
            cos, sin = cos * self._factor, sin * self._factor
        return cos, sin, -sin


def inverse_frequencies(config: RopeConfig, head_dim: int) -> Tensor:
    """What a position is multiplied by for the angle of each pair, float32 [pairs]. They are computed on the CPU whatever the model's
    device, so that angles are the same to the last bit."""
    turning = 2 * len(config.axes) or head_dim
    exponents = torch.arange(0, turning, 2, dtype=torch.float32) / turning
    frequencies = 1.0 / (config.theta**exponents)
    return frequencies / torch.tensor(config.stretch) if config.stretch else frequencies


def rotate(heads: Tensor, rotation: Rotation) -> None:
    """Turn the leading values of ``heads`` [n, num_heads, head_dim] in place, computing in float32."""
    cos, sin, minus_sin = rotation
    heads = heads[..., : 2 * cos.shape[-1]]
    values = heads.float()
    low, high = values.chunk(2, -1)
    from_low, from_high = low * sin, high * minus_sin
    torch.addcmul(from_high, low, cos, out=low)
    torch.addcmul(from_low, high, cos, out=high)
    if values is not heads:
        heads.copy_(values)
