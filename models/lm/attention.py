"""Attention over the paged KV cache: the interface that ``lm`` uses, and its CPU implementation in torch.

One gather per layer brings K and V (``kv_pages``). Measured (two cores, bf16, 16 layers, 4 sequences of 512 tokens):
gathering K and V apart 2.8 ms, together 1.6 ms; SDPA on the padded batch 3.6 ms, one by one 6.6 ms, bmm + softmax 9.5 ms.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from ..architecture import LanguageConfig
from .kv_pages import KvPages

_GROUP_BYTES = 4 << 20  # gathered K and V of a group of sequences: stays in cache, and bounds private memory


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


class _Group(NamedTuple):
    """Sequences of similar length, attended to as one padded batch."""

    rows: Tensor | None  # int64: which of the batch; None is all, in order
    pages: Tensor  # int64 [size x pages of the longest]
    mask: Tensor | None  # [size, 1, groups, tokens], 0 or -inf; None: all lengths are the same whole number of pages
    size: int
    num_tokens: int


class CpuAttention:
    """``Attention`` by gathering pages into scratch memory and torch's flash kernel, query heads of a KV head folded together."""

    def __init__(self, config: LanguageConfig, pages: KvPages) -> None:
        self._kv_heads, self._head_dim = config.num_kv_heads, config.head_dim
        self._fold = config.num_heads // config.num_kv_heads
        self._row = 2 * config.num_kv_heads * config.head_dim
        self._pages, self._page_tokens, self._dtype = pages, pages.page_tokens, pages.dtype
        self._rows = torch.empty(0, dtype=torch.int64)
        self._spans: Sequence[tuple[int, int]] = ()
        self._prefixes: list[Tensor] = []
        self._groups: list[_Group] = []

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
        self._groups = [self._group(lengths, block_tables, rows) for rows in self._partition(lengths.tolist())]

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
        q = q_NHD.view(-1, self._kv_heads, self._fold, self._head_dim)
        output = torch.empty_like(q, memory_format=torch.contiguous_format)
        for group in self._groups:
            kv = self._pages.gather(layer, group.pages).view(group.size, group.num_tokens, 2, self._kv_heads, self._head_dim)
            queries = q if group.rows is None else q.index_select(0, group.rows)
            k, v = kv[:, :, 0].transpose(1, 2), kv[:, :, 1].transpose(1, 2)
            attended = F.scaled_dot_product_attention(queries, k, v, attn_mask=group.mask)
            if group.rows is None:
                output = attended
            else:
                output.index_copy_(0, group.rows, attended)
        return output.flatten(1)

    def _causal(self, q: Tensor, kv: Tensor) -> tuple[Tensor, Tensor]:
        """New tokens among themselves. q [n, HKV, G, D] -> (output [n, HKV, G, D], log-sum-exp [n, HKV, G])."""
        shape = (self._fold, -1, -1, -1)
        k, v = kv[:, 0].transpose(0, 1).expand(shape), kv[:, 1].transpose(0, 1).expand(shape)
        output, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q.permute(2, 1, 0, 3), k, v, is_causal=True)
        return output.permute(2, 1, 0, 3), lse.permute(2, 1, 0)

    def _over_prefix(self, q: Tensor, kv: Tensor) -> tuple[Tensor, Tensor]:
        """New tokens over all earlier ones, shapes as in ``_causal``."""
        num_tokens = q.shape[0]
        folded = q.transpose(0, 1).reshape(1, self._kv_heads, num_tokens * self._fold, self._head_dim)
        k, v = kv[:, 0].transpose(0, 1).unsqueeze(0), kv[:, 1].transpose(0, 1).unsqueeze(0)
        output, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(folded, k, v)
        shape = (self._kv_heads, num_tokens, self._fold)
        return output.view(*shape, self._head_dim).transpose(0, 1), lse.view(shape).transpose(0, 1)

    @staticmethod
    def _merge(one: tuple[Tensor, Tensor], other: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Attention over the union of two disjoint sets of tokens, in float32."""
        (output, lse), (other_output, other_lse) = one, other
        weight = torch.sigmoid(other_lse - lse).unsqueeze(-1)
        return torch.lerp(output.float(), other_output.float(), weight), torch.logaddexp(lse, other_lse)

    def _partition(self, lengths: list[int]) -> list[list[int]]:
        """Split a batch, longest first, so that no group has a row less than half its longest or more than ``_GROUP_BYTES``."""
        order = sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True)
        groups: list[list[int]] = []
        row_bytes = self._row * self._dtype.itemsize
        for row in order:
            if groups:
                longest = lengths[groups[-1][0]]
                fits = (len(groups[-1]) + 1) * longest * row_bytes <= _GROUP_BYTES
                if fits and longest <= max(2 * lengths[row], lengths[row] + 4 * self._page_tokens):
                    groups[-1].append(row)
                    continue
            groups.append([row])
        return [sorted(group) for group in groups]

    def _group(self, lengths: Tensor, block_tables: Tensor, members: list[int]) -> _Group:
        rows = None if len(members) == len(lengths) else torch.tensor(members)
        if rows is not None:
            lengths, block_tables = lengths[rows], block_tables[rows]
        num_pages = -(-int(lengths.max()) // self._page_tokens)
        pages = block_tables[:, :num_pages]
        owned = torch.arange(num_pages) * self._page_tokens < lengths.unsqueeze(1)
        pages = torch.where(owned, pages, pages[:, :1])
        num_tokens = num_pages * self._page_tokens
        mask = None
        if not bool((lengths == num_tokens).all()):
            hidden = torch.arange(num_tokens) >= lengths.unsqueeze(1)
            mask = torch.zeros(hidden.shape, dtype=self._dtype).masked_fill_(hidden, float("-inf"))
            mask = mask[:, None, None].expand(-1, 1, self._fold, -1)
        return _Group(rows, pages.flatten(), mask, len(members), num_tokens)
