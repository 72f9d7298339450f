"""Recurrent states of DeltaNet layers in pages of two pools: views of their parts. See ``state_layout``."""

from typing import NamedTuple

import torch
from torch import Tensor

from ...cpu_kernels.delta_kernels import Pages
from ..architecture import ModelConfig
from ..checkpoint.weights import torch_dtype
from ..state_layout import Part, StateLayout, base_parts, log_parts, state_layout
from .delta_rule import Known


class StatePools(NamedTuple):
    """Pages of bases and of logs, uint8 [num_pages, page_bytes]. Other processes have them too; they are written in place."""

    bases: Tensor
    logs: Tensor


class Base(NamedTuple):
    """A layer's part of a base: views [heads, keys, values] float32 and [conv_size - 1, mixed]."""

    state: Tensor
    columns: Tensor


class DeltaPages:
    """The bases and logs of a model, layer by layer."""

    def __init__(self, config: ModelConfig, pools: StatePools) -> None:
        delta, layout = config.language.delta, state_layout(config)
        assert delta is not None and layout is not None
        self.layout: StateLayout = layout
        num_layers = config.language.num_layers - config.language.num_kv_layers
        base, log = base_parts(delta, config.dtype), log_parts(delta, config.dtype, layout.ring)
        self._states, self._columns = _views(pools.bases, base, num_layers)
        self._keys, self._values, self._decays, self._last_columns = _views(pools.logs, log, num_layers)

    @property
    def parts(self) -> Pages:
        """Of all pages, as kernels take them."""
        return Pages(self._states, self._columns, self._keys, self._values, self._decays, self._last_columns)

    def base(self, layer: int, page: int) -> Base:
        """A layer's part of a base, to read or to write."""
        return Base(self._states[page, layer], self._columns[page, layer])

    def known(self, layer: int, page: int, start: int, end: int) -> Known:
        """A copy of a log's entries of tokens [start, end)."""
        places = torch.arange(start, end) % self.layout.ring
        return Known(*(part[page, layer].index_select(0, places) for part in (self._keys, self._values, self._decays)))

    def append(self, layer: int, page: int, start: int, known: Known) -> None:
        """Write entries of tokens from ``start`` on."""
        places = torch.arange(start, start + len(known.decays)) % self.layout.ring
        for part, values in zip((self._keys, self._values, self._decays), known, strict=True):
            part[page, layer].index_copy_(0, places, values)

    def columns(self, layer: int, page: int, start: int, end: int) -> Tensor:
        """A copy of a log's columns of tokens [start, end)."""
        kept = self._last_columns[page, layer]
        return kept.index_select(0, torch.arange(start, end) % len(kept))

    def append_columns(self, layer: int, page: int, start: int, columns: Tensor) -> None:
        """Write columns of tokens from ``start`` on."""
        kept = self._last_columns[page, layer]
        kept.index_copy_(0, torch.arange(start, start + len(columns)) % len(kept), columns)


def _views(pool: Tensor, parts: tuple[Part, ...], num_layers: int) -> list[Tensor]:
    """Each part of all pages, [num_pages, num_layers, ...]."""
    layers = pool.view(len(pool), num_layers, sum(part.num_bytes for part in parts))
    views, start = [], 0
    for part in parts:
        dtype = torch_dtype(part.dtype)
        length = torch.Size(part.shape).numel() * dtype.itemsize
        views.append(layers[..., start : start + length].view(dtype).view(len(pool), num_layers, *part.shape))
        start += part.num_bytes
    return views
