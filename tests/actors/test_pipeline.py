"""Stages of prefill's pipeline on real pages: together they write the bits that one process writes, and a stage can be done again."""

import numpy as np
import pytest
import torch

from mmrt.actors.host.device import Completion
from mmrt.actors.host.embedding_pages import HostEmbeddingPages
from mmrt.actors.host.pipeline import PipelineStage, layers_of_rank, open_streams
from mmrt.actors.prefill import PrefillWorker
from mmrt.models.architecture import ModelConfig
from mmrt.models.config import facts_of
from mmrt.runtime.bus.messages import Done, Pooling, Skipped
from mmrt.runtime.bus.plans import Prefill, PrefillChunk
from mmrt.runtime.bus.sampling import Sampling
from mmrt.runtime.config.runtime_config import MAX_UNANSWERED, parse_config
from mmrt.runtime.controller.scheduling.types import num_relays
from mmrt.runtime.process.memory_layout import plan_layout
from mmrt.shm.logprob_file import PROMPT
from mmrt.shm.run_directory import RunDirectory
from mmrt.tests.actors.bench import PAGE_TOKENS, Bench, Row, Weights, clip

CPU = torch.device("cpu")


def stages(bench: Bench, count: int) -> list[PrefillWorker]:
    """The workers of a pipeline of so many stages, on the bench's pages."""
    config = parse_config(f'[actors]\nlayout = "E+{count}P+D"\n[scheduling]\nprefill_pipeline = true')
    open_streams(bench.run, config, bench.config, writable=True).create()
    actors = [actor for actor in config.instances if actor.startswith("prefill")]
    pages, completion = HostEmbeddingPages(bench.config, bench.embeddings), Completion(CPU)
    return [
        PrefillWorker(
            bench.config,
            bench.model,
            bench.table,
            pages,
            PAGE_TOKENS,
            completion,
            stage=PipelineStage.open(bench.run, config, bench.config, actor, CPU),
        )
        for actor in actors
    ]


def chunks_of(row: Row, first: int, last: int, spans: list, at: int = 0) -> PrefillChunk:
    parts = [part for span in spans if (part := clip(span, first, last))]
    return PrefillChunk(row.row, row.generation, 0, first, last, parts, stream_at=at)


def pages_of(bench: Bench, row: Row) -> np.ndarray:
    """All bytes of a row's KV pages."""
    return bench.kv.data[bench.table.pages(row.row, 0).astype(np.int64)]


@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("kind", ["tiny", "deep"])
def test_stages_write_the_bits_of_one_process(run: RunDirectory, request: pytest.FixtureRequest, kind: str, count: int) -> None:
    """Two rows in the plans, one with a picture whose deep parts reach into later stages; each stage is done twice."""
    model: tuple[ModelConfig, Weights] = request.getfixturevalue(kind)
    bench = Bench(run, *model)
    assert bench.config.language.num_layers >= count
    media, rows = bench.image(9, 14, 14)
    prompt, words, found = bench.ids(70), bench.ids(30), []
    places = [bench.place(ids, row=at, spans=spans) for at, (ids, spans) in enumerate([(prompt, [media]), (words, [])] * 2)]
    workers = stages(bench, count)
    for is_whole, (seen, text) in enumerate([places[:2], places[2:]]):
        for row in (seen, text):
            bench.grant_all(row)
            bench.kv.data[bench.table.pages(row.row, 0).astype(np.int64)] = 0
        for first, last in ((0, 25), (25, 69)):
            parts = [chunks_of(seen, first, last, [rows])]
            if first:
                parts.append(chunks_of(text, 0, 29, [], at=last - first))
            if is_whole:
                assert bench.worker.execute(Prefill(parts)) == Done()
                continue
            for rank, worker in enumerate(workers):
                for _ in range(2):
                    assert worker.execute(Prefill(parts, rank, relay=1)) == Done()
            bench.table.set_prefilled(seen.row, 0, last)
        found.append([pages_of(bench, row) for row in (seen, text)])
    for ours, theirs in zip(*found, strict=True):
        assert np.array_equal(ours, theirs)


def test_a_stage_takes_no_stream_that_was_not_written(bench: Bench) -> None:
    row, workers = bench.place(bench.ids(40)), stages(bench, 2)
    bench.grant_all(row)
    with pytest.raises(ValueError, match="no stream of 39 tokens"):
        workers[1].execute(Prefill([chunks_of(row, 0, 39, [])], 1, 0))


