"""Attention without causality within each of many consecutive sequences: long ones in tiles, short ones at once.

A head of 80 is taken as 64 + 16: two products each way instead of one over 128 with 37.5 % of it zeros. Scores carry log2(e), so that
exponentials are powers of two. ``op`` checks the kernels' arguments and launches them.

M queries and N keys of a tile, D0 + D1 the size of a head (D1 = 0: one part).
"""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def _load(ptr, lane, stride, live, FIRST: tl.constexpr, SIZE: tl.constexpr, MASKED: tl.constexpr):
    """Dimensions from FIRST of the tokens ``lane`` from ``ptr``: [tokens, SIZE]. What is not ``live`` is 0, so that no neighbour's NaN
    counts."""
    address = ptr + (lane.to(tl.int64)[:, None] * stride + (FIRST + tl.arange(0, SIZE))[None, :])
    if MASKED:
        return tl.load(address, mask=live[:, None], other=0.0)
    else:
        return tl.load(address)


@triton.jit
def _scores(q0, q1, k_ptr, lane, stride, live, scale, D0: tl.constexpr, D1: tl.constexpr, MASKED: tl.constexpr):
    """Scaled q . k of a tile, [M, N]; -inf for keys that are not live."""
    scores = tl.dot(q0, _load(k_ptr, lane, stride, live, 0, D0, MASKED).T, input_precision="ieee")
    if D1 > 0:
        scores = tl.dot(q1, _load(k_ptr, lane, stride, live, D0, D1, MASKED).T, scores, input_precision="ieee")
    scores = scores * scale
    if MASKED:
        scores = tl.where(live[None, :], scores, float("-inf"))
    return scores


@triton.jit
def _step(
    q0,
    q1,
    peak,
    total,
    acc0,
    acc1,
    k_ptr,
    v_ptr,
    start,
    stop,
    stride_k,
    stride_v,
    scale,
    D0: tl.constexpr,
    D1: tl.constexpr,
    TILE: tl.constexpr,
    MASKED: tl.constexpr,
):
    """One tile of keys and values into the running softmax of each query: its peak, sum of exponentials and weighted values."""
    lane = tl.arange(0, TILE)
    live = start + lane < stop
    k_ptr += tl.cast(start, tl.int64) * stride_k
    v_ptr += tl.cast(start, tl.int64) * stride_v
    scores = _scores(q0, q1, k_ptr, lane, stride_k, live, scale, D0, D1, MASKED)
    new_peak = tl.maximum(peak, tl.max(scores, 1))
    p = tl.exp2(scores - new_peak[:, None])
    shrink = tl.exp2(peak - new_peak)
    total = total * shrink + tl.sum(p, 1)
    v0 = _load(v_ptr, lane, stride_v, live, 0, D0, MASKED)
    acc0 = tl.dot(p.to(v0.dtype), v0, acc0 * shrink[:, None], input_precision="ieee")
    if D1 > 0:
        v1 = _load(v_ptr, lane, stride_v, live, D0, D1, MASKED)
        acc1 = tl.dot(p.to(v1.dtype), v1, acc1 * shrink[:, None], input_precision="ieee")
    return new_peak, total, acc0, acc1


@triton.jit
def _store(ptr, lane, stride, live, value, FIRST: tl.constexpr, SIZE: tl.constexpr):
    address = ptr + (lane.to(tl.int64)[:, None] * stride + (FIRST + tl.arange(0, SIZE))[None, :])
    tl.store(address, value, mask=live[:, None])


