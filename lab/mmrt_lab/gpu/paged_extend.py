"""Section ``paged_extend``."""

from collections.abc import Iterator, Sequence
from functools import partial

import torch

from mmrt.triton_kernels.paged_extend import paged_extend, paged_extend_reference, plan_extend

from .case import PAGE_DTYPES, Check, Size, Timing, can_read, require_attention, type_name
from .counts import HEADS_7B, Heads, Spans, extend_flops
from .material import far_apart, make_cache, poison
from .results import Row
from .timing import Clock, Timed

_SPANS: dict[Size, Spans] = {"tiny": ((0, 9), (21, 30), (16, 17)), "device": ((0, 200), (333, 460), (4096, 4097), (1000, 1129), (7, 7))}
_SMALL = Heads(num_heads=4, num_kv_heads=2, head_dim=32)
_WIDE = Heads(num_heads=8, num_kv_heads=4, head_dim=256), Heads(num_heads=8, num_kv_heads=1, head_dim=512)
_PAGE_TOKENS = 16


def checks(device: torch.device, size: Size) -> Iterator[Check]:
    """Several sequences' chunks in one batch, with and without tokens before them."""
    heads = [_SMALL] if size == "tiny" else [HEADS_7B, Heads(num_heads=16, num_kv_heads=2, head_dim=64)]
    for kind in heads:
        for dtype, values in PAGE_DTYPES:
            name = f"{type_name(dtype)} over {type_name(values)}, {kind}"
            if can_read(values, device):
                yield Check(name, partial(_check, device, _SPANS[size], kind, dtype, values))
    seeing = partial(
        _check, device, _SPANS[size], heads[0], torch.bfloat16, torch.bfloat16, window=10 if size == "tiny" else 100, sees=True
    )
    yield Check("bf16, windows, and pictures that see themselves", seeing)
    for wide in _WIDE:
        yield Check(f"bf16, {wide}", partial(_check, device, _SPANS[size], wide, torch.bfloat16, torch.bfloat16))
    far = partial(_check, device, _SPANS[size], heads[0], torch.bfloat16, torch.int8, is_far=True)
    yield Check("bf16 over int8, addresses past 2**31", far)
    short = ((40, 44),) if size == "tiny" else ((900, 904), (17, 19))
    yield Check("bf16, short chunks", partial(_check, device, short, heads[0], torch.bfloat16, torch.bfloat16))


def timings(quick: bool) -> Iterator[Timing]:
    """Chunks of 2k tokens and more, and shorter ones of several sequences."""
    forms: list[tuple[str, Spans, str]] = [
        ("2048 on 8192", ((8192, 10240),), "extend"),
        ("8192 on 0", ((0, 8192),), ""),
        ("2048 on 32768", ((32768, 34816),), "extend"),
        ("4 x 512 on 8192", ((8192, 8704),) * 4, ""),
    ]
    for name, spans, target in forms[: 2 if quick else None]:
        yield Timing(f"bf16, {name} tokens", partial(_run, spans, torch.bfloat16, target))
    yield Timing("int8 pages, 2048 on 8192 tokens", partial(_run, ((8192, 10240),), torch.int8, ""))


def time_extend(clock: Clock, spans: Spans, heads: Heads, values: torch.dtype) -> Timed:
    """bfloat16 chunks over a cache of ``values``."""
    starts = [start for start, _ in spans]
    cache = make_cache(starts, heads.num_kv_heads, heads.head_dim, _PAGE_TOKENS, values, clock.device)
    q, k, v = _projection(spans, heads, torch.bfloat16, clock.device)
    plan = plan_extend(spans, heads.num_heads, heads.num_kv_heads, heads.head_dim, q.dtype, clock.device)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    return clock.time([partial(paged_extend, q, k, v, cache.kv, cache.table, plan, out=out)])


def _projection(spans: Spans, heads: Heads, dtype: torch.dtype, device: torch.device) -> Sequence[torch.Tensor]:
    num_tokens = sum(end - start for start, end in spans)
    sizes = [heads.num_heads, heads.num_kv_heads, heads.num_kv_heads]
    return torch.split(torch.randn(num_tokens, sum(sizes), heads.head_dim, dtype=dtype, device=device), sizes, 1)


def _check(
    device: torch.device,
    spans: Spans,
    heads: Heads,
    dtype: torch.dtype,
    values: torch.dtype,
    *,
    is_far: bool = False,
    window: int = 0,
    sees: bool = False,
) -> float:
    """``sees``: the second half of each chunk is a picture that sees itself."""
    cache = make_cache([start for start, _ in spans], heads.num_kv_heads, heads.head_dim, _PAGE_TOKENS, values, device)
    poison(cache)
    cache = far_apart(cache) if is_far else cache
    q, k, v = _projection(spans, heads, dtype, device)
    pictures = [[((start + end) // 2, end)] for start, end in spans] if sees else None
    shape = heads.num_heads, heads.num_kv_heads, heads.head_dim
    plan = plan_extend(spans, *shape, dtype, device, window=window, pictures=pictures)
    out = torch.full(q.shape, torch.nan, dtype=dtype, device=device)
    paged_extend(q, k, v, cache.kv, cache.table, plan, out=out)
    expected = paged_extend_reference(q, k, v, cache.kv, cache.table, spans, window, pictures or ())
    return require_attention(out, expected)


def _run(spans: Spans, values: torch.dtype, target: str, clock: Clock) -> list[Row]:
    flops = extend_flops(spans, HEADS_7B.num_heads, HEADS_7B.head_dim)
    return [time_extend(clock, spans, HEADS_7B, values).computed(flops, target=target, note=str(HEADS_7B))]
