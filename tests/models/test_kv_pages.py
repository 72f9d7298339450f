"""Quantized KV pages against the kernels' reference, and what they change of a model's answers."""

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mmrt.bench.accuracy import our_logits
from mmrt.models.architecture import KvDType, LanguageConfig, ModelConfig
from mmrt.models.kv_pages import STORED, KvPages
from mmrt.triton_kernels.kv_write.reference import quantize

Loaded = Any  # conftest.Loaded
QUANTIZED: list[KvDType] = ["int8", "fp8"]
PAGE_TOKENS, NUM_PAGES, NUM_LAYERS = 4, 5, 2


def make_config(num_kv_heads: int, head_dim: int, kv_dtype: KvDType, dtype: Any = "float32") -> ModelConfig:
    language = LanguageConfig(
        vocab_size=8, hidden_size=8, intermediate_size=8, num_layers=NUM_LAYERS, num_heads=num_kv_heads, num_kv_heads=num_kv_heads,
        head_dim=head_dim, rms_norm_eps=1e-6, rope_theta=1e4,
    )  # fmt: skip
    return ModelConfig(family="text", language=language, dtype=dtype, kv_dtype=kv_dtype, max_context=64, eos_token_ids=())


def make_pages(config: ModelConfig, dtype: torch.dtype = torch.float32) -> KvPages:
    kv = torch.zeros(NUM_PAGES, config.kv_page_bytes(PAGE_TOKENS), dtype=torch.uint8)
    return KvPages(config.language, kv, PAGE_TOKENS, dtype, config.kv_dtype)


@settings(max_examples=40, deadline=None)
@given(
    kv_dtype=st.sampled_from(QUANTIZED),
    num_kv_heads=st.integers(1, 5),
    head_dim=st.sampled_from([16, 32, 80, 128]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    magnitude=st.floats(-30, 30),
    seed=st.integers(0, 99),
)
def test_rows_hold_what_the_kernels_reference_makes(
    kv_dtype: KvDType, num_kv_heads: int, head_dim: int, dtype: torch.dtype, magnitude: float, seed: int
) -> None:
    torch.manual_seed(seed)
    kv = (torch.randn(3, 2 * num_kv_heads * head_dim) * 10**magnitude).to(dtype)
    kv[0, :head_dim] = 0
    pages = make_pages(make_config(num_kv_heads, head_dim, kv_dtype), dtype)
    pages.rows[4, 1, :3] = pages.pack(kv)
    values, scales = quantize(kv.view(3, 2, num_kv_heads, head_dim), STORED[kv_dtype])
    assert pages.scales is not None
    assert torch.equal(pages.scales[4, 1, :3], scales)
    assert torch.equal(pages.values[4, 1, :3].float(), values.float())
    assert not pages.rows[:4].any() and not pages.rows[4, 0].any() and not pages.rows[4, 1, 3:].any()
    expected = (values.float() * scales.unsqueeze(-1)).to(dtype)
    assert torch.equal(pages.unpack(pages.rows[4, 1, :3]), expected)


@pytest.mark.parametrize("kv_dtype", QUANTIZED)
@pytest.mark.parametrize(("num_kv_heads", "head_dim"), [(4, 128), (2, 64), (1, 80)])
def test_a_quantized_page_is_about_half_a_bfloat16_page(kv_dtype: KvDType, num_kv_heads: int, head_dim: int) -> None:
    plain = make_config(num_kv_heads, head_dim, "auto", "bfloat16").kv_page_bytes(16)
    quantized = make_config(num_kv_heads, head_dim, kv_dtype, "bfloat16").kv_page_bytes(16)
    assert 0.5 < quantized / plain <= 0.6
    assert quantized % (NUM_LAYERS * 16 * 32) == 0  # each row on a sector


def test_plain_rows_are_the_models_own_numbers() -> None:
    pages = make_pages(make_config(2, 16, "auto"))
    kv = torch.randn(3, 64)
    assert pages.pack(kv) is kv
    pages.rows[1, 0, :3] = kv
    assert torch.equal(pages.values[1, 0, :3].flatten(1), kv) and pages.scales is None


@pytest.mark.parametrize("kv_dtype", QUANTIZED)
def test_a_model_says_nearly_the_same_over_quantized_pages(models: Callable[[str], Loaded], kv_dtype: KvDType) -> None:
    """In float32 they would be equal to 1e-5."""
    omni = models("qwen2_5_omni")
    ids = torch.randint(0, 1000, (2, 60), generator=torch.Generator().manual_seed(1))
    plain, quantized = (
        our_logits(omni.path, msgspec.structs.replace(omni.config, kv_dtype=kind), ids, 40) for kind in ("auto", kv_dtype)
    )
    error = float((quantized - plain).abs().mean() / plain.std())
    assert 1e-4 < error < {"int8": 0.02, "fp8": 0.1}[kv_dtype]
