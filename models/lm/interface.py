"""A decoder layer's operations besides matrix products, on the device of the KV pages: ``Operations``.

Shapes: N tokens, H hidden size, I intermediate size, D head size, E experts.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

from torch import Tensor

from ..architecture import KvPlace, LanguageConfig
from .attention import Attention
from .delta import Delta
from .delta_pages import DeltaPages
from .experts import Experts
from .kv_pages import KvPages

QkNorms = tuple[Tensor, Tensor]
"""Weights [D] of the RMSNorm of each query head and of each key head."""


class Operations(Protocol):
    """One forward's operations. ``begin_*`` of all ``attentions`` and ``begin`` once per forward, the others in each layer."""

    @property
    def attentions(self) -> Sequence[Attention]:
        """Of each group of layers (``LanguageConfig.kv_groups``)."""
        ...

    @property
    def delta(self) -> Delta | None:
        """None for a model without recurrent states."""
        ...

    def begin(self, positions: Tensor) -> None:
        """``positions`` int64 [3, N] of the forward's tokens, on the model's device."""
        ...

    def norm(self, x_NH: Tensor, weight: Tensor) -> Tensor:
        """RMSNorm with ``weight`` [H]."""
        ...

    def add_norm(self, x_NH: Tensor, residual_NH: Tensor, weight: Tensor) -> Tensor:
        """``residual`` += x in place, and its ``norm``. ``x`` is used up."""
        ...

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """``gate_up`` [N, 2 I], gate first -> silu(gate) x up, [N, I]. ``gate_up`` is used up."""
        ...

    def experts(self, x_NH: Tensor, logits_NE: Tensor, experts: Experts) -> Tensor:
        """Each token's sum over its experts, float32 [N, H]; ``logits`` are the router's."""
        ...

    def rotate_and_write(self, place: KvPlace | None, heads: Tensor, rope: int, norms: QkNorms | None) -> None:
        """Normalise and rotate a projection's query and key heads in place, and store K and V.

        ``heads`` [N, num_heads + 2 x num_kv_heads, D]: queries, keys, values; without any queries, too. ``rope``: the index of
        theirs. Without a ``place`` all are queries, and nothing is stored.
        """
        ...


MakeOperations = Callable[[LanguageConfig, Sequence[KvPages], DeltaPages | None], Operations]
