"""Section ``vision_attention``."""

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import accumulate

import torch
from torch import Tensor

from mmrt.triton_kernels.vision_attention import attend, reference, rotate

from .case import Check, Size, Timing, require_attention, require_close, type_name
from .counts import attention_flops
from .results import Row
from .timing import Clock, Timed

NUM_HEADS, HEAD_DIM = 16, 80
_FRAMES: dict[Size, Sequence[int]] = {"tiny": (70, 0, 5), "device": (1000, 0, 1, 129, 4100)}
_WINDOWS: dict[Size, Sequence[int]] = {"tiny": (16, 3), "device": (64, 64, 48, 36, 64, 1, 0, 64)}
_SMALL_WINDOWS = (30, 7), (16, 4)  # for which smaller tiles are compiled
_WINDOW = 64


def checks(device: torch.device, size: Size) -> Iterator[Check]:
    """Frames and windows of uneven lengths."""
    num_heads = 1 if size == "tiny" else NUM_HEADS
    for dtype in (torch.bfloat16, torch.float16):
        yield Check(f"{type_name(dtype)}, frames", partial(_check, device, _FRAMES[size], num_heads, dtype))
        yield Check(f"{type_name(dtype)}, windows", partial(_check, device, _WINDOWS[size], num_heads, dtype))
    for lengths in _SMALL_WINDOWS:
        yield Check(f"bf16, windows up to {lengths[0]}", partial(_check, device, lengths, num_heads, torch.bfloat16))
    yield Check("bf16, rotation", partial(_check_rotation, device, sum(_FRAMES[size]), num_heads))


def timings(quick: bool) -> Iterator[Timing]:
    """Full attention over frames of 4k tokens and more, and windows of 64."""
    forms = [("1 x 4096", [4096]), ("8 x 4096", [4096] * 8), ("1 x 16384", [16384])]
    for name, lengths in forms[: 2 if quick else None]:
        yield Timing(f"bf16, frames, {name} tokens", partial(_frames, lengths))
    yield Timing("bf16, windows, 512 x 64 tokens", _windows)
    yield Timing("bf16, rotation, 5184 tokens", partial(_rotation, 5184))


def make_projection(
    lengths: Sequence[int], num_heads: int, dtype: torch.dtype, device: torch.device
) -> tuple[Sequence[Tensor], Tensor]:
    """q, k, v [T, H, D], views of one tensor, and ``cu_seqlens``."""
    bounds = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device)
    return torch.randn(sum(lengths), 3, num_heads, HEAD_DIM, dtype=dtype, device=device).unbind(1), bounds


def _check(device: torch.device, lengths: Sequence[int], num_heads: int, dtype: torch.dtype) -> float:
    (q, k, v), bounds = make_projection(lengths, num_heads, dtype, device)
    out = torch.full(q.shape, torch.nan, dtype=dtype, device=device)
    attend(q, k, v, bounds, max(lengths), out=out)
    expected = reference.attend(q, k, v, bounds)
    return require_attention(out, expected)


def _check_rotation(device: torch.device, num_tokens: int, num_heads: int) -> float:
    (q, k, _), _ = make_projection([num_tokens], num_heads, torch.bfloat16, device)
    cos, sin = torch.randn(2, num_tokens, HEAD_DIM // 2, device=device)
    expected = [reference.rotate(heads, cos, sin).to(q.dtype) for heads in (q, k)]
    rotate(q, k, cos, sin)
    return require_close("heads", torch.stack((q, k)), torch.stack(expected), rtol=1.6e-2, atol=1.6e-3)


def _time_attend(lengths: Sequence[int], clock: Clock) -> tuple[Timed, int]:
    """Also the bytes that are moved: queries, keys and values in, results out."""
    (q, k, v), bounds = make_projection(lengths, NUM_HEADS, torch.bfloat16, clock.device)
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    return clock.time([partial(attend, q, k, v, bounds, max(lengths), out=out)]), 4 * out.nbytes


def _frames(lengths: Sequence[int], clock: Clock) -> list[Row]:
    timed, _ = _time_attend(lengths, clock)
    flops = attention_flops(lengths, NUM_HEADS, HEAD_DIM)
    return [timed.computed(flops, target="vision", note=f"{NUM_HEADS} heads of {HEAD_DIM}")]


def _windows(clock: Clock) -> list[Row]:
    timed, num_bytes = _time_attend([_WINDOW] * 512, clock)
    return [timed.moved(num_bytes, note="four tensors moved")]


def _rotation(num_tokens: int, clock: Clock) -> list[Row]:
    (q, k, _), _ = make_projection([num_tokens], NUM_HEADS, torch.bfloat16, clock.device)
    cos = torch.ones(num_tokens, HEAD_DIM // 2, device=clock.device)
    timed = clock.time([partial(rotate, q, k, cos, torch.zeros_like(cos))])
    return [timed.moved(4 * q.numel() * q.itemsize, note="queries and keys, in place")]
