"""Reference for the kernel, in plain torch; ``models.lm`` does the same on the CPU (its ``_project``)."""

import torch
import torch.nn.functional as F
from torch import Tensor

from ..paged_kv import PagedKV
from .op import LARGEST, QkNorm, Rotary

SMALLEST_SCALE = 1e-8


def quantize(heads: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """heads [..., head_dim] -> (values of ``dtype``, scales float32 [...]): each head's largest magnitude becomes LARGEST[dtype]."""
    scales = (heads.float().abs().amax(-1) / LARGEST[dtype]).clamp(min=SMALLEST_SCALE)
    values = heads.float() / scales.unsqueeze(-1)
    if dtype == torch.int8:
        values = values.round()
    return values.clamp(-LARGEST[dtype], LARGEST[dtype]).to(dtype), scales


def _write_kv(k: Tensor, v: Tensor, slots: Tensor, kv: PagedKV) -> None:
    page_tokens = kv.k_pages.shape[1]
    for values, target, scales in ((k, kv.k_pages, kv.k_scales), (v, kv.v_pages, kv.v_scales)):
        for heads, slot in zip(torch.nan_to_num(values, nan=0.0, posinf=0.0, neginf=0.0), slots.tolist(), strict=True):
            if slot < 0:
                continue
            place = divmod(slot, page_tokens)
            if scales is None:
                target[place] = heads
            else:
                target[place], scales[place] = quantize(heads, target.dtype)


def _axes(rotary: Rotary, num_pairs: int) -> list[int]:
    """The axis of each pair."""
    if not rotary.interleaved:
        return [axis for axis, count in enumerate(rotary.section or (num_pairs,)) for _ in range(count)]
    left = [num_pairs, *rotary.section[1:]]
    axes = []
    for pair in range(num_pairs):
        axis = pair % 3 if left[pair % 3] else 0
        left[axis] -= 1
        axes.append(axis)
    return axes


def rotate_and_write_kv(
    heads: Tensor, positions: Tensor, slots: Tensor | None, kv: PagedKV | None, rotary: Rotary, norm: QkNorm | None = None
) -> None:
    """As ``op.rotate_and_write_kv``."""
    num_kv_heads, head_dim = 0 if kv is None else kv.k_pages.shape[2], heads.shape[2]
    num_heads = heads.shape[1] - 2 * num_kv_heads
    queries, k, v = torch.split(heads, [num_heads, num_kv_heads, num_kv_heads], 1)
    if norm is not None:
        queries.copy_(F.rms_norm(queries, (head_dim,), norm.q, norm.epsilon))
        k.copy_(F.rms_norm(k, (head_dim,), norm.k, norm.epsilon))
    axis = torch.tensor(_axes(rotary, head_dim // 2), device=heads.device)
    angle = (positions[axis].T * rotary.frequencies).unsqueeze(1)
    turning = heads[:, : num_heads + num_kv_heads]
    low, high = turning.float().chunk(2, -1)
    cos, sin = angle.cos() * rotary.factor, angle.sin() * rotary.factor
    turned = low * cos - high * sin, high * cos + low * sin
    turning.copy_(torch.cat(turned, -1))
    if kv is not None and slots is not None:
        _write_kv(k, v, slots, kv)
