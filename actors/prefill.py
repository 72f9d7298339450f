"""The prefill actor: the language model over chunks of prompts. Token ids and embedding rows in, KV pages out. Of a plain row's last
chunk it draws the answer's first token (``FirstTokens``).
Where they are asked for it writes the log-probabilities of a prompt's tokens, or a vector pooled from its last hidden states. Saved
pages (``cache.dir``) it loads.

A chunk may reach into ids that were generated before a preemption: then the prompt and those ids are prefilled.
"""

import time
from collections import OrderedDict

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..models.architecture import ModelConfig
from ..models.families.registry import family_of
from ..models.lm.decoder import AfterLayer, Chunk, Decoder, StateRefs, Stream
from ..models.lm.warm_up import warm_up_prefill
from ..models.pictures import whole_runs, within
from ..models.sampling.logprobs import logprobs_of
from ..runtime.bus.copy_plans import Load
from ..runtime.bus.messages import Done, Result, SequenceSpec, Skipped, decode_sequence_spec
from ..runtime.bus.plans import Plan, Prefill, PrefillChunk
from ..runtime.observe.flight import Kind
from ..runtime.pools import state_pool, window_pool
from ..runtime.process.saved_pages import cache_directory
from ..runtime.stage_table import number_of
from ..shm.layer_progress import LayerCounter, LayerProgress
from ..shm.logprob_file import PROMPT
from ..shm.pool import PagePool
from ..shm.sequence_table import SequenceTable
from .decode.first_tokens import FirstTokens, NoteDraw
from .host.actor import Actor
from .host.breaks import has_breaks
from .host.device import Completion
from .host.embedding_pages import EmbeddingPages, open_embedding_pages
from .host.language_model import open_language_model
from .host.logprobs import to_host
from .host.page_loader import PageLoader
from .host.page_packer import PackedPages, open_packing, pack_chunks
from .host.pipeline import PipelineStage
from .host.plan_loop import PlanLoop
from .host.shared_tensors import SharedTensors

KEPT_POSITIONS = 64
LOGITS_AT_ONCE = 64  # tokens


def main(actor: Actor) -> None:
    """Entry of the prefill process."""
    layout = actor.wait_for_layout()
    shared = SharedTensors(actor)
    kv = PagePool.attach(actor.run, actor.kv_pool, "fill")
    model = open_language_model(actor, shared, kv, layout)
    embeddings = open_embedding_pages(actor.model, PagePool.attach(actor.run, "embedding", "read"), shared)
    shared.close()
    completion = Completion(shared.device)
    embeddings.warm_up()
    if shared.device.type == "cuda":
        warm_up_prefill(model, layout.kv_page_tokens)
    completion.wait()  # a failure here must not count against the first plan
    table = SequenceTable.attach(actor.run)
    actor.open_turn(completion.wait)

    def note_draw(row: int, generation: int, began_ns: int) -> None:
        actor.flight.record(Kind.FIRST_TOKEN, began_ns, time.monotonic_ns() - began_ns, row, generation)

    def in_a_break() -> bool:
        if actor.turn.after_layer is not None:
            actor.turn.after_layer()
        return plans.do_short()

    stage = PipelineStage.open(actor.run, actor.config, actor.model, actor.name, shared.device)
    layers = open_counter(actor, stage)
    after_layer = actor.turn.after_layer if layers is None else layers.before(actor.turn.after_layer)
    if has_breaks(actor.config, actor.model):
        after_layer = in_a_break
    worker = PrefillWorker(actor.model, model, table, embeddings, layout.kv_page_tokens, completion, after_layer, note_draw, stage)
    cache = cache_directory(actor.config)
    states = PageLoader(actor.run, PagePool.attach(actor.run, state_pool(actor.kv_pool), "fill"), cache) if layout.has_states else None
    windows = (
        PageLoader(actor.run, PagePool.attach(actor.run, window_pool(actor.kv_pool), "fill"), cache) if layout.has_windows else None
    )
    loader = PageLoader(actor.run, kv, cache, states, windows)
    packing = open_packing(actor, layout.kv_page_tokens) if stage.is_last else None
    packed = None if packing is None else PackedPages(actor, kv, packing, "own")

    def execute(plan: Plan) -> Result:
        if isinstance(plan, Load):
            return loader.load_chunks(plan, table)
        assert isinstance(plan, Prefill) and actor.status is not None
        if layers is not None:
            layers.begin(actor.status.step_plan)
        result = worker.execute(plan)
        if packed is not None:
            pack_chunks(packed, plan, table, layout.kv_page_tokens)
        if layers is not None and isinstance(result, Done):
            layers.done(plan.units)
        return result

    plans = PlanLoop(actor, table, shared.device_pages)
    plans.serve(execute)


