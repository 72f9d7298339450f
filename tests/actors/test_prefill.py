"""The prefill worker on real pages: how a prompt is cut into chunks and where its embedding rows lie makes no difference."""

from collections.abc import Collection

import numpy as np
import pytest
import torch

from mmrt.actors.host.device import Completion
from mmrt.actors.host.embedding_pages import HostEmbeddingPages
from mmrt.actors.prefill import PrefillWorker
from mmrt.models.architecture import ModelConfig
from mmrt.models.lm.decoder import AfterLayer, Chunk, Stream
from mmrt.models.lm.language_model import LanguageModel
from mmrt.runtime.bus.messages import Done, Pooling, decode_sequence_spec
from mmrt.runtime.bus.plans import Prefill, PrefillChunk
from mmrt.runtime.bus.sampling import Sampling
from mmrt.schema.rows import Phase
from mmrt.shm.errors import StalePage
from mmrt.shm.logprob_file import PROMPT
from mmrt.shm.run_directory import RunDirectory
from mmrt.tests.actors.bench import PAGE_TOKENS, Bench, Counting, Row, Weights


def cache(bench: Bench, row: Row, num_tokens: int, member: int = 0) -> torch.Tensor:
    """A member's K and V of its first tokens, float32 [num_layers, num_tokens, ...]."""
    pages = bench.table.pages(row.row, member).astype(np.int64)
    layers = bench.config.language.num_layers
    values = torch.from_numpy(bench.kv.data[pages]).view(torch.float32).view(len(pages), layers, PAGE_TOKENS, -1)
    return values.transpose(0, 1).reshape(layers, len(pages) * PAGE_TOKENS, -1)[:, :num_tokens]


