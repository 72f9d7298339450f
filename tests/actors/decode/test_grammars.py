"""Rows that follow grammars in decode's running set: their answers survive kills and preemption, and one that fails ends alone."""

import json
from pathlib import Path

import pytest
import torch

from mmrt.models.architecture import ModelConfig
from mmrt.models.errors import GrammarError
from mmrt.models.grammar.matcher import Matchers
from mmrt.models.grammar.source import GrammarSource, source_of_choice, source_of_lark, source_of_regex, source_of_schema
from mmrt.models.grammar.text import grammar_text
from mmrt.models.grammar.vocabulary import load_vocabulary
from mmrt.models.text.tokenizer import Tokenizer
from mmrt.runtime.bus.sampling import Sampling
from mmrt.schema.rows import EndCode, Phase
from mmrt.shm.run_directory import RunDirectory
from mmrt.tests.actors.bench import Bench, Row, Weights

both_ways = pytest.mark.parametrize("launches_ahead", [False, True], ids=["as told", "ahead"])
RECORD = source_of_schema(
    {
        "type": "object",
        "properties": {"id": {"type": "string", "pattern": "^[a-f0-9]{12}$"}, "n": {"type": "integer", "minimum": 5, "maximum": 4999}},
        "required": ["id", "n"],
        "additionalProperties": False,
    }
)


@pytest.fixture(scope="module")
def matchers(tiny: tuple[ModelConfig, Weights], checkpoint: Path) -> Matchers:
    return Matchers(load_vocabulary(checkpoint, tiny[0]))


@pytest.fixture
def bench(run: RunDirectory, tiny: tuple[ModelConfig, Weights], matchers: Matchers, launches_ahead: bool) -> Bench:
    return Bench(run, *tiny, launches_ahead=launches_ahead, grammars=matchers)


@pytest.fixture(scope="module")
def tokenizer(checkpoint: Path) -> Tokenizer:
    return Tokenizer.load(checkpoint)


def asks(source: GrammarSource, **sampling: float) -> Sampling:
    return Sampling(**{"temperature": 1.0, "seed": 3, **sampling}, grammar=grammar_text(source))  # type: ignore[arg-type]


def place(bench: Bench, source: GrammarSource = RECORD, row: int = 0, max_new_tokens: int = 110, **sampling: float) -> Row:
    companion = [9, 8, 7] if "guidance_scale" in sampling else []
    placed = bench.place(
        list(range(50, 70)), companion, row=row, max_new_tokens=max_new_tokens, sampling=asks(source, **sampling), ignore_eos=False
    )
    return placed


def check_record(text: str) -> None:
    record = json.loads(text)
    assert len(record["id"]) == 12 and 5 <= record["n"] <= 4999 and len(record) == 2


@both_ways
def test_answers_follow_their_grammars(bench: Bench, tokenizer: Tokenizer) -> None:
    """Beside a row that follows none, whose answer is the same as alone: greedy, drawn, guided, penalised and biased."""
    plain = bench.place([5, 6, 7], row=7, max_new_tokens=30)
    bench.start(plain)
    bench.run_to_end()
    alone = bench.committed(plain)
    bench.table.set_phase(7, Phase.FREE)
    plain = bench.place([5, 6, 7], row=7, max_new_tokens=30)
    options: list[dict[str, float]] = [
        {"temperature": 0},
        {"top_k": 4},
        {"guidance_scale": 3.0},
        {"min_p": 0.1, "repetition_penalty": 1.9},
    ]
    options += [{"frequency_penalty": 2.0, "top_p": 0.5}, {"min_tokens": 50}]
    rows = [place(bench, row=row, **how) for row, how in enumerate(options)]
    for one in (*rows, plain):
        bench.start(one)
    bench.run_to_end()
    assert bench.committed(plain) == alone
    texts = [tokenizer.decode(bench.committed(row)) for row in rows]
    for row, text in zip(rows, texts, strict=True):
        assert bench.end(row) == EndCode.STOP
        check_record(text)
    assert len(set(texts)) > 3


