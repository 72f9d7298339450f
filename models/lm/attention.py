"""Attention over the paged KV cache: the interface that ``lm`` uses, and its implementation for a CPU.

A decode step attends in a kernel of its own (``attention_kernel``), new tokens of prompts in another (``flash_attention``). Where there
is no kernel, torch attends. In decode steps a sequence of more than ``_PADDED_TOKENS`` is then attended to alone: its K and V are
gathered (``kv_pages``) and used while they are in cache. A call costs 10 µs, so shorter ones are padded and attended to together.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from ...cpu_kernels.attention_kernel import PagedAttention
from ...cpu_kernels.flash_attention import KeyRanges, attend, causal, has_kernel, prepare
from ..pictures import Run
from .kv_pages import KvPages

_PADDED_TOKENS = 192  # of the longest sequence that is attended to with others
_GROUP_BYTES = 1 << 20  # gathered K and V of several sequences: they stay in cache
_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default


class Attention(Protocol):
    """One forward's attention in the layers of a group, which are numbered in it (``KvPlace``). ``begin_*`` once per forward, then
    ``*_attend`` in each layer, over K and V that are written. Shapes: N tokens of all sequences together, HQ = num_heads, R = 2 x
    num_kv_heads x head_dim."""

    def begin_prefill(
        self, spans: Sequence[tuple[int, int]], block_tables: Sequence[Tensor], pictures: Sequence[Sequence[Run]] = ()
    ) -> None:
        """``spans`` (start, end) of each sequence's new tokens; ``block_tables`` int64, at least the pages of [0, end) each;
        ``pictures`` of each that have new tokens, which count where ``AttentionConfig.sees_pictures``.

        Raises: ValueError for one that reaches beyond them."""
        ...

    def begin_decode(self, lengths: Tensor, block_tables: Tensor) -> None:
        """``lengths`` int64 [B], the new token included; ``block_tables`` int64 [B, P], arbitrary after a row's own pages."""
        ...

    def prefill_attend(self, layer: int, q_NHD: Tensor, kv_NR: Tensor) -> Tensor:
        """Attend from each new token to the tokens up to itself that it sees. ``kv_NR`` as written. Returns [N, HQ x D]."""
        ...

    def decode_attend(self, layer: int, q_NHD: Tensor) -> Tensor:
        """Attend from each sequence's new token to those of its ``length`` tokens that it sees. Returns [B, HQ x D]."""
        ...


def _ends(start: int, end: int, pictures: Sequence[Run]) -> Tensor:
    """Up to where each of the tokens [start, end) sees: itself, or the end of its picture. int64 [end - start], in the sequence."""
    ends = torch.arange(start + 1, end + 1)
    for first, last in pictures:
        if last > end:
            raise ValueError(f"a chunk of tokens {start} to {end} ends within a picture of tokens {first} to {last}")
        ends[max(first - start, 0) : max(last - start, 0)] = last
    return ends


class _Group(NamedTuple):
    """Sequences that are attended to as one batch, padded; or one alone."""

    pages: Tensor  # int64 [size x pages of the longest]
    gathered: Tensor  # [size x pages of the longest, values of a page in a layer], scratch memory
    k: Tensor  # [size, HKV, tokens, D], a view of ``gathered``, as ``v`` is
    v: Tensor
    mask: Tensor | None  # [size, 1, groups, tokens], 0 or -inf; None for one alone


class _Span(NamedTuple):
    """New tokens of a sequence, and what they see of earlier ones: the first ``num_earlier`` of those on ``pages``."""

    num_tokens: int
    num_earlier: int
    pages: Tensor  # int64
    own: KeyRanges | None = None  # that the kernel attends to among the new tokens; None without one
    earlier: KeyRanges | None = None  # and on the pages; None: all
    mask: Tensor | None = None  # [new, earlier and new], 0 or -inf, of a window without a kernel


