"""A matrix product with a bias, of views by name. Towers use it."""

from typing import Self

from torch import Tensor

from ..lm.matrices import FloatMatrix


class Linear:
    """x W' + b of rows [M, K], [M, N]; without ``bias`` where it is None."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._matrix, self._bias = FloatMatrix(weight), bias

    @classmethod
    def of(cls, weights: dict[str, Tensor], name: str) -> Self:
        """The tensors NAME.weight and, where there is one, NAME.bias."""
        return cls(weights[f"{name}.weight"], weights.get(f"{name}.bias"))

    def __call__(self, x: Tensor) -> Tensor:
        return self._matrix.product(x, self._bias)
