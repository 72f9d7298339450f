"""The encoder worker: rows come out of patch pages, embeddings go into theirs, wherever the pages lie."""

import numpy as np
import pytest
import torch

from mmrt.actors.encoder import EncoderWorker
from mmrt.actors.host.device import Completion
from mmrt.actors.host.embedding_pages import HostEmbeddingPages
from mmrt.models.architecture import ModelConfig
from mmrt.models.towers.dispatch import Towers
from mmrt.models.towers.interface import TowerInput
from mmrt.runtime.bus.messages import Done, PageRun
from mmrt.runtime.bus.plans import Encode, EncodePart
from mmrt.schema.media import SegmentShape
from mmrt.shm.errors import StalePage
from mmrt.shm.pool import PagePool
from mmrt.shm.run_directory import RunDirectory
from mmrt.tests.actors.bench import EMBEDDING_PAGE_TOKENS, Weights

PATCH_ROW_BYTES = 1176


class Encoding:
    """Two pools and the towers of the tiny model."""

    def __init__(self, run: RunDirectory, config: ModelConfig, weights: Weights) -> None:
        self.config = config
        self.row_bytes = config.embedding_row_bytes()
        self.towers = Towers(config, {name: view for name, view in weights.items() if name.startswith(("vision.", "audio."))})
        self.patches = PagePool.create(run, "patch", 24, 16 * PATCH_ROW_BYTES)
        self.embeddings = PagePool.create(run, "embedding", 24, EMBEDDING_PAGE_TOKENS * self.row_bytes)
        pages = HostEmbeddingPages(config, self.embeddings)
        self.worker = EncoderWorker(self.towers, self.patches, pages, Completion(torch.device("cpu")))
        self.random = np.random.default_rng(0)
        self._free = {id(pool): self.random.permutation(pool.num_pages).tolist() for pool in (self.patches, self.embeddings)}

    def grant(self, pool: PagePool, row_bytes: int, num_rows: int) -> PageRun:
        pages = [self._free[id(pool)].pop() for _ in range(-(-num_rows // pool.rows_per_page(row_bytes)))]
        pool.generations[pages] += np.uint64(1)
        return PageRun(pages, pool.generations[pages].tolist())

    def part(self, kind: str, grid: tuple[int, int, int]) -> tuple[EncodePart, TowerInput]:
        """A segment of noise in pages, and the same for a tower."""
        if kind == "audio":
            num_rows, num_tokens = grid[0], ((grid[0] - 1) // 2 + 1 - 2) // 2 + 1
            rows = self.random.normal(0, 0.5, (num_rows, 128)).astype(np.float32)
        else:
            num_rows = int(np.prod(grid))
            num_tokens = num_rows // 4
            rows = self.random.integers(0, 256, (num_rows, PATCH_ROW_BYTES), dtype=np.uint8)
        row_bytes = rows[0].nbytes
        shape = SegmentShape(kind, grid, num_rows, row_bytes, num_tokens)  # type: ignore[arg-type]
        source = self.grant(self.patches, row_bytes, num_rows)
        self.patches.scatter_rows(source.pages, rows)
        target = self.grant(self.embeddings, self.row_bytes, num_tokens)
        return EncodePart(0, 1, shape, source, target), TowerInput(kind, rows, grid)  # type: ignore[arg-type]

    def written(self, part: EncodePart) -> torch.Tensor:
        rows = self.embeddings.gather_rows(part.target.pages, self.row_bytes, part.shape.num_tokens)
        return torch.from_numpy(rows.copy()).view(torch.float32)


@pytest.fixture
def encoding(run: RunDirectory, tiny: tuple[ModelConfig, Weights]) -> Encoding:
    return Encoding(run, *tiny)


def test_parts_of_all_kinds_in_one_plan(encoding: Encoding) -> None:
    made = [encoding.part(*what) for what in (("image", (1, 12, 12)), ("audio", (120, 0, 0)), ("video", (2, 4, 6)))]
    assert encoding.worker.execute(Encode([part for part, _ in made])) == Done()
    for part, tower_input in made:
        (alone,) = encoding.towers.encode([tower_input])
        assert alone.shape[0] == part.shape.num_tokens
        torch.testing.assert_close(encoding.written(part), alone.clone(), atol=1e-4, rtol=1e-3)


def test_a_repeated_plan_writes_the_same(encoding: Encoding) -> None:
    part, _ = encoding.part("image", (1, 8, 8))
    encoding.worker.execute(Encode([part]))
    first = encoding.written(part)
    encoding.embeddings.data[part.target.pages] = 0xAB
    encoding.worker.execute(Encode([part]))
    assert torch.equal(encoding.written(part), first)


@pytest.mark.parametrize("which", ["source", "target"])
def test_pages_that_were_given_away_are_left_alone(encoding: Encoding, which: str) -> None:
    part, _ = encoding.part("image", (1, 8, 8))
    pool = encoding.patches if which == "source" else encoding.embeddings
    pages = getattr(part, which).pages
    pool.generations[pages[-1]] += np.uint64(1)
    before = encoding.embeddings.data.copy()
    with pytest.raises(StalePage):
        encoding.worker.execute(Encode([part]))
    assert np.array_equal(encoding.embeddings.data, before)


def test_pauses_between_layers_change_nothing(encoding: Encoding) -> None:
    inputs = [encoding.part("image", (1, 12, 12))[1], encoding.part("audio", (120, 0, 0))[1]]
    plain, calls = encoding.towers.encode(inputs), []
    for found, expected in zip(encoding.towers.encode(inputs, lambda: calls.append(1)), plain, strict=True):
        assert torch.equal(found, expected)
    vision, audio = encoding.config.vision, encoding.config.audio
    assert vision is not None and audio is not None
    assert len(calls) == vision.depth + audio.num_layers
    encoding.towers.encode(inputs)
    assert len(calls) == vision.depth + audio.num_layers, "the next plan may not want pauses"
