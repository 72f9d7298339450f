"""``Attention`` over pages in device memory, by Triton kernels. Loaded only for models on CUDA devices: see ``layer_ops``.

The kernels take a page (``kv_pages``) by its strides. Nothing is read back from the device; with arguments that lie there already,
``begin_decode`` and all that follows it can be captured in a CUDA graph.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from ...triton_kernels.paged_decode import DecodeWorkspace, paged_decode, plan_decode
from ...triton_kernels.paged_extend import ExtendPlan, paged_extend, plan_extend
from ...triton_kernels.paged_kv import PagedKV
from ..pictures import Run
from .kv_pages import KvPages


class TritonAttention:
    """``Attention``. ``layers``: views of each layer's pages; ``slots`` int64 [N]: the places of the forward's new tokens, page x
    page_tokens + index in it, -1 for padding. ``is_decoding``: the forward is a step."""

    def __init__(self, pages: KvPages) -> None:
        """``pages`` on the device."""
        self._device, self._dtype, self._page_tokens = pages.values.device, pages.dtype, pages.page_tokens
        self._heads = pages.heads.num_heads, pages.heads.num_kv_heads, pages.heads.head_dim
        self._scale, self._window, self._sees_pictures = pages.heads.scale, pages.heads.window, pages.heads.sees_pictures
        parts = [tensor.unbind(3) for tensor in (pages.values, pages.scales) if tensor is not None]
        views = [tensor.unbind(1) for part in parts for tensor in part]
        self.layers = [PagedKV(*layer) for layer in zip(*views, strict=True)]
        self.slots = torch.empty(0, dtype=torch.int64, device=self._device)
        self.is_decoding = False
        is_cuda = self._device.type == "cuda"
        self._num_sms = torch.cuda.get_device_properties(self._device).multi_processor_count if is_cuda else 1
        self._block_table = torch.empty(0, 0, dtype=torch.int32, device=self._device)
        self._extend: ExtendPlan | None = None
        self._decode: DecodeWorkspace | None = None

    def begin_prefill(
        self, spans: Sequence[tuple[int, int]], block_tables: Sequence[Tensor], pictures: Sequence[Sequence[Run]] = ()
    ) -> None:
        slots = []
        for (start, end), table in zip(spans, block_tables, strict=True):
            index = torch.arange(start, end, device=table.device)
            slots.append(table[index // self._page_tokens] * self._page_tokens + index % self._page_tokens)
        self.slots, self.is_decoding = torch.cat(slots).to(self._device), False
        self._block_table = self._moved(pad_sequence(list(block_tables), batch_first=True))
        seen = (pictures or [()] * len(spans)) if self._sees_pictures else None  # one variant of the kernel, with pictures or without
        self._extend = plan_extend(spans, *self._heads, self._dtype, self._device, window=self._window, pictures=seen)

    def begin_decode(self, lengths: Tensor, block_tables: Tensor) -> None:
        """A row of length 0 is padding: nothing is stored for it, and its result is 0. Raises: ValueError for more than 1024 rows."""
        last = lengths - 1
        pages = block_tables.gather(1, (last // self._page_tokens).clamp(min=0).unsqueeze(1)).squeeze(1)
        slots = pages * self._page_tokens + last % self._page_tokens
        self.slots, self.is_decoding = torch.where(last >= 0, slots, -1).to(self._device), True
        self._block_table = self._moved(block_tables)
        self._decode = DecodeWorkspace.allocate(lengths.shape[0], *self._heads, self._num_sms, self._device)
        plan_decode(self._moved(lengths), self._decode, self._window)

    def prefill_attend(self, layer: int, q_NHD: Tensor, kv_NR: Tensor) -> Tensor:
        assert self._extend is not None, "begin_prefill comes first"
        _, num_kv_heads, head_dim = self._heads
        k, v = kv_NR.view(-1, 2, num_kv_heads, head_dim).unbind(1)
        return paged_extend(q_NHD, k, v, self.layers[layer], self._block_table, self._extend, scale=self._scale).flatten(1)

    def decode_attend(self, layer: int, q_NHD: Tensor) -> Tensor:
        assert self._decode is not None, "begin_decode comes first"
        return paged_decode(q_NHD, self.layers[layer], self._block_table, self._decode, scale=self._scale).flatten(1)

    def _moved(self, index: Tensor) -> Tensor:
        return index.to(self._device, torch.int32).contiguous()
