"""Paged caches and page lists for checks and timings, made on the device."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from mmrt.triton_kernels.paged_kv import PagedKV

_UNUSED = -(2**30)
_FAR = 2**31  # elements: beyond what an int32 can address
_ALIGNMENT = 16


class Cache(NamedTuple):
    """Pages for rows of ``lengths`` int32 [B] tokens. ``table`` int32 [B, W]; entries after a row's pages are invalid."""

    kv: PagedKV
    table: Tensor
    lengths: Tensor


def make_cache(
    lengths: Sequence[int], num_kv_heads: int, head_dim: int, page_tokens: int, dtype: torch.dtype, device: torch.device
) -> Cache:
    """Random values on pages in random order, K beside V on a page, as in the KV pool."""
    table, num_pages = make_table(lengths, page_tokens, device)
    pool = random_values((num_pages, page_tokens, 2, num_kv_heads, head_dim), dtype, device)
    k_scales = v_scales = None
    if dtype.itemsize == 1:
        k_scales, v_scales = torch.rand(2, num_pages, num_kv_heads, page_tokens, device=device).mul_(0.02).transpose(2, 3).unbind()
    kv = PagedKV(pool[:, :, 0], pool[:, :, 1], k_scales, v_scales)
    return Cache(kv, table, torch.tensor(lengths, dtype=torch.int32, device=device))


def far_apart(cache: Cache) -> Cache:
    """The same on pages that lie as if other layers' were between them, half of them 2**31 elements or more after the first."""
    num_pages, page_tokens, num_heads, head_dim = cache.kv.k_pages.shape
    token = 2 * num_heads * head_dim
    stride = -(-_FAR // (num_pages // 2) // _ALIGNMENT) * _ALIGNMENT
    memory = torch.empty(stride * (num_pages - 1) + page_tokens * token, dtype=cache.kv.k_pages.dtype, device=cache.table.device)
    pool = memory.as_strided((num_pages, page_tokens, 2, num_heads, head_dim), (stride, token, token // 2, head_dim, 1))
    for index, pages in enumerate(cache.kv[:2]):
        pool[:, :, index].copy_(pages)
    return cache._replace(kv=cache.kv._replace(k_pages=pool[:, :, 0], v_pages=pool[:, :, 1]))


def make_table(lengths: Sequence[int], page_tokens: int, device: torch.device) -> tuple[Tensor, int]:
    """Block tables int32 [B, W], and the number of pages, some of them unused."""
    needs = [-(-length // page_tokens) for length in lengths]
    num_pages = sum(needs) + 3
    order = torch.randperm(num_pages, device="cpu").to(torch.int32)
    table = torch.full((len(lengths), max([*needs, 1])), _UNUSED, dtype=torch.int32)
    first = 0
    for row, need in enumerate(needs):
        table[row, :need] = order[first : first + need]
        first += need
    return table.to(device), num_pages


def random_values(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Of unit variance; of 8 bits about 100 times as large, for scales of about 0.01."""
    if dtype == torch.int8:
        return torch.randint(-127, 128, shape, dtype=dtype, device=device)
    if dtype.itemsize == 1:
        return torch.randn(shape, dtype=torch.bfloat16, device=device).mul_(50.0).to(dtype)
    return torch.randn(shape, dtype=dtype, device=device)


def poison(cache: Cache) -> None:
    """NaN on pages wherever none of the rows has a token: in values, or in scales where values are quantized."""
    page_tokens = cache.kv.k_pages.shape[1]
    is_used = torch.zeros(cache.kv.k_pages.shape[:2], dtype=torch.bool)
    for row, length in zip(cache.table.tolist(), cache.lengths.tolist(), strict=True):
        for place in range(0, length, page_tokens):
            is_used[row[place // page_tokens], : length - place] = True
    nobody = ~is_used.to(cache.table.device)
    values, scales = cache.kv[:2], [tensor for tensor in cache.kv[2:] if tensor is not None]
    for tensor in scales or values:
        tensor[nobody] = torch.nan


def last_slots(table: Tensor, lengths: Tensor, page_tokens: int) -> Tensor:
    """Slots int64 [B] of each row's last token; -1 where a row has none."""
    last = (lengths.long() - 1).clamp(min=0)
    pages = table.long().gather(1, (last // page_tokens).unsqueeze(1)).squeeze(1)
    return torch.where(lengths > 0, pages * page_tokens + last % page_tokens, -1)


def copy_of(kv: PagedKV) -> PagedKV:
    """The same in memory of its own."""
    scales = (None if tensor is None else tensor.clone() for tensor in kv[2:])
    return PagedKV(kv.k_pages.clone(), kv.v_pages.clone(), *scales)
