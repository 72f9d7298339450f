"""The four index arrays of one iteration, made on the host and copied to the device at once."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Self

import torch
from torch import Tensor


class PageSpan(NamedTuple):
    """One request's part of an iteration: ``num_tokens`` rows from its row ``cu_page_len`` on.

    ``pages`` starts at the page that holds row ``cu_page_len``: earlier pages may have been freed already (US4). Without any
    pages the rows of the contiguous buffer stay unchanged: text between media is skipped in this way.
    """

    pages: Sequence[int]
    cu_page_len: int
    num_tokens: int


def num_consumed_pages(cu_page_len: int, num_tokens: int, page_tokens: int) -> int:
    """The number of leading pages of a ``PageSpan`` that hold only its rows, and can be freed once it is read (US4)."""
    return (cu_page_len + num_tokens) // page_tokens - cu_page_len // page_tokens


@dataclass(frozen=True, slots=True)
class PageIndices:
    """Int32 on the device; R requests, M pages in all.

    pv_indptr [R + 1]: request r has rows [pv_indptr[r], pv_indptr[r + 1]) of the contiguous buffer. pv_page_indptr [R + 1]: and pages
    pv_page_indices [M] [pv_page_indptr[r] : pv_page_indptr[r + 1]]. pv_cu_page_len [R]: rows written or read in earlier iterations.
    ``num_rows`` and ``max_tokens``, the last of pv_indptr and the most rows of a request, are host numbers.
    """

    pv_indptr: Tensor
    pv_page_indptr: Tensor
    pv_page_indices: Tensor
    pv_cu_page_len: Tensor
    num_rows: int
    max_tokens: int

    @classmethod
    def pack(cls, spans: Sequence[PageSpan], page_tokens: int, device: torch.device) -> Self:
        """Pack into one copy to ``device``. Raises: ValueError for negative numbers, or too few pages for a span's rows."""
        indptr, page_indptr, page_indices = [0], [0], list[int]()
        for number, span in enumerate(spans):
            if span.cu_page_len < 0 or span.num_tokens < 0:
                raise ValueError(f"span {number} has {span.num_tokens} rows from {span.cu_page_len} on (both must be 0 or more)")
            room = len(span.pages) * page_tokens - span.cu_page_len % page_tokens
            if span.pages and span.num_tokens > room:
                raise ValueError(f"span {number} has {span.num_tokens} rows, its {len(span.pages)} pages room for {room}")
            indptr.append(indptr[-1] + span.num_tokens)
            page_indptr.append(page_indptr[-1] + len(span.pages))
            page_indices += span.pages
        packed = torch.tensor([*indptr, *page_indptr, *page_indices, *(span.cu_page_len for span in spans)], dtype=torch.int32)
        sizes = [len(indptr), len(page_indptr), len(page_indices), len(spans)]
        pv_indptr, pv_page_indptr, pv_page_indices, pv_cu_page_len = torch.split(packed.to(device, non_blocking=True), sizes)
        max_tokens = max((span.num_tokens for span in spans), default=0)
        return cls(pv_indptr, pv_page_indptr, pv_page_indices, pv_cu_page_len, indptr[-1], max_tokens)
