"""Section ``paged_decode``."""

from collections.abc import Iterator, Sequence
from functools import partial

import torch

from mmrt.triton_kernels.paged_decode import DecodeWorkspace, paged_decode, paged_decode_reference, plan_decode

from .case import PAGE_DTYPES, Check, Size, Timing, can_read, num_multiprocessors, require_attention, type_name
from .counts import HEADS_7B, HEADS_8B, Heads, decode_bytes
from .material import far_apart, make_cache, poison
from .results import Row
from .timing import Clock, Timed

_LENGTHS: dict[Size, Sequence[int]] = {"tiny": (0, 5, 40), "device": (0, 1, 16, 97, 700, 5003)}
_PAGE_TOKENS = 16
_SMALL, _WIDE = Heads(num_heads=4, num_kv_heads=2, head_dim=32), Heads(num_heads=8, num_kv_heads=1, head_dim=512)


def checks(device: torch.device, size: Size) -> Iterator[Check]:
    """Ragged rows, an empty one among them, pages in random order, NaN after the tokens."""
    heads = [_SMALL] if size == "tiny" else [HEADS_7B, Heads(num_heads=16, num_kv_heads=2, head_dim=64)]
    for kind in heads:
        for dtype, values in PAGE_DTYPES:
            name = f"{type_name(dtype)} over {type_name(values)}, {kind}"
            if can_read(values, device):
                yield Check(name, partial(_check, device, _LENGTHS[size], kind, dtype, values))
    window = 7 if size == "tiny" else 100
    yield Check(
        f"bf16, windows of {window}", partial(_check, device, _LENGTHS[size], heads[0], torch.bfloat16, torch.bfloat16, window=window)
    )
    yield Check(f"bf16, {_WIDE}", partial(_check, device, _LENGTHS[size], _WIDE, torch.bfloat16, torch.bfloat16))
    far = partial(_check, device, _LENGTHS[size], heads[0], torch.bfloat16, torch.int8, is_far=True)
    yield Check("bf16 over int8, addresses past 2**31", far)
    if size == "device":
        yield Check("bf16, one long row", partial(_check, device, (70001,), HEADS_8B, torch.bfloat16, torch.bfloat16))


def timings(quick: bool) -> Iterator[Timing]:
    """KV of a gigabyte in several forms, 8-bit caches beside the same tokens in 16 bits, and one row of 8k tokens."""
    forms = {
        "64 x 8192": [8192] * 64,
        "256 x 2048": [2048] * 256,
        "8 x 65536": [65536] * 8,
        "64 of 1024 to 15360": list(range(1024, 15361, 14336 // 63))[:64],
    }
    for name, lengths in list(forms.items())[: 1 if quick else None]:
        yield Timing(f"bf16, {name} tokens", partial(_long, lengths, torch.bfloat16))
    yield Timing("int8, 64 x 8192 tokens", partial(_narrow, torch.int8))
    yield Timing("e4m3, 64 x 8192 tokens", partial(_narrow, torch.float8_e4m3fn))
    yield Timing("bf16, 1 x 8192 tokens", _one_row)
    yield Timing("plan of 64 rows", _plan)


def time_decode(clock: Clock, lengths: Sequence[int], heads: Heads, values: torch.dtype, *, num_copies: int = 1) -> Timed:
    """bfloat16 queries over a cache of ``values``; as many caches as copies, so that each finds the L2 cache without its own."""
    num_rows = len(lengths)
    cache = make_cache([*lengths] * num_copies, heads.num_kv_heads, heads.head_dim, _PAGE_TOKENS, values, clock.device)
    num_sms = num_multiprocessors(clock.device)
    workspace = DecodeWorkspace.allocate(num_rows, heads.num_heads, heads.num_kv_heads, heads.head_dim, num_sms, clock.device)
    plan_decode(cache.lengths[:num_rows].contiguous(), workspace)
    q = torch.randn(num_rows, heads.num_heads, heads.head_dim, dtype=torch.bfloat16, device=clock.device)
    out = torch.empty_like(q)
    tables = torch.split(cache.table, num_rows)
    return clock.time([partial(paged_decode, q, cache.kv, table, workspace, out=out) for table in tables])


def _check(
    device: torch.device,
    lengths: Sequence[int],
    heads: Heads,
    dtype: torch.dtype,
    values: torch.dtype,
    *,
    is_far: bool = False,
    window: int = 0,
) -> float:
    cache = make_cache(lengths, heads.num_kv_heads, heads.head_dim, _PAGE_TOKENS, values, device)
    poison(cache)
    cache = far_apart(cache) if is_far else cache
    q = torch.randn(len(lengths), heads.num_heads + 2, heads.head_dim, dtype=dtype, device=device)[:, : heads.num_heads]
    num_sms = num_multiprocessors(device)
    workspace = DecodeWorkspace.allocate(len(lengths), heads.num_heads, heads.num_kv_heads, heads.head_dim, num_sms, device)
    plan_decode(cache.lengths, workspace, window)
    out = torch.full(q.shape, torch.nan, dtype=dtype, device=device)
    paged_decode(q, cache.kv, cache.table, workspace, out=out)
    expected = paged_decode_reference(q, cache.kv, cache.table, cache.lengths, window)
    return require_attention(out, expected)


def _long(lengths: Sequence[int], values: torch.dtype, clock: Clock) -> list[Row]:
    return [_row(time_decode(clock, lengths, HEADS_7B, values), lengths, HEADS_7B, values, "decode")]


def _narrow(values: torch.dtype, clock: Clock) -> list[Row]:
    name = type_name(values)
    if not can_read(values, clock.device):
        return [Row(note=f"not measured: this device has no {name}")]
    lengths = [8192] * 64
    wide = time_decode(clock, lengths, HEADS_7B, torch.bfloat16)
    narrow = time_decode(clock, lengths, HEADS_7B, values)
    ratio = wide.time_us / narrow.time_us
    return [
        _row(narrow, lengths, HEADS_7B, values, "decode, 8 bits"),
        Row(case=f"{name} over bf16, tokens per second", rate=ratio, unit="x", target="decode, 8 bits over 16"),
    ]


def _one_row(clock: Clock) -> list[Row]:
    timed = time_decode(clock, [8192], HEADS_8B, torch.bfloat16, num_copies=16)
    return [_row(timed, [8192], HEADS_8B, torch.bfloat16, "decode, one row")]


def _plan(clock: Clock) -> list[Row]:
    workspace = DecodeWorkspace.allocate(64, 28, 4, 128, num_multiprocessors(clock.device), clock.device)
    lengths = torch.full((64,), 8192, dtype=torch.int32, device=clock.device)
    return [clock.time([partial(plan_decode, lengths, workspace)] * 16).row(note="once per step")]


def _row(timed: Timed, lengths: Sequence[int], heads: Heads, values: torch.dtype, target: str) -> Row:
    num_bytes = decode_bytes(lengths, heads.num_heads, heads.num_kv_heads, heads.head_dim, values.itemsize)
    return timed.moved(num_bytes, target=target, note=str(heads))
