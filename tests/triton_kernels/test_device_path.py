"""What actors do where a run computes on CUDA, by the same code in Triton's interpreter: equal to what they do on the CPU."""

from functools import partial
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

from mmrt.actors.decode.running_set import RunningSet
from mmrt.actors.host.device import Completion
from mmrt.actors.host.embedding_pages import DeviceEmbeddingPages, HostEmbeddingPages
from mmrt.actors.host.shared_tensors import copy_pages
from mmrt.actors.prefill import PrefillWorker
from mmrt.cli.replay_worker import Replay
from mmrt.models.architecture import DType, KvDType, ModelConfig
from mmrt.models.checkpoint.weights import attach_weights, torch_dtype, write_weights
from mmrt.models.config import load_model_config
from mmrt.models.families.qwen2_5 import vision_tower
from mmrt.models.families.qwen2_5.triton_vision import TritonVisionOperations
from mmrt.models.lm.decode_graphs import DecodeGraphs, StepInputs, bucket_of
from mmrt.models.lm.language_model import LanguageModel
from mmrt.models.lm.triton_layer_ops import TritonOperations
from mmrt.models.lm.warm_up import warm_up_decode, warm_up_prefill, warm_up_towers
from mmrt.models.make.checkpoint import make_checkpoint
from mmrt.models.media_config import VisionConfig
from mmrt.models.sampling.interface import Sampler
from mmrt.models.sampling.sampler import CpuSampler
from mmrt.models.sampling.triton_sampler import TritonSampler
from mmrt.models.towers.dispatch import Towers
from mmrt.models.towers.interface import TowerInput
from mmrt.runtime.bus.messages import Done, PageRun
from mmrt.runtime.bus.plans import EmbeddingSpan, Encode, EncodePart, Prefill, PrefillChunk
from mmrt.runtime.bus.sampling import Sampling
from mmrt.runtime.config.runtime_config import RuntimeConfig, to_data
from mmrt.schema.media import SegmentShape
from mmrt.shm.errors import StalePage
from mmrt.shm.pool import PagePool
from mmrt.shm.run_directory import RunDirectory
from mmrt.tests.actors.bench import EMBEDDING_PAGE_TOKENS, PAGE_TOKENS, Bench, Weights, clip
from mmrt.tests.actors.test_replay_worker import Order

NUM_TOKENS = 3


@pytest.fixture(scope="module")
def tiny(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[ModelConfig, Weights]:
    family = getattr(request, "param", "qwen2_5_omni")
    path = tmp_path_factory.mktemp("checkpoints") / family
    make_checkpoint("tiny", path, family)
    config = load_model_config(path)
    made: list[torch.Tensor] = []

    def allocate(num_bytes: int) -> torch.Tensor:
        made.append(torch.zeros(num_bytes, dtype=torch.uint8))
        return made[0]

    index = write_weights(path, config, allocate)
    return config, attach_weights(made[0], index)


def moved(weights: Weights, device: torch.device) -> Weights:
    return {name: weight.to(device) for name, weight in weights.items()}


@pytest.mark.parametrize(
    "tiny",
    [
        "qwen2_5_omni",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("qwen2_5_vl", "qwen2_vl", "qwen3_vl", "glm_ocr", "glm4v")),
    ],
    indirect=True,
)
@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 2e-5), pytest.param("bfloat16", 5e-2, marks=pytest.mark.slow)])
def test_a_vision_tower_sees_the_same_by_kernels(
    tiny: tuple[ModelConfig, Weights], device: torch.device, dtype: DType, tolerance: float
) -> None:
    """A picture larger than a window, whose windows at the right and below are smaller than the others; a small one; and a clip."""
    config = msgspec.structs.replace(tiny[0], dtype=dtype)
    weights = {name: weight.to(torch_dtype(dtype)) for name, weight in tiny[1].items()}
    random = np.random.default_rng(0)
    parts = [
        TowerInput("image", random.integers(0, 256, (t * height * width, config.patch_row_bytes()), dtype=np.uint8), (t, height, width))
        for t, height, width in ((1, 10, 8), (1, 4, 4), (2, 2, 4))
    ]
    plain = Towers(config, weights)
    expected = plain.encode(parts)
    if device.type == "cuda":
        actual = Towers(config, moved(weights, device), device).encode(parts)
    else:
        actual = by_kernels(plain, config).encode(parts)
    for output, reference in zip(actual, expected, strict=True):
        torch.testing.assert_close(output.cpu(), reference, rtol=0, atol=tolerance)


