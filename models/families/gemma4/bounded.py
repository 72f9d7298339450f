"""Products of towers whose inputs and outputs are kept within bounds that the checkpoint has."""

import torch
from torch import Tensor

from ...towers.linear import Linear
from .towers_config import BOUNDS


class Bounded:
    """x W' of rows, without a bias. Tensors are NAME.linear.weight, and NAME.input_min and its like where there are bounds."""

    def __init__(self, weights: dict[str, Tensor], name: str) -> None:
        self._matrix = Linear(weights[f"{name}.linear.weight"], None)
        self._bounds = [weights[f"{name}.{bound}"] for bound in BOUNDS if f"{name}.{bound}" in weights]

    def __call__(self, x: Tensor) -> Tensor:
        if not self._bounds:
            return self._matrix(x)
        input_min, input_max, output_min, output_max = self._bounds
        return self._matrix(torch.clamp(x, input_min, input_max)).clamp_(output_min, output_max)
