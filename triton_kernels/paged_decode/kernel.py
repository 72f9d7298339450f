"""Three kernels: the plan of a step, attention over one item of it, and the sum of a row's items.

``op`` checks their arguments and launches them. Scores carry log2(e), so that exponentials are powers of two.
"""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit(do_not_specialize=["num_rows", "num_items", "window"], do_not_specialize_on_alignment=["lengths_ptr"])
def plan_kernel(lengths_ptr, items_ptr, rows_ptr, num_rows, num_items, window, CHUNK: tl.constexpr, MAX_ROWS: tl.constexpr):
    """One program. Items are whole chunks of tokens but for a row's last; all rows' items are as short as ``num_items`` allows. A row's
    first item begins with its window."""
    row = tl.arange(0, MAX_ROWS)
    present = row < num_rows
    end = tl.maximum(tl.load(lengths_ptr + row, mask=present, other=0), 0)
    length = tl.minimum(end, window)
    begin = end - length
    chunks = tl.cdiv(length, CHUNK)
    # The smallest number of chunks per item with which all fit. One item per row always does: num_rows <= num_items.
    low = tl.full([], 1, tl.int32)
    high = tl.maximum(tl.max(chunks, 0), 1)
    while low < high:
        middle = (low + high) // 2
        fits = tl.sum(tl.where(present, tl.maximum(tl.cdiv(chunks, middle), 1), 0), 0) <= num_items
        high = tl.where(fits, middle, high)
        low = tl.where(fits, low, middle + 1)
    count = tl.where(present, tl.maximum(tl.cdiv(chunks, low), 1), 0)
    first = tl.cumsum(count, 0) - count
    tl.store(rows_ptr + 2 * row, first, mask=present)
    tl.store(rows_ptr + 2 * row + 1, count, mask=present)
    # Never longer than ``low`` chunks, and so never leaves an item of a row empty unless the row is.
    step = tl.cdiv(chunks, tl.maximum(count, 1)) * CHUNK
    for number in range(0, tl.max(count, 0)):
        item = items_ptr + 4 * (first + number)
        mask = number < count
        tl.store(item, row, mask=mask)
        tl.store(item + 1, begin + number * step, mask=mask)
        tl.store(item + 2, begin + tl.minimum((number + 1) * step, length), mask=mask)
        tl.store(item + 3, (count == 1).to(tl.int32), mask=mask)
    for start in range(tl.sum(count, 0), num_items, MAX_ROWS):
        tl.store(items_ptr + 4 * (start + row), -1, mask=start + row < num_items)


