"""KV pages in fewer bits, for their way from one pool to another (KQ2): lossy.

A packed page has a part for each group of layers (``kv_pages``): its values, then their scales. In int8 each head of a token has a
float32 scale, as in a cache of int8 (KQ1). In int4 the values of a head are in groups of ``PACKED_GROUP``, each with a scale and a zero
in bfloat16: a value is (code - 8) x scale + zero, as in ``checkpoint.int4``. Two codes share a byte, the even one in its low half.
"""

import math
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from ...schema.weight_layout import INT4_MIDDLE
from ..architecture import KvGroup, LanguageConfig, kv_part_bytes, packed_group, packed_part_bytes
from ..checkpoint import int4
from .kv_pages import quantize_heads

Packed = Literal["int8", "int4"]
"""The type of packed values."""


class KvPacking:
    """Packs pages whose numbers are the model's, ``dtype``, on the CPU. P pages."""

    def __init__(self, config: LanguageConfig, page_tokens: int, dtype: torch.dtype, packed: Packed) -> None:
        groups = config.kv_groups
        self._groups = [_GroupPacking(group, page_tokens, dtype, packed) for group in groups]
        self._sizes = kv_part_bytes(config, page_tokens, dtype.itemsize, "auto")
        self._packed_sizes = [packed_part_bytes(group, page_tokens, packed) for group in groups]

    def pack(self, pages: Tensor) -> Tensor:
        """Return pages uint8 [P, page_bytes] as uint8 [P, packed_page_bytes]. All numbers of the pages are finite."""
        parts = torch.split(pages, self._sizes, 1)
        return torch.cat([group.pack(part) for group, part in zip(self._groups, parts, strict=True)], 1)

    def unpack(self, packed: Tensor) -> Tensor:
        """Return pages uint8 [P, page_bytes] that ``pack`` has packed."""
        parts = zip(self._groups, torch.split(packed, self._packed_sizes, 1), self._sizes, strict=True)
        return torch.cat([F.pad(found := group.unpack(part), (0, size - found.shape[1])) for group, part, size in parts], 1)


class _GroupPacking:
    """``KvPacking`` of a group's part of pages."""

    def __init__(self, group: KvGroup, page_tokens: int, dtype: torch.dtype, packed: Packed) -> None:
        self._dtype = dtype
        self._packed = packed
        self._head_dim = group.heads.head_dim
        self._group = packed_group(self._head_dim)
        self._num_values = math.prod((len(group.layers), page_tokens, 2, group.heads.num_kv_heads, self._head_dim))

    def pack(self, pages: Tensor) -> Tensor:
        used, num_pages = pages[:, : self._num_values * self._dtype.itemsize], len(pages)
        heads = used.view(self._dtype).float().reshape(-1, self._head_dim)
        if self._packed == "int8":
            values, scales = quantize_heads(heads, torch.int8)
            return torch.cat((values.view(num_pages, -1).view(torch.uint8), scales.view(num_pages, -1).view(torch.uint8)), 1)
        codes, scales, zeros = int4.quantize(heads.clone(), self._head_dim // self._group)
        low, high = codes.view(num_pages, -1, 2).unbind(2)
        factors = torch.stack((scales, zeros)).bfloat16().view(2, num_pages, -1).transpose(0, 1).contiguous()
        return torch.cat((high << 4 | low, factors.view(num_pages, -1).view(torch.uint8)), 1)

    def unpack(self, packed: Tensor) -> Tensor:
        num_pages, num_values = len(packed), self._num_values
        if self._packed == "int8":
            values, scales = packed[:, :num_values].view(torch.int8), packed[:, num_values:].contiguous().view(torch.float32)
            found = values.reshape(num_pages, -1, self._head_dim).float().mul_(scales.unsqueeze(-1))
        else:
            codes = packed[:, : num_values // 2]
            scales, zeros = packed[:, num_values // 2 :].contiguous().view(torch.bfloat16).float().view(num_pages, 2, -1, 1).unbind(1)
            values = torch.stack((codes & 15, codes >> 4), 2).view(num_pages, -1, self._group).float().sub_(INT4_MIDDLE)
            found = torch.addcmul(zeros, values, scales)
        return found.to(self._dtype).view(num_pages, -1).view(torch.uint8)
