"""A matrix product with a bias, of views by name. Towers use it."""

from typing import NamedTuple, Self

import torch.nn.functional as F
from torch import Tensor


class Linear(NamedTuple):
    """x W' + b; without ``bias`` where it is None."""

    weight: Tensor
    bias: Tensor | None

    @classmethod
    def of(cls, weights: dict[str, Tensor], name: str) -> Self:
        """The tensors NAME.weight and, where there is one, NAME.bias."""
        return cls(weights[f"{name}.weight"], weights.get(f"{name}.bias"))

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)
