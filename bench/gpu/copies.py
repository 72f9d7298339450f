"""Sections ``embedding_pages`` and ``kv_transfer``: rows and heads between pages and contiguous memory."""

from collections.abc import Callable, Iterator
from functools import partial

import torch

from ...triton_kernels.embedding_pages import PageIndices, PageSpan, read_embeddings, write_embeddings
from ...triton_kernels.embedding_pages import reference as page_reference
from ...triton_kernels.kv_transfer import LayerBuffer, gather_layer, scatter_layer, transfer_layout
from ...triton_kernels.kv_transfer import reference as transfer_reference
from ...triton_kernels.kv_transfer.buffer import Packing
from .case import Check, Size, Timing, gigabytes_per_s, narrow_float, require_close, require_equal, type_name
from .counts import HEADS_7B, Heads
from .material import copy_of, make_cache
from .results import Row
from .timing import Clock

_ROW_TOKENS, _KV_TOKENS = 32, 16  # of a page
_SMALL = Heads(num_heads=2, num_kv_heads=2, head_dim=32)


def checks(device: torch.device, size: Size) -> Iterator[Check]:
    """Rows in several requests, one of which has no pages; heads as they are and packed, both ways."""
    for hidden in (16, 48) if size == "tiny" else (2048, 3584, 1176):
        yield Check(f"embeddings, {hidden} wide", partial(_check_rows, device, hidden, 1 if size == "tiny" else 9))
    heads, num_tokens = (_SMALL, 21) if size == "tiny" else (HEADS_7B, 1013)
    kinds: list[tuple[torch.dtype, Packing]] = [(torch.bfloat16, "none"), (torch.bfloat16, "int8"), (torch.bfloat16, "int4")]
    for values, packing in [*kinds, (torch.int8, "none"), (narrow_float(device), "none")]:
        name = f"{type_name(values)} pages, packing {packing}, {num_tokens} tokens"
        yield Check(f"transfer, {name}", partial(_check_transfer, device, num_tokens, heads, values, packing))


def timings(quick: bool) -> Iterator[Timing]:
    """Hundreds of megabytes each way."""
    yield Timing("write embeddings, 65536 x 3584", partial(_rows, write_embeddings))
    yield Timing("read embeddings, 65536 x 3584", partial(_rows, _read))
    packings: tuple[Packing, ...] = ("none", "int4", "int8")
    for packing in packings[: 1 if quick else None]:
        target = "traffic" if packing == "none" else ""
        yield Timing(f"gather KV, packing {packing}, 131072 tokens", partial(_transfer, packing, True, target))
        yield Timing(f"scatter KV, packing {packing}, 131072 tokens", partial(_transfer, packing, False, target))


def _check_rows(device: torch.device, hidden: int, scale: int) -> float:
    spans = (
        PageSpan([4, 1], 5 * scale, 30 * scale),
        PageSpan([], 0, 3),
        PageSpan([0], 0, 7 * scale),
        PageSpan([3, 2], _ROW_TOKENS * scale - 1, 9),
    )
    page_tokens = _ROW_TOKENS * scale
    indices = PageIndices.pack(spans, page_tokens, device)
    rows = torch.randn(indices.num_rows + 2, hidden, dtype=torch.bfloat16, device=device)
    pages = torch.full((5, page_tokens, hidden), torch.nan, dtype=torch.bfloat16, device=device)
    expected_pages = pages.clone()
    write_embeddings(rows, pages, indices)
    page_reference.write_embeddings(rows, expected_pages, indices)
    require_equal("pages", pages, expected_pages)
    out = torch.full_like(rows, torch.nan)
    expected = out.clone()
    read_embeddings(pages, indices, out)
    page_reference.read_embeddings(expected_pages, indices, expected)
    return require_equal("rows", out, expected)


