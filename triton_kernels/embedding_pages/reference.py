"""Reference for the kernel, row by row."""

from collections.abc import Iterator

from torch import Tensor

from .indices import PageIndices


def write_embeddings(rows: Tensor, pages: Tensor, indices: PageIndices) -> None:
    """As ``op.write_embeddings``."""
    for row, page, token in _places(indices, pages.shape[1]):
        pages[page, token] = rows[row]


def read_embeddings(pages: Tensor, indices: PageIndices, out: Tensor) -> None:
    """As ``op.read_embeddings``."""
    for row, page, token in _places(indices, pages.shape[1]):
        out[row] = pages[page, token]


def _places(indices: PageIndices, page_tokens: int) -> Iterator[tuple[int, int, int]]:
    """(row, page, token in the page) of every row that has a page."""
    indptr, page_indptr = indices.pv_indptr.tolist(), indices.pv_page_indptr.tolist()
    for request, cu_page_len in enumerate(indices.pv_cu_page_len.tolist()):
        pages = indices.pv_page_indices[page_indptr[request] : page_indptr[request + 1]].tolist()
        for number, row in enumerate(range(indptr[request], indptr[request + 1])):
            page, token = divmod(cu_page_len % page_tokens + number, page_tokens)
            if page < len(pages):
                yield row, pages[page], token
