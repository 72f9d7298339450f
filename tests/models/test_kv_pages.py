"""Quantized KV pages against the kernels' reference, and what they change of a model's answers."""

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mmrt.models.architecture import AttentionConfig, KvDType, LanguageConfig, LayerConfig, MlpConfig, ModelConfig, RopeConfig
from mmrt.models.lm.kv_packing import KvPacking
from mmrt.models.lm.kv_pages import STORED, KvPages
from mmrt.tests.models.logits import our_logits
from mmrt.tests.settings import examples
from mmrt.triton_kernels.kv_write.reference import quantize

Loaded = Any  # conftest.Loaded
QUANTIZED: list[KvDType] = ["int8", "fp8"]
PAGE_TOKENS, NUM_PAGES, NUM_LAYERS = 4, 5, 2


def make_config(num_kv_heads: int, head_dim: int, kv_dtype: KvDType, dtype: Any = "float32") -> ModelConfig:
    language = LanguageConfig(
        vocab_size=8,
        hidden_size=8,
        rms_norm_eps=1e-6,
        layers=(
            LayerConfig(
                mixer=AttentionConfig(num_heads=num_kv_heads, num_kv_heads=num_kv_heads, head_dim=head_dim),
                feed_forward=MlpConfig(intermediate_size=8),
            ),
        )
        * NUM_LAYERS,
        ropes=(RopeConfig(theta=1e4),),
    )
    return ModelConfig(family="text", language=language, dtype=dtype, kv_dtype=kv_dtype, max_context=64, eos_token_ids=())


def make_pool(config: ModelConfig, dtype: torch.dtype = torch.float32, page_tokens: int = PAGE_TOKENS) -> tuple[torch.Tensor, KvPages]:
    kv = torch.zeros(NUM_PAGES, config.kv_page_bytes(page_tokens), dtype=torch.uint8)
    return kv, KvPages(config.language, kv, page_tokens, dtype, config.kv_dtype)


