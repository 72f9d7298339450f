"""A sequence table and pools on tmpfs with a model on them, and the controller's part: rows, pages, plans, phases."""

from collections.abc import Callable, Collection, Sequence

import numpy as np
import torch

from mmrt.actors.decode.prompt_lookup import PromptLookup
from mmrt.actors.decode.running_set import Grammars, RunningSet
from mmrt.actors.host.device import Completion
from mmrt.actors.host.embedding_pages import HostEmbeddingPages
from mmrt.actors.prefill import PrefillWorker
from mmrt.models.architecture import ModelConfig
from mmrt.models.lm.decoder import AfterLayer, Chunk, Decoder, StateRows, Stream
from mmrt.models.lm.language_model import LanguageModel
from mmrt.models.sampling.sampler import CpuSampler
from mmrt.runtime.bus.messages import Done, Generation, PageRun, Pooling, SequenceSpec
from mmrt.runtime.bus.plans import EmbeddingSpan, Prefill, PrefillChunk
from mmrt.runtime.bus.sampling import Sampling
from mmrt.runtime.bus.wire import encode
from mmrt.schema.media import ItemShape, MediaSpan, SegmentShape
from mmrt.schema.rows import EndCode, Phase
from mmrt.shm.pool import PagePool
from mmrt.shm.run_directory import RunDirectory
from mmrt.shm.sequence_table import SequenceTable
from mmrt.shm.step_gaps import StepGaps

PAGE_TOKENS = 16
EMBEDDING_PAGE_TOKENS = 32
MAX_CONTEXT = 256
Weights = dict[str, torch.Tensor]
GREEDY = Sampling(temperature=0)


class Counting:
    """A decoder whose next token is the input token plus one. ``broken``: input ids with which a forward raises."""

    def __init__(self, vocab_size: int, broken: frozenset[int] = frozenset()) -> None:
        self.vocab_size = vocab_size
        self.broken = broken
        self.num_steps = 0

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        return torch.zeros(len(ids), 1)

    def prefill(
        self,
        chunks: list[Chunk],
        wanted: Collection[int] = (),
        after_layer: AfterLayer | None = None,
        ends: Collection[int] = (),
        stream: Stream | None = None,
        first: int = 0,
    ) -> list[torch.Tensor]:
        return [chunks[index].embeds for index in wanted]

    def prefill_layers(
        self, chunks: list[Chunk], layers: range, stream: Stream | None = None, after_layer: AfterLayer | None = None
    ) -> Stream:
        raise AssertionError("it has no layers")

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return torch.zeros(len(hidden), self.vocab_size)

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
        if self.broken & set(ids.tolist()):
            raise RuntimeError("this one cannot be computed")
        assert block_tables.shape[1] * PAGE_TOKENS >= int(lengths.max())
        self.num_steps += 1
        return torch.nn.functional.one_hot(ids + 1, self.vocab_size).float()


class Row:
    """One generation of a row as the controller sees it."""

    def __init__(self, row: int, generation: int, spec: SequenceSpec) -> None:
        self.row = row
        self.generation = generation
        self.spec = spec
        self.place = (row, generation)


