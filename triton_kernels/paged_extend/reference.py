"""Reference for the kernel, in torch and float32, sequence by sequence and head by head."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ..paged_decode.reference import gather
from ..paged_kv import PagedKV


def paged_extend_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    kv: PagedKV,
    block_table: Tensor,
    spans: Sequence[tuple[int, int]],
    window: int = 0,
    pictures: Sequence[Sequence[tuple[int, int]]] = (),
    scale: float = 0.0,
) -> Tensor:
    """As ``plan_extend`` and ``paged_extend`` for these ``spans``; float32 [N, num_heads, head_dim]."""
    _, num_heads, head_dim = q.shape
    out = torch.zeros(q.shape, dtype=torch.float32, device=q.device)
    row = 0
    for sequence, (start, end) in enumerate(spans):
        rows = slice(row, row + end - start)
        row = rows.stop
        first = max(start + 1 - window, 0) if window else 0
        earlier_k, earlier_v = gather(kv, block_table[sequence], start, min(first, start))
        all_k, all_v = torch.cat((earlier_k, k[rows].float())), torch.cat((earlier_v, v[rows].float()))
        index = torch.arange(min(first, start), end, device=q.device)
        query = torch.arange(start, end, device=q.device)[:, None]
        hidden = index > query
        for its_first, its_end in pictures[sequence] if pictures else ():
            hidden &= ~((query >= its_first) & (query < its_end) & (index < its_end))
        if window:
            hidden |= index <= query - window
        for head in range(num_heads):
            kv_head = head // (num_heads // all_k.shape[1])
            scores = q[rows, head].float() @ all_k[:, kv_head].T * (scale or 1 / math.sqrt(head_dim))
            out[rows, head] = torch.softmax(scores.masked_fill(hidden, -math.inf), 1) @ all_v[:, kv_head]
    return out