def open_counter(actor: Actor, stage: PipelineStage) -> LayerCounter | None:
    """Return what tells other devices how many layers are stored, where there are several (KT1). Only the plans of the last stage are
    followed: those of the stages before it are done when one of its begins."""
    if actor.config.num_kv_pools == 1 or not stage.is_last:
        return None
    words, layers = LayerProgress.attach(actor.run, writable=True), stage.layers
    return LayerCounter(words, actor.generation, number_of(actor.name), layers.start, len(layers) / layers.stop)


class PrefillWorker:
    """Turns prefill plans into forwards. Positions of a row's prompt are kept while its generation lasts."""

    def __init__(
        self,
        config: ModelConfig,
        model: Decoder,
        table: SequenceTable,
        embeddings: EmbeddingPages,
        page_tokens: int,
        completion: Completion,
        after_layer: AfterLayer | None = None,
        note_draw: NoteDraw = lambda row, generation, began_ns: None,
        stage: PipelineStage | None = None,
    ) -> None:
        """``note_draw`` is told of first tokens. ``stage``: of a pipeline; None: it has all layers."""
        self._config = config
        self._model = model
        self._table = table
        self._embeddings = embeddings
        self._page_tokens = page_tokens
        self._completion = completion
        self._after_layer = after_layer
        self._stage = stage or PipelineStage.whole(config, torch.device("cpu"))
        self._first_tokens = FirstTokens(config, model, table, note_draw)
        self._positions: OrderedDict[tuple[int, int, int], tuple[NDArray[np.int64], int]] = OrderedDict()

    def execute(self, plan: Plan) -> Result:
        """Run one forward over the plan's chunks, to the end; chunks of rows that have ended meanwhile are left out."""
        assert isinstance(plan, Prefill)
        live = [chunk for chunk in plan.chunks if self._table.generation[chunk.row] == chunk.row_generation]
        stage = self._stage
        if stage.rank and stage.is_last and any(self._table.num_prefilled(chunk.row)[chunk.member] != chunk.start for chunk in live):
            return Skipped()  # the chunk before one of them was not done to its end, or this one was done before
        if live:
            try:
                specs = [decode_sequence_spec(self._table.read_spec(chunk.row)) for chunk in live]
                chunks = list(map(self._chunk, specs, live))
                stream = stage.read(plan.relay, live)
                if stage.is_last:
                    self._end(specs, live, chunks, stream)
                else:
                    stage.write(plan.relay, live, self._model.prefill_layers(chunks, stage.layers, stream, self._after_layer))
            finally:
                self._completion.wait()  # also after an error: kernels before it may still be writing pages
        return Done()

    def _end(self, specs: list[SequenceSpec], live: list[PrefillChunk], chunks: list[Chunk], stream: Stream | None) -> None:
        """Take the chunks through the last layers; write what is asked for of their tokens, and draw first tokens."""
        wanted = [at for at, (spec, chunk) in enumerate(zip(specs, live, strict=True)) if _is_read(spec, chunk)]
        ends = [at for at, (spec, chunk) in enumerate(zip(specs, live, strict=True)) if self._first_tokens.are_due(spec, chunk)]
        hidden = self._model.prefill(chunks, wanted, self._after_layer, ends, stream, self._stage.layers.start)
        states_of = dict(zip(sorted({*wanted, *ends}), hidden, strict=True))
        for at in wanted:
            self._write_logprobs(specs[at], live[at], states_of[at])
            if _is_pooled(specs[at], live[at]):
                self._write_vector(specs[at], live[at], states_of[at])
        if ends:
            rows = [(live[at].row, live[at].row_generation, specs[at]) for at in ends]
            self._first_tokens.draw(rows, torch.cat([states_of[at][-1:] for at in ends]))

    def _write_logprobs(self, spec: SequenceSpec, chunk: PrefillChunk, hidden: Tensor) -> None:
        """Write those of the prompt's tokens that follow the chunk's, a few at a time: logits take much memory."""
        scored = _scored(spec, chunk)
        for first in scored[::LOGITS_AT_ONCE]:
            last = min(first + LOGITS_AT_ONCE, scored.stop)
            logits = self._model.logits(hidden[first - 1 - chunk.start : last - 1 - chunk.start])
            tokens = torch.from_numpy(self._table.prompt[chunk.row, 0, first:last].astype(np.int64)).to(logits.device)
            found = logprobs_of(tokens, logits.log_softmax(1), spec.generation.sampling.prompt_logprobs or 0)
            self._table.logprobs.write(chunk.row, PROMPT, first, to_host(found))

    def _write_vector(self, spec: SequenceSpec, chunk: PrefillChunk, hidden: Tensor) -> None:
        """Write the last hidden state, or the sum of all up to the chunk's end."""
        vector = (hidden[-1].double() if spec.generation.pooling == "last" else hidden.sum(0, dtype=torch.float64)).cpu().numpy()
        if spec.generation.pooling == "mean" and chunk.start:
            vector = vector + self._table.vectors.read(chunk.row, chunk.start)
        self._table.vectors.write(chunk.row, chunk.start, chunk.end, vector)

    def _chunk(self, spec: SequenceSpec, chunk: PrefillChunk) -> Chunk:
        ids = torch.from_numpy(self._ids(spec, chunk))
        embeds = self._model.embed(ids)
        deep = self._embeddings.read(chunk.spans, chunk.start, embeds)
        num_pages = -(-chunk.end // self._page_tokens)
        block_table = self._table.prefill_pages(chunk.row, chunk.member)[:num_pages].astype(np.int64)
        positions = torch.from_numpy(self._chunk_positions(spec, chunk))
        state = StateRefs(chunk.state_from, chunk.state_to, chunk.log, tuple(chunk.snapshots))
        runs = [] if chunk.member else whole_runs(self._config.language, spec.spans)
        pictures = within(runs, chunk.start, chunk.end)
        windows = torch.from_numpy(self._table.prefill_window_pages(chunk.row, chunk.member)[:num_pages].astype(np.int64))
        return Chunk(embeds, positions, chunk.start, torch.from_numpy(block_table), state, deep, ids, pictures, windows)

    def _ids(self, spec: SequenceSpec, chunk: PrefillChunk) -> NDArray[np.int64]:
        """Ids [start, end) of the prompt followed by the generated ids."""
        num_prompt = spec.num_companion_tokens if chunk.member else spec.num_prompt_tokens
        prompt = self._table.prompt[chunk.row, chunk.member, chunk.start : min(chunk.end, num_prompt)]
        generated = self._table.ids[chunk.row, max(0, chunk.start - num_prompt) : max(0, chunk.end - num_prompt)]
        return np.concatenate((prompt, generated), dtype=np.int64, casting="unsafe")

    def _chunk_positions(self, spec: SequenceSpec, chunk: PrefillChunk) -> NDArray[np.int64]:
        """M-RoPE positions, int64 [3, end - start]."""
        key = (chunk.row, chunk.row_generation, chunk.member)
        if key not in self._positions:
            num_tokens = spec.num_companion_tokens if chunk.member else spec.num_prompt_tokens
            spans = [] if chunk.member else spec.spans
            self._positions[key] = family_of(self._config).positions(self._config, num_tokens, spans)
            if len(self._positions) > KEPT_POSITIONS:
                self._positions.popitem(last=False)
        prompt, delta = self._positions[key]
        num_prompt = prompt.shape[1]
        beyond = np.arange(max(chunk.start, num_prompt), max(chunk.end, num_prompt)) + delta
        inside = prompt[:, chunk.start : min(chunk.end, num_prompt)]
        return np.concatenate((inside, np.broadcast_to(beyond, (3, len(beyond)))), axis=1)


def _scored(spec: SequenceSpec, chunk: PrefillChunk) -> range:
    """Return the prompt's tokens behind the chunk's, each by one, whose log-probabilities are asked for."""
    sampling, num_tokens = spec.generation.sampling, spec.num_prompt_tokens
    if sampling.prompt_logprobs is None or chunk.member:
        return range(0)
    first = num_tokens - sampling.prompt_logprobs_last if sampling.prompt_logprobs_last else 1
    return range(max(first, chunk.start + 1), min(chunk.end + 1, num_tokens))


def _is_pooled(spec: SequenceSpec, chunk: PrefillChunk) -> bool:
    return spec.generation.pooling == "mean" or spec.generation.pooling == "last" and chunk.end == spec.num_prompt_tokens


def _is_read(spec: SequenceSpec, chunk: PrefillChunk) -> bool:
    """Return whether its hidden states are needed."""
    return bool(_scored(spec, chunk)) or _is_pooled(spec, chunk)
