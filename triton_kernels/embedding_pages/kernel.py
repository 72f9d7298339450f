"""Copies rows between a contiguous buffer and pages, in either direction."""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["pv_indptr", "pv_page_indptr", "pv_page_indices", "pv_cu_page_len"])
def copy_rows(
    rows_ptr,
    pages_ptr,
    pv_indptr,
    pv_page_indptr,
    pv_page_indices,
    pv_cu_page_len,
    stride_row: tl.int64,
    stride_page: tl.int64,
    stride_token: tl.int64,
    NUM_WORDS: tl.constexpr,
    PAGE_TOKENS: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_WORDS: tl.constexpr,
    WRITE: tl.constexpr,
):
    """Grid (requests, blocks of tokens, blocks of words). Rows are 32-bit words, whatever their dtype; strides count words."""
    request = tl.program_id(0)
    start = tl.load(pv_indptr + request)
    num_tokens = tl.load(pv_indptr + request + 1) - start
    first = tl.program_id(1) * BLOCK_TOKENS
    if first >= num_tokens:
        return
    first_page = tl.load(pv_page_indptr + request)
    num_pages = tl.load(pv_page_indptr + request + 1) - first_page
    token = first + tl.arange(0, BLOCK_TOKENS)
    position = tl.load(pv_cu_page_len + request) % PAGE_TOKENS + token
    listed = (token < num_tokens) & (position // PAGE_TOKENS < num_pages)
    page = tl.load(pv_page_indices + first_page + position // PAGE_TOKENS, mask=listed, other=0).to(tl.int64)
    word = tl.program_id(2) * BLOCK_WORDS + tl.arange(0, BLOCK_WORDS)
    mask = listed[:, None] & (word < NUM_WORDS)[None, :]
    in_pages = pages_ptr + (page * stride_page + position % PAGE_TOKENS * stride_token)[:, None] + word[None, :]
    in_rows = rows_ptr + ((start + token) * stride_row)[:, None] + word[None, :]
    if WRITE:
        tl.store(in_pages, tl.load(in_rows, mask=mask, other=0), mask=mask)
    else:
        tl.store(in_rows, tl.load(in_pages, mask=mask, other=0), mask=mask)