class Bench:
    """All that decode and prefill share, and a controller's hands."""

    def __init__(
        self,
        run: RunDirectory,
        config: ModelConfig,
        weights: Weights,
        model: Decoder | None = None,
        *,
        launches_ahead: bool = False,
        grammars: Grammars | None = None,
        lookup: Callable[[SequenceTable, int], PromptLookup] | None = None,
    ) -> None:
        self.run = run
        self.lookup = lookup
        self.grammars = grammars
        self.launches_ahead = launches_ahead
        self.config = config
        self.table = SequenceTable.create(run, 8, MAX_CONTEXT, MAX_CONTEXT // PAGE_TOKENS)
        self.gaps = StepGaps.create(run, 2)
        self.kv = PagePool.create(run, "kv", 96, config.kv_page_bytes(PAGE_TOKENS))
        self.embeddings = PagePool.create(run, "embedding", 24, EMBEDDING_PAGE_TOKENS * config.embedding_row_bytes())
        self.random = np.random.default_rng(3)
        self.kv.data[:] = self.random.integers(0, 60, self.kv.data.shape, dtype=np.uint8)  # finite garbage, as of earlier rows
        self.model = model or LanguageModel(config, weights, torch.from_numpy(self.kv.data), PAGE_TOKENS)
        pages = HostEmbeddingPages(config, self.embeddings)
        self.worker = PrefillWorker(config, self.model, self.table, pages, PAGE_TOKENS, Completion(torch.device("cpu")))
        self.running = self.new_running_set()
        self._free = self.random.permutation(self.kv.num_pages).tolist()
        self._free_embeddings = self.random.permutation(self.embeddings.num_pages).tolist()

    def new_running_set(self) -> RunningSet:
        """That of the next decode generation."""
        self.running = RunningSet(
            self.config,
            self.model,
            CpuSampler(self.config.language.vocab_size),
            self.table,
            PAGE_TOKENS,
            Completion(torch.device("cpu")),
            launches_ahead=self.launches_ahead,
            grammars=self.grammars,
            lookup=None if self.lookup is None else self.lookup(self.table, PAGE_TOKENS),
        )
        return self.running

    def ids(self, count: int) -> list[int]:
        """Random prompt ids."""
        return self.random.integers(0, 1000, count).tolist()

    def place(
        self,
        prompt: Sequence[int],
        companion: Sequence[int] = (),
        *,
        row: int = 0,
        max_new_tokens: int = 40,
        sampling: Sampling = GREEDY,
        spans: Sequence[MediaSpan] = (),
        ignore_eos: bool = True,
        deadline_s: float = 0.0,
        stop_token_ids: Sequence[int] = (),
        pooling: Pooling | None = None,
    ) -> Row:
        """A prepared row without pages."""
        generation = self.table.begin(row)
        self.table.set_owner(row, 0)
        for member, ids in enumerate((prompt, companion)):
            self.table.write_prompt(row, member, ids)
        spec = SequenceSpec(
            key=100 + row,
            generation=Generation(
                f"r{row}", sampling, deadline_s=deadline_s, stop_token_ids=list(stop_token_ids), ignore_eos=ignore_eos, pooling=pooling
            ),
            num_prompt_tokens=len(prompt),
            num_companion_tokens=len(companion),
            max_new_tokens=max_new_tokens,
            spans=list(spans),
            gateway_generation=1,
        )
        self.table.write_spec(row, encode(spec))
        self.table.set_phase(row, Phase.PREPARE)
        return Row(row, generation, spec)

    def grant(self, row: Row, *num_pages: int) -> None:
        """Pages for each member, neighbours nowhere."""
        for member, count in enumerate(num_pages):
            self.table.append_pages(row.row, member, [self._free.pop() for _ in range(count)])

    def grant_all(self, row: Row) -> None:
        """Pages for all that the row can ever hold."""
        spec = row.spec
        for member, length in enumerate((spec.num_prompt_tokens, spec.num_companion_tokens)):
            if length:
                pages = -(-(length + spec.max_new_tokens - 1) // PAGE_TOKENS)
                self.grant(row, *((0,) * member), pages)

    def prefill(self, row: Row, chunk: int = MAX_CONTEXT, spans: Sequence[EmbeddingSpan] = ()) -> None:
        """Prefill both members but for their last token, unless it counts in a vector, in chunks, over what was committed too."""
        committed = self.table.committed(*row.place)
        spec = row.spec
        for member, length in enumerate((spec.num_prompt_tokens, spec.num_companion_tokens)):
            target = length + committed - (spec.generation.pooling is None) if length else 0
            for start in range(0, target, chunk):
                end = min(start + chunk, target)
                parts = [part for span in spans if not member and (part := clip(span, start, end))]
                plan = Prefill([PrefillChunk(row.row, row.generation, member, start, end, parts)])
                assert self.worker.execute(plan) == Done()

    def to_decode(self, row: Row) -> None:
        self.table.set_phase(row.row, Phase.DECODE)
        self.running.settle()
        self.running.add(*row.place)

    def start(self, row: Row, **how: int | Sequence[EmbeddingSpan]) -> None:
        """Everything from a prepared row to a member of the running set."""
        self.grant_all(row)
        self.prefill(row, **how)  # type: ignore[arg-type]
        self.to_decode(row)

    def preempt(self, row: Row) -> None:
        """The row loses its pages, which others overwrite; it keeps what was committed."""
        self.table.set_phase(row.row, Phase.PREPARE)
        self.running.settle()
        self.running.remove(*row.place)
        lost = [page for member in (0, 1) for page in self.table.pages(row.row, member).tolist()]
        self.table.num_pages[row.row] = 0
        self.kv.data[lost] = self.random.integers(0, 60, (len(lost), self.kv.page_bytes), dtype=np.uint8)
        self._free = lost + self._free

    def committed(self, row: Row) -> list[int]:
        return self.table.ids[row.row, : self.table.committed(*row.place)].tolist()

    def end(self, row: Row) -> EndCode:
        return self.table.end(*row.place)

    def run_to_end(self, limit: int = 400) -> None:
        """Step until nobody is left."""
        for _ in range(limit):
            if not self.running.rows:
                return
            assert self.running.step().rows, "members wait for pages"
        raise AssertionError("no end")

    def image(self, start: int, height: int, width: int) -> tuple[MediaSpan, EmbeddingSpan]:
        """An image of random embedding rows that stands at ``start``, in pages in no order."""
        grid = (1, height, width)
        num_tokens = height * width // 4
        shape = ItemShape("image", grid, num_tokens, [SegmentShape("image", grid, height * width, 1176, num_tokens)])
        pages = [self._free_embeddings.pop() for _ in range(-(-num_tokens // EMBEDDING_PAGE_TOKENS))]
        self.embeddings.generations[pages] += np.uint64(1)
        width = (1 + self.config.num_deep) * self.config.language.hidden_size
        rows = self.random.normal(0, 0.5, (num_tokens, width)).astype(np.float32)
        self.embeddings.scatter_rows(pages, rows)
        source = PageRun(pages, self.embeddings.generations[pages].tolist())
        return MediaSpan(start, shape), EmbeddingSpan(start, num_tokens, 0, source)


def clip(span: EmbeddingSpan, start: int, end: int) -> EmbeddingSpan | None:
    """What a chunk takes of a segment, as the controller's tracker words it."""
    first, last = max(start, span.start), min(end, span.start + span.num_tokens)
    if first >= last:
        return None
    skipped = (first - span.start) // EMBEDDING_PAGE_TOKENS
    used = -(-(last - span.start) // EMBEDDING_PAGE_TOKENS)
    source = PageRun(span.source.pages[skipped:used], span.source.generations[skipped:used])
    return EmbeddingSpan(first, last - first, first - span.start - skipped * EMBEDDING_PAGE_TOKENS, source)