@both_ways
@pytest.mark.parametrize("how", [{}, {"guidance_scale": 2.0, "frequency_penalty": 0.5}], ids=["drawn", "guided"])
def test_a_new_generation_and_a_preempted_row_go_on(bench: Bench, tokenizer: Tokenizer, how: dict[str, float]) -> None:
    row = place(bench, row=1, **how)
    bench.start(row)
    bench.run_to_end()
    expected = bench.committed(row)
    bench.table.set_phase(1, Phase.FREE)
    row = place(bench, row=1, **how)
    bench.start(row)
    for turn in range(3):
        for _ in range(3):
            bench.running.step()
        if turn % 2:
            bench.preempt(row)
            bench.start(row)
        else:
            bench.new_running_set().add(*row.place)
    bench.run_to_end()
    assert bench.committed(row) == expected
    check_record(tokenizer.decode(expected))


def test_an_answer_ends_where_nothing_can_follow(bench: Bench, tokenizer: Tokenizer) -> None:
    """Without an end-of-sequence token, and in time even where that is the last token allowed."""
    row = place(bench, source_of_choice(["yes"]))
    bench.start(row)
    bench.run_to_end()
    ids = bench.committed(row)
    assert (tokenizer.decode(ids, with_control_tokens=True), bench.end(row)) == ("yes", EndCode.STOP)
    last = place(bench, source_of_choice(["yes"]), row=1, max_new_tokens=len(ids))
    cut = place(bench, source_of_choice(["yes"]), row=2, max_new_tokens=len(ids) - 1 or 1)
    for one in (last, cut):
        bench.start(one)
    bench.run_to_end()
    assert bench.end(last) == EndCode.STOP and (len(ids) == 1 or bench.end(cut) == EndCode.LENGTH)


def test_a_process_that_died_between_the_last_token_and_the_end(bench: Bench) -> None:
    row = place(bench)
    bench.start(row)
    bench.run_to_end()
    ids = bench.committed(row)
    bench.table.ends[row.row] = 0
    bench.new_running_set().add(*row.place)
    assert not bench.running.rows and (bench.end(row), bench.committed(row)) == (EndCode.STOP, ids)


@both_ways
@pytest.mark.parametrize(
    ("source", "answer"),
    [
        (source_of_lark('start: "ab" <[IMAGE]>'), "ab"),
        (source_of_regex("x(a{1,3}){8000}"), "x"),
    ],
    ids=["a dead end", "too much work"],
)
def test_an_answer_that_cannot_go_on_ends_alone(bench: Bench, tokenizer: Tokenizer, source: GrammarSource, answer: str) -> None:
    """What it has drawn without a grammar is not committed."""
    source = source._replace(text=source.text.replace("IMAGE", str(bench.config.placeholder_id("image"))))
    rows = [place(bench, source), place(bench, row=1)]
    for row in rows:
        bench.start(row)
    bench.run_to_end()
    assert [bench.end(row) for row in rows] == [EndCode.GRAMMAR, EndCode.STOP]
    assert answer.startswith(tokenizer.decode(bench.committed(rows[0])))
    check_record(tokenizer.decode(bench.committed(rows[1])))


def test_a_step_that_fails_leaves_every_answer_where_it_was(
    bench: Bench, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps over both rows fail behind the draw, and each row goes on alone."""
    rows = [place(bench, row=row, seed=row) for row in range(2)]
    for row in rows:
        bench.start(row)
    sample, calls = bench.running._sampler.sample, []

    def failing(logits: torch.Tensor, *rest: object) -> torch.Tensor:
        calls.append(len(logits))
        tokens = sample(logits, *rest)  # type: ignore[arg-type]
        if len(logits) == 2 and len(calls) % 3 == 0:
            raise RuntimeError("after the draw")
        return tokens

    monkeypatch.setattr(bench.running._sampler, "sample", failing)
    while bench.running.rows:
        try:
            bench.running.step()
        except RuntimeError:
            bench.running.step_apart()
    assert 1 in calls and 2 in calls
    for row in rows:
        assert bench.end(row) == EndCode.STOP
        check_record(tokenizer.decode(bench.committed(row)))


def test_a_grammar_that_does_not_compile_is_not_added(bench: Bench) -> None:
    row = bench.place([1, 2], sampling=Sampling(grammar="start: ("))
    bench.grant_all(row)
    bench.prefill(row)
    with pytest.raises(GrammarError):
        bench.to_decode(row)
    assert not bench.running.rows
