"""Paged caches as the tests want them: pages of all rows mixed up, NaN wherever no token lies, and block tables with junk behind."""

import torch
from torch import Tensor

from mmrt.models.architecture import AttentionConfig, LanguageConfig, LayerConfig, MlpConfig, RopeConfig
from mmrt.models.lm.attention import CpuAttention
from mmrt.models.lm.kv_pages import KvPages
from mmrt.triton_kernels.paged_kv import PagedKV

TOLERANCES = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 2e-2}
NUM_LAYERS = 2
LAYER = 1
NOWHERE = -(2**30)  # in a block table: no kernel may read what lies there


def make_tables(lengths: list[int], page_tokens: int, generator: torch.Generator) -> tuple[Tensor, int]:
    """Block tables int32 [B, W] of pages in random order, and how many pages there are. Behind a row's own stand impossible ones."""
    needs = [-(-length // page_tokens) for length in lengths]
    num_pages = sum(needs) + 3
    free = torch.randperm(num_pages, generator=generator).tolist()
    width = max([*needs, 1]) + 1
    rows = [[free.pop() for _ in range(need)] + [NOWHERE] * (width - need) for need in needs]
    return torch.tensor(rows, dtype=torch.int32), num_pages


def hide_before(table: Tensor, firsts: list[int], page_tokens: int) -> None:
    """Take away the pages before the one with the first token that a row's window has."""
    for row, first in enumerate(firsts):
        table[row, : max(first, 0) // page_tokens] = NOWHERE


def cpu_attention(pool: Tensor, num_heads: int, window: int = 0, scale: float = 0.0, sees_pictures: bool = False) -> CpuAttention:
    """The CPU's attention over ``pool`` [pages, layers, page tokens, K and V, KV heads, D] float32."""
    _, num_layers, page_tokens, _, num_kv_heads, head_dim = pool.shape
    heads = AttentionConfig(
        num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, window=window, scale=scale, sees_pictures=sees_pictures
    )
    layer = LayerConfig(mixer=heads, feed_forward=MlpConfig(intermediate_size=64))
    config = LanguageConfig(
        vocab_size=8, hidden_size=64, rms_norm_eps=1e-6, layers=(layer,) * num_layers, ropes=(RopeConfig(theta=10000.0),)
    )
    return CpuAttention(KvPages(config, pool.flatten(1).view(torch.uint8), page_tokens, torch.float32))


def fill(kv: PagedKV, row: Tensor, length: int, generator: torch.Generator) -> None:
    """Random K and V for a row's tokens, quantized where the cache is."""
    page_tokens = kv.k_pages.shape[1]
    index = torch.arange(length, device=row.device)
    pages, slots = row.long()[index // page_tokens], index % page_tokens
    for values, scales in ((kv.k_pages, kv.k_scales), (kv.v_pages, kv.v_scales)):
        tokens = torch.randn(length, *values.shape[2:], generator=generator).to(row.device)
        if scales is not None:
            largest = 127.0 if values.dtype is torch.int8 else torch.finfo(values.dtype).max
            scale = tokens.abs().amax(-1) / largest
            tokens = tokens / scale.unsqueeze(-1)
            scales[pages, slots] = scale
            tokens = tokens.round() if values.dtype is torch.int8 else tokens
        values[pages, slots] = tokens.to(values.dtype)


def make_cache(
    lengths: list[int],
    num_kv_heads: int,
    head_dim: int,
    page_tokens: int,
    dtype: torch.dtype,
    device: torch.device,
    seed: int = 0,
) -> tuple[PagedKV, Tensor]:
    """One layer's views into a pool laid out as mmrt's, and block tables, for rows of these lengths."""
    generator = torch.Generator().manual_seed(seed)
    table, num_pages = make_tables(lengths, page_tokens, generator)
    shape = (num_pages, NUM_LAYERS, page_tokens, 2, num_kv_heads, head_dim)
    if dtype is torch.int8:
        pool = torch.randint(-128, 128, shape, generator=generator).to(dtype)
    else:
        pool = torch.full(shape, torch.nan).to(dtype)
    pool = pool.to(device)[:, LAYER]
    k_scales = v_scales = None
    if dtype.itemsize == 1:
        k_scales, v_scales = torch.full((2, num_pages, num_kv_heads, page_tokens), torch.nan, device=device).transpose(2, 3)
    kv = PagedKV(pool[:, :, 0], pool[:, :, 1], k_scales, v_scales)
    table = table.to(device)
    for row, length in enumerate(lengths):
        fill(kv, table[row], length, generator)
    return kv, table


def poisoned(*shape: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """What a kernel must overwrite."""
    return torch.full(shape, torch.nan, dtype=dtype, device=device)
