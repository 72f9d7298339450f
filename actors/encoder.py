"""The encoder actor: vision and audio towers. Patch pages in, embedding pages out (US2). Saved pages (``cache.dir``) it loads."""

import numpy as np

from ..models.lm.decoder import AfterLayer
from ..models.lm.warm_up import warm_up_towers
from ..models.towers.dispatch import Towers
from ..models.towers.interface import TowerInput
from ..runtime.bus.copy_plans import LoadSegments
from ..runtime.bus.messages import Done, Result
from ..runtime.bus.plans import Encode, EncodePart, Plan
from ..runtime.process.saved_pages import cache_directory
from ..shm.pool import PagePool
from ..shm.sequence_table import SequenceTable
from .host.actor import Actor
from .host.device import Completion
from .host.embedding_pages import EmbeddingPages, open_embedding_pages
from .host.kept_kernels import keep_kernels
from .host.page_loader import PageLoader
from .host.plan_loop import serve_plans
from .host.shared_tensors import SharedTensors


def main(actor: Actor) -> None:
    """Entry of the encoder process."""
    actor.wait_for_layout()
    config = actor.model
    shared = SharedTensors(actor)
    keep_kernels()
    towers = Towers(config, shared.weights(), shared.device)
    pool = PagePool.attach(actor.run, "embedding", "fill")
    embeddings = open_embedding_pages(config, pool, shared)
    shared.close()
    completion = Completion(shared.device)
    embeddings.warm_up()
    if shared.device.type == "cuda":
        warm_up_towers(towers, config)
    completion.wait()  # a failure here must not count against the first plan
    actor.open_turn(completion.wait)
    worker = EncoderWorker(towers, PagePool.attach(actor.run, "patch", "read"), embeddings, completion, actor.turn.after_layer)
    loader = PageLoader(actor.run, pool, cache_directory(actor.config))

    def execute(plan: Plan) -> Result:
        return loader.load_segments(plan) if isinstance(plan, LoadSegments) else worker.execute(plan)

    serve_plans(actor, execute, SequenceTable.attach(actor.run, writable=False), shared.device_pages)


class EncoderWorker:
    """Turns encode plans into tower forwards."""

    def __init__(
        self,
        towers: Towers,
        patches: PagePool,
        embeddings: EmbeddingPages,
        completion: Completion,
        after_layer: AfterLayer | None = None,
    ) -> None:
        self._towers = towers
        self._patches = patches
        self._embeddings = embeddings
        self._completion = completion
        self._after_layer = after_layer

    def execute(self, plan: Plan) -> Result:
        """Encode every part, to the end; a part's rows are read where they lie when its pages are contiguous."""
        assert isinstance(plan, Encode)
        outputs = self._towers.encode([self._input(part) for part in plan.parts], self._after_layer)
        self._embeddings.write([part.target for part in plan.parts], outputs)
        self._completion.wait()
        return Done()

    def _input(self, part: EncodePart) -> TowerInput:
        self._patches.check(part.source.pages, part.source.generations)
        shape = part.shape
        rows = self._patches.gather_rows(part.source.pages, shape.row_bytes, shape.num_rows)
        rows = rows.view(np.float32) if shape.kind == "audio" else rows
        return TowerInput(shape.kind, rows, shape.grid, shape.details, shape.ids)