def by_kernels(towers: Towers, config: ModelConfig) -> Towers:
    """What ``Towers`` does on a CUDA device."""
    assert config.vision is not None
    towers._towers["image"].operations = TritonVisionOperations(config.vision.norm_eps)  # type: ignore[attr-defined]
    return towers


def test_heads_of_a_tower_that_the_kernels_cannot_do_are_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vision_tower, "TorchVisionOperations", lambda _, device: device)
    cuda = torch.device("cuda", 1)
    tower = VisionConfig(
        depth=1, hidden_size=144, intermediate_size=8, num_heads=2, in_channels=3, patch_size=14, temporal_patch_size=2, merge_size=2,
        out_hidden_size=8,
    )  # fmt: skip
    assert vision_tower.operations_for(tower, torch.bfloat16, cuda) == cuda
    of_80 = msgspec.structs.replace(tower, hidden_size=160)
    assert isinstance(vision_tower.operations_for(of_80, torch.bfloat16, cuda), TritonVisionOperations)


@pytest.mark.parametrize("tiny", ["qwen2_5_omni", "qwen3_vl"], indirect=True)
def test_embedding_rows_come_back_through_device_pages(
    run: RunDirectory, tiny: tuple[ModelConfig, Weights], device: torch.device
) -> None:
    """Two segments in pages in no order, read in chunks that begin and end anywhere, over text that stays."""
    config, _ = tiny
    page_bytes = EMBEDDING_PAGE_TOKENS * config.embedding_row_bytes()
    pools = [PagePool.create(run, name, 9, page_bytes, on_device=name == "device") for name in ("host", "device")]
    for pool in pools:
        pool.generations[:] = 4
    memory = torch.full((9, page_bytes), 77, dtype=torch.uint8, device=device)
    both = HostEmbeddingPages(config, pools[0]), DeviceEmbeddingPages(config, pools[1], memory)
    runs = [PageRun([7, 2, 5], [4, 4, 4]), PageRun([0], [4])]
    hidden_size, num_deep = config.language.hidden_size, config.num_deep
    rows = [torch.randn(count, (1 + num_deep) * hidden_size) for count in (70, 9)]
    both[0].write(runs, rows)
    both[1].write(runs, [its.to(device) for its in rows])
    whole = [EmbeddingSpan(5, 70, 0, runs[0]), EmbeddingSpan(80, 9, 0, runs[1])]
    for start, end in ((0, 95), (5, 6), (40, 84), (75, 80), (37, 75)):
        spans = [part for span in whole if (part := clip(span, start, end))]
        found, deep = [], []
        for pages, place in zip(both, (torch.device("cpu"), device), strict=True):
            embeds = torch.full((end - start, hidden_size), 3.0, device=place)
            added = pages.read(spans, start, embeds)
            found.append(embeds.cpu())
            deep += [] if added is None else [added.cpu()]
        assert torch.equal(*found)
        assert len(deep) == 2 * bool(spans and num_deep) and (not deep or torch.equal(*deep))
        for span in spans:
            first = span.start - (5 if span.start < 75 else 80)
            expected = rows[span.start >= 75][first : first + span.num_tokens].view(-1, 1 + num_deep, hidden_size)
            where = slice(span.start - start, span.start - start + span.num_tokens)
            assert torch.equal(found[0][where], expected[:, 0]) and (not deep or torch.equal(deep[0][where], expected[:, 1:]))
        assert spans or bool((found[0] == 3).all())
    pools[1].generations[2] = 5
    with pytest.raises(StalePage):
        both[1].read(whole, 0, torch.zeros(95, hidden_size, device=device))