@settings(max_examples=examples(60), deadline=None)
@given(
    kv_dtype=st.sampled_from(QUANTIZED),
    page_tokens=st.sampled_from([1, 3, 4, 16]),
    num_kv_heads=st.integers(1, 5),
    head_dim=st.sampled_from([16, 32, 80, 128]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    magnitude=st.floats(-30, 30),
    seed=st.integers(0, 99),
)
def test_pages_hold_what_the_kernels_reference_makes(
    kv_dtype: KvDType, page_tokens: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype, magnitude: float, seed: int
) -> None:
    """Five tokens of a sequence whose pages are 4, 1, 3, 0 and 2, in the second of two layers."""
    torch.manual_seed(seed)
    new = (torch.randn(5, 2 * num_kv_heads * head_dim) * 10**magnitude).to(dtype)
    new[0, :head_dim] = 0
    kv, pages = make_pool(make_config(num_kv_heads, head_dim, kv_dtype), dtype, page_tokens)
    table, index = torch.tensor([4, 1, 3, 0, 2]), torch.arange(5)
    places = table[index // page_tokens]
    pages.write(1, (places, index % page_tokens), new)
    values, scales = quantize(new.view(5, 2, num_kv_heads, head_dim), STORED[kv_dtype])
    assert pages.scales is not None
    assert torch.equal(pages.scales[places, 1, index % page_tokens], scales)
    assert torch.equal(pages.values[places, 1, index % page_tokens].float(), values.float())
    assert not pages.values[:, 0].view(torch.uint8).any() and not pages.scales[:, 0].any(), "nothing in the first layer"
    stored = (values.view(torch.uint8) != 0).sum() + (scales.contiguous().view(torch.uint8) != 0).sum()
    assert (kv != 0).sum() == stored, "and nothing beside the tokens"
    expected = (values.float() * scales.unsqueeze(-1)).to(dtype)
    assert torch.equal(pages.gather(1, table)[:5], expected)


def test_many_pages_are_read_in_blocks() -> None:
    config = make_config(4, 128, "int8")
    kv = torch.zeros(700, config.kv_page_bytes(PAGE_TOKENS), dtype=torch.uint8)
    pages = KvPages(config.language, kv, PAGE_TOKENS, torch.float32, "int8")
    new, table = torch.randn(600 * PAGE_TOKENS, 1024), torch.randperm(700)[:600]
    index = torch.arange(len(new))
    pages.write(1, (table[index // PAGE_TOKENS], index % PAGE_TOKENS), new)
    torch.testing.assert_close(pages.gather(1, table).flatten(1), new, rtol=0, atol=0.03)


@pytest.mark.parametrize("kv_dtype", QUANTIZED)
@pytest.mark.parametrize(("num_kv_heads", "head_dim"), [(4, 128), (2, 64), (1, 80)])
def test_a_quantized_page_is_about_half_a_bfloat16_page(kv_dtype: KvDType, num_kv_heads: int, head_dim: int) -> None:
    plain = make_config(num_kv_heads, head_dim, "auto", "bfloat16").kv_page_bytes(16)
    quantized = make_config(num_kv_heads, head_dim, kv_dtype, "bfloat16").kv_page_bytes(16)
    assert 0.5 < quantized / plain <= 0.6
    assert quantized % (NUM_LAYERS * 32) == 0, "each layer's part on a sector of its own"


def test_plain_pages_are_the_models_own_numbers() -> None:
    _, pages = make_pool(make_config(2, 16, "auto"))
    new = torch.randn(3, 64)
    pages.write(0, (torch.tensor([1, 1, 3]), torch.tensor([2, 3, 0])), new)
    assert pages.scales is None
    assert torch.equal(pages.values[[1, 1, 3], 0, [2, 3, 0]].flatten(1), new)
    assert torch.equal(pages.gather(0, torch.tensor([1, 3]))[2:5].flatten(1), new)


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


@pytest.mark.parametrize("packed", ["int8", "int4"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("head_dim", [16, 80, 128])
def test_a_packed_page_is_off_by_half_a_step_of_its_scale(packed: Any, dtype: Any, head_dim: int) -> None:
    config, numbers = make_config(3, head_dim, "auto", dtype), getattr(torch, dtype)
    values = torch.randn(2, NUM_LAYERS, PAGE_TOKENS, 2, 3, head_dim, generator=torch.Generator().manual_seed(1)) * 40
    values[0, 0] = 0.0
    pages = values.to(numbers).view(2, -1).view(torch.uint8)
    packing = KvPacking(config.language, PAGE_TOKENS, numbers, packed)
    found = packing.pack(pages)
    assert found.shape == (2, config.packed_page_bytes(PAGE_TOKENS, packed)) and found.shape[1] < pages.shape[1]
    assert torch.equal(packing.pack(pages[1:]), found[1:]), "a page is packed by itself"
    error = (packing.unpack(found).view(numbers).view(values.shape).float() - values).abs().flatten(-1)
    span = values.abs().amax(-1) / 127 if packed == "int8" else (values.amax(-1) - values.amin(-1)) / 15
    assert (error <= 0.56 * span.unsqueeze(-1) + 0.008 * values.abs()).all(), "half a step, and the rounding of scales and numbers"


def grouped_config(kv_dtype: KvDType) -> ModelConfig:
    """Two groups whose parts are no multiples of 64 bytes, and a layer that attends to another's K and V."""
    config = make_config(1, 16, kv_dtype, "bfloat16")
    small, large = (AttentionConfig(num_heads=3, num_kv_heads=heads, head_dim=size) for heads, size in ((1, 16), (3, 32)))
    mixers = small, large, small, msgspec.structs.replace(large, owner=1), small
    layers = tuple(LayerConfig(mixer=mixer, feed_forward=MlpConfig(intermediate_size=8)) for mixer in mixers)
    return msgspec.structs.replace(config, language=msgspec.structs.replace(config.language, layers=layers))


@pytest.mark.parametrize("kv_dtype", ["auto", *QUANTIZED])
def test_groups_lie_side_by_side(kv_dtype: KvDType) -> None:
    """What is written of one layer is read again, and is in no other."""
    config = grouped_config(kv_dtype)
    language = config.language
    assert [group.layers for group in language.kv_groups] == [(0, 2, 4), (1,)]
    assert language.kv_place(4) == (0, 2) and language.kv_place(3) == language.kv_place(1) == (1, 0) and language.last_owner == 4
    kv = torch.zeros(NUM_PAGES, config.kv_page_bytes(3), dtype=torch.uint8)
    assert kv.shape[1] % 64 == 0
    groups = KvPages.of_groups(language, kv, 3, torch.bfloat16, kv_dtype)
    places, expected = (torch.tensor([4, 4, 2, 0]), torch.tensor([0, 2, 1, 2])), {}
    for group, pages in enumerate(groups):
        for layer in range(pages.num_layers):
            new = torch.randint(-127, 128, (4, 2 * pages.heads.num_kv_heads * pages.heads.head_dim)).bfloat16()
            new[:, :: pages.heads.head_dim] = 127  # so that int8 has them as they are
            pages.write(layer, places, new)
            expected[group, layer] = new
    for (group, layer), new in expected.items():
        found = groups[group].gather(layer, torch.arange(NUM_PAGES)).view(NUM_PAGES, 3, -1)
        torch.testing.assert_close(found[places], new, rtol=0.07 if kv_dtype == "fp8" else 0, atol=0)
        found[places] = 0
        assert not found.any()


@pytest.mark.parametrize("packed", ["int8", "int4"])
def test_groups_are_packed_one_by_one(packed: Any) -> None:
    config = grouped_config("auto")
    kv = torch.zeros(NUM_PAGES, config.kv_page_bytes(3), dtype=torch.uint8)
    for pages in KvPages.of_groups(config.language, kv, 3, torch.bfloat16):
        pages.values.copy_(torch.randn(pages.values.shape) * pages.heads.head_dim)
    packing = KvPacking(config.language, 3, torch.bfloat16, packed)
    packed_pages = packing.pack(kv)
    assert packed_pages.shape == (NUM_PAGES, config.packed_page_bytes(3, packed))
    found = packing.unpack(packed_pages)
    assert found.shape == kv.shape
    for before, after in zip(*(KvPages.of_groups(config.language, each, 3, torch.bfloat16) for each in (kv, found)), strict=True):
        tolerance = before.heads.head_dim * (0.05 if packed == "int8" else 0.6)
        torch.testing.assert_close(after.values, before.values, rtol=0, atol=tolerance)
