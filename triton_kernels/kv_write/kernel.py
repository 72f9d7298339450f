"""A head is handled as two halves, because rotation pairs element j with j + head_dim / 2. All arithmetic is in float32.

Pages are quantized where there are scales: the largest magnitude of a token's head becomes ``LARGEST``.
"""

import triton
import triton.language as tl

SMALLEST_SCALE = tl.constexpr(1e-8)
_ROUNDING = tl.constexpr(12582912.0)  # 1.5 x 2 ** 23: adding and taking it away rounds to nearest even
_INVERSE_QUARTER = tl.constexpr(0.6366197723675814)
# pi / 2 in four parts; the first three have so few bits that their product with up to 2 ** 18 quarter turns is exact.
_QUARTER_0, _QUARTER_1, _QUARTER_2 = tl.constexpr(1.5), tl.constexpr(9 / 128), tl.constexpr(63 / 131072)
_QUARTER_3 = tl.constexpr(3.174939427807999e-06)


@triton.jit
def rounded(x):
    """To nearest even; |x| < 2 ** 22."""
    return (x + _ROUNDING) - _ROUNDING


@triton.jit
def cosine_and_sine(angle):
    """Of float32 angles up to 4e5, within 1e-6. The library's functions would need a stack, the hardware's are exact near 0 only."""
    quarters = rounded(angle * _INVERSE_QUARTER)
    x = angle - quarters * _QUARTER_0 - quarters * _QUARTER_1 - quarters * _QUARTER_2 - quarters * _QUARTER_3
    square = x * x
    sine = x + x * square * (-1.6666654611e-1 + square * (8.3321608736e-3 + square * -1.9515295891e-4))
    cosine = (
        1.0 - 0.5 * square + square * square * (4.166664568298827e-2 + square * (-1.388731625493765e-3 + square * 2.443315711809948e-5))
    )
    quadrant = quarters.to(tl.int32)
    odd = (quadrant & 1) == 1
    first, second = tl.where(odd, sine, cosine), tl.where(odd, cosine, sine)
    return tl.where(((quadrant + 1) & 2) == 2, -first, first), tl.where((quadrant & 2) == 2, -second, second)