@triton.jit(do_not_specialize=["stride_bt"], do_not_specialize_on_alignment=["table_ptr"])
def attend_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    k_scales_ptr,
    v_scales_ptr,
    table_ptr,
    items_ptr,
    out_ptr,
    partial_ptr,
    lse_ptr,
    scale,
    stride_qb: tl.int64,
    stride_qh: tl.int64,
    stride_ob: tl.int64,
    stride_oh: tl.int64,
    stride_kp: tl.int64,
    stride_kt: tl.int64,
    stride_kh: tl.int64,
    stride_sp: tl.int64,
    stride_st: tl.int64,
    stride_sh: tl.int64,
    stride_bt: tl.int64,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE_TOKENS: tl.constexpr,
    BLOCK_H: tl.constexpr,
    TILE: tl.constexpr,
):
    """Program (KV head, item): the head's query heads over the item's tokens; to ``out`` where the item is its row's only one."""
    kv_head = tl.program_id(0)
    item = tl.program_id(1)
    row = tl.load(items_ptr + 4 * item).to(tl.int64)
    if row < 0:
        return
    start = tl.load(items_ptr + 4 * item + 1)
    end = tl.load(items_ptr + 4 * item + 2)
    is_only = tl.load(items_ptr + 4 * item + 3)

    lane = tl.arange(0, BLOCK_H)
    head = kv_head * GROUP + lane
    in_group = lane < GROUP
    d = tl.arange(0, HEAD_DIM)
    q = tl.load(q_ptr + row * stride_qb + head[:, None] * stride_qh + d[None, :], mask=in_group[:, None], other=0.0)
    m = tl.full([BLOCK_H], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_H], tl.float32)
    acc = tl.zeros([BLOCK_H, HEAD_DIM], tl.float32)
    for tile in range(start, end, TILE):
        token = tile + tl.arange(0, TILE)
        live = token < end
        page = tl.load(table_ptr + row * stride_bt + token // PAGE_TOKENS, mask=live, other=0).to(tl.int64)
        slot = token % PAGE_TOKENS
        at = page * stride_kp + slot * stride_kt + kv_head * stride_kh
        # A masked load gives 0 for what other rows have left in a page, NaN among it.
        k = tl.load(k_ptr + at[None, :] + d[:, None], mask=live[None, :], other=0.0)
        v = tl.load(v_ptr + at[:, None] + d[None, :], mask=live[:, None], other=0.0)
        scores = tl.dot(q, k.to(q.dtype), input_precision="ieee") * (scale * LOG2E)
        if k_scales_ptr is not None:
            scale_at = page * stride_sp + slot * stride_st + kv_head * stride_sh
            scores *= tl.load(k_scales_ptr + scale_at, mask=live, other=0.0)[None, :]
        scores = tl.where(live[None, :], scores, float("-inf"))
        new_m = tl.maximum(m, tl.max(scores, 1))
        p = tl.exp2(scores - new_m[:, None])
        shrink = tl.exp2(m - new_m)
        total = total * shrink + tl.sum(p, 1)
        if v_scales_ptr is not None:
            p *= tl.load(v_scales_ptr + scale_at, mask=live, other=0.0)[None, :]
        acc = acc * shrink[:, None] + tl.dot(p.to(q.dtype), v.to(q.dtype), input_precision="ieee")
        m = new_m

    # A row without tokens gives 0.
    result = acc / tl.where(total == 0, 1.0, total)[:, None]
    if is_only:
        tl.store(out_ptr + row * stride_ob + head[:, None] * stride_oh + d[None, :], result, mask=in_group[:, None])
    else:
        part = item.to(tl.int64) * (tl.num_programs(0) * GROUP) + head
        tl.store(partial_ptr + part[:, None] * HEAD_DIM + d[None, :], result, mask=in_group[:, None])
        tl.store(lse_ptr + part, m + tl.log2(total), mask=in_group)


@triton.jit
def reduce_kernel(
    partial_ptr,
    lse_ptr,
    rows_ptr,
    out_ptr,
    stride_ob: tl.int64,
    stride_oh: tl.int64,
    HEAD_DIM: tl.constexpr,
    BLOCK_ITEMS: tl.constexpr,
):
    """Program (row, head): the row's items, weighted by their sums of exponentials. Rows of one item are done already."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    first = tl.load(rows_ptr + 2 * row)
    count = tl.load(rows_ptr + 2 * row + 1)
    if count <= 1:
        return
    d = tl.arange(0, HEAD_DIM)
    m = tl.full([], float("-inf"), tl.float32)
    total = tl.zeros([], tl.float32)
    acc = tl.zeros([HEAD_DIM], tl.float32)
    for begin in range(0, count, BLOCK_ITEMS):
        number = begin + tl.arange(0, BLOCK_ITEMS)
        live = number < count
        part = (first + number).to(tl.int64) * tl.num_programs(1) + head
        lse = tl.load(lse_ptr + part, mask=live, other=float("-inf"))
        values = tl.load(partial_ptr + part[:, None] * HEAD_DIM + d[None, :], mask=live[:, None], other=0.0)
        new_m = tl.maximum(m, tl.max(lse, 0))
        weight = tl.exp2(lse - new_m)
        shrink = tl.exp2(m - new_m)
        total = total * shrink + tl.sum(weight, 0)
        acc = acc * shrink + tl.sum(values * weight[:, None], 0)
        m = new_m
    tl.store(out_ptr + row * stride_ob + head * stride_oh + d, acc / total)
