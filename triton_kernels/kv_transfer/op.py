"""The checked wrappers, called once per layer of a sequence that moves; the caller orders streams and copies the buffer."""

import torch
import triton
from torch import Tensor

from ..checks import check_device, check_tensor
from ..paged_decode.config import HEAD_DIMS
from ..paged_kv import FLOATS, QUANTIZED, PagedKV
from .buffer import LayerBuffer
from .config import launch
from .kernel import transfer_rows

_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32}  # what values are seen as that are copied as they are


def gather_layer(kv: PagedKV, page_ids: Tensor, buffer: LayerBuffer) -> None:
    """Copy a sequence's K and V of one layer out of its pages.

    page_ids int32 [at least the pages of the buffer's tokens], in order: the sequence's row of the block table. The buffer's dtype says
    how values are packed (see ``LayerBuffer``). Raises: ValueError.
    """
    _launch(kv, page_ids, buffer, gather=True)


def scatter_layer(buffer: LayerBuffer, page_ids: Tensor, kv: PagedKV) -> None:
    """The other way round, into pages of the dtype that was gathered from. Slots of the last page behind the tokens are left alone."""
    _launch(kv, page_ids, buffer, gather=False)


def _launch(kv: PagedKV, page_ids: Tensor, buffer: LayerBuffer, *, gather: bool) -> None:
    packing = _check(kv, page_ids, buffer)
    num_tokens = buffer.values.shape[0]
    if not num_tokens:
        return
    k, v, values = kv.k_pages, kv.v_pages, buffer.values
    if not packing:
        bits = _BITS[values.itemsize]
        k, v, values = k.view(bits), v.view(bits), values.view(bits)
    _, page_tokens, num_kv_heads, head_dim = k.shape
    config = launch(head_dim)
    transfer_rows[(triton.cdiv(num_tokens * num_kv_heads, config.tiles["BLOCK_ROWS"]),)](
        k,
        v,
        kv.k_scales,
        kv.v_scales,
        page_ids,
        values,
        buffer.scales,
        num_tokens,
        *k.stride()[:3],
        *kv.scale_strides(),
        NUM_KV_HEADS=num_kv_heads,
        HALF=head_dim // 2,
        PAGE_TOKENS=page_tokens,
        PACKING=packing,
        GATHER=gather,
        **config.arguments(),
    )


def _check(kv: PagedKV, page_ids: Tensor, buffer: LayerBuffer) -> int:
    """The bits of a packed value, 0 if values are copied as they are."""
    k, values, scales = kv.k_pages, *buffer
    check_device("k_pages", k.device)
    check_tensor("k_pages", k, (None, None, None, None), FLOATS if kv.k_scales is None else QUANTIZED, k.device)
    kv.check(k)
    _, page_tokens, num_kv_heads, head_dim = k.shape
    if head_dim not in HEAD_DIMS:
        raise ValueError(f"head_dim {head_dim} is not one of {', '.join(map(str, HEAD_DIMS))}")
    packings = {k.dtype: 0} if kv.k_scales is not None else {k.dtype: 0, torch.int8: 8, torch.uint8: 4}
    check_tensor("values", values, (None, None, None, None), packings.keys(), k.device)
    packing = packings[values.dtype]
    check_tensor("values", values, (None, 2, num_kv_heads, head_dim // 2 if packing == 4 else head_dim), packings.keys(), k.device)
    if (scales is None) != (kv.k_scales is None and not packing):
        raise ValueError(f"values of {values.dtype} from pages of {k.dtype} come {'with' if scales is None else 'without'} scales")
    if scales is not None:
        check_tensor("scales", scales, values.shape[:3], (torch.float32,), k.device)
    check_tensor("page_ids", page_ids, (None,), (torch.int32,), k.device)
    if page_ids.shape[0] * page_tokens < values.shape[0]:
        raise ValueError(f"{values.shape[0]} tokens are more than {page_ids.shape[0]} pages of {page_tokens}")
    for name, tensor in (("values", values), ("scales", scales), ("page_ids", page_ids)):
        if tensor is not None and not tensor.is_contiguous():
            raise ValueError(f"{name} has strides {list(tensor.stride())}, is not contiguous")
    return packing
