"""Rotary position embedding on one axis or three (M-RoPE). ``lm`` calls it once per forward and applies it in every layer."""

import torch
from torch import Tensor

from ..architecture import LanguageConfig


class Rope:
    """Angles of a decoder. Pair j of a head turns by position[axis(j)] x theta ** (-2j / head_dim)."""

    def __init__(self, config: LanguageConfig) -> None:
        pairs = config.head_dim // 2
        exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
        self._inverse_frequency = 1.0 / (config.rope_theta**exponents)
        section = config.mrope_section or (pairs,)
        self._axis = torch.repeat_interleave(torch.arange(len(section)), torch.tensor(section))

    def rotation(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """positions int64 [3, n] -> (cos, sin), float32 [n, 1, head_dim] each; the first half of sin is negated for ``rotate``."""
        angles = positions[self._axis].T * self._inverse_frequency
        cos, sin = angles.cos(), angles.sin()
        return torch.cat((cos, cos), -1).unsqueeze(1), torch.cat((-sin, sin), -1).unsqueeze(1)


def rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Turn ``heads`` [n, num_heads, head_dim] in place, computing in float32."""
    values = heads.float()
    heads.copy_(torch.addcmul(values * cos, values.roll(heads.shape[-1] // 2, -1), sin))