def _check_transfer(device: torch.device, num_tokens: int, heads: Heads, values: torch.dtype, packing: Packing) -> float:
    cache = make_cache([num_tokens], heads.num_kv_heads, heads.head_dim, _KV_TOKENS, values, device)
    layout = transfer_layout(2, num_tokens, heads.num_kv_heads, heads.head_dim, values, packing)
    buffer, expected = (layout.layer(torch.full((layout.num_bytes,), 0x11, dtype=torch.uint8, device=device), 1) for _ in range(2))
    gather_layer(cache.kv, cache.table[0], buffer)
    transfer_reference.gather_layer(cache.kv, cache.table[0], expected)
    difference = _require_same_buffer(buffer, expected, packing)
    there, there_expected = copy_of(cache.kv), copy_of(cache.kv)
    backwards = cache.table[0].flip(0).contiguous()
    scatter_layer(buffer, backwards, there)
    transfer_reference.scatter_layer(buffer, backwards, there_expected)
    for name, got, want in zip(there._fields, there, there_expected, strict=True):
        if got is not None and want is not None:
            difference = max(difference, require_close(name, got.float(), want.float(), rtol=8e-3, atol=1e-6))
    return difference


def _require_same_buffer(buffer: LayerBuffer, expected: LayerBuffer, packing: Packing) -> float:
    """Bits as they are; packed values within a step, where a quotient falls between two."""
    if buffer.scales is not None and expected.scales is not None:
        require_close("scales", buffer.scales, expected.scales, rtol=1e-5, atol=0.0)
    if packing == "none":
        return require_equal("values", buffer.values.float(), expected.values.float())
    return require_close("values", _whole(buffer.values), _whole(expected.values), atol=1.0)


def _whole(values: torch.Tensor) -> torch.Tensor:
    """Packed values as integers."""
    if values.dtype == torch.int8:
        return values.int()
    return torch.cat([((values.int() >> shift & 15) ^ 8) - 8 for shift in (0, 4)], -1)


def _read(rows: torch.Tensor, pages: torch.Tensor, indices: PageIndices) -> None:
    read_embeddings(pages, indices, rows)


def _rows(copy: Callable[[torch.Tensor, torch.Tensor, PageIndices], None], clock: Clock) -> list[Row]:
    num_rows, hidden, num_requests = 65536, 3584, 16
    num_pages = num_rows // _ROW_TOKENS
    each = num_pages // num_requests
    order = torch.randperm(num_pages, device="cpu").tolist()
    spans = [PageSpan(order[first : first + each], 0, each * _ROW_TOKENS) for first in range(0, num_pages, each)]
    indices = PageIndices.pack(spans, _ROW_TOKENS, clock.device)
    rows = torch.randn(num_rows, hidden, dtype=torch.bfloat16, device=clock.device)
    pages = torch.zeros(num_pages, _ROW_TOKENS, hidden, dtype=torch.bfloat16, device=clock.device)
    timed = clock.time([partial(copy, rows, pages, indices)])
    return [_row(2 * rows.numel() * rows.itemsize, timed.time_us, timed.first_s, "traffic")]


def _transfer(packing: Packing, is_gather: bool, target: str, clock: Clock) -> list[Row]:
    num_tokens, heads = 131072, HEADS_7B
    cache = make_cache([num_tokens], heads.num_kv_heads, heads.head_dim, _KV_TOKENS, torch.bfloat16, clock.device)
    layout = transfer_layout(1, num_tokens, heads.num_kv_heads, heads.head_dim, torch.bfloat16, packing)
    buffer = layout.layer(torch.zeros(layout.num_bytes, dtype=torch.uint8, device=clock.device), 0)
    pages = cache.table[0]
    launch = partial(gather_layer, cache.kv, pages, buffer) if is_gather else partial(scatter_layer, buffer, pages, cache.kv)
    timed = clock.time([launch])
    num_bytes = num_tokens * 2 * heads.num_kv_heads * heads.head_dim * 2 + layout.num_bytes
    return [_row(num_bytes, timed.time_us, timed.first_s, target)]


def _row(num_bytes: int, time_us: float, first_s: float, target: str) -> Row:
    return Row(case="", time_us=time_us, rate=gigabytes_per_s(num_bytes, time_us), unit="GB/s", target=target, first_s=first_s)
