"""Pages of the KV cache: the layout and number format of a token's K and V.

A page is the parts of groups of layers that attend alike, one behind the other; where there are several, each is a multiple of 64
bytes. Those of groups with a window may be pages of a pool of their own (``LanguageConfig.has_windows_apart``). A group's part is
[layers, part]: a part for each layer that has K and V of its own. It has K and V of the page's tokens, [page_tokens, 2 (K, V),
num_kv_heads, head_dim] in the model's dtype; a token's K and V lie side by side, as the fused projection makes them. In a quantized
cache (KQ1) they are int8 or float8_e4m3fn, the largest magnitude of each head being the largest of that type; the scales follow them,
float32 [2, num_kv_heads, page_tokens]: those that a kernel needs for a tile of tokens are neighbours. Parts of layers are whole sectors
of 32 bytes then.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ..architecture import KvDType, LanguageConfig, kv_layer_bytes, kv_part_bytes

STORED = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
_LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
_SMALLEST_SCALE = 1e-8
_BLOCK_BYTES = 1 << 18  # of quantized pages, turned into the model's dtype at once


def quantize_heads(heads: Tensor, stored: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return float32 [..., head_dim] as values of the type ``stored`` and float32 [...], the scale of each head (KQ1)."""
    largest = _LARGEST[stored]
    scales = (heads.abs().amax(-1) / largest).clamp_(min=_SMALLEST_SCALE)
    heads = heads / scales.unsqueeze(-1)
    whole = heads.round_() if stored == torch.int8 else heads
    return whole.clamp_(-largest, largest).to(stored), scales


class KvPages:
    """A group's part of a KV pool on any device, read and written in torch. ``dtype`` is the model's; ``heads``: how its layers attend.

    ``values`` [num_pages, layers, page_tokens, 2, num_kv_heads, head_dim] as stored, and ``scales`` float32 [the same without head_dim]
    by which they are multiplied, or None: views of the pool. Pages may lie apart.
    """

    def __init__(
        self,
        config: LanguageConfig,
        kv: Tensor,
        page_tokens: int,
        dtype: torch.dtype,
        kv_dtype: KvDType = "auto",
        group: int = 0,
        beside: Sequence[int] | None = None,
    ) -> None:
        """``kv`` uint8 [num_pages, page_bytes], contiguous; it is shared with other processes and written in place. ``beside``: the
        groups whose parts its pages have; None: all."""
        self.heads, layers = config.kv_groups[group]
        self.page_tokens, self.dtype, self.num_layers = page_tokens, dtype, len(layers)
        self._stored = STORED.get(kv_dtype, dtype)
        self._shape = page_tokens, 2, self.heads.num_kv_heads, self.heads.head_dim
        self._is_quantized = kv_dtype != "auto"
        sizes = kv_part_bytes(config, page_tokens, dtype.itemsize, kv_dtype)
        start = sum(size for number, size in enumerate(sizes[:group]) if beside is None or number in beside)
        num_bytes = self.num_layers * kv_layer_bytes(self.heads, page_tokens, dtype.itemsize, kv_dtype)
        parts = kv[:, start : start + num_bytes]
        parts = (parts if self._is_quantized else parts.view(dtype)).view(kv.shape[0], self.num_layers, -1)
        self._layers = parts.unbind(1)
        self.values, self.scales = self._split(parts)
        self._scratch = torch.empty(0, dtype=dtype)

    @classmethod
    def of_groups(
        cls,
        config: LanguageConfig,
        kv: Tensor,
        page_tokens: int,
        dtype: torch.dtype,
        kv_dtype: KvDType = "auto",
        windows: Tensor | None = None,
    ) -> "list[KvPages]":
        """The parts of all groups. ``windows``: pages of those that attend to a window, as ``kv``; None: they lie in ``kv``, too."""
        groups = range(len(config.kv_groups))
        if windows is None:
            return [cls(config, kv, page_tokens, dtype, kv_dtype, group) for group in groups]
        apart = [group for group in groups if config.kv_groups[group].heads.window]
        rest = [group for group in groups if group not in apart]
        pools = [(windows, apart) if group in apart else (kv, rest) for group in groups]
        return [
            cls(config, pool, page_tokens, dtype, kv_dtype, group, beside) for group, (pool, beside) in zip(groups, pools, strict=True)
        ]

    def write(self, layer: int, places: tuple[Tensor, Tensor], kv_NR: Tensor) -> None:
        """Store K and V [N, 2 x num_kv_heads x head_dim], finite, at ``places``: pages and slots in them, int64 [N] each."""
        heads = kv_NR.view(-1, *self._shape[1:])
        if self.scales is None:
            self.values[:, layer].index_put_(places, heads)
            return
        values, scales = quantize_heads(heads.float(), self._stored)
        self.values[:, layer].view(torch.uint8)[places] = values.view(torch.uint8)
        self.scales[:, layer][places] = scales

    def scratch(self, num_pages: int) -> Tensor:
        """Memory for K and V of so many pages, [num_pages, page_tokens x 2 x num_kv_heads x head_dim]: the same in every call."""
        size = math.prod(self._shape)
        if self._scratch.numel() < num_pages * size:
            self._scratch = self._scratch.new_empty(num_pages * size)
        return self._scratch[: num_pages * size].view(num_pages, size)

    def gather(self, layer: int, pages: Tensor) -> Tensor:
        """K and V of whole pages in order: [len(pages) x page_tokens, 2, num_kv_heads, head_dim], valid until the next call."""
        out = self.scratch(len(pages))
        self.gather_into(out, layer, pages)
        return out.view(-1, *self._shape[1:])

    def gather_into(self, out: Tensor, layer: int, pages: Tensor) -> None:
        """As ``gather``, into memory of the shape and dtype of ``scratch``."""
        parts = self._layers[layer]
        if self.scales is None:
            torch.index_select(parts, 0, pages, out=out)
            return
        size = max(1, _BLOCK_BYTES // parts.shape[1])
        for block, chosen in zip(torch.split(out, size), torch.split(pages, size), strict=True):
            values, scales = self._split(parts.index_select(0, chosen))
            assert scales is not None
            block.view(values.shape).copy_(values.float().mul_(scales.unsqueeze(-1)))

    def _split(self, parts: Tensor) -> tuple[Tensor, Tensor | None]:
        """Values [..., page_tokens, 2, num_kv_heads, head_dim] and scales [..., page_tokens, 2, num_kv_heads] of parts [..., part]."""
        page_tokens, two, num_kv_heads, head_dim = self._shape
        leading = parts.shape[:-1]
        if not self._is_quantized:
            return parts.view(*leading, *self._shape), None
        num_heads = page_tokens * two * num_kv_heads
        values, scales = parts[..., : num_heads * head_dim], parts[..., num_heads * head_dim : num_heads * (head_dim + 4)]
        by_head = scales.view(torch.float32).view(*leading, two, num_kv_heads, page_tokens)
        return values.view(self._stored).view(*leading, *self._shape), by_head.movedim(-1, -3)
