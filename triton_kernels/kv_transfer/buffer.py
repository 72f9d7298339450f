"""The contiguous buffer: one stretch of bytes per layer, so that a layer can be sent while the next ones are computed (KT1)."""

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

Packing = Literal["none", "int8", "int4"]

_GRAIN = 256  # bytes, of a layer and of its scales


class LayerBuffer(NamedTuple):
    """One layer's part. ``values`` [num_tokens, 2 (K, V), num_kv_heads, head_dim] in the pages' dtype or int8; or uint8 with half the
    last axis: INT4, element j in the low and j + head_dim / 2 in the high four bits. ``scales`` float32 [num_tokens, 2, num_kv_heads],
    unless values are not quantized."""

    values: Tensor
    scales: Tensor | None


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferLayout:
    """Where the layers of a sequence lie in its buffer. ``row`` is the number of entries of a head in ``dtype``."""

    num_layers: int
    num_tokens: int
    num_kv_heads: int
    row: int
    dtype: torch.dtype
    has_scales: bool

    @property
    def values_bytes(self) -> int:
        """Bytes of a layer's values, with padding."""
        return _padded(self.num_tokens * 2 * self.num_kv_heads * self.row * self.dtype.itemsize)

    @property
    def layer_bytes(self) -> int:
        """Bytes of a layer."""
        return self.values_bytes + (_padded(self.num_tokens * 2 * self.num_kv_heads * 4) if self.has_scales else 0)

    @property
    def num_bytes(self) -> int:
        """Bytes of the buffer."""
        return self.num_layers * self.layer_bytes

    def layer(self, buffer: Tensor, layer: int) -> LayerBuffer:
        """Views of one layer in ``buffer`` uint8 [at least num_bytes]. Raises: ValueError."""
        if buffer.dtype != torch.uint8 or buffer.ndim != 1 or not buffer.is_contiguous() or buffer.shape[0] < self.num_bytes:
            raise ValueError(f"buffer is {buffer.dtype} {tuple(buffer.shape)}, must be contiguous uint8 [at least {self.num_bytes}]")
        if not 0 <= layer < self.num_layers:
            raise ValueError(f"layer {layer} outside a buffer of {self.num_layers} layers")
        heads = (self.num_tokens, 2, self.num_kv_heads)
        start = layer * self.layer_bytes
        count = self.num_tokens * 2 * self.num_kv_heads
        values = buffer[start : start + count * self.row * self.dtype.itemsize].view(self.dtype).view(*heads, self.row)
        if not self.has_scales:
            return LayerBuffer(values, None)
        start += self.values_bytes
        return LayerBuffer(values, buffer[start : start + 4 * count].view(torch.float32).view(heads))


def transfer_layout(
    num_layers: int, num_tokens: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype, packing: Packing
) -> TransferLayout:
    """For pages of ``dtype``. What is quantized already keeps its values and scales. Raises: ValueError if it is to be packed."""
    if packing != "none" and dtype.itemsize == 1:
        raise ValueError(f"pages of {dtype} are quantized already: packing {packing!r} must be 'none'")
    return TransferLayout(
        num_layers=num_layers,
        num_tokens=num_tokens,
        num_kv_heads=num_kv_heads,
        row=head_dim // 2 if packing == "int4" else head_dim,
        dtype={"none": dtype, "int8": torch.int8, "int4": torch.uint8}[packing],
        has_scales=packing != "none" or dtype.itemsize == 1,
    )


def _padded(num_bytes: int) -> int:
    return -(-num_bytes // _GRAIN) * _GRAIN