def test_log_probabilities_come_from_the_last_stage(bench: Bench) -> None:
    prompt, workers = bench.ids(40), stages(bench, 2)
    rows = [bench.place(prompt, row=at, sampling=Sampling(temperature=0, prompt_logprobs=3)) for at in (0, 1)]
    for row in rows:
        bench.grant_all(row)
    assert bench.worker.execute(Prefill([chunks_of(rows[0], 0, 39, [])])) == Done()
    plan = [chunks_of(rows[1], 0, 39, [])]
    assert workers[0].execute(Prefill(plan, 0, 0)) == Done()
    with pytest.raises(ValueError, match="no records"):
        bench.table.logprobs.read(1, PROMPT, 1, 40, 3)
    assert workers[1].execute(Prefill(plan, 1, 0)) == Done()
    ours, theirs = (bench.table.logprobs.read(at, PROMPT, 1, 40, 3) for at in (1, 0))
    assert np.array_equal(ours.own, theirs.own) and np.array_equal(ours.ids, theirs.ids)


@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_vectors_come_from_the_last_stage(bench: Bench, pooling: Pooling) -> None:
    prompt, workers = bench.ids(40), stages(bench, 2)
    rows = [bench.place(prompt, row=at, pooling=pooling) for at in (0, 1)]
    for row in rows:
        bench.grant_all(row)
    for first, last in ((0, 25), (25, 40)):
        assert bench.worker.execute(Prefill([chunks_of(rows[0], first, last, [])])) == Done()
        for rank, worker in enumerate(workers):
            for _ in range(2):
                assert worker.execute(Prefill([chunks_of(rows[1], first, last, [])], rank, relay=3)) == Done()
        for row in rows:
            bench.table.set_prefilled(row.row, 0, last)
    assert np.array_equal(*[bench.table.vectors.read(at, 40) for at in (0, 1)])


def test_the_last_stage_draws_the_first_token_once(bench: Bench) -> None:
    prompt, workers = bench.ids(40), stages(bench, 2)
    rows = [bench.place(prompt, row=at) for at in (0, 1)]
    for row in rows:
        bench.grant_all(row)
    assert bench.worker.execute(Prefill([chunks_of(rows[0], 0, 40, [])])) == Done()
    assert workers[0].execute(Prefill([chunks_of(rows[1], 0, 40, [])], 0, 0)) == Done()
    assert bench.table.committed(1, rows[1].generation) == 0
    for _ in range(2):
        assert workers[1].execute(Prefill([chunks_of(rows[1], 0, 40, [])], 1, 0)) == Done()
    assert [bench.table.committed(row.row, row.generation) for row in rows] == [1, 1]
    assert bench.table.ids[1, 0] == bench.table.ids[0, 0]


def test_the_last_stage_leaves_a_chunk_behind_one_that_was_not_done(bench: Bench) -> None:
    """Its token would be drawn over keys and values that are not there."""
    row, workers = bench.place(bench.ids(40)), stages(bench, 2)
    bench.grant_all(row)
    second = Prefill([chunks_of(row, 20, 39, [])], 0, 0)
    assert workers[0].execute(second) == Done()
    rest = Prefill(second.chunks, 1, 0)
    assert workers[1].execute(rest) == Skipped()
    bench.table.set_prefilled(row.row, 0, 20)
    assert workers[1].execute(rest) == Done()
    bench.table.set_prefilled(row.row, 0, 39)
    assert workers[1].execute(rest) == Skipped(), "it was done before"


def test_the_file_of_streams_is_as_large_as_the_layout_says(run: RunDirectory, tiny: tuple[ModelConfig, Weights]) -> None:
    config, model = parse_config('[actors]\nlayout = "E+3P+D"\n[scheduling]\nprefill_pipeline = true'), tiny[0]
    layout, token = plan_layout(config, facts_of(model, PAGE_TOKENS), model.dtype), bytes(model.stream_token_bytes())
    streams = open_streams(run, config, model, writable=True)
    streams.create()
    last = PipelineStage.open(run, config, model, "prefill.1", CPU)._place(num_relays(3, MAX_UNANSWERED) - 1, 1)
    streams.write(last, config.max_prefill_tokens - 1, token)
    assert run.segment_path("streams").stat().st_size == layout.stream_bytes


def test_layers_are_divided_evenly() -> None:
    for num_layers in range(2, 70):
        for count in range(2, min(num_layers, 8) + 1):
            ranges = [layers_of_rank(num_layers, rank, count) for rank in range(count)]
            assert [layer for part in ranges for layer in part] == list(range(num_layers))
            assert {len(part) for part in ranges} <= {num_layers // count, num_layers // count + 1}
