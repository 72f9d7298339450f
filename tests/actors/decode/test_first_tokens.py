"""First tokens that prefill draws: they are those that decode draws, and decode goes on behind them."""

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from mmrt.models.architecture import ModelConfig
from mmrt.runtime.bus.messages import Done
from mmrt.runtime.bus.plans import Prefill, PrefillChunk
from mmrt.runtime.bus.sampling import Sampling
from mmrt.schema.rows import EndCode, Phase
from mmrt.shm.logprob_file import ANSWER, PROMPT
from mmrt.shm.run_directory import RunDirectory
from mmrt.tests.actors.bench import GREEDY, Bench, Row, Weights

PROMPT_IDS = np.random.default_rng(1).integers(0, 1000, 37).tolist()
SAMPLINGS = {
    "greedy": GREEDY,
    "drawn": Sampling(temperature=1.0, top_p=0.9, seed=7),
    "with logprobs": Sampling(temperature=1.0, seed=5, logprobs=3),
    "penalised": Sampling(temperature=0, repetition_penalty=1.2, presence_penalty=0.3),
    "ruled": Sampling(temperature=0, logit_bias=[(5, 3.0)], bad_words=[[5, 5]], min_tokens=9),
}


def execute(bench: Bench, *rows: Row, start: int = 0) -> None:
    """One plan that ends at the prompts' ends."""
    chunks = [PrefillChunk(row.row, row.generation, 0, start, row.spec.num_prompt_tokens, []) for row in rows]
    assert bench.worker.execute(Prefill(chunks)) == Done()


def answer(bench: Bench, row: Row) -> tuple[Any, ...]:
    """Its ids and end, and what is asked for of log-probabilities, which may differ in the last bits."""
    ids, asked = bench.committed(row), row.spec.generation.sampling.logprobs
    if asked is None:
        return ids, bench.end(row)
    own, rank, likeliest, values = bench.table.logprobs.read(row.row, ANSWER, 0, len(ids), asked)
    return ids, bench.end(row), rank.tolist(), likeliest.tolist(), own, values


def test_answers_are_those_of_decode_alone(bench: Bench) -> None:
    """Each on its own, and all in one plan; what was drawn is committed with the plan, which draws once."""
    expected = {}
    for name, sampling in SAMPLINGS.items():
        row = bench.place(PROMPT_IDS, row=7, max_new_tokens=12, sampling=sampling)
        bench.start(row)
        bench.run_to_end()
        found = answer(bench, row)
        expected[name] = tuple(pytest.approx(part, abs=1e-4) if isinstance(part, np.ndarray) else part for part in found)
        bench.table.set_phase(7, Phase.FREE)
    rows = {name: bench.place(PROMPT_IDS, row=at, max_new_tokens=12, sampling=one) for at, (name, one) in enumerate(SAMPLINGS.items())}
    first, *others = rows.values()
    for row in rows.values():
        bench.grant_all(row)
    began_ns = time.monotonic_ns()
    execute(bench, first)
    execute(bench, *others)
    execute(bench, *rows.values())
    for name, row in rows.items():
        assert bench.committed(row) == expected[name][0][:1], name
        assert began_ns <= (bench.table.first_token_ns(*row.place) or 0) <= time.monotonic_ns()
        bench.to_decode(row)
    bench.run_to_end()
    assert {name: answer(bench, row) for name, row in rows.items()} == expected


@pytest.mark.parametrize("end", ["length", "eos", "stop id"])
def test_a_first_token_may_be_the_last(bench: Bench, end: str) -> None:
    probe = bench.place(PROMPT_IDS, row=6)
    bench.grant_all(probe)
    execute(bench, probe)
    (token,) = bench.committed(probe)
    how: dict[str, Any] = {"length": {"max_new_tokens": 1}, "eos": {"ignore_eos": False}, "stop id": {"stop_token_ids": [token]}}[end]
    if end == "eos":
        bias = [(bench.config.eos_token_ids[0], 100.0)]
        how["sampling"], token = Sampling(temperature=0, logit_bias=bias), bench.config.eos_token_ids[0]
    row = bench.place(PROMPT_IDS, row=1, **how)
    bench.grant_all(row)
    execute(bench, row)
    assert bench.committed(row) == [token]
    assert bench.end(row) == (EndCode.LENGTH if end == "length" else EndCode.STOP)
    bench.to_decode(row)
    assert not bench.running.rows


def test_who_gets_none(bench: Bench) -> None:
    """Chunks that end before; rows with a vector in the place of an answer; one that was preempted; and one that is gone."""
    early, pooled, resumed, gone = (
        bench.place(PROMPT_IDS, row=row, pooling=pooling) for row, pooling in enumerate((None, "last", None, None))
    )
    for row in (early, pooled, resumed, gone):
        bench.grant_all(row)
    bench.table.commit(np.array([2]), np.array([resumed.generation]), np.array([77]))
    bench.table.set_phase(3, Phase.FREE)
    bench.table.begin(3)
    chunks = [PrefillChunk(0, early.generation, 0, 0, 36, [])]
    assert bench.worker.execute(Prefill(chunks)) == Done()
    execute(bench, pooled, resumed, gone)
    assert bench.committed(early) == bench.committed(pooled) == bench.committed(gone) == [] and bench.committed(resumed) == [77]


def test_beside_log_probabilities_of_the_prompt(bench: Bench) -> None:
    """A plan in which some want all hidden states."""
    rows = [
        bench.place(PROMPT_IDS, row=at, sampling=Sampling(temperature=0, prompt_logprobs=asked)) for at, asked in ((0, 1), (1, None))
    ]
    for row in rows:
        bench.grant_all(row)
    execute(bench, *rows)
    assert bench.committed(rows[0]) == bench.committed(rows[1]) != []
    assert bench.table.logprobs.read(0, PROMPT, 1, 37, 1).own.shape == (36,)


@pytest.mark.parametrize("cuts", [(0, 37), (0, 36, 37), (0, 16, 37)])
def test_behind_pictures_whose_rows_have_several_parts(
    run: RunDirectory, deep: tuple[ModelConfig, Weights], cuts: Sequence[int]
) -> None:
    bench = Bench(run, *deep)
    media, rows = bench.image(9, 8, 8)
    plain, drawn = (bench.place(PROMPT_IDS, row=row, spans=[media], max_new_tokens=6) for row in (0, 1))
    bench.start(plain, spans=[rows])
    bench.run_to_end()
    bench.grant_all(drawn)
    for start, end in zip(cuts, cuts[1:], strict=False):
        first, last = max(start, rows.start), min(end, rows.start + rows.num_tokens)
        part = [] if first >= last else [type(rows)(first, last - first, first - rows.start, rows.source)]
        assert bench.worker.execute(Prefill([PrefillChunk(1, drawn.generation, 0, start, end, part)])) == Done()
    assert bench.committed(drawn) == bench.committed(plain)[:1]
    bench.to_decode(drawn)
    bench.run_to_end()
    assert bench.committed(drawn) == bench.committed(plain)
