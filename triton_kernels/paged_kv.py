"""The paged KV cache of one layer, as the attention kernels take it."""

from typing import NamedTuple

import torch
from torch import Tensor

from .checks import check_aligned, check_same_strides, check_tensor

QUANTIZED = (torch.int8, torch.float8_e4m3fn)
FLOATS = (torch.bfloat16, torch.float16, torch.float32)


class PagedKV(NamedTuple):
    """Views into the pool: token t of a row lies on page ``block_table[row, t // page_tokens]`` in slot ``t % page_tokens``.

    k_pages and v_pages [num_pages, page_tokens, num_kv_heads, head_dim] with equal strides: in the dtype of the queries, or in int8
    or float8_e4m3fn, then with k_scales and v_scales float32 [num_pages, page_tokens, num_kv_heads], by which K and V of a token and
    head are multiplied.
    """

    k_pages: Tensor
    v_pages: Tensor
    k_scales: Tensor | None = None
    v_scales: Tensor | None = None

    def check(self, q: Tensor) -> None:
        """Check that the kernels can read this with queries like ``q`` [.., num_heads, head_dim]. Raises: ValueError."""
        k, v = self.k_pages, self.v_pages
        quantized = self.k_scales is not None
        check_tensor("k_pages", k, (None, None, None, q.shape[-1]), QUANTIZED if quantized else (q.dtype,), q.device)
        check_tensor("v_pages", v, k.shape, (k.dtype,), q.device)
        check_aligned("k_pages", k)
        check_aligned("v_pages", v)
        check_same_strides("k_pages", k, "v_pages", v)
        if not k.shape[0] or not k.shape[1]:
            raise ValueError(f"k_pages has {k.shape[0]} pages of {k.shape[1]} tokens, not at least 1 of 1")
        if not k.shape[2] or q.shape[-2] % k.shape[2]:
            raise ValueError(f"{q.shape[-2]} heads of q are no multiple of {k.shape[2]} heads of k_pages")
        if k.dtype is torch.float8_e4m3fn and k.is_cuda and torch.cuda.get_device_capability(k.device) < (8, 9):
            raise ValueError(f"k_pages is {k.dtype}, which needs compute capability 8.9 or later")
        if (self.k_scales is None) != (self.v_scales is None):
            raise ValueError("one of k_scales and v_scales is missing")
        if self.k_scales is not None and self.v_scales is not None:
            check_tensor("k_scales", self.k_scales, k.shape[:3], (torch.float32,), q.device)
            check_tensor("v_scales", self.v_scales, k.shape[:3], (torch.float32,), q.device)
            check_same_strides("k_scales", self.k_scales, "v_scales", self.v_scales)

    def scale_strides(self) -> tuple[int, ...]:
        """Strides of the scales; zeros where there are none."""
        return (0, 0, 0) if self.k_scales is None else self.k_scales.stride()
