"""The same in plain torch, one sequence at a time in float32. For tests."""

import torch
from torch import Tensor


def attend(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor) -> Tensor:
    """As ``op.attend``: [T, H, D] -> float32 [T, H, D]; NaN where no sequence is."""
    out = torch.full(q.shape, float("nan"), device=q.device)
    bounds = cu_seqlens.tolist()
    for start, stop in zip(bounds, bounds[1:], strict=False):
        here = slice(start, stop)
        scores = torch.einsum("mhd,nhd->hmn", q[here].float(), k[here].float()) * q.shape[2] ** -0.5
        out[here] = torch.einsum("hmn,nhd->mhd", scores.softmax(-1), v[here].float())
    return out


def rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """As ``op.rotate`` does to queries and keys, after transformers' ``rotate_half``: [T, H, D] -> float32 [T, H, D]."""
    low, high = heads.float().chunk(2, -1)
    cos, sin = (torch.cat((half, half), -1).unsqueeze(1) for half in (cos, sin))
    return heads.float() * cos + torch.cat((-high, low), -1) * sin
