"""The encoder actor: vision and audio towers. Patch pages in, embedding pages out (US2)."""

import numpy as np
import torch

from ..models.config import ModelConfig
from ..models.towers import TowerInput, Towers
from ..runtime.messages import Done, Encode, EncodePart, Plan, Result
from ..shm.pool import PagePool
from ..shm.sequence_table import SequenceTable
from .base import Actor
from .language_model import shared_weights
from .plans import serve_plans


def main(actor: Actor) -> None:
    """Entry of the encoder process."""
    actor.wait_for_layout()
    config = actor.model
    towers = Towers(config, shared_weights(actor))
    worker = EncoderWorker(config, towers, PagePool.attach(actor.run, "patch"), PagePool.attach(actor.run, "embedding"))
    serve_plans(actor, worker.execute, SequenceTable.attach(actor.run, writable=False))


class EncoderWorker:
    """Turns encode plans into tower forwards."""

    def __init__(self, config: ModelConfig, towers: Towers, patches: PagePool, embeddings: PagePool) -> None:
        self._row_bytes = config.embedding_row_bytes()
        self._towers = towers
        self._patches = patches
        self._embeddings = embeddings

    def execute(self, plan: Plan) -> Result:
        """Encode every part; a part's rows are read where they lie when its pages are contiguous."""
        assert isinstance(plan, Encode)
        outputs = self._towers.encode([self._input(part) for part in plan.parts])
        for part, output in zip(plan.parts, outputs, strict=True):
            self._embeddings.check(part.target.pages, part.target.generations)
            rows = output.contiguous().view(torch.uint8).numpy().reshape(-1, self._row_bytes)
            self._embeddings.scatter_rows(part.target.pages, rows)
        return Done()

    def _input(self, part: EncodePart) -> TowerInput:
        self._patches.check(part.source.pages, part.source.generations)
        shape = part.shape
        rows = self._patches.gather_rows(part.source.pages, shape.row_bytes, shape.num_rows)
        if part.kind == "audio":
            return TowerInput(part.kind, rows.view(np.float32), shape.grid)
        return TowerInput(part.kind, rows, shape.grid)
