"""What an actor launches before its first request is all that it ever has Triton compile: kernels by actor, over steps of any shape.

``late_variants`` runs in a process of its own: on a CPU with the stub driver of ``launch_keys``, which asks for every variant at every
launch and runs none; on a GPU with what the product has there, graphs among it, an actor a process.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
import triton

import mmrt.triton_kernels.embedding_pages  # noqa: F401  before ``record``, behind which kernels would be made for the interpreter
from mmrt.actors.host.embedding_pages import DeviceEmbeddingPages, EmbeddingPages
from mmrt.models.architecture import KvDType, ModelConfig
from mmrt.models.config import load_model_config
from mmrt.models.families.qwen2_5.triton_vision import TritonVisionOperations
from mmrt.models.families.registry import family_of
from mmrt.models.lm.decode_graphs import DecodeGraphs, StepInputs, bucket_of
from mmrt.models.lm.decoder import Chunk, StateRows
from mmrt.models.lm.language_model import LanguageModel
from mmrt.models.lm.triton_layer_ops import TritonOperations
from mmrt.models.lm.warm_up import warm_up_decode, warm_up_prefill, warm_up_towers
from mmrt.models.make.checkpoint import make_checkpoint
from mmrt.models.sampling.interface import Pairs, Sampler, SamplingRows
from mmrt.models.sampling.penalties import History, Penalties
from mmrt.models.sampling.triton_sampler import TritonSampler
from mmrt.models.towers.dispatch import Towers
from mmrt.models.towers.interface import TowerInput
from mmrt.runtime.bus.messages import PageRun
from mmrt.runtime.bus.plans import EmbeddingSpan
from mmrt.shm.pool import PagePool
from mmrt.shm.run_directory import RunDirectory
from mmrt.tests.settings import also_slow
from mmrt.tests.triton_kernels.launch_keys import count, record

PAGE_TOKENS, EMBEDDING_PAGE_TOKENS, MAX_PAGES, MAX_ROWS = 16, 32, 40, 40
ROWS = (1, 2, 3, 7, 16, 33)
DRAWS = ((0, 0, 1, 0), (1, 0, 1, 0), (0.7, 5, 1, 0), (1, 0, 0.9, 0), (1, 0, 1, 0.1), (2, 50, 0.5, 0.2))
SCRIPT = """
import json, pathlib, torch
from mmrt.tests.triton_kernels.test_warm_up import late_variants
print(json.dumps(late_variants(pathlib.Path({path!r}), {actors!r}, {kv_dtype!r}, torch.device({device!r}))))
"""
PAGES = {"copy_rows": 0}
KERNELS = {
    "encoder": PAGES | {"norm_row": 0, "silu_mul_rows": 0, "rotate_kernel": 0, "windows_kernel": 0, "sequences_kernel": 0},
    "prefill": PAGES | {"norm_row": 0, "silu_mul_rows": 0, "rotate_and_write_heads": 0, "extend_kernel": 0},
    "decode": {"norm_row": 0, "silu_mul_rows": 0, "rotate_and_write_heads": 0, "plan_kernel": 0, "attend_kernel": 0, "reduce_kernel": 0}
    | {"prepare_kernel": 0, "measure_kernel": 0, "gather_kernel": 0, "draw_kernel": 0, "count_kernel": 0},
}
Stages = tuple[Callable[[], None], Callable[[], None]]
"""What an actor does before its first request, and its requests."""


def late_variants(path: Path, actors: list[str], kv_dtype: KvDType, device: torch.device) -> dict[str, int]:
    """Variants that were not there after the warm-up, by ``actor kernel``; kernels that were only launched before count 0."""
    found = record() if device.type == "cpu" else watch()
    config = msgspec.structs.replace(load_model_config(path, "bfloat16"), kv_dtype=kv_dtype)
    weights = {
        spec.name: torch.zeros(spec.shape, dtype=torch.bfloat16, device=device) for spec in family_of(config).tensor_specs(config)
    }
    late: dict[str, int] = {}
    with RunDirectory.create(path / "run", {}) as run:
        for actor in actors:
            warm_up, serve = STAGES[actor](run, config, weights, device)
            found.clear()
            warm_up()
            ready = {name: frozenset(keys) for name, keys in found.items()}
            serve()
            late |= {f"{actor} {name}": len(keys - ready.get(name, frozenset())) for name, keys in found.items()}
    return late


def watch() -> dict[str, set[str]]:
    """As ``record``, of what is compiled and run."""
    found: dict[str, set[str]] = defaultdict(set)

    def note(*, key: str, fn: Any, **_: Any) -> bool:
        found[fn.name.rpartition(".")[2]].add(key)
        return False

    triton.knobs.runtime.jit_cache_hook = note
    return found


def encoder(run: RunDirectory, config: ModelConfig, weights: dict[str, torch.Tensor], device: torch.device) -> Stages:
    towers, pages = Towers(config, weights, device), embedding_pages(run, "encoder", config, device)
    assert config.vision is not None and config.vision_rules is not None
    towers._towers["image"].operations = TritonVisionOperations(config.vision.norm_eps)  # type: ignore[attr-defined]
    row_bytes = config.vision_rules.row_bytes

    def warm_up() -> None:
        pages.warm_up()
        warm_up_towers(towers, config)

    def serve() -> None:
        """Pictures of every size, alone and together, and a clip."""
        sizes = [(2, 2), (4, 4), (2, 12), (6, 6), (8, 8), (10, 6), (2, 40), (18, 22)]
        plans = [[(1, *size)] for size in sizes] + [[(1, *size) for size in sizes[:4]], [(3, 6, 10)], [(2, 2, 2), (1, 18, 2)]]
        for grids in plans:
            parts = [TowerInput("image", np.zeros((t * h * w, row_bytes), np.uint8), (t, h, w)) for t, h, w in grids]
            outputs = towers.encode(parts)
            pages.write([page_run(number, len(rows)) for number, rows in enumerate(outputs)], outputs)

    return warm_up, serve


def prefill(run: RunDirectory, config: ModelConfig, weights: dict[str, torch.Tensor], device: torch.device) -> Stages:
    model, pages = language_model(config, weights, device), embedding_pages(run, "prefill", config, device)

    def warm_up() -> None:
        pages.warm_up()
        warm_up_prefill(model, PAGE_TOKENS)

    def chunk(start: int, end: int) -> Chunk:
        embeds = model.embed(torch.zeros(end - start, dtype=torch.int64))
        middle = (end - start) // 2
        pages.read([EmbeddingSpan(start + middle, end - start - middle, 5, page_run(0, 300))], start, embeds)
        positions = torch.arange(start, end).expand(3, -1)
        return Chunk(embeds, positions, start, torch.arange(-(-end // PAGE_TOKENS)))

    def serve() -> None:
        """Chunks short and long, at the beginning of prompts and behind them, alone and together."""
        for spans in (
            [(0, 1)],
            [(16, 32)],
            [(1, 300)],
            [(0, 16)],
            [(599, 600)],
            [(40, 41), (0, 16), (2, 99)],
            [(0, 33)] * 5,
            [(100, 612)],
        ):
            model.prefill([chunk(*span) for span in spans])

    return warm_up, serve


def decode(run: RunDirectory, config: ModelConfig, weights: dict[str, torch.Tensor], device: torch.device) -> Stages:
    model, vocabulary = language_model(config, weights, device), config.language.vocab_size
    is_cuda = device.type == "cuda"
    steps = DecodeGraphs(model, vocabulary, MAX_ROWS, MAX_PAGES, device) if is_cuda else Steps(model)
    sampler = TritonSampler(vocabulary, device)

    def serve() -> None:
        """Steps over rows of any number and length, as ``RunningSet`` launches them; draws of every kind."""
        for num_rows in ROWS:
            for num_pairs in {0, 1, num_rows // 2}:
                num_sequences = num_rows + min(num_pairs, MAX_ROWS - num_rows)
                lengths = torch.arange(num_sequences) * 17 % 600 + 1
                tables = torch.zeros(num_sequences, -(-int(lengths.max()) // PAGE_TOKENS), dtype=torch.int64)
                logits = steps.decode(torch.zeros_like(lengths), (lengths - 1).expand(3, -1), lengths, tables)
                draw(sampler, logits, num_rows)

    def warm_up() -> None:
        if isinstance(steps, DecodeGraphs):
            steps.capture_all()
        warm_up_decode(steps, sampler)

    return warm_up, serve


STAGES = {"encoder": encoder, "prefill": prefill, "decode": decode}


class Steps:
    """``DecodeGraphs`` without graphs: its launches, over its inputs."""

    def __init__(self, model: LanguageModel) -> None:
        self._model = model
        self.embed, self.prefill = model.embed, model.prefill

    def fold(self, borders: Sequence[int], states: StateRows, targets: Sequence[int]) -> None:
        raise AssertionError("it has no states")

    def decode(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        lengths: torch.Tensor,
        block_tables: torch.Tensor,
        states: StateRows | None = None,
        window_tables: torch.Tensor | None = None,
    ) -> torch.Tensor:
        inputs = StepInputs.allocate(bucket_of(len(ids)), MAX_PAGES, torch.device("cpu"))
        inputs.fill(ids, positions, lengths, block_tables)
        return self._model.decode(*inputs.arguments())[: len(ids)]


def draw(sampler: Sampler, logits: torch.Tensor, num_rows: int) -> None:
    """Greedy rows, rows that draw, each filter and all of them, guidance where there are companions, penalties of some rows."""
    number = np.arange(num_rows)
    zeros, ones = np.zeros(num_rows, np.float32), np.ones(num_rows, np.float32)
    num_pairs = len(logits) - num_rows
    pairs = Pairs(number[:num_pairs], number[:num_pairs] + num_rows, np.full(num_pairs, 1.5, np.float32)) if num_pairs else None
    for temperature, top_k, top_p, min_p in DRAWS:
        rows = SamplingRows(
            temperature=ones * np.float32(temperature),
            top_k=np.full(num_rows, top_k),
            top_p=ones * np.float32(top_p),
            min_p=ones * np.float32(min_p),
            seed=number.astype(np.uint64),
            index=number,
        )
        for num_penalised in {0, 1, num_rows}:
            histories = [History(np.arange(1 + 40 * i), np.arange(3 * i)) for i in range(num_penalised)]
            sampler.remember(histories)
            some = slice(num_penalised)
            penalties = Penalties(number[some], 1.2 * ones[some], ones[some], zeros[some]) if num_penalised else None
            sampler.sample(logits, rows, pairs, penalties).cpu()


def language_model(config: ModelConfig, weights: dict[str, torch.Tensor], device: torch.device) -> LanguageModel:
    kv = torch.zeros(MAX_PAGES, config.kv_page_bytes(PAGE_TOKENS), dtype=torch.uint8, device=device)
    return LanguageModel(config, weights, kv, PAGE_TOKENS, TritonOperations)


def embedding_pages(run: RunDirectory, name: str, config: ModelConfig, device: torch.device) -> EmbeddingPages:
    num_bytes = EMBEDDING_PAGE_TOKENS * config.embedding_row_bytes()
    pool = PagePool.create(run, name, 24, num_bytes, on_device=True)
    return DeviceEmbeddingPages(config, pool, torch.zeros(24, num_bytes, dtype=torch.uint8, device=device))


def page_run(first: int, num_rows: int) -> PageRun:
    pages = [(first + i) % 24 for i in range(-(-num_rows // EMBEDDING_PAGE_TOKENS))]
    return PageRun(pages, [0] * len(pages))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    make_checkpoint("tiny", path := tmp_path_factory.mktemp("checkpoint") / "tiny", "qwen2_5_vl")
    return path


def check(path: Path, actors: list[str], kv_dtype: KvDType, device: str) -> None:
    found = count(SCRIPT.format(path=str(path), actors=actors, kv_dtype=kv_dtype, device=device))
    assert found == {f"{actor} {name}": 0 for actor in actors for name in KERNELS[actor]}


@pytest.mark.parametrize("actor", ["encoder", *also_slow("prefill", "decode")])
def test_nothing_is_compiled_after_warming_up(checkpoint: Path, actor: str) -> None:
    check(checkpoint, [actor], "auto", "cpu")


@pytest.mark.parametrize("kv_dtype", ["int8", pytest.param("fp8", marks=pytest.mark.slow)])
def test_nor_with_quantized_pages(checkpoint: Path, kv_dtype: KvDType) -> None:
    check(checkpoint, ["prefill", "decode"], kv_dtype, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("actor", STAGES)
def test_nor_on_a_gpu(checkpoint: Path, actor: str) -> None:
    check(checkpoint, [actor], "auto", "cuda:0")
