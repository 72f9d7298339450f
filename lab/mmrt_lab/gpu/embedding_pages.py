"""Section ``embedding_pages``: rows between pages and contiguous memory."""

from collections.abc import Callable, Iterator
from functools import partial

import torch

from mmrt.triton_kernels.embedding_pages import PageIndices, PageSpan, read_embeddings, write_embeddings
from mmrt.triton_kernels.embedding_pages import reference as page_reference

from .case import Check, Size, Timing, require_equal
from .results import Row
from .timing import Clock

_PAGE_TOKENS = 32


def checks(device: torch.device, size: Size) -> Iterator[Check]:
    """Rows in several requests, one of them without pages."""
    for hidden in (16, 48) if size == "tiny" else (2048, 3584, 1176):
        yield Check(f"embeddings, {hidden} wide", partial(_check_rows, device, hidden, 1 if size == "tiny" else 9))


def timings(quick: bool) -> Iterator[Timing]:
    """Hundreds of megabytes each way."""
    yield Timing("write embeddings, 65536 x 3584", partial(_rows, write_embeddings))
    yield Timing("read embeddings, 65536 x 3584", partial(_rows, _read))


def _check_rows(device: torch.device, hidden: int, scale: int) -> float:
    spans = (
        PageSpan([4, 1], 5 * scale, 30 * scale),
        PageSpan([], 0, 3),
        PageSpan([0], 0, 7 * scale),
        PageSpan([3, 2], _PAGE_TOKENS * scale - 1, 9),
    )
    page_tokens = _PAGE_TOKENS * scale
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


def _read(rows: torch.Tensor, pages: torch.Tensor, indices: PageIndices) -> None:
    read_embeddings(pages, indices, rows)


def _rows(copy: Callable[[torch.Tensor, torch.Tensor, PageIndices], None], clock: Clock) -> list[Row]:
    num_rows, hidden, num_requests = 65536, 3584, 16
    num_pages = num_rows // _PAGE_TOKENS
    each = num_pages // num_requests
    order = torch.randperm(num_pages, device="cpu").tolist()
    spans = [PageSpan(order[first : first + each], 0, each * _PAGE_TOKENS) for first in range(0, num_pages, each)]
    indices = PageIndices.pack(spans, _PAGE_TOKENS, clock.device)
    rows = torch.randn(num_rows, hidden, dtype=torch.bfloat16, device=clock.device)
    pages = torch.zeros(num_pages, _PAGE_TOKENS, hidden, dtype=torch.bfloat16, device=clock.device)
    timed = clock.time([partial(copy, rows, pages, indices)])
    return [timed.moved(2 * rows.nbytes, target="traffic")]
