"""What the kernel must do, in plain torch."""

import torch
from torch import Tensor

from ..paged_kv import PagedKV
from .buffer import LayerBuffer

SMALLEST_SCALE = 1e-8


def gather_layer(kv: PagedKV, page_ids: Tensor, buffer: LayerBuffer) -> None:
    """As ``op.gather_layer``."""
    num_tokens = buffer.values.shape[0]
    page, token = _places(page_ids, num_tokens, kv.k_pages.shape[1])
    heads = torch.stack((kv.k_pages[page, token], kv.v_pages[page, token]), 1)
    if buffer.scales is None:
        buffer.values.copy_(heads)
    elif kv.k_scales is not None and kv.v_scales is not None:
        buffer.values.copy_(heads)
        buffer.scales.copy_(torch.stack((kv.k_scales[page, token], kv.v_scales[page, token]), 1))
    else:
        largest = 7.0 if buffer.values.dtype == torch.uint8 else 127.0
        buffer.scales.copy_((heads.float().abs().amax(-1) / largest).clamp(min=SMALLEST_SCALE))
        whole = (heads.float() / buffer.scales.unsqueeze(-1)).round().clamp(-largest, largest).int()
        low, high = whole.chunk(2, -1)
        buffer.values.copy_(whole if buffer.values.dtype == torch.int8 else low & 15 | (high & 15) << 4)


def scatter_layer(buffer: LayerBuffer, page_ids: Tensor, kv: PagedKV) -> None:
    """As ``op.scatter_layer``."""
    page, token = _places(page_ids, buffer.values.shape[0], kv.k_pages.shape[1])
    values = buffer.values
    if kv.k_scales is not None and kv.v_scales is not None and buffer.scales is not None:
        kv.k_scales[page, token], kv.v_scales[page, token] = buffer.scales.unbind(1)
    elif buffer.scales is not None:
        if values.dtype == torch.uint8:
            packed = values.int()
            values = torch.cat((((packed & 15) ^ 8) - 8, ((packed >> 4) ^ 8) - 8), -1)
        values = (values.float() * buffer.scales.unsqueeze(-1)).to(kv.k_pages.dtype)
    kv.k_pages[page, token], kv.v_pages[page, token] = values.unbind(1)


def _places(page_ids: Tensor, num_tokens: int, page_tokens: int) -> tuple[Tensor, Tensor]:
    index = torch.arange(num_tokens, device=page_ids.device)
    return page_ids[index // page_tokens].long(), index % page_tokens
