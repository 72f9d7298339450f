"""The checked wrappers. The prefill and encoder actors call them once per plan."""

import torch
import triton
from torch import Tensor

from ..checks import check_dense, check_device, check_tensor
from .config import launch
from .indices import PageIndices
from .kernel import copy_rows

_WORD_BYTES = 4


def write_embeddings(rows: Tensor, pages: Tensor, indices: PageIndices) -> None:
    """Store contiguous rows in pages (US3).

    rows [N, H], N >= indices.num_rows; pages [num_pages, page_tokens, H], same dtype (any) and device, updated in place. The last axis
    of both is contiguous; rows and strides are multiples of 4 bytes (of 64 for full speed).
    Raises: ValueError.
    """
    _copy(rows, pages, indices, write=True)


def read_embeddings(pages: Tensor, indices: PageIndices, out: Tensor) -> None:
    """Fetch rows from pages into ``out`` [N, H], the reverse of ``write_embeddings``. Rows without pages stay unchanged."""
    _copy(out, pages, indices, write=False)


def _copy(rows: Tensor, pages: Tensor, indices: PageIndices, *, write: bool) -> None:
    _check(rows, pages, indices)
    if not indices.max_tokens:
        return
    words, page_words = rows.view(torch.int32), pages.view(torch.int32)
    num_words = words.shape[1]
    config = launch(num_words)
    blocks = triton.cdiv(indices.max_tokens, config.tiles["BLOCK_TOKENS"]), triton.cdiv(num_words, config.tiles["BLOCK_WORDS"])
    copy_rows[(indices.pv_cu_page_len.shape[0], *blocks)](
        words,
        page_words,
        indices.pv_indptr,
        indices.pv_page_indptr,
        indices.pv_page_indices,
        indices.pv_cu_page_len,
        words.stride(0),
        page_words.stride(0),
        page_words.stride(1),
        NUM_WORDS=num_words,
        PAGE_TOKENS=pages.shape[1],
        WRITE=write,
        **config.arguments(),
    )


def _check(rows: Tensor, pages: Tensor, indices: PageIndices) -> None:
    check_device("rows", rows.device)
    check_tensor("rows", rows, (None, None), (rows.dtype,), rows.device)
    check_tensor("pages", pages, (None, None, rows.shape[1]), (rows.dtype,), rows.device)
    for name, tensor in (("rows", rows), ("pages", pages)):
        if not tensor.shape[-1] or tensor.stride(-1) != 1:
            raise ValueError(f"{name} has {tensor.shape[-1]} elements at stride {tensor.stride(-1)} in its last axis, not some at 1")
        for count in (tensor.shape[-1], *tensor.stride()[:-1], tensor.storage_offset()):
            if count * tensor.itemsize % _WORD_BYTES:
                raise ValueError(f"a row, stride or offset of {name} is {count * tensor.itemsize} bytes, no multiple of {_WORD_BYTES}")
    if indices.num_rows > rows.shape[0]:
        raise ValueError(f"the indices name {indices.num_rows} rows, there are {rows.shape[0]}")
    num_requests = indices.pv_cu_page_len.shape[0]
    sizes = {"pv_indptr": num_requests + 1, "pv_page_indptr": num_requests + 1, "pv_page_indices": None, "pv_cu_page_len": num_requests}
    for name, size in sizes.items():
        index: Tensor = getattr(indices, name)
        check_tensor(name, index, (size,), (torch.int32,), rows.device)
        check_dense(name, index)
