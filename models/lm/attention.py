"""Attention over the paged KV cache: the interface that ``lm`` uses, and its CPU implementation in torch.

In a decode step each sequence is attended to alone: its K and V are gathered (``kv_pages``) and used while they are in cache, and its
result does not depend on the rest of the batch.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from ..architecture import LanguageConfig
from .kv_pages import KvPages

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


class Attention(Protocol):
    """One forward's attention. ``begin_*`` once per forward, then ``*_attend`` in each layer, over K and V that are written. Shapes: N
    tokens of all sequences together, HQ = num_heads, R = 2 x num_kv_heads x head_dim."""

    def begin_prefill(self, spans: Sequence[tuple[int, int]], block_tables: Sequence[Tensor]) -> None:
        """``spans`` (start, end) of each sequence's new tokens; ``block_tables`` int64, at least the pages of [0, end) each."""
        ...

    def begin_decode(self, lengths: Tensor, block_tables: Tensor) -> None:
        """``lengths`` int64 [B], the new token included; ``block_tables`` int64 [B, P], arbitrary after a row's own pages."""
        ...

    def prefill_attend(self, layer: int, q_NHD: Tensor, kv_NR: Tensor) -> Tensor:
        """Attend from each new token to all tokens up to itself. ``kv_NR`` as written. Returns [N, HQ x D]."""
        ...

    def decode_attend(self, layer: int, q_NHD: Tensor) -> Tensor:
        """Attend from each sequence's new token to its ``length`` tokens. Returns [B, HQ x D]."""
        ...


class _Sequence(NamedTuple):
    """A sequence of a decode step: its pages, and the scratch memory into which each layer gathers them."""

    pages: Tensor  # int64 [P]
    gathered: Tensor  # [P, values of a page in a layer]
    k: Tensor  # [1, HKV, length, D], a view of ``gathered``, as ``v`` is
    v: Tensor


class CpuAttention:
    """``Attention`` by gathering pages into scratch memory and torch's flash kernel, query heads of a KV head folded together."""

    def __init__(self, config: LanguageConfig, pages: KvPages) -> None:
        self._kv_heads, self._head_dim = config.num_kv_heads, config.head_dim
        self._fold = config.num_heads // config.num_kv_heads
        self._pages, self._page_tokens, self._dtype = pages, pages.page_tokens, pages.dtype
        self._rows = torch.empty(0, dtype=torch.int64)
        self._spans: Sequence[tuple[int, int]] = ()
        self._prefixes: list[Tensor] = []
        self._sequences: list[_Sequence] = []

    def begin_prefill(self, spans: Sequence[tuple[int, int]], block_tables: Sequence[Tensor]) -> None:
        self._spans = spans
        rows = []
        self._prefixes = []
        for (start, end), table in zip(spans, block_tables, strict=True):
            index = torch.arange(start, end)
            rows.append(self._pages.rows(table[index // self._page_tokens], index))
            self._prefixes.append(table[: -(-start // self._page_tokens)])
        self._rows = torch.cat(rows)

    def begin_decode(self, lengths: Tensor, block_tables: Tensor) -> None:
        last = lengths - 1
        pages = block_tables.gather(1, (last // self._page_tokens).unsqueeze(1)).squeeze(1)
        self._rows = self._pages.rows(pages, last)
        scratch = self._pages.scratch(block_tables.shape[1])
        k, v = scratch.view(1, -1, 2, self._kv_heads, self._head_dim).transpose(1, 3).unbind(2)
        self._sequences = []
        for length, table in zip(lengths.tolist(), block_tables, strict=True):
            num_pages = -(-length // self._page_tokens)
            self._sequences.append(_Sequence(table[:num_pages], scratch[:num_pages], k[:, :, :length], v[:, :, :length]))

    def write(self, layer: int, kv_NR: Tensor) -> None:
        """Store the new tokens' K (rotated) and V."""
        # A request's NaN must not spoil a page for its next owner: masked scores of NaN are still NaN.
        finite = torch.nan_to_num(kv_NR, nan=0.0, posinf=0.0, neginf=0.0)
        self._pages.write(layer, self._rows, finite)

    def prefill_attend(self, layer: int, q_NHD: Tensor, kv_NR: Tensor) -> Tensor:
        outputs = []
        row = 0
        for (start, end), prefix in zip(self._spans, self._prefixes, strict=True):
            rows = slice(row, row + end - start)
            row = rows.stop
            q = q_NHD[rows].view(-1, self._kv_heads, self._fold, self._head_dim)
            kv = kv_NR[rows].view(-1, 2, self._kv_heads, self._head_dim)
            output = self._causal(q, kv)
            if start:
                output = self._merge(output, self._over_prefix(q, self._pages.gather(layer, prefix)[:start]))
            outputs.append(output[0].to(self._dtype).flatten(1))
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    def decode_attend(self, layer: int, q_NHD: Tensor) -> Tensor:
        queries = q_NHD.view(-1, self._kv_heads, self._fold, self._head_dim).split(1)
        outputs = []
        for q, (pages, gathered, k, v) in zip(queries, self._sequences, strict=True):
            self._pages.gather_into(gathered, layer, pages)
            outputs.append(_flash(q, k, v)[0])
        return torch.cat(outputs).flatten(1)

    def _causal(self, q: Tensor, kv: Tensor) -> tuple[Tensor, Tensor]:
        """New tokens among themselves. q [n, HKV, G, D] -> (output [n, HKV, G, D], log-sum-exp [n, HKV, G])."""
        shape = (self._fold, -1, -1, -1)
        k, v = kv[:, 0].transpose(0, 1).expand(shape), kv[:, 1].transpose(0, 1).expand(shape)
        output, lse = _flash(q.permute(2, 1, 0, 3), k, v, is_causal=True)
        return output.permute(2, 1, 0, 3), lse.permute(2, 1, 0)

    def _over_prefix(self, q: Tensor, kv: Tensor) -> tuple[Tensor, Tensor]:
        """New tokens over all earlier ones, shapes as in ``_causal``."""
        num_tokens = q.shape[0]
        folded = q.transpose(0, 1).reshape(1, self._kv_heads, num_tokens * self._fold, self._head_dim)
        k, v = kv[:, 0].transpose(0, 1).unsqueeze(0), kv[:, 1].transpose(0, 1).unsqueeze(0)
        output, lse = _flash(folded, k, v)
        shape = (self._kv_heads, num_tokens, self._fold)
        return output.view(*shape, self._head_dim).transpose(0, 1), lse.view(shape).transpose(0, 1)

    @staticmethod
    def _merge(one: tuple[Tensor, Tensor], other: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Attention over the union of two disjoint sets of tokens, in float32."""
        (output, lse), (other_output, other_lse) = one, other
        weight = torch.sigmoid(other_lse - lse).unsqueeze(-1)
        return torch.lerp(output.float(), other_output.float(), weight), torch.logaddexp(lse, other_lse)