@triton.jit
def _load_halves(head_ptr, half, live, HALF: tl.constexpr):
    """[HEADS, HALF] twice, float32, from ``head_ptr`` [HEADS]."""
    address = head_ptr[:, None] + half[None, :]
    mask = live[:, None]
    return tl.load(address, mask=mask, other=0.0).to(tl.float32), tl.load(address + HALF, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _quantized(x, inverse_scale, LARGEST: tl.constexpr, WHOLE: tl.constexpr):
    x = x * inverse_scale[:, None]
    if WHOLE:
        x = rounded(x)
    return tl.minimum(tl.maximum(x, -LARGEST), LARGEST)


@triton.jit
def _store_halves(low, high, page_ptr, scales_ptr, in_scales, half, live, HALF: tl.constexpr, LARGEST: tl.constexpr):
    """[HEADS, HALF] twice into pages. Values that are not finite become 0, so that no page is spoilt for its next owner."""
    low = tl.where(tl.abs(low) < float("inf"), low, 0.0)
    high = tl.where(tl.abs(high) < float("inf"), high, 0.0)
    dtype: tl.constexpr = page_ptr.dtype.element_ty
    if scales_ptr is not None:
        largest = tl.maximum(tl.max(tl.abs(low), 1), tl.max(tl.abs(high), 1))
        scale = tl.maximum(largest / LARGEST, SMALLEST_SCALE)
        tl.store(scales_ptr + in_scales, scale, mask=live)
        low = _quantized(low, 1.0 / scale, LARGEST, dtype == tl.int8)
        high = _quantized(high, 1.0 / scale, LARGEST, dtype == tl.int8)
    address = page_ptr[:, None] + half[None, :]
    tl.store(address, low.to(dtype), mask=live[:, None])
    tl.store(address + HALF, high.to(dtype), mask=live[:, None])


@triton.jit(do_not_specialize=["positions_ptr", "slots_ptr", "stride_axis"])
def rotate_and_write_heads(
    heads_ptr,
    positions_ptr,
    frequencies_ptr,
    q_norm_ptr,
    k_norm_ptr,
    slots_ptr,
    k_pages_ptr,
    v_pages_ptr,
    k_scales_ptr,
    v_scales_ptr,
    epsilon,
    stride_token: tl.int64,
    stride_axis: tl.int64,
    stride_page: tl.int64,
    stride_page_token: tl.int64,
    stride_page_head: tl.int64,
    stride_scale_page: tl.int64,
    stride_scale_token: tl.int64,
    stride_scale_head: tl.int64,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    PAGE_TOKENS: tl.constexpr,
    FIRST_H: tl.constexpr,
    FIRST_W: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    FACTOR: tl.constexpr,
    LARGEST: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
):
    """Grid (tokens, blocks of query heads, then of KV heads; without ``slots_ptr`` there are none). Pairs [0, FIRST_H) turn by t,
    [FIRST_H, FIRST_W) by h, the rest by w; INTERLEAVED: so many by each, in turn while h and w have some left."""
    q_blocks: tl.constexpr = (NUM_HEADS + BLOCK_HEADS - 1) // BLOCK_HEADS
    token = tl.program_id(0)
    block = tl.program_id(1)
    of_keys = block >= q_blocks
    slot = tl.load(slots_ptr + token) if slots_ptr is not None else -1
    half = tl.arange(0, HALF)
    head = tl.where(of_keys, block - q_blocks, block) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    live = head < tl.where(of_keys, NUM_KV_HEADS, NUM_HEADS)
    heads = heads_ptr + token.to(tl.int64) * stride_token
    head_ptr = heads + (tl.where(of_keys, NUM_HEADS, 0) + head) * (2 * HALF)
    low, high = _load_halves(head_ptr, half, live, HALF)
    to_page = live & of_keys & (slot >= 0)
    if slots_ptr is not None:
        v_low, v_high = _load_halves(head_ptr + NUM_KV_HEADS * (2 * HALF), half, to_page, HALF)
    if INTERLEAVED:
        turn = half % 3
        axis = tl.where(half < 3 * tl.where(turn == 1, FIRST_W - FIRST_H, HALF - FIRST_W), turn, 0)
    else:
        axis = (half >= FIRST_H).to(tl.int32) + (half >= FIRST_W).to(tl.int32)
    position = tl.load(positions_ptr + axis * stride_axis + token).to(tl.float32)
    cosine, sine = cosine_and_sine(position * tl.load(frequencies_ptr + half))
    if FACTOR != 1.0:
        cosine, sine = cosine * FACTOR, sine * FACTOR

    dtype: tl.constexpr = heads_ptr.dtype.element_ty
    if q_norm_ptr is not None:
        weight_ptr = tl.where(of_keys, k_norm_ptr, q_norm_ptr) + half
        weight_low, weight_high = tl.load(weight_ptr).to(tl.float32), tl.load(weight_ptr + HALF).to(tl.float32)
        mean = (tl.sum(low * low, 1) + tl.sum(high * high, 1)) / (2 * HALF)
        factor = tl.rsqrt(mean + epsilon)[:, None]
        low = (low * factor * weight_low[None, :]).to(dtype).to(tl.float32)
        high = (high * factor * weight_high[None, :]).to(dtype).to(tl.float32)
    turned_low = (low * cosine[None, :] - high * sine[None, :]).to(dtype)
    turned_high = (high * cosine[None, :] + low * sine[None, :]).to(dtype)
    address = head_ptr[:, None] + half[None, :]
    tl.store(address, turned_low, mask=live[:, None])
    tl.store(address + HALF, turned_high, mask=live[:, None])

    if slots_ptr is not None:
        if of_keys & (slot >= 0):
            low, high = turned_low.to(tl.float32), turned_high.to(tl.float32)
            in_page = slot // PAGE_TOKENS * stride_page + slot % PAGE_TOKENS * stride_page_token + head * stride_page_head
            in_scales = slot // PAGE_TOKENS * stride_scale_page + slot % PAGE_TOKENS * stride_scale_token + head * stride_scale_head
            _store_halves(low, high, k_pages_ptr + in_page, k_scales_ptr, in_scales, half, live, HALF, LARGEST)
            _store_halves(v_low, v_high, v_pages_ptr + in_page, v_scales_ptr, in_scales, half, live, HALF, LARGEST)
