"""The checked entry to paged decode. A step calls ``plan_decode`` once and ``paged_decode`` in each layer.

Nothing here reads device memory from the host, and grids depend on shapes alone: both can be captured in a CUDA graph, whose
replays follow the contents of ``lengths``, ``block_table`` and the pages.
"""

import math
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from ..checks import check_aligned, check_dense, check_device, check_tensor
from ..paged_kv import FLOATS, PagedKV
from .config import CHUNK_TOKENS, HEAD_DIMS, MAX_GROUP, MAX_ROWS, NO_WINDOW, REDUCE_ITEMS, decode_launch, num_items
from .kernel import attend_kernel, plan_kernel, reduce_kernel


@dataclass(frozen=True, slots=True)
class DecodeWorkspace:
    """Device memory of one batch size, at fixed addresses.

    items int32 [I, 4]: an item's row (-1: none), its first token and the one after its last, and 1 if it is its row's only one.
    rows int32 [B, 2]: a row's first item and how many it has. partial float32 [I, num_heads, head_dim] and lse float32 [I, num_heads]:
    an item's output and the log2 of its sum of exponentials, where its row has several.
    """

    items: Tensor
    rows: Tensor
    partial: Tensor
    lse: Tensor

    @classmethod
    def allocate(cls, num_rows: int, num_heads: int, num_kv_heads: int, head_dim: int, num_sms: int, device: torch.device) -> Self:
        """Allocate for batches of ``num_rows`` on a device of ``num_sms`` multiprocessors. Raises: ValueError."""
        if not 1 <= num_rows <= MAX_ROWS:
            raise ValueError(f"{num_rows} rows are not between 1 and {MAX_ROWS}")
        if not 1 <= num_kv_heads <= num_heads or num_sms < 1:
            raise ValueError(f"{num_heads} heads, {num_kv_heads} KV heads and {num_sms} multiprocessors make no grid")
        count = num_items(num_rows, num_kv_heads, num_sms, head_dim)
        return cls(
            items=torch.empty(count, 4, dtype=torch.int32, device=device),
            rows=torch.empty(num_rows, 2, dtype=torch.int32, device=device),
            partial=torch.empty(count, num_heads, head_dim, dtype=torch.float32, device=device),
            lse=torch.empty(count, num_heads, dtype=torch.float32, device=device),
        )


def plan_decode(lengths: Tensor, workspace: DecodeWorkspace, window: int = 0) -> None:
    """Cut rows into items of about the same length. Raises: ValueError.

    ``lengths`` int32 [B]: tokens of the row, the new one included; 0 in a padded row. No row may be longer than its pages in the
    block table; that is not checked, since the host does not know it. ``window``: how many of the last of them are attended to, 0: all.
    What lies before them is not read, neither pages nor their entries in the block table.
    """
    if not 0 <= window <= NO_WINDOW:
        raise ValueError(f"a window of {window} tokens is not between 0 (all) and {NO_WINDOW}")
    check_device("lengths", lengths.device)
    check_tensor("lengths", lengths, (workspace.rows.shape[0],), (torch.int32,), workspace.rows.device)
    check_dense("lengths", lengths)
    counts = lengths.shape[0], workspace.items.shape[0]
    tables = lengths, workspace.items, workspace.rows
    plan_kernel[(1,)](*tables, *counts, window or NO_WINDOW, CHUNK=CHUNK_TOKENS, MAX_ROWS=MAX_ROWS)


def paged_decode(
    q: Tensor,
    kv: PagedKV,
    block_table: Tensor,
    workspace: DecodeWorkspace,
    *,
    scale: float = 0.0,
    out: Tensor | None = None,
) -> Tensor:
    """Attention of each row's one new token over the row's tokens, as ``plan_decode`` has cut them.

    q [B, num_heads, head_dim], bfloat16, float16 or float32; query head h reads KV head h // (num_heads / num_kv_heads).
    block_table int32 [B, W]: pages in the order of the row's tokens; entries after the row's own are arbitrary. ``scale`` of scores, 0:
    1 / sqrt(head_dim).
    out as q, allocated if not given; rows of length 0 get 0. Split over tokens after Flash-Decoding (Dao et al., 2023).
    Raises: ValueError.
    """
    check_device("q", q.device)
    check_tensor("q", q, (workspace.rows.shape[0], workspace.lse.shape[1], workspace.partial.shape[2]), FLOATS, workspace.rows.device)
    if out is None:
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
    num_rows, num_heads, head_dim = q.shape
    kv.check(q)
    group = num_heads // kv.k_pages.shape[2]
    check_shape(head_dim, group)
    check_tensor("out", out, q.shape, (q.dtype,), q.device)
    check_tensor("block_table", block_table, (num_rows, None), (torch.int32,), q.device)
    check_dense("block_table", block_table)
    check_aligned("q", q)
    check_aligned("out", out)
    launch = decode_launch(head_dim, group, kv.k_pages.element_size())
    attend_kernel[(kv.k_pages.shape[2], workspace.items.shape[0])](
        q,
        *kv,
        block_table,
        workspace.items,
        out,
        workspace.partial,
        workspace.lse,
        scale or 1 / math.sqrt(head_dim),
        *q.stride()[:2],
        *out.stride()[:2],
        *kv.k_pages.stride()[:3],
        *kv.scale_strides(),
        block_table.stride(0),
        GROUP=group,
        HEAD_DIM=head_dim,
        PAGE_TOKENS=kv.k_pages.shape[1],
        **launch.arguments(),
    )
    if workspace.items.shape[0] > num_rows:
        strides = out.stride()[:2]
        reduce_kernel[(num_rows, num_heads)](
            workspace.partial, workspace.lse, workspace.rows, out, *strides, HEAD_DIM=head_dim, BLOCK_ITEMS=REDUCE_ITEMS
        )
    return out


def check_shape(head_dim: int, group: int) -> None:
    """Check that the attention kernels over pages support this shape. Raises: ValueError."""
    if head_dim not in HEAD_DIMS:
        raise ValueError(f"head_dim {head_dim} is not one of {', '.join(map(str, HEAD_DIMS))}")
    if group > MAX_GROUP:
        raise ValueError(f"{group} query heads per KV head are more than {MAX_GROUP}")