class DeviceBench(Bench):
    """As ``Bench``, with kernels on pages of the device."""

    def __init__(self, run: RunDirectory, config: ModelConfig, weights: Weights, device: torch.device) -> None:
        self.sampler: Sampler = CpuSampler(config.language.vocab_size)
        self.completion = Completion(device)
        super().__init__(run, config, weights)
        self.pages = torch.from_numpy(self.kv.data).to(device)
        embeddings = torch.zeros(self.embeddings.num_pages, self.embeddings.page_bytes, dtype=torch.uint8, device=device)
        self.model = LanguageModel(config, moved(weights, device), self.pages, PAGE_TOKENS, TritonOperations)
        self.sampler = TritonSampler(config.language.vocab_size, device)
        paged = DeviceEmbeddingPages(config, self.embeddings, embeddings)
        self.worker = PrefillWorker(config, self.model, self.table, paged, PAGE_TOKENS, self.completion)
        self.new_running_set()

    def new_running_set(self) -> RunningSet:
        self.running = RunningSet(self.config, self.model, self.sampler, self.table, PAGE_TOKENS, self.completion, launches_ahead=True)
        return self.running


@pytest.mark.parametrize("num_rows", [3, pytest.param(5, marks=pytest.mark.slow)])
def test_prefill_and_decode_by_kernels_say_what_the_cpu_says(
    run: RunDirectory, tiny: tuple[ModelConfig, Weights], device: torch.device, num_rows: int
) -> None:
    """Rows with penalties, one that draws, a guided pair, and one whose prompt has two pages, in one running set."""
    config, weights = tiny
    said = []
    for name in ("cpu", "device"):
        with RunDirectory.create(run.path.parent / name, {}) as place:
            bench = Bench(place, config, weights) if name == "cpu" else DeviceBench(place, config, weights, device)
            asked = [
                ([[9] * 5], Sampling(temperature=0, frequency_penalty=2.0)),
                ([[7, 8, 9]], Sampling(temperature=0.8, top_p=0.9, seed=3)),
                ([[5] * 3, [6] * 2], Sampling(temperature=0, guidance_scale=1.7)),
                ([[9, 4, 9]], Sampling(temperature=0, repetition_penalty=1.9)),
                ([list(range(40, 61))], Sampling(temperature=0)),
            ]
            rows = [
                bench.place(*prompts, row=row, max_new_tokens=NUM_TOKENS, sampling=sampling)
                for row, (prompts, sampling) in enumerate(asked[:num_rows])
            ]
            for row in rows:
                bench.start(row)
            bench.run_to_end()
            said.append([bench.committed(row) for row in rows])
    assert said[0] == said[1] and all(len(ids) == NUM_TOKENS for ids in said[0])


def test_a_plan_captured_from_device_pages_is_done_again_on_the_cpu(
    tmp_path: Path, tiny: tuple[ModelConfig, Weights], device: torch.device
) -> None:
    """The last part of a prompt, behind one that lies in the same pages already."""
    make_checkpoint("tiny", checkpoint := tmp_path / "checkpoint", "qwen2_5_omni")
    with RunDirectory.create(tmp_path / "run", {"config": to_data(RuntimeConfig())}) as place:
        bench = DeviceBench(place, *tiny, device)
        row = bench.place(list(range(40, 61)), row=0)
        bench.grant_all(row)
        bench.worker.execute(Prefill([PrefillChunk(0, row.generation, 0, 0, 5, [])]))
        order = Order(place, "prefill", tmp_path / "captures", {"kv": partial(copy_pages, bench.pages)})
        order.give()
        order.do(7, Prefill([PrefillChunk(0, row.generation, 0, 5, 20, [])]), bench.worker.execute)
        (capture,) = order.taken()
    before, after = (capture.tensors[f"{when}.kv"] for when in ("before", "after"))
    assert before.any() and (before != after).any() and (device.type == "cpu" or not bench.kv.data.any())
    with Replay.open(capture, checkpoint) as replay:
        (kv,) = replay.run().differences or []
    assert kv.num_pages == 2 and (kv.largest or 0.0) < 1e-4


