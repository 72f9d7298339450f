"""Section ``peers``: attention of torch, cuDNN, FlexAttention, FlashInfer and FlashAttention on the work that ours is timed with.

Each is imported where it is called; one that is absent or fails is a note. Notes say where KV is contiguous, and how large pages are.
"""

import importlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .case import Timing
from .counts import HEADS_7B, attention_flops, decode_bytes, extend_flops
from .results import Row
from .timing import Clock

_NUM_ROWS, _LENGTH = 64, 8192  # of decode
_START, _CHUNK = 8192, 2048  # of extend
_PROMPT = 8192  # of extend from the start, for what knows causal masks of squares alone
_FRAMES, _FRAME, _VISION_HEADS, _VISION_DIM = 8, 4096, 16, 80
_HEADS = HEADS_7B
_PAGE_TOKENS, _FLASHINFER_BYTES = 16, 128 * 2**20
_FLASH_3, _FLASH_3_PAGE = "flash_attn_interface", 128


def timings(quick: bool) -> Iterator[Timing]:
    """Decode, extend and vision; FlexAttention, which compiles for long, not in quick runs."""
    decode = f"decode, bf16, {_NUM_ROWS} x {_LENGTH} tokens"
    extend = f"extend, bf16, {_CHUNK} on {_START} tokens"
    vision = f"vision, bf16, {_FRAMES} x {_FRAME} tokens"
    peers: list[tuple[str, Callable[[Clock], list[Row]]]] = [
        (f"{decode}: torch SDPA", _sdpa_decode),
        (f"{decode}: FlashInfer", _flashinfer_decode),
        (f"{decode}: flash-attn", _flash_decode),
        (f"{decode}: FlashAttention 3", _flash_3_decode),
        (f"{extend}: torch SDPA", _sdpa_extend),
        (f"extend, bf16, {_PROMPT} on 0 tokens: torch SDPA, cuDNN", _cudnn_extend),
        (f"{extend}: FlashInfer", _flashinfer_extend),
        (f"{extend}: flash-attn", partial(_flash_extend, "flash_attn")),
        (f"{extend}: FlashAttention 3", partial(_flash_extend, _FLASH_3)),
        (f"{vision}: torch SDPA", _sdpa_vision),
        (f"{vision}: torch SDPA, cuDNN", _cudnn_vision),
        (f"{vision}: flash-attn", partial(_flash_vision, "flash_attn")),
        (f"{vision}: FlashAttention 3", partial(_flash_vision, _FLASH_3)),
    ]
    if not quick:
        peers += [
            (f"{decode}: FlexAttention", _flex_decode),
            (f"{extend}: FlexAttention", _flex_extend),
            (f"{vision}: FlexAttention", _flex_vision),
        ]
    for name, measure in peers:
        yield Timing(name, measure, is_peer=True)


def _random(clock: Clock, *sizes: int) -> Tensor:
    return torch.randn(sizes, dtype=torch.bfloat16, device=clock.device)


def _decode_tensors(clock: Clock) -> tuple[Tensor, Tensor, Tensor]:
    """q [B, H, 1, D], k and v [B, KV heads, L, D]."""
    kv = _random(clock, 2, _NUM_ROWS, _HEADS.num_kv_heads, _LENGTH, _HEADS.head_dim)
    return _random(clock, _NUM_ROWS, _HEADS.num_heads, 1, _HEADS.head_dim), kv[0], kv[1]


def _extend_tensors(clock: Clock, start: int = _START, chunk: int = _CHUNK) -> tuple[Tensor, Tensor, Tensor]:
    """q [1, H, N, D], k and v [1, KV heads, L, D]."""
    kv = _random(clock, 2, 1, _HEADS.num_kv_heads, start + chunk, _HEADS.head_dim)
    return _random(clock, 1, _HEADS.num_heads, chunk, _HEADS.head_dim), kv[0], kv[1]


