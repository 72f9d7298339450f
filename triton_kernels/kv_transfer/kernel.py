"""Both directions. A row is one token's K or V of one head, handled as two halves, so that INT4 pairs need no shuffle.

``PACKING``: 0 copies values as they are, with the scales of the pages if there are any; 8 and 4 are the bits of a packed value.
"""

import triton
import triton.language as tl

from ..kv_write.kernel import SMALLEST_SCALE, rounded


@triton.jit
def _gather_rows(
    page_ptr, page_scales_ptr, in_scales, values_ptr, scales_ptr, row, half, live, HALF: tl.constexpr, PACKING: tl.constexpr
):
    mask = live[:, None]
    source = page_ptr[:, None] + half[None, :]
    low, high = tl.load(source, mask=mask, other=0), tl.load(source + HALF, mask=mask, other=0)
    if PACKING == 0:
        target = values_ptr + (row * (2 * HALF))[:, None] + half[None, :]
        tl.store(target, low, mask=mask)
        tl.store(target + HALF, high, mask=mask)
        if page_scales_ptr is not None:
            tl.store(scales_ptr + row, tl.load(page_scales_ptr + in_scales, mask=live, other=0.0), mask=live)
    else:
        low, high = low.to(tl.float32), high.to(tl.float32)
        limit: tl.constexpr = 2 ** (PACKING - 1) - 1
        scale = tl.maximum(tl.maximum(tl.max(tl.abs(low), 1), tl.max(tl.abs(high), 1)) / limit, SMALLEST_SCALE)
        tl.store(scales_ptr + row, scale, mask=live)
        inverse = (1.0 / scale)[:, None]
        low = tl.minimum(tl.maximum(rounded(low * inverse), -limit), limit).to(tl.int32)
        high = tl.minimum(tl.maximum(rounded(high * inverse), -limit), limit).to(tl.int32)
        if PACKING == 8:
            target = values_ptr + (row * (2 * HALF))[:, None] + half[None, :]
            tl.store(target, low.to(tl.int8), mask=mask)
            tl.store(target + HALF, high.to(tl.int8), mask=mask)
        else:
            target = values_ptr + (row * HALF)[:, None] + half[None, :]
            tl.store(target, ((low & 15) | ((high & 15) << 4)).to(tl.uint8), mask=mask)


@triton.jit
def _scatter_rows(
    page_ptr, page_scales_ptr, in_scales, values_ptr, scales_ptr, row, half, live, HALF: tl.constexpr, PACKING: tl.constexpr
):
    mask = live[:, None]
    dtype: tl.constexpr = page_ptr.dtype.element_ty
    target = page_ptr[:, None] + half[None, :]
    if PACKING == 4:
        packed = tl.load(values_ptr + (row * HALF)[:, None] + half[None, :], mask=mask, other=0).to(tl.int32)
        low, high = ((packed & 15) ^ 8) - 8, ((packed >> 4) ^ 8) - 8
    else:
        source = values_ptr + (row * (2 * HALF))[:, None] + half[None, :]
        low, high = tl.load(source, mask=mask, other=0), tl.load(source + HALF, mask=mask, other=0)
    if PACKING > 0:
        scale = tl.load(scales_ptr + row, mask=live, other=0.0)[:, None]
        low, high = (low.to(tl.float32) * scale).to(dtype), (high.to(tl.float32) * scale).to(dtype)
    elif page_scales_ptr is not None:
        tl.store(page_scales_ptr + in_scales, tl.load(scales_ptr + row, mask=live, other=0.0), mask=live)
    tl.store(target, low, mask=mask)
    tl.store(target + HALF, high, mask=mask)


@triton.jit(do_not_specialize=["page_ids_ptr", "num_tokens"])
def transfer_rows(
    k_pages_ptr,
    v_pages_ptr,
    k_scales_ptr,
    v_scales_ptr,
    page_ids_ptr,
    values_ptr,
    scales_ptr,
    num_tokens,
    stride_page: tl.int64,
    stride_token: tl.int64,
    stride_head: tl.int64,
    stride_scale_page: tl.int64,
    stride_scale_token: tl.int64,
    stride_scale_head: tl.int64,
    NUM_KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    PAGE_TOKENS: tl.constexpr,
    PACKING: tl.constexpr,
    GATHER: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
):
    """Grid (blocks of tokens x heads,)."""
    number = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    token, head = number // NUM_KV_HEADS, number % NUM_KV_HEADS
    live = token < num_tokens
    page = tl.load(page_ids_ptr + token // PAGE_TOKENS, mask=live, other=0).to(tl.int64)
    in_pages = page * stride_page + token % PAGE_TOKENS * stride_token + head * stride_head
    in_scales = page * stride_scale_page + token % PAGE_TOKENS * stride_scale_token + head * stride_scale_head
    row = (token * (2 * NUM_KV_HEADS) + head).to(tl.int64)
    half = tl.arange(0, HALF)
    k, v = k_pages_ptr + in_pages, v_pages_ptr + in_pages
    v_row = row + NUM_KV_HEADS
    if GATHER:
        _gather_rows(k, k_scales_ptr, in_scales, values_ptr, scales_ptr, row, half, live, HALF, PACKING)
        _gather_rows(v, v_scales_ptr, in_scales, values_ptr, scales_ptr, v_row, half, live, HALF, PACKING)
    else:
        _scatter_rows(k, k_scales_ptr, in_scales, values_ptr, scales_ptr, row, half, live, HALF, PACKING)
        _scatter_rows(v, v_scales_ptr, in_scales, values_ptr, scales_ptr, v_row, half, live, HALF, PACKING)
