"""Section ``kv_write``: new tokens' K and V into pages, fused with QK-norm and M-RoPE."""

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from mmrt.triton_kernels.kv_write import QkNorm, Rotary, reference, rotate_and_write_kv
from mmrt.triton_kernels.paged_kv import PagedKV

from .case import Check, Size, Timing, can_read, require_close, type_name
from .counts import HEADS_7B, Heads, rotate_and_write_bytes
from .material import copy_of, make_cache
from .results import Row
from .timing import Clock

_SMALL = Heads(num_heads=4, num_kv_heads=2, head_dim=32)
_PAGE_TOKENS = 16
_ROUNDING = {torch.bfloat16: 1.6e-2, torch.float32: 2e-5}  # of rotated heads
_STEPS = {torch.int8: 0.02, torch.float8_e4m3fn: 0.13}  # relative, of quantized values


def checks(device: torch.device, size: Size) -> Iterator[Check]:
    """Some tokens skipped, pages poisoned first. In float32 an angle that was rounded differently would show."""
    heads, num_tokens = (_SMALL, 3) if size == "tiny" else (HEADS_7B, 300)
    for values in (torch.bfloat16, torch.int8, torch.float8_e4m3fn):
        for with_norm in (False, True) if can_read(values, device) else ():
            name = f"fused{', QK-norm' if with_norm else ''}, into {type_name(values)}, {num_tokens} tokens"
            yield Check(name, partial(_check_fused, device, num_tokens, heads, values, with_norm))
    yield Check(f"fused, fp32, {num_tokens} tokens", partial(_check_fused, device, num_tokens, heads, torch.float32, False))


def timings(quick: bool) -> Iterator[Timing]:
    """Prompts of hundreds of megabytes, and the 64 tokens of a decode step."""
    for values in (torch.bfloat16, torch.int8):
        name = type_name(values)
        yield Timing(f"fused, into {name}, 32768 tokens", partial(_fused, 32768, values, 1, "traffic"))
    if not quick:
        yield Timing("fused, into bf16, 64 tokens, in L2", partial(_fused, 64, torch.bfloat16, 16, ""))


def make_rotary(head_dim: int, device: torch.device, section: tuple[int, ...] | None = None) -> Rotary:
    """M-RoPE over three axes; the section of Qwen2.5-VL in proportion where none is given."""
    half = head_dim // 2
    frequencies = 1e6 ** (-torch.arange(half, dtype=torch.float32, device=device) / half)
    return Rotary(frequencies, section or (half // 4, half * 3 // 8, half - half // 4 - half * 3 // 8))


def _check_fused(device: torch.device, num_tokens: int, heads: Heads, values: torch.dtype, with_norm: bool) -> float:
    width = heads.num_heads + 2 * heads.num_kv_heads
    dtype = values if values in _ROUNDING else torch.bfloat16
    fused = torch.randn(num_tokens, width, heads.head_dim, dtype=dtype, device=device)
    positions = torch.randint(0, 30000, (3, num_tokens), dtype=torch.int64, device=device)
    norm = None
    if with_norm:
        weights = torch.rand(2, heads.head_dim, device=device).add_(0.5).to(torch.bfloat16)
        norm = QkNorm(weights[0], weights[1], 1e-6)
    kv, expected, slots = _pages(num_tokens, heads, values, device)
    rotary, by_reference = make_rotary(heads.head_dim, device), fused.clone()
    rotate_and_write_kv(fused, positions, slots, kv, rotary, norm)
    reference.rotate_and_write_kv(by_reference, positions, slots, expected, rotary, norm)
    difference = require_close("heads", fused, by_reference, rtol=_ROUNDING[dtype], atol=_ROUNDING[dtype])
    return max(difference, _require_same(kv, expected))


def _pages(num_tokens: int, heads: Heads, values: torch.dtype, device: torch.device) -> tuple[PagedKV, PagedKV, Tensor]:
    """Poisoned pages twice, and a slot for each token, some -1."""
    kv = make_cache([2 * num_tokens], heads.num_kv_heads, heads.head_dim, _PAGE_TOKENS, values, device).kv
    if kv.k_scales is None or kv.v_scales is None:
        kv.k_pages.fill_(torch.nan)
        kv.v_pages.fill_(torch.nan)
    else:
        kv.k_scales.fill_(torch.nan)
        kv.v_scales.fill_(torch.nan)
    slots = torch.randperm(kv.k_pages.shape[0] * _PAGE_TOKENS, device=device)[:num_tokens]
    slots[1::3] = -1
    return kv, copy_of(kv), slots


def _require_same(kv: PagedKV, expected: PagedKV) -> float:
    """The largest difference of values; quantized ones may be a step apart, since a rounding may have moved the head's largest."""
    differences = [0.0]
    for name, got, want in zip(PagedKV._fields, kv, expected, strict=True):
        if got is None or want is None:
            continue
        if name.endswith("scales"):
            require_close(name, got, want, rtol=_ROUNDING[torch.bfloat16], atol=0.0)
        elif got.dtype in _STEPS:
            step = 1.0 if got.dtype == torch.int8 else 0.0
            require_close(name, got.float(), want.float(), rtol=_STEPS[got.dtype], atol=step + 0.02)
        else:
            differences.append(require_close(name, got, want, rtol=_ROUNDING[got.dtype], atol=_ROUNDING[got.dtype]))
    return max(differences)


def _fused(num_tokens: int, values: torch.dtype, num_copies: int, target: str, clock: Clock) -> list[Row]:
    heads = HEADS_7B
    width = heads.num_heads + 2 * heads.num_kv_heads
    fused = torch.randn(num_tokens, width, heads.head_dim, dtype=torch.bfloat16, device=clock.device)
    positions = torch.arange(num_tokens, device=clock.device).expand(3, num_tokens).contiguous()
    kv = make_cache([num_tokens], heads.num_kv_heads, heads.head_dim, _PAGE_TOKENS, values, clock.device).kv
    slots = torch.arange(num_tokens, device=clock.device)
    rotary = make_rotary(heads.head_dim, clock.device)
    timed = clock.time([partial(rotate_and_write_kv, fused, positions, slots, kv, rotary)] * num_copies)
    if not target:  # what stays in the L2 cache has no rate to compare with a copy's
        return [timed.row(note=str(heads))]
    num_bytes = rotate_and_write_bytes(num_tokens, heads.num_heads, heads.num_kv_heads, heads.head_dim, values.itemsize)
    return [timed.moved(num_bytes, target=target, note=str(heads))]