def _vision_tensors(clock: Clock) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v [frames, H, L, D]."""
    q, k, v = _random(clock, 3, _FRAMES, _VISION_HEADS, _FRAME, _VISION_DIM).unbind()
    return q, k, v


def _time_decode(clock: Clock, launch: Callable[[], object], note: str) -> list[Row]:
    num_bytes = decode_bytes([_LENGTH] * _NUM_ROWS, _HEADS.num_heads, _HEADS.num_kv_heads, _HEADS.head_dim, 2)
    return [clock.time([launch], in_graph=False).moved(num_bytes, note=note)]


def _time_extend(clock: Clock, launch: Callable[[], object], note: str, span: tuple[int, int] = (_START, _START + _CHUNK)) -> list[Row]:
    flops = extend_flops([span], _HEADS.num_heads, _HEADS.head_dim)
    return [clock.time([launch], in_graph=False).computed(flops, note=note)]


def _time_vision(clock: Clock, launch: Callable[[], object]) -> list[Row]:
    flops = attention_flops([_FRAME] * _FRAMES, _VISION_HEADS, _VISION_DIM)
    return [clock.time([launch], in_graph=False).computed(flops)]


def _sdpa_decode(clock: Clock) -> list[Row]:
    q, k, v = _decode_tensors(clock)
    return _time_decode(clock, partial(F.scaled_dot_product_attention, q, k, v, enable_gqa=True), "contiguous KV")


def _sdpa_extend(clock: Clock) -> list[Row]:
    from torch.nn.attention.bias import causal_lower_right

    q, k, v = _with_repeated_heads(*_extend_tensors(clock))
    mask = causal_lower_right(_CHUNK, _START + _CHUNK)
    return _time_extend(clock, partial(F.scaled_dot_product_attention, q, k, v, attn_mask=mask), "contiguous KV, heads repeated")


def _sdpa_vision(clock: Clock) -> list[Row]:
    q, k, v = _vision_tensors(clock)
    return _time_vision(clock, partial(F.scaled_dot_product_attention, q, k, v))


def _with_repeated_heads(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    group = _HEADS.num_heads // _HEADS.num_kv_heads
    return q, k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)


def _cudnn(q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool) -> Tensor:
    """torch's choice on Hopper is FlashAttention 2; cuDNN has kernels of its own for it."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        return F.scaled_dot_product_attention(q, k, v, is_causal=is_causal)


def _cudnn_extend(clock: Clock) -> list[Row]:
    tensors = _with_repeated_heads(*_extend_tensors(clock, 0, _PROMPT))
    return _time_extend(clock, partial(_cudnn, *tensors, is_causal=True), "contiguous KV, heads repeated", (0, _PROMPT))


def _cudnn_vision(clock: Clock) -> list[Row]:
    return _time_vision(clock, partial(_cudnn, *_vision_tensors(clock), is_causal=False))


def _flash_decode(clock: Clock) -> list[Row]:
    attend = importlib.import_module("flash_attn").flash_attn_with_kvcache
    q, k, v = (tensor.transpose(1, 2).contiguous() for tensor in _decode_tensors(clock))
    lengths = torch.full((_NUM_ROWS,), _LENGTH, dtype=torch.int32, device=clock.device)
    return _time_decode(clock, partial(attend, q, k, v, cache_seqlens=lengths), "contiguous KV")


def _flash_3_decode(clock: Clock) -> list[Row]:
    attend = importlib.import_module(_FLASH_3).flash_attn_with_kvcache
    pages_per_row = _LENGTH // _FLASH_3_PAGE
    num_pages = _NUM_ROWS * pages_per_row
    kv = _random(clock, 2, num_pages, _FLASH_3_PAGE, _HEADS.num_kv_heads, _HEADS.head_dim)
    table = torch.randperm(num_pages, device=clock.device).to(torch.int32).view(_NUM_ROWS, pages_per_row)
    lengths = torch.full((_NUM_ROWS,), _LENGTH, dtype=torch.int32, device=clock.device)
    q = _random(clock, _NUM_ROWS, 1, _HEADS.num_heads, _HEADS.head_dim)
    launch = partial(attend, q, *kv.unbind(), cache_seqlens=lengths, page_table=table, causal=True)
    return _time_decode(clock, launch, f"pages of {_FLASH_3_PAGE}")


def _flash_extend(library: str, clock: Clock) -> list[Row]:
    attend = importlib.import_module(library).flash_attn_func
    q, k, v = (tensor.transpose(1, 2).contiguous() for tensor in _extend_tensors(clock))
    return _time_extend(clock, partial(attend, q, k, v, causal=True), "contiguous KV")


