"""Reference for the kernels, in torch and float32, row by row and head by head."""

import math

import torch
from torch import Tensor

from ..paged_kv import PagedKV


def gather(kv: PagedKV, table: Tensor, num_tokens: int, first: int = 0) -> tuple[Tensor, Tensor]:
    """K and V of a row's tokens [first, num_tokens), float32 [tokens, num_kv_heads, head_dim]; ``table`` [W] its pages."""
    page_tokens = kv.k_pages.shape[1]
    skipped = first // page_tokens
    pages = table[skipped : -(-num_tokens // page_tokens)].long()
    k, v = kv.k_pages[pages].float(), kv.v_pages[pages].float()
    if kv.k_scales is not None and kv.v_scales is not None:
        k, v = k * kv.k_scales[pages].unsqueeze(-1), v * kv.v_scales[pages].unsqueeze(-1)
    tokens = slice(first - skipped * page_tokens, num_tokens - skipped * page_tokens)
    return k.flatten(0, 1)[tokens], v.flatten(0, 1)[tokens]


def paged_decode_reference(q: Tensor, kv: PagedKV, block_table: Tensor, lengths: Tensor, window: int = 0, scale: float = 0.0) -> Tensor:
    """As ``plan_decode`` and ``paged_decode`` for rows of these ``lengths``; float32 [B, num_heads, head_dim]."""
    num_rows, num_heads, head_dim = q.shape
    out = torch.zeros(q.shape, dtype=torch.float32, device=q.device)
    for row in range(num_rows):
        length = int(lengths[row])
        if not length:
            continue
        k, v = gather(kv, block_table[row], length, max(length - window, 0) if window else 0)
        for head in range(num_heads):
            kv_head = head // (num_heads // k.shape[1])
            weights = torch.softmax(k[:, kv_head] @ q[row, head].float() * (scale or 1 / math.sqrt(head_dim)), 0)
            out[row, head] = weights @ v[:, kv_head]
    return out
