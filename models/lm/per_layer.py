"""Per-layer inputs, as Gemma 4's: each layer mixes a short vector of its own into the residual stream, which depends on the token's id
and on its embedding. ``LanguageModel`` makes those of all layers at once. Shapes: N tokens, H hidden, L layers, P values of an input.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from ..architecture import PerLayerConfig
from .feed_forwards import Weights
from .interface import Operations
from .matrices import matrix_of, table_of


class PerLayerInputs:
    """What layers get of tokens."""

    def __init__(self, config: PerLayerConfig, num_layers: int, weights: Weights, operations: Operations) -> None:
        self._table, self._projection = table_of(weights, "per_layer_table"), matrix_of(weights, "per_layer_projection")
        self._norm, self._operations = weights["per_layer_norm"], operations
        self._shape, self._pad_id = (num_layers, config.size), config.pad_id
        self._placeholders = torch.tensor(config.placeholders, dtype=torch.int64, device=self._norm.device)

    def of(self, ids: Tensor, embeds_NH: Tensor) -> Tensor:
        """[N, L, P]. Placeholders of media count as padding."""
        ids = torch.where(torch.isin(ids, self._placeholders), self._pad_id, ids)
        dtype, (num_layers, size) = embeds_NH.dtype, self._shape
        of_ids = self._table.lookup(ids, dtype).view(-1, num_layers, size)
        of_ids = of_ids * torch.tensor(size**0.5, dtype=dtype)
        projected = self._projection.product(embeds_NH).mul_(embeds_NH.shape[1] ** -0.5)
        return self._operations.norm(projected.view(-1, num_layers, size), self._norm).add_(of_ids).mul_(2**-0.5)


class PerLayerMixing:
    """A layer's part: what it does behind its feed-forward."""

    def __init__(self, prefix: str, weights: Weights, operations: Operations) -> None:
        self._gate, self._out = (matrix_of(weights, f"{prefix}per_layer_{name}") for name in ("gate", "out"))
        self._norm, self._operations = weights[f"{prefix}per_layer_out_norm"], operations

    def add(self, hidden_NH: Tensor, input_NP: Tensor) -> None:
        """Add to the residual stream, in place."""
        gated = F.gelu(self._gate.product(hidden_NH), approximate="tanh").mul_(input_NP)
        hidden_NH += self._operations.norm(self._out.product(gated), self._norm)
