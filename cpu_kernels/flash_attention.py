"""Attention of many queries on a CPU: from the tokens of a prompt or the rows of a picture to keys and values that lie in order, in
float32, or in bfloat16 on a processor that multiplies pairs of them.

Keys and values are taken in blocks, which stay in the second cache while a block of queries attends to them; sums so far are scaled
again whenever a block has a larger score (FlashAttention, arXiv 2205.14135). A query's result is the same bits whatever queries are
beside it, and however many threads there are. Shapes: S sequences of N queries and M keys each, HKV heads of keys and values, G query
heads for each, D head_dim.
"""

import math
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from .flash_items import Items
from .flash_pairs import PairItems
from .kernel import Kernel, available_threads, has_bfloat16, load_kernel, vector_width

_QUERIES = 192  # of a block, for each of G heads; less where threads would have nothing to do
_LEAST_QUERIES = 24
_ITEMS = 4  # of work for each thread, which are not equally large
_LEAST_WORK = 1 << 18  # products of a query and a key: fewer are left to one thread
_MOST_HEAD_DIM = 512


def has_kernel(q: Tensor) -> bool:
    """Return whether ``attend`` takes such queries [..., D], of whole vectors: float32 on a processor with AVX2; bfloat16, of two
    vectors at least, on one with AVX512-BF16 and without AMX, by which torch attends."""
    width, head_dim = vector_width(), q.shape[-1]
    if width is None or q.device.type != "cpu" or head_dim % width or head_dim > _MOST_HEAD_DIM:
        return False
    return q.dtype == torch.float32 or (q.dtype == torch.bfloat16 and head_dim >= 2 * width and _takes_bfloat16())


@cache
def _takes_bfloat16() -> bool:
    return has_bfloat16() and not torch.cpu._is_amx_tile_supported()


def prepare(head_dim: int, dtype: torch.dtype, scale: float = 0.0) -> None:
    """Load the kernel for such heads, where there is one; otherwise the first call would make it, in 0.2 to 0.7 s."""
    if has_kernel(torch.empty(0, head_dim, dtype=dtype)):
        _kernel(head_dim, scale, dtype)


class KeyRanges(NamedTuple):
    """The keys [first, end) that each query attends to, int64 [N] each; where there are none the result is 0. Neither falls from one
    query to the next. ``num_keys``: up to the last of them."""

    firsts: Tensor
    ends: Tensor
    num_keys: int

    @classmethod
    def of(cls, firsts: Tensor, ends: Tensor) -> "KeyRanges":
        """Raises: ValueError for firsts or ends that fall, or are negative."""
        if not len(ends):
            return cls(firsts.long(), ends.long(), 0)
        found = cls(firsts.long().contiguous(), ends.long().contiguous(), int(ends.max()))
        if firsts.shape != ends.shape or any(int(bounds[0]) < 0 or bool((bounds.diff() < 0).any()) for bounds in found[:2]):
            raise ValueError(f"keys from {firsts.tolist()} to {ends.tolist()} are no ranges that rise")
        return found


def causal(num_queries: int, window: int = 0) -> KeyRanges:
    """Query i attends to the keys 0 to i, of which the last ``window`` if that is not 0."""
    ends = torch.arange(1, num_queries + 1)
    return KeyRanges.of((ends - window).clamp_(min=0) if window else torch.zeros_like(ends), ends)


class Attended(NamedTuple):
    """``output`` [S, N, HKV x G, D]; ``largest`` score of each query, and the ``weight`` of all: the sum of exponentials of scores less
    the largest one, [S, N, HKV x G]. float32."""

    output: Tensor
    largest: Tensor
    weight: Tensor

    @property
    def log_sum_exp(self) -> Tensor:
        """Of the scores."""
        return self.largest + self.weight.log()


def attend(q_SNHD: Tensor, k_SMHD: Tensor, v_SMHD: Tensor, ranges: KeyRanges | None = None, scale: float = 0.0) -> Attended:
    """softmax(scale q k') v; ``scale`` 0: 1 / sqrt(D). Without ``ranges`` each query attends to all keys.

    Raises: ValueError for shapes and dtypes that do not fit each other, which would read beyond them.
    """
    (num_sequences, num_queries, num_heads, head_dim), (_, num_keys, kv_heads, _) = q_SNHD.shape, k_SMHD.shape
    tensors = q_SNHD, k_SMHD, v_SMHD
    is_alike = k_SMHD.shape == v_SMHD.shape == (num_sequences, num_keys, kv_heads, head_dim) and num_heads % kv_heads == 0
    is_alike = is_alike and q_SNHD.dtype == k_SMHD.dtype == v_SMHD.dtype
    is_within = ranges is None or (len(ranges.firsts) == num_queries and ranges.num_keys <= num_keys)
    if not is_alike or num_keys < 1 or not is_within or not all(map(has_kernel, tensors)):
        shapes = ", ".join(f"{tensor.dtype} {list(tensor.shape)}" for tensor in tensors)
        raise ValueError(f"queries, keys and values are {shapes}: they do not fit each other")
    q, k, v = (tensor if tensor.stride(3) == 1 else tensor.contiguous() for tensor in tensors)
    output = torch.empty(q.shape, dtype=torch.float32)
    largest, weight = torch.empty(2, *q.shape[:3], dtype=torch.float32)
    has_team = num_sequences * num_heads * num_queries * num_keys >= _LEAST_WORK
    num_threads, block = available_threads() if has_team else 1, _QUERIES
    while num_threads > 1 and block > _LEAST_QUERIES and num_sequences * kv_heads * -(-num_queries // block) < _ITEMS * num_threads:
        block //= 2
    num_items = num_sequences * kv_heads * -(-num_queries // block)
    firsts, ends = (torch.tensor([0]), torch.tensor([num_keys])) if ranges is None else ranges[:2]
    strides = (tensor.stride(dimension) for tensor in (q, k, v) for dimension in range(3))
    addresses = (tensor.data_ptr() for tensor in (q, k, v, output, largest, weight, firsts, ends))
    counts = num_queries, num_keys, kv_heads, num_heads // kv_heads, int(ranges is not None)
    _kernel(head_dim, scale, q.dtype).run((1, num_items, *counts, *strides, *addresses, block), num_threads)
    return Attended(output, largest, weight)


@cache
def _kernel(head_dim: int, scale: float, dtype: torch.dtype) -> Kernel:
    width, is_narrow = vector_width(), dtype == torch.bfloat16
    assert width is not None
    name = f"flash-{'pairs-' if is_narrow else ''}{head_dim}{f'-{scale.hex()}' if scale else ''}"
    items = (PairItems if is_narrow else Items)(head_dim, scale or 1 / math.sqrt(head_dim), width)
    return load_kernel(name, items, 1, with_bfloat16=is_narrow)
