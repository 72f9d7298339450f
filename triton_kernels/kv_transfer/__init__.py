"""KV of one sequence from pages into a contiguous buffer, layer by layer, and back; as it is, or packed to INT8 or INT4 (KQ2, KT1)."""

from .buffer import LayerBuffer, TransferLayout, transfer_layout
from .op import gather_layer, scatter_layer

__all__ = ["LayerBuffer", "TransferLayout", "gather_layer", "scatter_layer", "transfer_layout"]