class CpuAttention:
    """``Attention`` by kernels where there are some; else by torch's flash kernel, query heads of a KV head folded together, in decode
    steps over pages that are gathered into scratch memory. ``is_decoding``: the forward is a step."""

    def __init__(self, pages: KvPages) -> None:
        heads = pages.heads
        self._kv_heads, self._head_dim = heads.num_kv_heads, heads.head_dim
        self._scale, self._window, self._sees_pictures = heads.scale, heads.window, heads.sees_pictures
        self._fold = heads.num_heads // heads.num_kv_heads
        self._pages, self._page_tokens, self._dtype = pages, pages.page_tokens, pages.dtype
        self._token_bytes = 2 * self._kv_heads * self._head_dim * self._dtype.itemsize
        self._order = self._place = torch.empty(0, dtype=torch.int64)  # of the batch's rows in the groups, and of these in the batch
        self._places = self._order, self._order  # of the new tokens: pages, and slots in them
        self.is_decoding = False
        self._spans: list[_Span] = []
        self._groups: list[_Group] = []
        self._sizes: list[int] = []
        self._kernel = PagedAttention.of(pages.values, self._kv_heads, self._fold, self._scale, self._window)
        self._has_kernel = has_kernel(torch.empty(0, self._head_dim, dtype=self._dtype))
        prepare(self._head_dim, self._dtype, self._scale)

    def begin_prefill(
        self, spans: Sequence[tuple[int, int]], block_tables: Sequence[Tensor], pictures: Sequence[Sequence[Run]] = ()
    ) -> None:
        self.is_decoding = False
        seen: Sequence[Sequence[Run]] = pictures if self._sees_pictures and pictures else [()] * len(spans)
        self._spans = [self._span(*span, table, its) for span, table, its in zip(spans, block_tables, seen, strict=True)]
        tokens = [torch.arange(start, end) for start, end in spans]
        pages = [table[index // self._page_tokens] for index, table in zip(tokens, block_tables, strict=True)]
        self._places = torch.cat(pages), torch.cat(tokens) % self._page_tokens

    def _span(self, start: int, end: int, table: Tensor, pictures: Sequence[Run]) -> _Span:
        num_tokens, window = end - start, self._window
        first = max(start + 1 - window, 0) if window else 0
        skipped = first // self._page_tokens * self._page_tokens
        num_earlier = start - skipped
        pages = table[skipped // self._page_tokens : -(-start // self._page_tokens)]
        firsts = (torch.arange(start, end) + 1 - window - skipped).clamp_(min=0)  # on the pages, with a window
        if self._has_kernel:
            earlier = KeyRanges.of(firsts, torch.full_like(firsts, num_earlier)) if window and num_earlier else None
            own = causal(num_tokens, window)
            if pictures:
                own = KeyRanges.of(own.firsts, _ends(start, end, pictures) - start)
            return _Span(num_tokens, num_earlier, pages, own, earlier)
        if not window and not pictures:
            return _Span(num_tokens, num_earlier, pages)
        keys = torch.arange(num_earlier + num_tokens)
        seen_from, seen_to = firsts.unsqueeze(1) if window else 0, (_ends(start, end, pictures) - skipped).unsqueeze(1)
        hidden = (keys < seen_from) | (keys >= seen_to)
        return _Span(num_tokens, num_earlier, pages, mask=torch.zeros(hidden.shape, dtype=self._dtype).masked_fill_(hidden, -torch.inf))

    def begin_decode(self, lengths: Tensor, block_tables: Tensor) -> None:
        self.is_decoding = True
        last = lengths - 1
        pages = block_tables.gather(1, (last // self._page_tokens).unsqueeze(1)).squeeze(1)
        self._places = pages, last % self._page_tokens
        if self._kernel is not None:
            self._kernel.begin(lengths, block_tables)
            return
        partition = self._partition(lengths.tolist())
        self._groups = [self._group(lengths[rows], block_tables[rows]) for rows in partition]
        self._sizes = [len(rows) for rows in partition]
        self._order = torch.tensor([row for rows in partition for row in rows])
        self._place = self._order.argsort()

    def write(self, layer: int, kv_NR: Tensor) -> None:
        """Store the new tokens' K (rotated) and V."""
        # A request's NaN must not spoil a page for its next owner: masked scores of NaN are still NaN.
        finite = torch.nan_to_num(kv_NR, nan=0.0, posinf=0.0, neginf=0.0)
        self._pages.write(layer, self._places, finite)

    def prefill_attend(self, layer: int, q_NHD: Tensor, kv_NR: Tensor) -> Tensor:
        outputs = []
        row = 0
        for span in self._spans:
            rows = slice(row, row + span.num_tokens)
            row = rows.stop
            q, kv = q_NHD[rows], kv_NR[rows].view(-1, 2, self._kv_heads, self._head_dim)
            earlier = self._pages.gather(layer, span.pages)[: span.num_earlier] if span.num_earlier else None
            outputs.append(self._attend(span, q, kv, earlier).to(self._dtype).flatten(1))
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    def _attend(self, span: _Span, q: Tensor, kv: Tensor, earlier: Tensor | None) -> Tensor:
        """Attention of new tokens to themselves, and to earlier ones. q [n, HQ, D] -> [n, HQ, D]."""
        if span.mask is not None:
            return self._by_torch(q, kv if earlier is None else torch.cat([earlier, kv]), span.mask)[0]
        output = self._by_torch(q, kv) if span.own is None else self._by_kernel(q, kv, span.own)
        if earlier is not None:
            found = self._over_prefix(q, earlier) if span.own is None else self._by_kernel(q, earlier, span.earlier)
            return self._merge(output, found)[0]
        return output[0]

    def decode_attend(self, layer: int, q_NHD: Tensor) -> Tensor:
        if self._kernel is not None:
            attended = self._kernel.attend(layer, q_NHD)
            return attended if self._dtype == torch.float32 else attended.to(self._dtype)
        queries = q_NHD.index_select(0, self._order).view(-1, self._kv_heads, self._fold, self._head_dim)
        outputs = []
        for q, (pages, gathered, k, v, mask) in zip(torch.split(queries, self._sizes), self._groups, strict=True):
            self._pages.gather_into(gathered, layer, pages)
            outputs.append(_flash(q, k, v, attn_mask=mask, scale=self._scale or None)[0])
        return torch.cat(outputs).index_select(0, self._place).flatten(1)

    def _by_torch(self, q: Tensor, kv: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Attention to as many tokens as queries, up to each; with a ``mask`` to others. q [n, HQ, D] -> (output [n, HQ, D],
        log-sum-exp [n, HQ])."""
        q = q.view(-1, self._kv_heads, self._fold, self._head_dim)
        shape = (self._fold, -1, -1, -1)
        k, v = kv[:, 0].transpose(0, 1).expand(shape), kv[:, 1].transpose(0, 1).expand(shape)
        output, lse = _flash(q.permute(2, 1, 0, 3), k, v, is_causal=mask is None, attn_mask=mask, scale=self._scale or None)
        return output.permute(2, 1, 0, 3).flatten(1, 2), lse.permute(2, 1, 0).flatten(1, 2)

    def _over_prefix(self, q: Tensor, kv: Tensor) -> tuple[Tensor, Tensor]:
        """As ``_by_torch``, of new tokens to all earlier ones."""
        num_tokens = q.shape[0]
        folded = (
            q.view(-1, self._kv_heads, self._fold, self._head_dim)
            .transpose(0, 1)
            .reshape(1, self._kv_heads, num_tokens * self._fold, self._head_dim)
        )
        k, v = kv[:, 0].transpose(0, 1).unsqueeze(0), kv[:, 1].transpose(0, 1).unsqueeze(0)
        output, lse = _flash(folded, k, v, scale=self._scale or None)
        shape = (self._kv_heads, num_tokens, self._fold)
        return output.view(*shape, self._head_dim).transpose(0, 1).flatten(1, 2), lse.view(shape).transpose(0, 1).flatten(1, 2)

    def _by_kernel(self, q: Tensor, kv: Tensor, ranges: KeyRanges | None) -> tuple[Tensor, Tensor]:
        found = attend(q.unsqueeze(0), kv[:, 0].unsqueeze(0), kv[:, 1].unsqueeze(0), ranges, self._scale)
        return found.output[0], found.log_sum_exp[0]

    @staticmethod
    def _merge(one: tuple[Tensor, Tensor], other: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Attention over the union of two disjoint sets of tokens, in float32."""
        (output, lse), (other_output, other_lse) = one, other
        weight = torch.sigmoid(other_lse - lse).unsqueeze(-1)
        return torch.lerp(output.float(), other_output.float(), weight), torch.logaddexp(lse, other_lse)

    def _partition(self, lengths: list[int]) -> list[list[int]]:
        """Split a batch: each long row is alone, and short rows of similar length are a group."""
        groups: list[list[int]] = []
        for row in sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True):
            if groups:
                longest = lengths[groups[-1][0]]
                fits = (len(groups[-1]) + 1) * longest * self._token_bytes <= _GROUP_BYTES
                is_alike = longest <= max(2 * lengths[row], lengths[row] + 4 * self._page_tokens)
                if longest <= _PADDED_TOKENS and fits and is_alike:
                    groups[-1].append(row)
                    continue
            groups.append([row])
        return groups

    def _group(self, lengths: Tensor, block_tables: Tensor) -> _Group:
        size, longest = len(lengths), int(lengths[0])
        window = self._window or longest
        first_page = max(longest - window, 0) // self._page_tokens if size == 1 else 0
        skipped, num_pages = first_page * self._page_tokens, -(-longest // self._page_tokens) - first_page
        pages = block_tables[:, first_page : first_page + num_pages]
        mask, first = None, max(longest - window, 0) - skipped if size == 1 else 0
        if size > 1:
            starts, last = torch.arange(num_pages) * self._page_tokens, (lengths - 1).unsqueeze(1) // self._page_tokens
            is_read = (starts < lengths.unsqueeze(1)) & (starts + self._page_tokens > (lengths - window).unsqueeze(1))
            pages = torch.where(is_read, pages, pages.gather(1, last))
            tokens = torch.arange(longest)
            hidden = (tokens >= lengths.unsqueeze(1)) | (tokens < (lengths - window).unsqueeze(1))
            mask = torch.zeros(hidden.shape, dtype=self._dtype).masked_fill_(hidden, float("-inf"))
            mask = mask[:, None, None].expand(-1, 1, self._fold, -1)
        gathered = self._pages.scratch(size * num_pages)
        kv = gathered.view(size, -1, 2, self._kv_heads, self._head_dim)[:, first : longest - skipped].transpose(1, 3)
        return _Group(pages.flatten(), gathered, kv[:, :, 0], kv[:, :, 1], mask)
