"""The checked entry to paged extend. A prefill step calls ``plan_extend`` once and ``paged_extend`` in each layer."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..checks import check_aligned, check_dense, check_device, check_same_strides, check_tensor
from ..launch import Launch, architecture
from ..paged_decode.config import NO_WINDOW
from ..paged_decode.op import check_shape
from ..paged_kv import FLOATS, PagedKV
from .config import MAX_BLOCKS, extend_launch
from .kernel import extend_kernel


@dataclass(frozen=True, slots=True)
class ExtendPlan:
    """The tokens of each program. ``blocks`` int32 [X, 5], longest work first: sequence, row of the block's first token in the batch,
    number of tokens, index of the first one in its chunk, and tokens before the chunk. ``ends`` int32 [num_tokens]: up to where each
    token sees its chunk, or None: up to itself. ``window``: tokens that each sees up to itself, or None: all."""

    blocks: Tensor
    ends: Tensor | None
    window: int | None
    num_tokens: int
    num_sequences: int
    longest_prefix: int
    group: int
    launch: Launch


def plan_extend(
    spans: Sequence[tuple[int, int]],
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    device: torch.device,
    *,
    window: int = 0,
    pictures: Sequence[Sequence[tuple[int, int]]] | None = None,
) -> ExtendPlan:
    """Cut chunks into blocks. ``spans``: (start, end) of each sequence's chunk, as ``Attention.begin_prefill`` has them; ``dtype`` of
    queries. ``window``: how many tokens each sees up to itself, 0: all. ``pictures`` (start, end) of each sequence, in order, see
    themselves up to their ends, and none may reach beyond its chunk; None: of a model whose pictures do not. Raises: ValueError."""
    for start, end in spans:
        if not 0 <= start <= end < 2**31:
            raise ValueError(f"span ({start}, {end}) is no range of tokens below 2**31")
    if num_kv_heads < 1 or num_heads % num_kv_heads:
        raise ValueError(f"{num_heads} heads are no multiple of {num_kv_heads} KV heads")
    if not 0 <= window <= NO_WINDOW:
        raise ValueError(f"a window of {window} tokens is not between 0 (all) and {NO_WINDOW}")
    group = num_heads // num_kv_heads
    check_shape(head_dim, group)
    lengths = [end - start for start, end in spans]
    launch = extend_launch(head_dim, group, max(lengths, default=0), dtype.itemsize, architecture(device))
    step = launch.tiles["BLOCK_M"] // group
    num_blocks = sum(-(-length // step) for length in lengths)
    if num_blocks > MAX_BLOCKS:
        raise ValueError(f"{sum(lengths)} tokens make {num_blocks} blocks of up to {step}, more than {MAX_BLOCKS}")
    blocks = []
    row = 0
    for sequence, ((start, _), length) in enumerate(zip(spans, lengths, strict=True)):
        blocks += [(sequence, row + offset, min(step, length - offset), offset, start) for offset in range(0, length, step)]
        row += length
    blocks.sort(key=lambda block: block[3] + block[4], reverse=True)
    table = torch.tensor(blocks, dtype=torch.int32).view(-1, 5).to(device)
    ends = None
    if pictures is not None:
        seen = [end for span, its in zip(spans, pictures, strict=True) for end in _ends(*span, its)]
        ends = torch.tensor(seen, dtype=torch.int32).to(device)
    return ExtendPlan(table, ends, window or None, row, len(spans), max((start for start, _ in spans), default=0), group, launch)


def _ends(start: int, end: int, pictures: Sequence[tuple[int, int]]) -> Iterator[int]:
    """Up to where each of a chunk's tokens sees the chunk: itself, or the last one of its picture. Raises: ValueError."""
    ends = list(range(1, end - start + 1))
    for first, last in pictures:
        if last > end:
            raise ValueError(f"a chunk of tokens {start} to {end} ends within a picture of tokens {first} to {last}")
        its = slice(max(first - start, 0), max(last - start, 0))
        ends[its] = [last - start] * len(ends[its])
    return iter(ends)


def paged_extend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    kv: PagedKV,
    block_table: Tensor,
    plan: ExtendPlan,
    *,
    scale: float = 0.0,
    out: Tensor | None = None,
) -> Tensor:
    """Attention of each chunk's tokens to those before the chunk, from pages, and to the chunk's own up to themselves or the end of
    their picture; of all these to those in the plan's window.

    q [N, num_heads, head_dim], and k, v [N, num_kv_heads, head_dim] with equal strides: the chunks of all sequences one after another,
    in bfloat16, float16 or float32, before any quantization. block_table int32 [S, W]: pages in the order of a sequence's tokens, at
    least those before its chunk; later entries are arbitrary, as are those before the window of its first token. ``scale`` of scores,
    0: 1 / sqrt(head_dim). out as q, allocated if not given. The online softmax is FlashAttention-2's (Dao, 2023). Raises: ValueError.
    """
    _check(q, k, v, kv, block_table, plan)
    if out is None:
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
    check_tensor("out", out, q.shape, (q.dtype,), q.device)
    check_aligned("out", out)
    extend_kernel[(kv.k_pages.shape[2], plan.blocks.shape[0])](
        q,
        k,
        v,
        *kv,
        block_table,
        plan.blocks,
        plan.ends,
        out,
        scale or 1 / math.sqrt(q.shape[2]),
        plan.window,
        *q.stride()[:2],
        *out.stride()[:2],
        *k.stride()[:2],
        *kv.k_pages.stride()[:3],
        *kv.scale_strides(),
        block_table.stride(0),
        GROUP=plan.group,
        HEAD_DIM=q.shape[2],
        PAGE_TOKENS=kv.k_pages.shape[1],
        **plan.launch.arguments(),
    )
    return out


def _check(q: Tensor, k: Tensor, v: Tensor, kv: PagedKV, block_table: Tensor, plan: ExtendPlan) -> None:
    check_device("q", q.device)
    check_tensor("q", q, (plan.num_tokens, None, None), FLOATS, plan.blocks.device)
    _, num_heads, head_dim = q.shape
    kv.check(q)
    _, page_tokens, num_kv_heads, _ = kv.k_pages.shape
    if num_heads != num_kv_heads * plan.group:
        raise ValueError(f"{num_heads} heads of q for {num_kv_heads} of k_pages are not the {plan.group} per KV head of the plan")
    check_shape(head_dim, plan.group)
    check_tensor("k", k, (plan.num_tokens, num_kv_heads, head_dim), (q.dtype,), q.device)
    check_tensor("v", v, k.shape, (q.dtype,), q.device)
    check_tensor("block_table", block_table, (plan.num_sequences, None), (torch.int32,), q.device)
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        check_aligned(name, tensor)
    check_same_strides("k", k, "v", v)
    check_dense("block_table", block_table)
    if plan.longest_prefix > block_table.shape[1] * page_tokens:
        raise ValueError(f"{plan.longest_prefix} tokens before a chunk are more than {block_table.shape[1]} pages of {page_tokens}")