@pytest.mark.parametrize("chunk", [1, 7, 16, 33, 200])
def test_chunks_add_up_to_the_whole(bench: Bench, chunk: int) -> None:
    prompt = bench.ids(70)
    media, rows = bench.image(9, 14, 14)  # 49 tokens: two pages, the second half full
    caches = []
    for index, step in enumerate((200, chunk)):
        row = bench.place(prompt, row=index, spans=[media])
        bench.grant_all(row)
        bench.prefill(row, step, [rows])
        caches.append(cache(bench, row, 69))
    torch.testing.assert_close(caches[1], caches[0], atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("chunk", [1, 7, 33])
def test_rows_of_several_parts_add_up_too(run: RunDirectory, deep: tuple[ModelConfig, Weights], chunk: int) -> None:
    """Beside a text in the same plans, which stays what it is."""
    bench = Bench(run, *deep)
    assert bench.config.num_deep == 3
    media, rows = bench.image(9, 14, 14)
    prompt, caches = bench.ids(70), []
    for index, step in enumerate((200, chunk)):
        row = bench.place(prompt, row=index, spans=[media])
        bench.grant_all(row)
        bench.prefill(row, step, [rows])
        caches.append(cache(bench, row, 69))
    torch.testing.assert_close(caches[1], caches[0], atol=2e-5, rtol=1e-4)
    words = bench.ids(30)
    texts = [bench.place(words, row=index) for index in (2, 3)]
    for text in texts:
        bench.grant_all(text)
    bench.prefill(texts[0])
    seen = [PrefillChunk(1, row.generation, 0, 0, 69, [rows]), PrefillChunk(3, texts[1].generation, 0, 0, 29, [])]
    assert bench.worker.execute(Prefill(seen)) == Done()
    torch.testing.assert_close(cache(bench, texts[1], 29), cache(bench, texts[0], 29), atol=2e-5, rtol=1e-4)
    torch.testing.assert_close(cache(bench, row, 69), caches[0], atol=2e-5, rtol=1e-4)
    numbers = bench.embeddings.gather_rows(rows.source.pages, bench.config.embedding_row_bytes(), 49).view(np.float32).reshape(49, -1)
    numbers[:, bench.config.language.hidden_size :] = 0
    bench.embeddings.scatter_rows(rows.source.pages, numbers)
    bench.prefill(row, chunk, [rows])
    changed = (cache(bench, row, 69) - caches[0]).abs().amax((0, 2)) > 1e-3
    assert not changed[:9].any() and changed[9:58].all(), "the parts behind the embedding count"


def test_both_members_in_one_plan(bench: Bench) -> None:
    prompt, companion = bench.ids(40), bench.ids(21)
    apart, together = (bench.place(prompt, companion, row=index) for index in (0, 1))
    for row in (apart, together):
        bench.grant_all(row)
    bench.prefill(apart)
    chunks = [PrefillChunk(1, together.generation, 0, 0, 39, []), PrefillChunk(1, together.generation, 1, 0, 20, [])]
    assert bench.worker.execute(Prefill(chunks)) == Done()
    for member, num_tokens in ((0, 39), (1, 20)):
        expected = cache(bench, apart, num_tokens, member)
        torch.testing.assert_close(cache(bench, together, num_tokens, member), expected, atol=2e-5, rtol=1e-4)


def test_a_chunk_may_reach_into_what_was_generated(bench: Bench) -> None:
    """Prompt and generated ids are one text: the same as a longer prompt."""
    ids = bench.ids(50)
    whole, resumed = bench.place(ids, row=0), bench.place(ids[:30], row=1)
    for token in ids[30:]:
        bench.table.commit(np.array([1]), np.array([resumed.generation]), np.array([token]))
    for row in (whole, resumed):
        bench.grant(row, 4)
    bench.prefill(whole)
    bench.prefill(resumed, chunk=20)  # [0, 20), [20, 40), [40, 49)
    torch.testing.assert_close(cache(bench, resumed, 49), cache(bench, whole, 49), atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("chunk", [7, 16, 200])
def test_log_probabilities_of_a_prompt(bench: Bench, chunk: int) -> None:
    """In any chunks, beside rows without, what decode says when it feeds the prompt token by token."""
    ids = bench.ids(150)
    row = bench.place(ids, row=3, max_new_tokens=1, sampling=Sampling(prompt_logprobs=2))
    silent = bench.place(bench.ids(20), row=4)
    for one in (row, silent):
        bench.grant_all(one)
        bench.prefill(one, chunk=chunk)
    found = bench.table.logprobs.read(3, PROMPT, 1, 150, 2)
    pages = torch.from_numpy(bench.table.block_table[3, 0].astype(np.int64))[None]
    for index in range(0, 149, 37):
        at, length = torch.tensor([index]), torch.tensor([index + 1])
        logits = bench.model.decode(torch.tensor(ids[index : index + 1]), at.expand(3, -1), length, pages)
        expected = logits.log_softmax(1)[0]
        assert abs(float(expected[ids[index + 1]]) - found.own[index]) < 1e-4
        np.testing.assert_allclose(found.values[index], expected.topk(2).values.numpy(), atol=1e-4)
        assert found.rank[index] == 1 + int((expected > expected[ids[index + 1]]).sum())
    with pytest.raises(ValueError, match="no records"):
        bench.table.logprobs.read(4, PROMPT, 1, 20, 2)


def test_log_probabilities_of_the_last_tokens_alone(bench: Bench) -> None:
    """Those of all, as far as they are asked for, wherever chunks begin."""
    ids = bench.ids(60)
    whole = bench.place(ids, row=0, max_new_tokens=1, sampling=Sampling(prompt_logprobs=1))
    bench.grant_all(whole)
    bench.prefill(whole)
    expected = bench.table.logprobs.read(0, PROMPT, 1, 60, 1)
    for chunk in (200, 59, 57, 16, 1):
        row = bench.place(ids, row=1, max_new_tokens=1, sampling=Sampling(prompt_logprobs=1, prompt_logprobs_last=4))
        bench.grant_all(row)
        bench.prefill(row, chunk)
        np.testing.assert_allclose(bench.table.logprobs.read(1, PROMPT, 56, 60, 1).own, expected.own[55:], atol=1e-4)
        bench.table.set_phase(1, Phase.FREE)


@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_vectors(bench: Bench, pooling: Pooling) -> None:
    """In any chunks, beside a row without, and when a chunk is computed again after its vector was written: that prefill was killed
    before it could say so."""
    prompt = bench.ids(70)
    media, rows = bench.image(9, 14, 14)
    found = []
    for index, step in enumerate((200, 7, 33)):
        row, silent = bench.place(prompt, row=index, spans=[media], pooling=pooling), bench.place(bench.ids(3), row=5)
        for one in (row, silent):
            bench.grant_all(one)
            bench.prefill(one, step, [rows] if one is row else [])
        again = PrefillChunk(index, row.generation, 0, (69 // step) * step, 70, [])
        if again.start >= 58:  # behind the picture
            assert bench.worker.execute(Prefill([again])) == Done()
        found.append(bench.table.vectors.read(index, 70))
        with pytest.raises(ValueError, match="row 5 has no vector of 3 tokens"):
            bench.table.vectors.read(5, 3)
        bench.table.set_phase(5, Phase.FREE)
    spec = decode_sequence_spec(bench.table.read_spec(0))
    chunk = bench.worker._chunk(spec, PrefillChunk(0, 1, 0, 0, 70, [rows]))
    (states,) = bench.model.prefill([chunk], [0])
    expected = states[-1] if pooling == "last" else states.sum(0)
    for vector in found:
        np.testing.assert_allclose(vector, expected.numpy(), atol=1e-3, rtol=1e-4)


def test_positions_behind_an_image_go_on_after_the_prompt(run: RunDirectory, tiny: tuple[ModelConfig, Weights]) -> None:
    seen: list[Chunk] = []

    class Recording(Counting):
        def embed(self, ids: torch.Tensor) -> torch.Tensor:
            return torch.zeros(len(ids), tiny[0].language.hidden_size)

        def prefill(
            self,
            chunks: list[Chunk],
            wanted: Collection[int] = (),
            after_layer: AfterLayer | None = None,
            ends: Collection[int] = (),
            stream: Stream | None = None,
            first: int = 0,
        ) -> list[torch.Tensor]:
            seen.extend(chunks)
            return []

    bench = Bench(run, *tiny, Recording(tiny[0].language.vocab_size))
    media, rows = bench.image(4, 8, 8)  # 16 tokens at 4 .. 8: what follows it begins at 8
    row = bench.place(bench.ids(25), spans=[media])
    for _ in range(6):
        bench.table.commit(np.array([0]), np.array([row.generation]), np.array([3]))
    bench.grant(row, 2)
    bench.prefill(row, 12, [rows])
    positions = torch.cat([chunk.positions for chunk in seen], 1)
    assert positions.shape == (3, 30)
    assert positions[:, :4].tolist() == [[0, 1, 2, 3]] * 3
    assert positions[0, 4:20].tolist() == [4] * 16
    assert positions[:, 20:].tolist() == [list(range(8, 18))] * 3
    assert [(chunk.start, len(chunk.block_table)) for chunk in seen] == [(0, 1), (12, 2), (24, 2)]


def test_a_spec_is_read_once_for_each_chunk(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    read = bench.table.read_spec
    asked: list[int] = []
    monkeypatch.setattr(bench.table, "read_spec", lambda row: asked.append(row) or read(row))
    first, second = (bench.place(bench.ids(20), row=row, pooling="mean") for row in (0, 1))
    for row in (first, second):
        bench.grant_all(row)
    chunks = [PrefillChunk(row.row, row.generation, 0, 0, 19, []) for row in (first, second)]
    assert bench.worker.execute(Prefill(chunks)) == Done()
    assert asked == [0, 1]


def test_rows_of_another_generation_are_left_out(bench: Bench) -> None:
    row = bench.place(bench.ids(20))
    bench.grant_all(row)
    before = cache(bench, row, 19).clone()
    stale = PrefillChunk(row.row, row.generation - 1, 0, 0, 19, [])
    assert bench.worker.execute(Prefill([stale])) == Done()
    assert torch.equal(cache(bench, row, 19), before)


def test_embedding_pages_that_were_given_away_are_not_read(bench: Bench) -> None:
    media, rows = bench.image(2, 8, 8)
    row = bench.place(bench.ids(30), spans=[media])
    bench.grant_all(row)
    bench.embeddings.generations[rows.source.pages[0]] += np.uint64(1)
    with pytest.raises(StalePage):
        bench.prefill(row, spans=[rows])


def test_in_bfloat16_embedding_rows_are_what_was_written(run: RunDirectory, tiny: tuple[ModelConfig, Weights]) -> None:
    import msgspec

    config, weights = tiny
    config = msgspec.structs.replace(config, dtype="bfloat16")
    half = {name: tensor.to(torch.bfloat16) for name, tensor in weights.items()}
    bench = Bench(run, config, half)
    assert isinstance(bench.model, LanguageModel)
    values = torch.randn(9, config.language.hidden_size).to(torch.bfloat16)
    media, rows = bench.image(3, 6, 6)
    bench.embeddings.scatter_rows(rows.source.pages, values.view(torch.uint8).numpy())
    seen: list[Chunk] = []
    bench.model.prefill = lambda chunks, *_: seen.extend(chunks) or []  # type: ignore[method-assign]
    row = bench.place(bench.ids(20), spans=[media])
    bench.grant_all(row)
    bench.prefill(row, 8, [rows])
    embeds = torch.cat([chunk.embeds for chunk in seen])
    assert embeds.dtype == torch.bfloat16
    assert torch.equal(embeds[3:12], values)
    assert torch.equal(embeds[0], half["embed"][int(bench.table.prompt[0, 0, 0])])


def test_pauses_between_layers_change_nothing(bench: Bench) -> None:
    prompt, calls = bench.ids(40), []
    plain, paused = bench.place(prompt, row=0), bench.place(prompt, row=1)
    for row in (plain, paused):
        bench.grant_all(row)
    bench.prefill(plain)
    pages = HostEmbeddingPages(bench.config, bench.embeddings)
    completion = Completion(torch.device("cpu"))
    bench.worker = PrefillWorker(bench.config, bench.model, bench.table, pages, PAGE_TOKENS, completion, lambda: calls.append(1))
    bench.prefill(paused)
    assert torch.equal(cache(bench, paused, 39), cache(bench, plain, 39))
    assert len(calls) == bench.config.language.num_layers - 1, "of the last layer there is little to compute"


def test_plans_in_the_breaks_of_another_change_neither(run: RunDirectory, deep: tuple[ModelConfig, Weights]) -> None:
    """Chunks with a picture whose rows have several parts; between any two of their layers a text of another length."""
    bench = Bench(run, *deep)
    media, rows = bench.image(9, 14, 14)
    prompt, words = bench.ids(70), bench.ids(31)
    plain, paused = (bench.place(prompt, row=index, spans=[media]) for index in (0, 1))
    text, between = (bench.place(words, row=index) for index in (2, 3))
    for row in (plain, paused, text, between):
        bench.grant_all(row)
    bench.prefill(plain, 33, [rows])
    bench.prefill(text)
    worker, num_breaks = bench.worker, 0

    def take_break() -> bool:
        nonlocal num_breaks
        num_breaks += 1
        chunk = PrefillChunk(between.row, between.generation, 0, 0, 30, [])
        assert worker.execute(Prefill([chunk])) == Done()
        return True

    pages, completion = HostEmbeddingPages(bench.config, bench.embeddings), Completion(torch.device("cpu"))
    bench.worker = PrefillWorker(bench.config, bench.model, bench.table, pages, PAGE_TOKENS, completion, take_break)
    bench.prefill(paused, 33, [rows])
    assert num_breaks == 3 * (bench.config.language.num_layers - 1)
    assert torch.equal(cache(bench, paused, 69), cache(bench, plain, 69))
    assert torch.equal(cache(bench, between, 30), cache(bench, text, 30))
