"""Pages of the KV cache: where a token's K and V lie in them, and in which numbers.

A page is [num_layers, page_tokens] rows. A row is one token's K and V in one layer, [2 (K, V), num_kv_heads, head_dim] in the model's
dtype, side by side as the fused projection makes them. In a quantized cache (KQ1) they are int8 or float8_e4m3fn, each head's largest
magnitude being the largest of that type; behind them stand the heads' scales, float32 [2, num_kv_heads], and the row is filled up to
a multiple of 32 bytes, which keeps every row on a sector of a GPU's memory.
"""

import torch
from torch import Tensor

from .architecture import KvDType, LanguageConfig

STORED = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
_LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
_SMALLEST_SCALE = 1e-8


class KvPages:
    """A KV pool as rows. ``dtype`` is the model's. ``rows`` [num_pages, num_layers, page_tokens, row]: of ``dtype``, or bytes where
    ``is_quantized``. ``values`` [num_pages, num_layers, page_tokens, 2, num_kv_heads, head_dim] as stored, and ``scales`` float32 [the
    same without head_dim] or None: views of the pool."""

    def __init__(self, config: LanguageConfig, kv: Tensor, page_tokens: int, dtype: torch.dtype, kv_dtype: KvDType = "auto") -> None:
        """``kv`` uint8 [num_pages, page_bytes], contiguous; it is shared with other processes and written in place."""
        self.page_tokens, self.dtype = page_tokens, dtype
        self.is_quantized = kv_dtype != "auto"
        self._stored = STORED.get(kv_dtype, dtype)
        self._heads = 2, config.num_kv_heads
        self._head_dim = config.head_dim
        rows = kv.view(kv.shape[0], config.num_layers, page_tokens, -1)
        values_bytes, scales_bytes = 2 * config.num_kv_heads * config.head_dim, 8 * config.num_kv_heads
        self._row_bytes = [values_bytes, scales_bytes, rows.shape[-1] - values_bytes - scales_bytes]  # of a quantized row, and padding
        self.rows = rows if self.is_quantized else rows.view(dtype)
        self.values, self.scales = self._parts(self.rows)
        self._scratch = torch.empty(0)

    def pack(self, kv_NR: Tensor) -> Tensor:
        """Rows [N, row] of K and V [N, 2 x num_kv_heads x head_dim], finite, in the model's dtype."""
        if not self.is_quantized:
            return kv_NR
        heads = kv_NR.float().view(-1, *self._heads, self._head_dim)
        largest = _LARGEST[self._stored]
        scale = (heads.abs().amax(-1) / largest).clamp_(min=_SMALLEST_SCALE)
        heads = heads / scale.unsqueeze(-1)
        rows = kv_NR.new_zeros(kv_NR.shape[0], self.rows.shape[-1], dtype=torch.uint8)
        values, scales = self._parts(rows)
        assert scales is not None
        values.copy_((heads.round_() if self._stored == torch.int8 else heads).clamp_(-largest, largest))
        scales.copy_(scale)
        return rows

    def unpack(self, rows: Tensor) -> Tensor:
        """K and V [n, 2, num_kv_heads, head_dim] of ``rows`` [n, row], in the model's dtype. Valid until the next call."""
        values, scales = self._parts(rows)
        if scales is None:
            return values
        if self._scratch.numel() < values.numel():
            self._scratch = torch.empty(values.numel())
        heads = self._scratch[: values.numel()].view(values.shape)
        return heads.copy_(values).mul_(scales.unsqueeze(-1)).to(self.dtype)

    def _parts(self, rows: Tensor) -> tuple[Tensor, Tensor | None]:
        """Values [..., 2, num_kv_heads, head_dim] and scales [..., 2, num_kv_heads] that lie in rows [..., row]."""
        shape = *rows.shape[:-1], *self._heads
        if not self.is_quantized:
            return rows.view(*shape, self._head_dim), None
        values, scales, _ = torch.split(rows, self._row_bytes, -1)
        return values.view(self._stored).view(*shape, self._head_dim), scales.view(torch.float32).view(shape)
