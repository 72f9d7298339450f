"""The checked wrapper. Decode and prefill call it once per layer; nothing is allocated and nothing read back."""

from typing import NamedTuple

import torch
import triton
from torch import Tensor

from ..checks import check_aligned, check_dense, check_device, check_tensor
from ..paged_decode.config import HEAD_DIMS
from ..paged_kv import FLOATS, PagedKV
from .config import launch
from .kernel import rotate_and_write_heads

LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
"""What the largest magnitude of a head becomes in quantized pages, by their dtype."""


class Rotary(NamedTuple):
    """``frequencies`` float32 [head_dim / 2]: pair j turns by position[axis(j)] x frequencies[j]. ``section``: how many pairs each axis
    (t, h, w) has, one axis after another; empty is one axis. ``interleaved``: the three axes take turns while h and w have pairs left.
    ``factor`` of cosines and sines."""

    frequencies: Tensor
    section: tuple[int, ...] = ()
    factor: float = 1.0
    interleaved: bool = False


class QkNorm(NamedTuple):
    """Weights [head_dim] of the RMSNorm of each query and key head, in the model's dtype or float32."""

    q: Tensor
    k: Tensor
    epsilon: float


def rotate_and_write_kv(
    heads: Tensor, positions: Tensor, slots: Tensor | None, kv: PagedKV | None, rotary: Rotary, norm: QkNorm | None = None
) -> None:
    """QK-norm, (M-)RoPE and the write of K and V into pages in one launch: everything between a layer's projection and its attention.

    heads [N, num_heads + 2 num_kv_heads, head_dim] float32, float16 or bfloat16, the projection's output: query, key and value heads,
    dense. Query and key heads are normalized and rotated in place; num_heads may be 0. positions int64 [axes, N], so that angles stay
    below 4e5; slots int64 [N]: page x page_tokens + index in it, unique, negative to skip a token. Pages are quantized per token and
    head if ``kv`` is; values that are not finite are stored as 0. Without ``kv`` and ``slots`` all heads are queries. M-RoPE after
    Qwen2-VL (Wang et al., 2024), interleaved after Qwen3-VL (arXiv 2511.21631). Raises: ValueError.
    """
    _check_heads(heads)
    num_tokens, _, head_dim = heads.shape
    num_kv_heads = _check_target(heads, slots, kv)
    num_heads = heads.shape[1] - 2 * num_kv_heads
    section = _check_rotary(heads, positions, rotary)
    if norm is not None:
        for name, weight in (("q norm", norm.q), ("k norm", norm.k)):
            check_tensor(name, weight, (head_dim,), (heads.dtype, torch.float32), heads.device)
            check_aligned(name, weight)
    if not num_tokens:
        return
    config = launch(num_heads, num_kv_heads, head_dim)
    block_heads = config.tiles["BLOCK_HEADS"]
    views: tuple[Tensor | None, ...] = (None,) * 4 if kv is None else kv
    strides = (0,) * 6 if kv is None else (*kv.k_pages.stride()[:3], *kv.scale_strides())
    rotate_and_write_heads[(num_tokens, triton.cdiv(num_heads, block_heads) + triton.cdiv(num_kv_heads, block_heads))](
        heads,
        positions,
        rotary.frequencies,
        None if norm is None else norm.q,
        None if norm is None else norm.k,
        slots,
        *views,
        0.0 if norm is None else norm.epsilon,
        heads.stride(0),
        positions.stride(0),
        *strides,
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=num_kv_heads,
        HALF=head_dim // 2,
        PAGE_TOKENS=1 if kv is None else kv.k_pages.shape[1],
        FIRST_H=section[0],
        FIRST_W=sum(section[:2]),
        INTERLEAVED=rotary.interleaved,
        FACTOR=rotary.factor,
        LARGEST=0.0 if kv is None else LARGEST.get(kv.k_pages.dtype, 0.0),
        **config.arguments(),
    )


def _check_target(heads: Tensor, slots: Tensor | None, kv: PagedKV | None) -> int:
    """The number of KV heads; 0 without pages."""
    if kv is None or slots is None:
        if kv is not None or slots is not None:
            raise ValueError("one of kv and slots is missing")
        return 0
    kv.check(heads)
    num_kv_heads = kv.k_pages.shape[2]
    if heads.shape[1] < 2 * num_kv_heads:
        raise ValueError(f"{heads.shape[1]} heads are fewer than {num_kv_heads} of keys and as many of values")
    check_tensor("slots", slots, (heads.shape[0],), (torch.int64,), heads.device)
    check_dense("slots", slots)
    return num_kv_heads


def _check_heads(heads: Tensor) -> None:
    check_device("heads", heads.device)
    check_tensor("heads", heads, (None, None, None), FLOATS, heads.device)
    check_aligned("heads", heads)
    if heads.shape[2] not in HEAD_DIMS:
        raise ValueError(f"head_dim {heads.shape[2]} is not one of {', '.join(map(str, HEAD_DIMS))}")
    if heads.stride(1) != heads.shape[2]:
        raise ValueError(f"heads are {heads.stride(1)} apart, not {heads.shape[2]}")


def _check_rotary(heads: Tensor, positions: Tensor, rotary: Rotary) -> tuple[int, ...]:
    """The section, with one axis where it is empty."""
    num_pairs = heads.shape[2] // 2
    section = rotary.section or (num_pairs,)
    if len(section) > 3 or min(section) < 0 or sum(section) != num_pairs:
        raise ValueError(f"section {section} is not at most three counts that make {num_pairs} pairs")
    if rotary.interleaved and (len(section) < 3 or 3 * section[1] > num_pairs + 1 or 3 * section[2] > num_pairs):
        raise ValueError(f"axes of {section} pairs cannot take turns: h and w need a third of {num_pairs} each at most")
    check_tensor("frequencies", rotary.frequencies, (num_pairs,), (torch.float32,), heads.device)
    check_aligned("frequencies", rotary.frequencies)
    check_tensor("positions", positions, (None, heads.shape[0]), (torch.int64,), heads.device)
    if positions.shape[0] < len(section):
        raise ValueError(f"positions has {positions.shape[0]} axes, section {len(section)}")
    check_dense("positions", positions)
    return section
