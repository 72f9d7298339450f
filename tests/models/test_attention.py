"""Attention of decode steps over pages, on the CPU: short sequences in groups, and long ones alone."""

import pytest
import torch

from mmrt.models.architecture import LanguageConfig
from mmrt.models.lm.attention import _PADDED_TOKENS, CpuAttention
from mmrt.models.lm.kv_pages import KvPages

CONFIG = LanguageConfig(
    vocab_size=8, hidden_size=8, intermediate_size=8, num_layers=2, num_heads=6, num_kv_heads=2, head_dim=24,
    rms_norm_eps=1e-6, rope_theta=1e4,
)  # fmt: skip
PAGE_TOKENS, LAYER = 4, 1
LENGTHS = [1, 30, _PADDED_TOKENS + 1, 17, 700, 341, 32, 100, _PADDED_TOKENS, 3]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_batches_and_sequences_alone(dtype: torch.dtype) -> None:
    most = -(-max(LENGTHS) // PAGE_TOKENS)
    generator = torch.Generator().manual_seed(0)
    shape = len(LENGTHS) * most, CONFIG.num_layers, PAGE_TOKENS, 2, CONFIG.num_kv_heads, CONFIG.head_dim
    values = torch.randn(shape, generator=generator).to(dtype)
    pages = KvPages(CONFIG, values.view(torch.uint8).flatten(1), PAGE_TOKENS, dtype)
    tables = torch.randperm(shape[0], generator=generator).view(-1, most)
    queries = torch.randn(len(LENGTHS), CONFIG.num_heads, CONFIG.head_dim, generator=generator).to(dtype)

    def attend(rows: list[int]) -> torch.Tensor:
        attention = CpuAttention(CONFIG, pages)
        attention.begin_decode(torch.tensor(LENGTHS)[rows], tables[rows])
        return attention.decode_attend(LAYER, queries[rows])

    together = attend(list(range(len(LENGTHS))))
    for row, length in enumerate(LENGTHS):
        if length > _PADDED_TOKENS:
            assert torch.equal(attend([row])[0], together[row])
        k, v = values[tables[row], LAYER].flatten(0, 1)[:length].double().permute(1, 2, 0, 3).repeat_interleave(3, 1)
        scores = (k @ queries[row].double().unsqueeze(-1)).squeeze(-1) / CONFIG.head_dim**0.5
        expected = (scores.softmax(1).unsqueeze(1) @ v).flatten()
        torch.testing.assert_close(together[row].double(), expected, rtol=0, atol=1e-5 if dtype == torch.float32 else 0.02)
