"""The language model by Triton's kernels against the same model in torch: equal logits and equal pages."""

import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from mmrt.models.architecture import AttentionConfig, KvDType, KvPlace, LanguageConfig, LayerConfig, MlpConfig, ModelConfig, RopeConfig
from mmrt.models.checkpoint.weights import attach_weights, write_weights
from mmrt.models.config import load_model_config
from mmrt.models.families.family import Family
from mmrt.models.families.registry import family_of
from mmrt.models.lm.decoder import Chunk
from mmrt.models.lm.kv_pages import KvPages
from mmrt.models.lm.language_model import LanguageModel
from mmrt.models.lm.layer_ops import CpuOperations
from mmrt.models.lm.triton_layer_ops import TritonOperations
from mmrt.models.make.checkpoint import make_checkpoint
from mmrt.models.sampling.interface import Pairs, SamplingRows
from mmrt.models.sampling.sampler import combine_guidance, sample
from mmrt.models.sampling.triton_sampler import TritonSampler
from mmrt.tests.settings import also_slow
from mmrt.tests.triton_kernels.test_launch_keys import count

PAGE_TOKENS = 8
NUM_PAGES = 40
TOLERANCE = 2e-4  # of logits with a deviation of 3, and of K and V with one of about 1
TOLERANCES: dict[KvDType, tuple[float, float]] = {"auto": (0, TOLERANCE), "int8": (0, 0.05), "fp8": (0.07, 0.05)}  # relative, absolute
LAUNCHES = """
import json, torch
from mmrt.models.architecture import AttentionConfig, LanguageConfig, LayerConfig, MlpConfig, ModelConfig, RopeConfig
from mmrt.models.families.registry import family_of
from mmrt.models.lm.language_model import Chunk, LanguageModel
from mmrt.models.lm.triton_layer_ops import TritonOperations
from mmrt.tests.triton_kernels.launch_keys import record

found = record()
layer = LayerConfig(
    mixer=AttentionConfig(num_heads=28, num_kv_heads=4, head_dim=128, bias=True), feed_forward=MlpConfig(intermediate_size=18944)
)
ropes = (RopeConfig(theta=1e6, axes=(0,) * 16 + (1,) * 24 + (2,) * 24),)
language = LanguageConfig(vocab_size=152064, hidden_size=3584, rms_norm_eps=1e-6, layers=(layer,) * 2, ropes=ropes)
config = ModelConfig(family="qwen2_5_vl", language=language, dtype="bfloat16", kv_dtype="KV_DTYPE", max_context=32768, eos_token_ids=())
"""
LAUNCHES_OF_GEMMA = """
import json, msgspec, pathlib, torch
from mmrt.models.config import load_model_config
from mmrt.models.families.registry import family_of
from mmrt.models.lm.language_model import Chunk, LanguageModel
from mmrt.models.lm.triton_layer_ops import TritonOperations
from mmrt.tests.triton_kernels.launch_keys import record

config = msgspec.structs.replace(load_model_config(pathlib.Path("CHECKPOINT")), dtype="bfloat16", kv_dtype="KV_DTYPE")
found = record()
"""
STEPS = """
weights = {spec.name: torch.empty(spec.shape, dtype=torch.bfloat16, device="meta") for spec in family_of(config).tensor_specs(config)}
kv = torch.empty(4000, config.kv_page_bytes(16), dtype=torch.uint8, device="meta")
lm = LanguageModel(config, weights, kv, 16, TritonOperations)
for spans in ([(0, 1)], [(16, 32)], [(1, 300)], [(40, 41), (0, 16), (2, 99)]):
    chunks = []
    for start, end in spans:
        zeros = torch.zeros(4, end, dtype=torch.int64)
        ids, pictures = zeros[0, start:], ((start, end),) if end - start > 1 else ()
        chunks.append(Chunk(lm.embed(ids), zeros[1:, start:], start, zeros[0, ::16], ids=ids, pictures=pictures))
    lm.prefill(chunks, ends=[0])
for rows in (1, 2, 3, 16, 33):
    for width in (1, 3, 16):
        column = torch.ones(rows, dtype=torch.int64)
        logits = lm.decode(column, column.expand(3, -1), column, torch.zeros(rows, width, dtype=torch.int64))
        assert logits.is_meta and logits.shape == (rows, config.language.vocab_size)
print(json.dumps({name: len(keys) for name, keys in found.items()}))
"""
Weights = dict[str, torch.Tensor]


