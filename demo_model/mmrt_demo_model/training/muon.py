"""Muon: momentum whose matrices are made orthogonal before they are added (Jordan et al. 2024).

The size of an update is matched to AdamW's (Liu et al. 2025).
torch.optim.Muon does the same in bfloat16, one matrix after another; on a CPU without bfloat16 units that takes four times as long.
"""

from collections import defaultdict
from collections.abc import Iterable

import torch
from torch import Tensor, nn

_MOMENTUM = 0.95
_COEFFICIENTS = (3.4445, -4.775, 2.0315)
_ITERATIONS = 5


class Muon(torch.optim.Optimizer):
    """For matrices alone. dtype: that of the iterations."""

    def __init__(self, matrices: Iterable[nn.Parameter], lr: float, weight_decay: float, dtype: torch.dtype) -> None:
        super().__init__(matrices, {"lr": lr, "weight_decay": weight_decay})
        self._dtype = dtype

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """One update of all matrices, those of one shape together."""
        for group in self.param_groups:
            alike: dict[torch.Size, list[nn.Parameter]] = defaultdict(list)
            for matrix in group["params"]:
                if matrix.grad is not None:
                    alike[matrix.shape].append(matrix)
            for shape, matrices in alike.items():
                updates = orthogonal(torch.stack([self._nesterov(matrix) for matrix in matrices]), self._dtype)
                rate = group["lr"] * 0.2 * max(shape) ** 0.5
                for matrix, update in zip(matrices, updates.unbind(), strict=True):
                    matrix.mul_(1 - group["lr"] * group["weight_decay"]).sub_(update, alpha=rate)

    def _nesterov(self, matrix: nn.Parameter) -> Tensor:
        gradient = matrix.grad
        assert gradient is not None
        state = self.state[matrix]
        momentum: Tensor = state.setdefault("momentum", torch.zeros_like(matrix))
        momentum.lerp_(gradient, 1 - _MOMENTUM)
        return gradient.lerp(momentum, _MOMENTUM)


def orthogonal(matrices: Tensor, dtype: torch.dtype) -> Tensor:
    """[n, rows, columns] -> the same with singular values near one, by Newton and Schulz's iteration."""
    a, b, c = _COEFFICIENTS
    wide = matrices.shape[1] <= matrices.shape[2]
    x = (matrices if wide else matrices.mT).to(dtype)
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(_ITERATIONS):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x if wide else x.mT).to(matrices.dtype)