def _flash_vision(library: str, clock: Clock) -> list[Row]:
    attend = importlib.import_module(library).flash_attn_func
    q, k, v = (tensor.transpose(1, 2).contiguous() for tensor in _vision_tensors(clock))
    return _time_vision(clock, partial(attend, q, k, v))


def _flashinfer_decode(clock: Clock) -> list[Row]:
    pages_per_row = _LENGTH // _PAGE_TOKENS
    num_pages = _NUM_ROWS * pages_per_row
    workspace = torch.zeros(_FLASHINFER_BYTES, dtype=torch.uint8, device=clock.device)
    wrapper = importlib.import_module("flashinfer").BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", use_tensor_cores=True)
    wrapper.plan(
        torch.arange(_NUM_ROWS + 1, dtype=torch.int32, device=clock.device) * pages_per_row,
        torch.randperm(num_pages, device=clock.device).to(torch.int32),
        torch.full((_NUM_ROWS,), _PAGE_TOKENS, dtype=torch.int32, device=clock.device),
        _HEADS.num_heads,
        _HEADS.num_kv_heads,
        _HEADS.head_dim,
        _PAGE_TOKENS,
        q_data_type=torch.bfloat16,
        kv_data_type=torch.bfloat16,
    )
    cache = _random(clock, num_pages, 2, _PAGE_TOKENS, _HEADS.num_kv_heads, _HEADS.head_dim)
    q = _random(clock, _NUM_ROWS, _HEADS.num_heads, _HEADS.head_dim)
    return _time_decode(clock, partial(wrapper.run, q, cache), f"pages of {_PAGE_TOKENS}")


def _flashinfer_extend(clock: Clock) -> list[Row]:
    num_pages = (_START + _CHUNK) // _PAGE_TOKENS
    workspace = torch.zeros(_FLASHINFER_BYTES, dtype=torch.uint8, device=clock.device)
    wrapper = importlib.import_module("flashinfer").BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD")
    wrapper.plan(
        torch.tensor([0, _CHUNK], dtype=torch.int32, device=clock.device),
        torch.tensor([0, num_pages], dtype=torch.int32, device=clock.device),
        torch.randperm(num_pages, device=clock.device).to(torch.int32),
        torch.full((1,), _PAGE_TOKENS, dtype=torch.int32, device=clock.device),
        _HEADS.num_heads,
        _HEADS.num_kv_heads,
        _HEADS.head_dim,
        _PAGE_TOKENS,
        causal=True,
        q_data_type=torch.bfloat16,
        kv_data_type=torch.bfloat16,
    )
    cache = _random(clock, num_pages, 2, _PAGE_TOKENS, _HEADS.num_kv_heads, _HEADS.head_dim)
    q = _random(clock, _CHUNK, _HEADS.num_heads, _HEADS.head_dim)
    return _time_extend(clock, partial(wrapper.run, q, cache), f"pages of {_PAGE_TOKENS}, the chunk's KV among them")


def _flex_decode(clock: Clock) -> list[Row]:
    q, k, v = _decode_tensors(clock)
    return _time_decode(clock, partial(_compiled_flex(), q, k, v, enable_gqa=True), "contiguous KV")


def _flex_extend(clock: Clock) -> list[Row]:
    from torch.nn.attention.flex_attention import create_block_mask

    def is_visible(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return query + _START >= key

    mask = create_block_mask(is_visible, None, None, _CHUNK, _START + _CHUNK, device=str(clock.device))
    q, k, v = _extend_tensors(clock)
    return _time_extend(clock, partial(_compiled_flex(), q, k, v, block_mask=mask, enable_gqa=True), "contiguous KV")


def _flex_vision(clock: Clock) -> list[Row]:
    q, k, v = _vision_tensors(clock)
    return _time_vision(clock, partial(_compiled_flex(), q, k, v))


def _compiled_flex() -> Callable[..., Any]:
    from torch.nn.attention.flex_attention import flex_attention

    compiled: Callable[..., Any] = torch.compile(flex_attention, dynamic=False)
    return compiled