def load_tiny(path: Path, family: Family) -> tuple[ModelConfig, Weights]:
    make_checkpoint("tiny", path, family)
    config = load_model_config(path)
    buffer = bytearray()

    def allocate(num_bytes: int) -> memoryview:
        buffer.extend(bytes(num_bytes))
        return memoryview(buffer)

    index = write_weights(path, config, allocate)
    return config, attach_weights(memoryview(buffer), index)


def make_qwen3() -> tuple[ModelConfig, Weights]:
    """One rotary axis, norms of queries and keys, no biases, and sizes that are no powers of two."""
    language = LanguageConfig(
        vocab_size=300,
        hidden_size=48,
        rms_norm_eps=1e-6,
        layers=(
            LayerConfig(
                mixer=AttentionConfig(num_heads=6, num_kv_heads=2, head_dim=16, qk_norm=True),
                feed_forward=MlpConfig(intermediate_size=80),
            ),
        )
        * 2,
        ropes=(RopeConfig(theta=5000.0),),
    )
    config = ModelConfig(family="qwen2_5_vl", language=language, dtype="float32", max_context=1000, eos_token_ids=())
    generator = torch.Generator().manual_seed(0)

    def draw(shape: tuple[int, ...]) -> torch.Tensor:
        values = torch.randn(shape, generator=generator)
        return 1 + 0.1 * values if len(shape) == 1 else values * shape[1] ** -0.5

    return config, {spec.name: draw(spec.shape) for spec in family_of(config).tensor_specs(config)}


