"""Attention of a chunk's tokens over the pages before it, and over what each sees of the chunk itself. ``op`` checks and launches.

The rows of a tile are the query heads of one KV head for consecutive tokens. Whole tiles that every row may see have no mask: nearly
all of a long context. Running maxima are in log2 units.
"""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def _absorb(scores, scale, v_scales, v, m, total, acc, QUANTIZED: tl.constexpr, MAY_HIDE: tl.constexpr):
    """One tile of scores and values into the running softmax. MAY_HIDE: rows may have seen no token yet."""
    new_m = tl.maximum(m, tl.max(scores, 1) * scale)
    known = tl.where(new_m == float("-inf"), 0.0, new_m) if MAY_HIDE else new_m
    p = tl.exp2(scores * scale - known[:, None])
    shrink = tl.exp2(m - known)
    total = total * shrink + tl.sum(p, 1)
    if QUANTIZED:
        p *= v_scales[None, :]
    acc = tl.dot(p.to(v.dtype), v, acc * shrink[:, None], input_precision="ieee")
    return new_m, total, acc


@triton.jit
def _absorb_pages(
    tile,
    first,
    end,
    earliest,
    q,
    scale,
    kv_head,
    table_ptr,
    k_ptr,
    v_ptr,
    k_scales_ptr,
    v_scales_ptr,
    stride_kp,
    stride_kt,
    stride_kh,
    stride_sp,
    stride_st,
    stride_sh,
    m,
    total,
    acc,
    HEAD_DIM: tl.constexpr,
    PAGE_TOKENS: tl.constexpr,
    TILE: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Tokens [tile, tile + TILE) of the pages; MASKED: only [first, end) of them, and of these each row from its ``earliest`` on, which
    is None without a window."""
    token = tile + tl.arange(0, TILE)
    d = tl.arange(0, HEAD_DIM)
    windowed: tl.constexpr = MASKED and earliest is not None
    live = token < end if MASKED else tl.full([TILE], True, tl.int1)
    if windowed:
        live = live & (token >= first)
    page = tl.load(table_ptr + token // PAGE_TOKENS, mask=live, other=0).to(tl.int64)
    slot = token % PAGE_TOKENS
    at = page * stride_kp + slot * stride_kt + kv_head * stride_kh
    # A masked load gives 0 for what other sequences have left in a page, NaN among it.
    k = tl.load(k_ptr + at[None, :] + d[:, None], mask=live[None, :], other=0.0).to(q.dtype)
    v = tl.load(v_ptr + at[:, None] + d[None, :], mask=live[:, None], other=0.0).to(q.dtype)
    scores = tl.dot(q, k, input_precision="ieee")
    v_scales = None
    if k_scales_ptr is not None:
        scale_at = page * stride_sp + slot * stride_st + kv_head * stride_sh
        scores *= tl.load(k_scales_ptr + scale_at, mask=live, other=0.0)[None, :]
        v_scales = tl.load(v_scales_ptr + scale_at, mask=live, other=0.0)
    if MASKED:
        scores = tl.where(live[None, :], scores, float("-inf"))
    if windowed:
        scores = tl.where(token[None, :] >= earliest[:, None], scores, float("-inf"))
    return _absorb(scores, scale, v_scales, v, m, total, acc, QUANTIZED=k_scales_ptr is not None, MAY_HIDE=windowed)


@triton.jit
def _absorb_chunk(
    tile,
    end,
    earliest,
    seen,
    q,
    scale,
    k_ptr,
    v_ptr,
    stride_nt,
    m,
    total,
    acc,
    HEAD_DIM: tl.constexpr,
    TILE: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Tokens [tile, tile + TILE) of the chunk, whose first token the pointers name; MASKED: each row from its ``earliest`` on, which is
    None without a window, up to its ``seen``."""
    token = tile + tl.arange(0, TILE)
    d = tl.arange(0, HEAD_DIM)
    live = token < end if MASKED else tl.full([TILE], True, tl.int1)
    at = token.to(tl.int64) * stride_nt
    k = tl.load(k_ptr + at[None, :] + d[:, None], mask=live[None, :], other=0.0)
    v = tl.load(v_ptr + at[:, None] + d[None, :], mask=live[:, None], other=0.0)
    scores = tl.dot(q, k, input_precision="ieee")
    if MASKED:
        scores = tl.where(token[None, :] < seen[:, None], scores, float("-inf"))
    windowed: tl.constexpr = MASKED and earliest is not None
    if windowed:
        scores = tl.where(token[None, :] >= earliest[:, None], scores, float("-inf"))
    return _absorb(scores, scale, None, v, m, total, acc, QUANTIZED=False, MAY_HIDE=windowed)


@triton.jit(do_not_specialize=["stride_bt", "window"], do_not_specialize_on_alignment=["table_ptr", "ends_ptr"])
def extend_kernel(
    q_ptr,
    k_new_ptr,
    v_new_ptr,
    k_ptr,
    v_ptr,
    k_scales_ptr,
    v_scales_ptr,
    table_ptr,
    blocks_ptr,
    ends_ptr,
    out_ptr,
    scale,
    window,
    stride_qn: tl.int64,
    stride_qh: tl.int64,
    stride_on: tl.int64,
    stride_oh: tl.int64,
    stride_nt: tl.int64,
    stride_nh: tl.int64,
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
    BLOCK_M: tl.constexpr,
    TILE: tl.constexpr,
):
    """Program (KV head, block): the head's query heads of a block's tokens. ``ends_ptr``: up to where each token sees its chunk; None:
    up to itself. ``window``: tokens that each sees up to itself; None: all."""
    kv_head = tl.program_id(0)
    block = blocks_ptr + 5 * tl.program_id(1)
    sequence = tl.load(block).to(tl.int64)
    first_row = tl.load(block + 1).to(tl.int64)
    num_queries = tl.load(block + 2)
    offset = tl.load(block + 3)
    prefix = tl.load(block + 4)

    lane = tl.arange(0, BLOCK_M)
    query = offset + lane // GROUP
    present = lane // GROUP < num_queries
    d = tl.arange(0, HEAD_DIM)
    row = first_row + lane // GROUP
    head = kv_head * GROUP + lane % GROUP
    q = tl.load(q_ptr + (row * stride_qn + head * stride_qh)[:, None] + d[None, :], mask=present[:, None], other=0.0)
    m = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, HEAD_DIM], tl.float32)
    scale *= LOG2E

    # Of the tokens [0, prefix) on pages no row sees those before ``first``; all see the tiles [clear, whole), and parts of the others.
    table_ptr += sequence * stride_bt
    first, skipped, clear, earliest = 0, 0, 0, None
    whole = prefix // TILE * TILE
    if window is not None:
        first = tl.minimum(tl.maximum(prefix + offset + 1 - window, 0), prefix)
        skipped = first // TILE * TILE
        last = tl.minimum(tl.maximum(prefix + offset + num_queries - window, 0), prefix)  # the first that the last token sees
        clear = tl.cdiv(last, TILE) * TILE
        whole = tl.maximum(whole, clear)
        earliest = prefix + query + 1 - window
    for tile in range(clear, whole, TILE):
        m, total, acc = _absorb_pages(
            tile, first, prefix, earliest, q, scale, kv_head, table_ptr, k_ptr, v_ptr, k_scales_ptr, v_scales_ptr,
            stride_kp, stride_kt, stride_kh, stride_sp, stride_st, stride_sh, m, total, acc, HEAD_DIM, PAGE_TOKENS, TILE, False,
        )  # fmt: skip
    for step in tl.range(whole - (clear - skipped), prefix, TILE, num_stages=1):
        # The tiles before ``clear``, then those from ``whole`` on.
        tile = step if window is None else tl.where(step < whole, step - (whole - clear), step)
        m, total, acc = _absorb_pages(
            tile, first, prefix, earliest, q, scale, kv_head, table_ptr, k_ptr, v_ptr, k_scales_ptr, v_scales_ptr,
            stride_kp, stride_kt, stride_kh, stride_sp, stride_st, stride_sh, m, total, acc, HEAD_DIM, PAGE_TOKENS, TILE, True,
        )  # fmt: skip

    # Of the chunk, the same.
    chunk = (first_row - offset) * stride_nt + kv_head * stride_nh
    k_new_ptr += chunk
    v_new_ptr += chunk
    seen = query + 1
    end = offset + num_queries
    whole = offset + 1
    if ends_ptr is not None:
        seen = tl.load(ends_ptr + row, mask=present, other=1)
        end = tl.load(ends_ptr + first_row + num_queries - 1)
        whole = tl.load(ends_ptr + first_row)
    whole = whole // TILE * TILE
    skipped, clear = 0, 0
    if window is not None:
        earliest = query + 1 - window
        skipped = tl.maximum(offset + 1 - window, 0) // TILE * TILE
        clear = tl.cdiv(tl.maximum(offset + num_queries - window, 0), TILE) * TILE
        whole = tl.maximum(whole, clear)
    # As many buffers as the loop over pages gets from 5 stages: page indirection costs it two.
    for tile in tl.range(clear, whole, TILE, num_stages=3):
        m, total, acc = _absorb_chunk(
            tile, end, earliest, seen, q, scale, k_new_ptr, v_new_ptr, stride_nt, m, total, acc, HEAD_DIM, TILE, False
        )  # fmt: skip
    for step in tl.range(whole - (clear - skipped), end, TILE, num_stages=1):
        tile = step if window is None else tl.where(step < whole, step - (whole - clear), step)
        m, total, acc = _absorb_chunk(
            tile, end, earliest, seen, q, scale, k_new_ptr, v_new_ptr, stride_nt, m, total, acc, HEAD_DIM, TILE, True
        )  # fmt: skip

    at = (row * stride_on + head * stride_oh)[:, None] + d[None, :]
    # Only a row that is not there may have seen nothing.
    tl.store(out_ptr + at, acc / tl.where(total == 0, 1.0, total)[:, None], mask=present[:, None])
