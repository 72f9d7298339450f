"""A layer's feed-forward, chosen by kind: normed [N, H] -> [N, H], for the residual stream.

``layers`` builds one for each layer. Shapes: N tokens of all sequences together, H hidden.
"""

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor

from ..architecture import FeedForwardConfig, MlpConfig, MoeConfig
from .experts import Experts
from .interface import Operations
from .matrices import matrix_of

Weights = dict[str, Tensor]
FeedForward = Callable[[Tensor], Tensor]


class Mlp:
    """``MlpConfig``, with a fused projection to gate and up."""

    def __init__(self, prefix: str, weights: Weights, operations: Operations, activation: str = "silu") -> None:
        self._gate_up, self._down = (matrix_of(weights, f"{prefix}{name}") for name in ("gate_up", "down"))
        self._activate = operations.silu_mul if activation == "silu" else gelu_mul

    def __call__(self, normed: Tensor) -> Tensor:
        return self._down.product(self._activate(self._gate_up.product(normed)))


def gelu_mul(gate_up: Tensor) -> Tensor:
    """``Operations.silu_mul`` with GELU, by its approximation, in place of SiLU, on any device."""
    gate, up = gate_up.chunk(2, -1)
    return F.gelu(gate, approximate="tanh").mul_(up)


class Moe:
    """The sum of a token's experts, and of the shared one if there is one."""

    def __init__(self, config: MoeConfig, prefix: str, weights: Weights, operations: Operations) -> None:
        self._router = matrix_of(weights, f"{prefix}router")
        self._experts = Experts(config, *(matrix_of(weights, f"{prefix}experts_{name}") for name in ("gate_up", "down")))
        self._operations = operations
        self._shared = Mlp(f"{prefix}shared_", weights, operations) if config.shared_size else None
        self._shared_router = matrix_of(weights, f"{prefix}shared_router") if config.shared_size else None

    def __call__(self, normed: Tensor) -> Tensor:
        total = self._operations.experts(normed, self._router.product(normed), self._experts)
        if self._shared is not None and self._shared_router is not None:
            share = self._shared_router.product(normed).float().sigmoid_()
            total.add_(self._shared(normed).float().mul_(share))
        return total.to(normed.dtype)


def feed_forward_of(config: FeedForwardConfig, index: int, weights: Weights, operations: Operations) -> FeedForward:
    """The feed-forward of layer ``index``."""
    prefix = f"layers.{index}."
    if isinstance(config, MlpConfig):
        return Mlp(prefix, weights, operations, config.activation)
    return Moe(config, prefix, weights, operations)