class Twins:
    """A model in torch and its twin in kernels, each with a pool of its own, and sequences whose pages lie anywhere."""

    def __init__(self, config: ModelConfig, weights: Weights, device: torch.device, num_sequences: int, max_tokens: int) -> None:
        self.device, self.config = device, config
        self.kv = torch.randint(0, 60, (NUM_PAGES, config.kv_page_bytes(PAGE_TOKENS)), dtype=torch.uint8)
        self.twin_kv = self.kv.to(device, copy=True)
        self.plain = LanguageModel(config, weights, self.kv, PAGE_TOKENS, CpuOperations)
        moved = {name: weight.to(device) for name, weight in weights.items()}
        self.twin = LanguageModel(config, moved, self.twin_kv, PAGE_TOKENS, TritonOperations)
        generator = torch.Generator().manual_seed(3)
        pages = -(-max_tokens // PAGE_TOKENS)
        self.tables = torch.randperm(NUM_PAGES, generator=generator)[: num_sequences * pages].view(num_sequences, pages)
        self.ids = torch.randint(0, config.language.vocab_size, (num_sequences, max_tokens), generator=generator)
        self.positions = torch.randint(0, 500, (num_sequences, 3, max_tokens), generator=generator)
        self.deep = torch.randn(num_sequences, max_tokens, config.num_deep, config.language.hidden_size, generator=generator)

    def share(self) -> None:
        """The twin continues from what the model in torch has written."""
        self.twin_kv.copy_(self.kv)

    def chunk(self, model: LanguageModel, sequence: int, start: int, end: int, *pictures: tuple[int, int]) -> Chunk:
        table = self.tables[sequence, : -(-end // PAGE_TOKENS)]
        ids = self.ids[sequence, start:end]
        embeds, deep = model.embed(ids), None
        if self.config.num_deep and sequence:  # the first has no media
            deep = self.deep[sequence, start:end].to(embeds.device)
        return Chunk(embeds, self.positions[sequence, :, start:end], start, table, deep=deep, ids=ids, pictures=pictures)

    def prefill(self, *chunks: tuple[Any, ...], ends: tuple[int, ...] = ()) -> list[torch.Tensor]:
        """Chunks (sequence, start, end, then pictures), by both. Returns the hidden states of the ``ends`` of each."""
        made = [model.prefill([self.chunk(model, *chunk) for chunk in chunks], ends=ends) for model in (self.plain, self.twin)]
        return [torch.cat(hidden).cpu() for hidden in made if hidden]

    def decode(self, lengths: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits of both for the sequences' tokens ``length - 1``."""
        last = torch.tensor(lengths) - 1
        row = torch.arange(len(lengths))
        arguments = self.ids[row, last], self.positions[row, :, last].T, last + 1, self.tables[: len(lengths)]
        return self.plain.decode(*arguments), self.twin.decode(*arguments).cpu()

    def check_pages(self) -> None:
        """Quantized values may be a step apart, where a rounding fell otherwise."""
        rtol, atol = TOLERANCES[self.config.kv_dtype]
        torch.testing.assert_close(self.read(self.twin_kv.cpu()), self.read(self.kv), rtol=rtol, atol=atol, equal_nan=True)

    def read(self, kv: torch.Tensor) -> torch.Tensor:
        groups = KvPages.of_groups(self.config.language, kv, PAGE_TOKENS, torch.float32, self.config.kv_dtype)
        layers = [pages.gather(layer, torch.arange(len(kv))).flatten() for pages in groups for layer in range(pages.num_layers)]
        return torch.cat([layer.clone() for layer in layers])


@pytest.mark.parametrize(
    ("family", "num_steps"), [("qwen3_vl", 1), *also_slow(("qwen2_5_vl", 2), ("qwen2_5_omni", 1), ("glm_ocr", 1), ("glm4v", 1))]
)
def test_a_tiny_checkpoint_says_the_same(tmp_path: Path, device: torch.device, family: Family, num_steps: int) -> None:
    twins = Twins(*load_tiny(tmp_path / family, family), device, num_sequences=3, max_tokens=100)
    twins.plain.prefill([twins.chunk(twins.plain, 0, 0, 90)])
    twins.share()
    twins.prefill((0, 90, 91), (1, 0, 9), (2, 0, 1))
    twins.prefill((1, 9, 10), (1, 10, 11), (2, 1, 2))  # a sequence may have several chunks in one forward
    twins.check_pages()
    for step in range(num_steps):
        expected, logits = twins.decode([92 + step, 12 + step, 3 + step])
        torch.testing.assert_close(logits, expected, rtol=0, atol=TOLERANCE)
        assert torch.equal(logits.argmax(1), expected.argmax(1))
    twins.check_pages()


@pytest.mark.parametrize("kv_dtype", ["int8", pytest.param("fp8", marks=pytest.mark.slow)])
@pytest.mark.parametrize("is_tiny", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["of our sizes", "tiny"])
def test_quantized_pages_say_the_same(tmp_path: Path, device: torch.device, kv_dtype: KvDType, is_tiny: bool) -> None:
    config, weights = load_tiny(tmp_path / "tiny", "qwen2_5_vl") if is_tiny else make_qwen3()
    twins = Twins(msgspec.structs.replace(config, kv_dtype=kv_dtype), weights, device, num_sequences=2, max_tokens=60)
    twins.prefill((0, 0, 21), (1, 0, 9))
    twins.prefill((0, 21, 40))
    twins.check_pages()
    for lengths in ([41, 10], [42, 11]):
        twins.share()
        expected, logits = twins.decode(lengths)
        torch.testing.assert_close(logits, expected, rtol=0, atol=0.05)
        twins.check_pages()


def test_norms_of_queries_and_keys(device: torch.device) -> None:
    twins = Twins(*make_qwen3(), device, num_sequences=2, max_tokens=40)
    twins.prefill((0, 0, 7), (1, 0, 8))
    twins.prefill((0, 7, 10))
    twins.check_pages()
    expected, logits = twins.decode([11, 9])
    torch.testing.assert_close(logits, expected, rtol=0, atol=TOLERANCE)
    twins.check_pages()


@pytest.mark.parametrize(
    ("family", "kv_dtype"),
    [
        ("gemma3_seeing", "auto"),
        ("gemma4", "int8"),
        *also_slow(("gemma3_seeing", "int8"), ("gemma4", "auto"), ("gemma4_unified", "auto")),
    ],
)
def test_windows_pictures_and_shared_keys(tmp_path: Path, device: torch.device, family: Family, kv_dtype: KvDType) -> None:
    """Windows of 48 tokens in chunks that are longer and shorter, a picture across a window's border, and what else these models have:
    two sizes of heads, a scale of scores, norms of values, norms of 1 + w in float32, layers without own keys, layers' own inputs."""
    config, weights = load_tiny(tmp_path / "tiny", family)
    twins = Twins(msgspec.structs.replace(config, kv_dtype=kv_dtype), weights, device, num_sequences=2, max_tokens=80)
    assert config.language.window == 48
    tolerance = 0.1 if kv_dtype == "int8" else TOLERANCE
    twins.prefill((0, 0, 60, (10, 58)), (1, 0, 3))
    twins.check_pages()
    twins.share()
    expected, hidden = twins.prefill((0, 60, 66, (59, 65)), (1, 3, 5), ends=(0, 1))
    torch.testing.assert_close(hidden, expected, rtol=0, atol=tolerance)
    twins.check_pages()
    twins.share()
    expected, logits = twins.decode([67, 6])
    torch.testing.assert_close(logits, expected, rtol=0, atol=tolerance)
    twins.check_pages()


def test_experts(tmp_path: Path, device: torch.device) -> None:
    """Chunks sort tokens by expert, steps have all experts under a mask."""
    config, weights = load_tiny(tmp_path / "tiny", "qwen3_moe")
    twins = Twins(config, weights, device, num_sequences=2, max_tokens=40)
    twins.prefill((0, 0, 10), (1, 0, 3))
    twins.check_pages()
    expected, logits = twins.decode([11, 4])
    torch.testing.assert_close(logits, expected, rtol=0, atol=TOLERANCE)
    twins.check_pages()


def test_padded_rows_touch_nothing(device: torch.device) -> None:
    """As a captured graph has them: length 0, and anything in the block table."""
    config, weights = make_qwen3()
    twins = Twins(config, weights, device, num_sequences=1, max_tokens=24)
    twins.prefill((0, 0, 9))
    before = twins.twin_kv.clone()
    expected = twins.plain.decode(twins.ids[:, 9], twins.positions[0, :, 9:10], torch.tensor([10]), twins.tables)
    tables = torch.full((3, 3), -(2**30))
    tables[1] = twins.tables[0]
    ids, positions = torch.zeros(3, dtype=torch.int64), torch.zeros(3, 3, dtype=torch.int64)
    ids[1], positions[:, 1] = twins.ids[0, 9], twins.positions[0, :, 9]
    on_device = [tensor.to(device) for tensor in (ids, positions, torch.tensor([0, 10, 0]), tables)]
    logits = twins.twin.decode(*on_device)
    torch.testing.assert_close(logits[1:2].cpu(), expected, rtol=0, atol=TOLERANCE)
    assert logits.isfinite().all()
    twins.check_pages()
    others = torch.ones(NUM_PAGES, dtype=torch.bool).index_fill_(0, twins.tables[0], False)
    assert torch.equal(twins.twin_kv[others], before[others])


def test_only_what_is_finite_is_stored(device: torch.device) -> None:
    config, _ = make_qwen3()
    language = config.language
    pool = torch.full((4, config.kv_page_bytes(PAGE_TOKENS) // 4), torch.nan, device=device)
    operations = TritonOperations(language, [KvPages(language, pool.view(torch.uint8), PAGE_TOKENS, torch.float32)])
    operations.attentions[0].begin_prefill([(6, 9)], [torch.tensor([2, 0])])
    assert operations.attentions[0].slots.tolist() == [22, 23, 0]
    operations.begin(torch.zeros(3, 3, dtype=torch.int64, device=device))
    kv = torch.randn(3, 64, device=device)
    kv[1, 40] = torch.inf
    operations.rotate_and_write(KvPlace(0, 1), kv.view(3, -1, language.heads.head_dim), 0, None)
    kv[1, 40] = 0
    tokens = pool.view(4, 2, PAGE_TOKENS, 64)
    assert torch.equal(torch.cat((tokens[2, 1, 6:], tokens[0, 1, :1])), kv)
    assert int(tokens.isfinite().sum()) == kv.numel()


def test_the_sampler_draws_as_the_cpu_does(device: torch.device) -> None:
    """Six rows, two of them pairs, then fewer: rows that are gone leave nothing behind."""
    generator = torch.Generator().manual_seed(5)
    logits = torch.randn(8, 300, generator=generator) * 2
    rows = SamplingRows(
        temperature=np.array([0, 1, 0.7, 1, 1.3, 1], np.float32),
        top_k=np.array([0, 0, 50, 2**40, 0, 3], np.int64),
        top_p=np.array([1, 1, 0.9, 0.8, 1, 1], np.float32),
        min_p=np.array([0, 0, 0, 0, 0.1, 0], np.float32),
        seed=np.array([0, 1, 2**64 - 1, 3, 4, 5], np.uint64),
        index=np.arange(6, dtype=np.int64),
    )
    pairs = Pairs(np.array([1, 4]), np.array([6, 7]), np.array([1.5, 3.0], np.float32))
    guided = logits[:6].clone()
    guided[pairs.row] = combine_guidance(logits[[1, 4]], logits[6:], torch.from_numpy(pairs.scale))
    drawer = TritonSampler(300, device)
    np.testing.assert_array_equal(drawer.sample(logits.to(device), rows, pairs).cpu(), sample(guided, rows))
    fewer = SamplingRows(*(getattr(rows, field.name)[:5] for field in fields(SamplingRows)))
    np.testing.assert_array_equal(drawer.sample(logits.to(device), fewer).cpu(), sample(logits[:5], fewer))
    assert (
        drawer.sample(logits.to(device), SamplingRows(*(getattr(rows, field.name)[:0] for field in fields(SamplingRows)))).numel() == 0
    )
    with pytest.raises(ValueError, match="6 rows draw from 3 rows of logits"):
        drawer.sample(logits[:3].to(device), rows)


@pytest.mark.parametrize("kv_dtype", [pytest.param("auto", marks=pytest.mark.slow), "int8"])
def test_all_that_kernels_get_lies_on_the_device_and_compiles_once(kv_dtype: str) -> None:
    """A model of 7B's sizes on the device "meta", arguments on the CPU: nothing is computed, and no mixture of devices is accepted."""
    variants = {
        "norm_row": 2,
        "rotate_and_write_heads": 2,
        "extend_kernel": 2,
        "silu_mul_rows": 1,
        "plan_kernel": 1,
        "attend_kernel": 1,
    }
    assert count((LAUNCHES + STEPS).replace("KV_DTYPE", kv_dtype)) == variants


@pytest.mark.parametrize("family", ["gemma3_seeing", "gemma4"])
def test_all_that_windows_get_lies_on_the_device_and_compiles_once(tmp_path: Path, family: Family) -> None:
    """As above. Chunks have a variant for each group of layers and choice of tiles, steps one for each size of heads."""
    make_checkpoint("tiny", tmp_path / "tiny", family)
    found = count((LAUNCHES_OF_GEMMA + STEPS).replace("CHECKPOINT", str(tmp_path / "tiny")).replace("KV_DTYPE", "auto"))
    assert {name: found[name] for name in ("extend_kernel", "attend_kernel", "plan_kernel")} == {
        "extend_kernel": 4,
        "attend_kernel": 1 if family == "gemma3_seeing" else 2,
        "plan_kernel": 1,
    }


def test_a_model_on_the_cpu_loads_no_kernels() -> None:
    actors = "mmrt.actors.memory, mmrt.actors.encoder, mmrt.actors.prefill, mmrt.actors.decode.loop"
    script = f"import sys, {actors}; print(sorted(name for name in sys.modules if name.startswith(('triton', 'mmrt.triton', 'cuda'))))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