def test_nobody_else_captures_them(run: RunDirectory, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    PagePool.create(run, "patch", 3, 64)
    PagePool.create(run, "embedding", 3, 64, on_device=True)
    order = Order(run, "encoder", tmp_path)
    order.give()
    part = EncodePart(0, 1, SegmentShape("image", (1, 2, 2), 4, 16, 1), PageRun([0], [0]), PageRun([1], [0]))
    order.do(5, Encode([part]), lambda _: Done())
    assert order.taken() == []
    assert "pages of pool 'embedding' lie on a CUDA device, where only the actor itself can copy them" in caplog.text


@pytest.mark.parametrize("kv_dtype", [pytest.param("auto", marks=pytest.mark.slow), "int8"])
def test_warming_up_stores_nothing(
    tiny: tuple[ModelConfig, Weights], device: torch.device, monkeypatch: pytest.MonkeyPatch, kv_dtype: KvDType
) -> None:
    monkeypatch.setattr("mmrt.models.lm.warm_up._CHUNKS", (1, 20))
    config, weights = msgspec.structs.replace(tiny[0], kv_dtype=kv_dtype), tiny[1]
    kv = torch.full((5, config.kv_page_bytes(PAGE_TOKENS)), 9, dtype=torch.uint8, device=device)
    model = LanguageModel(config, moved(weights, device), kv, PAGE_TOKENS, TritonOperations)
    warm_up_prefill(model, PAGE_TOKENS)
    warm_up_decode(model, TritonSampler(config.language.vocab_size, device))
    assert bool((kv == 9).all())


def test_so_does_warming_up_the_pages_of_embeddings(run: RunDirectory, tiny: tuple[ModelConfig, Weights], device: torch.device) -> None:
    pool = Bench(run, *tiny).embeddings
    pages = torch.full((pool.num_pages, pool.page_bytes), 9, dtype=torch.uint8, device=device)
    DeviceEmbeddingPages(tiny[0], pool, pages).warm_up()
    assert bool((pages == 9).all())


@pytest.mark.parametrize("tiny", ["qwen2_5_omni", "qwen2_5_vl", "qwen2_vl", "qwen3_vl"], indirect=True)
def test_the_pictures_and_the_sound_of_the_warm_up_are_encoded(tiny: tuple[ModelConfig, Weights]) -> None:
    warm_up_towers(Towers(tiny[0], tiny[1]), tiny[0])


@pytest.mark.gpu
@pytest.mark.parametrize("kv_dtype", ["auto", "int8"])
def test_graphs_replay_what_the_model_does(tiny: tuple[ModelConfig, Weights], kv_dtype: KvDType) -> None:
    """Steps of five rows, of one, and of five again, one after another in the same buffer of logits."""
    device = torch.device("cuda")
    config, weights = msgspec.structs.replace(tiny[0], kv_dtype=kv_dtype), tiny[1]
    kv = torch.zeros(20, config.kv_page_bytes(PAGE_TOKENS), dtype=torch.uint8, device=device)
    model = LanguageModel(config, moved(weights, device), kv, PAGE_TOKENS, TritonOperations)
    graphs = DecodeGraphs(model, config.language.vocab_size, 6, 16, device)
    graphs.capture_all()
    for num_rows in (5, 1, 5):
        ids = torch.arange(num_rows) + 7
        step = ids, torch.zeros(3, num_rows, dtype=torch.int64), torch.ones(num_rows, dtype=torch.int64), ids.unsqueeze(1)
        inputs = StepInputs.allocate(bucket_of(num_rows), 16, device)
        inputs.fill(*step)
        expected = model.decode(*inputs.arguments())[
            :num_rows
        ]  # of the graph's size: of another one products differ in their last bits
        torch.testing.assert_close(graphs.decode(*step), expected, rtol=0, atol=1e-5)
    with pytest.raises(ValueError, match="9 rows is larger than 8"):
        graphs.decode(torch.arange(9), torch.zeros(3, 9), torch.ones(9), torch.zeros(9, 1))


def test_a_step_in_a_graphs_place_says_the_same(tiny: tuple[ModelConfig, Weights], device: torch.device) -> None:
    """Two rows as a graph for four would read them: filled up with padding, and with a block table as wide as any."""
    config, weights = tiny
    kv = torch.randint(0, 60, (9, config.kv_page_bytes(PAGE_TOKENS)), dtype=torch.uint8).to(device)
    model = LanguageModel(config, moved(weights, device), kv, PAGE_TOKENS, TritonOperations)
    step = torch.tensor([3, 4]), torch.tensor([[20, 1]] * 3), torch.tensor([21, 2]), torch.tensor([[8, 1], [3, 0]])
    expected = model.decode(*step)
    inputs = StepInputs.allocate(4, 16, device)
    inputs.fill(*step)
    torch.testing.assert_close(model.decode(*inputs.arguments())[:2], expected, rtol=0, atol=2e-4)