@triton.jit(do_not_specialize=["num_sequences"], do_not_specialize_on_alignment=["bounds_ptr"])
def sequences_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    bounds_ptr,
    num_sequences,
    scale,
    stride_qt: tl.int64,
    stride_qh: tl.int64,
    stride_kt: tl.int64,
    stride_kh: tl.int64,
    stride_vt: tl.int64,
    stride_vh: tl.int64,
    stride_ot: tl.int64,
    stride_oh: tl.int64,
    D0: tl.constexpr,
    D1: tl.constexpr,
    BLOCK_M: tl.constexpr,
    TILE: tl.constexpr,
):
    """Program (block of queries, head). Blocks of sequence s are numbered from ``bounds[s] // BLOCK_M + s``: room for all of its
    blocks without anybody having counted them, so that some programs find nothing to do."""
    number = tl.program_id(0)
    head = tl.program_id(1)
    low = tl.full([], 0, tl.int32)
    high = num_sequences - 1
    while low < high:
        middle = (low + high + 1) // 2
        begins = tl.load(bounds_ptr + middle) // BLOCK_M + middle <= number
        low = tl.where(begins, middle, low)
        high = tl.where(begins, high, middle - 1)
    start = tl.load(bounds_ptr + low)
    stop = tl.load(bounds_ptr + low + 1)
    first = start + (number - start // BLOCK_M - low) * BLOCK_M
    if first >= stop:
        return
    lane = tl.arange(0, BLOCK_M)
    live = first + lane < stop
    q_ptr += first.to(tl.int64) * stride_qt + head * stride_qh
    q0 = _load(q_ptr, lane, stride_qt, live, 0, D0, True)
    q1 = q0
    acc0 = tl.zeros([BLOCK_M, D0], tl.float32)
    acc1 = acc0
    if D1 > 0:
        q1 = _load(q_ptr, lane, stride_qt, live, D0, D1, True)
        acc1 = tl.zeros([BLOCK_M, D1], tl.float32)
    peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    k_ptr += head * stride_kh
    v_ptr += head * stride_vh
    scale *= LOG2E
    whole = start + (stop - start) // TILE * TILE
    for key in range(start, whole, TILE):
        peak, total, acc0, acc1 = _step(
            q0, q1, peak, total, acc0, acc1, k_ptr, v_ptr, key, stop, stride_kt, stride_vt, scale, D0, D1, TILE, False
        )
    if whole < stop:
        peak, total, acc0, acc1 = _step(
            q0, q1, peak, total, acc0, acc1, k_ptr, v_ptr, whole, stop, stride_kt, stride_vt, scale, D0, D1, TILE, True
        )
    out_ptr += first.to(tl.int64) * stride_ot + head * stride_oh
    _store(out_ptr, lane, stride_ot, live, acc0 / total[:, None], 0, D0)
    if D1 > 0:
        _store(out_ptr, lane, stride_ot, live, acc1 / total[:, None], D0, D1)


@triton.jit(do_not_specialize_on_alignment=["bounds_ptr"])
def windows_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    bounds_ptr,
    scale,
    stride_qt: tl.int64,
    stride_qh: tl.int64,
    stride_kt: tl.int64,
    stride_kh: tl.int64,
    stride_vt: tl.int64,
    stride_vh: tl.int64,
    stride_ot: tl.int64,
    stride_oh: tl.int64,
    D0: tl.constexpr,
    D1: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """Program (window, head): all of a window of up to BLOCK_M tokens, without a loop."""
    window = tl.program_id(0)
    head = tl.program_id(1)
    start = tl.load(bounds_ptr + window)
    stop = tl.load(bounds_ptr + window + 1)
    if start >= stop:
        return
    lane = tl.arange(0, BLOCK_M)
    live = start + lane < stop
    at = start.to(tl.int64)
    q_ptr += at * stride_qt + head * stride_qh
    k_ptr += at * stride_kt + head * stride_kh
    v_ptr += at * stride_vt + head * stride_vh
    out_ptr += at * stride_ot + head * stride_oh
    q0 = _load(q_ptr, lane, stride_qt, live, 0, D0, True)
    q1 = q0
    if D1 > 0:
        q1 = _load(q_ptr, lane, stride_qt, live, D0, D1, True)
    scores = _scores(q0, q1, k_ptr, lane, stride_kt, live, scale * LOG2E, D0, D1, True)
    p = tl.exp2(scores - tl.max(scores, 1)[:, None])
    p = p / tl.sum(p, 1)[:, None]
    v0 = _load(v_ptr, lane, stride_vt, live, 0, D0, True)
    _store(out_ptr, lane, stride_ot, live, tl.dot(p.to(v0.dtype), v0, input_precision="ieee"), 0, D0)
    if D1 > 0:
        v1 = _load(v_ptr, lane, stride_vt, live, D0, D1, True)
        _store(out_ptr, lane, stride_ot, live, tl.dot(p.to(v1.dtype), v1, input_precision="ieee"), D0, D1)


@triton.jit
def _turn(head_ptr, half, live, cosine, sine, HALF: tl.constexpr):
    """[HEADS, HALF] twice, in place: element j of a head pairs with j + HALF."""
    address = head_ptr[:, None] + half[None, :]
    low = tl.load(address, mask=live, other=0.0).to(tl.float32)
    high = tl.load(address + HALF, mask=live, other=0.0).to(tl.float32)
    dtype: tl.constexpr = head_ptr.dtype.element_ty
    tl.store(address, (low * cosine - high * sine).to(dtype), mask=live)
    tl.store(address + HALF, (high * cosine + low * sine).to(dtype), mask=live)


@triton.jit
def rotate_kernel(
    q_ptr,
    k_ptr,
    cos_ptr,
    sin_ptr,
    stride_qt: tl.int64,
    stride_qh: tl.int64,
    stride_kt: tl.int64,
    stride_kh: tl.int64,
    NUM_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
):
    """Program (token, block of heads), of queries and of keys."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    half = tl.arange(0, BLOCK_HALF)
    inside = half < HALF
    live = (head < NUM_HEADS)[:, None] & inside[None, :]
    cosine = tl.load(cos_ptr + token * HALF + half, mask=inside, other=0.0)[None, :]
    sine = tl.load(sin_ptr + token * HALF + half, mask=inside, other=0.0)[None, :]
    _turn(q_ptr + token * stride_qt + head * stride_qh, half, live, cosine, sine, HALF)
    _turn(k_ptr + token * stride_kt + head * stride_kh, half, live, cosine, sine, HALF)
