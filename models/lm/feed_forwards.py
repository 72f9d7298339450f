"""A layer's feed-forward, chosen by kind: normed [N, H] and the residual stream [N, H] -> [N, H], for the stream.

``layers`` builds one for each layer. Shapes: N tokens of all sequences together, H hidden.
"""

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor

from ..architecture import FeedForwardConfig, MlpAndExpertsConfig, MlpConfig, MoeConfig
from .experts import Experts
from .interface import Operations
from .matrices import matrix_of

Weights = dict[str, Tensor]
FeedForward = Callable[[Tensor, Tensor], Tensor]


class Mlp:
    """``MlpConfig``, with a fused projection to gate and up."""

    def __init__(self, prefix: str, weights: Weights, operations: Operations, activation: str = "silu") -> None:
        self._gate_up, self._down = (matrix_of(weights, f"{prefix}{name}") for name in ("gate_up", "down"))
        self._activate = operations.silu_mul if activation == "silu" else gelu_mul

    def __call__(self, normed: Tensor, stream: Tensor | None = None) -> Tensor:
        return self._down.product(self._activate(self._gate_up.product(normed)))


def gelu_mul(gate_up: Tensor) -> Tensor:
    """``Operations.silu_mul`` with GELU, by its approximation, in place of SiLU, on any device."""
    gate, up = gate_up.chunk(2, -1)
    return F.gelu(gate, approximate="tanh").mul_(up)


class Moe:
    """The sum of a token's experts, and of the shared one if there is one."""

    def __init__(self, config: MoeConfig, prefix: str, weights: Weights, operations: Operations) -> None:
        self._router = matrix_of(weights, f"{prefix}router")
        gate_up, down = (matrix_of(weights, f"{prefix}experts_{name}") for name in ("gate_up", "down"))
        self._experts = Experts(config, gate_up, down)
        self._operations = operations
        self._shared = Mlp(f"{prefix}shared_", weights, operations) if config.shared_size else None
        self._shared_router = matrix_of(weights, f"{prefix}shared_router") if config.shared_size else None

    def __call__(self, normed: Tensor, stream: Tensor | None = None) -> Tensor:
        total = self._operations.experts(normed, self._router.product(normed), self._experts)
        if self._shared is not None and self._shared_router is not None:
            share = self._shared_router.product(normed).float().sigmoid_()
            total.add_(self._shared(normed).float().mul_(share))
        return total.to(normed.dtype)


class MlpAndExperts:
    """``MlpAndExpertsConfig``."""

    def __init__(self, config: MlpAndExpertsConfig, prefix: str, weights: Weights, operations: Operations) -> None:
        self._mlp = Mlp(prefix, weights, operations, config.mlp.activation)
        gate_up, down = (matrix_of(weights, f"{prefix}experts_{name}") for name in ("gate_up", "down"))
        activate = None if config.experts.activation == "silu" else gelu_mul
        self._experts = Experts(config.experts, gate_up, down, weights[f"{prefix}expert_scales"], activate)
        self._router, router_norm = matrix_of(weights, f"{prefix}router"), weights[f"{prefix}router_norm"]
        self._router_norm = router_norm * len(router_norm) ** -0.5
        self._norms = [weights[f"{prefix}{name}"] for name in ("mlp_norm", "experts_input_norm", "experts_norm")]
        self._operations = operations

    def __call__(self, normed: Tensor, stream: Tensor) -> Tensor:
        norm, (mlp_norm, input_norm, output_norm) = self._operations.norm, self._norms
        logits = self._router.product(norm(stream, self._router_norm))
        total = self._operations.experts(norm(stream, input_norm), logits, self._experts)
        return norm(self._mlp(normed), mlp_norm).add_(norm(total.to(normed.dtype), output_norm))


def feed_forward_of(config: FeedForwardConfig, index: int, weights: Weights, operations: Operations) -> FeedForward:
    """The feed-forward of layer ``index``."""
    prefix = f"layers.{index}."
    if isinstance(config, MlpConfig):
        return Mlp(prefix, weights, operations, config.activation)
    if isinstance(config, MlpAndExpertsConfig):
        return MlpAndExperts(config, prefix, weights, operations)
    return Moe(config, prefix, weights, operations)
