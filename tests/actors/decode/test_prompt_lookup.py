"""Guesses of decode: answers are those without them, whatever is guessed; and what is guessed is what has paid."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from mmrt.actors.decode import prompt_lookup
from mmrt.actors.decode.batch import Batch, Ints
from mmrt.actors.decode.drawing import Drawing
from mmrt.actors.decode.prompt_lookup import MOST_GUESSES, MOST_TOKENS, Guesses, PromptLookup, StepTime, look_up
from mmrt.models.architecture import ModelConfig
from mmrt.models.grammar.matcher import Matchers
from mmrt.models.grammar.source import source_of_schema
from mmrt.models.grammar.text import grammar_text
from mmrt.models.grammar.vocabulary import load_vocabulary
from mmrt.runtime.bus.sampling import Sampling
from mmrt.schema.rows import EndCode, Phase
from mmrt.shm.logprob_file import ANSWER
from mmrt.shm.run_directory import RunDirectory
from mmrt.shm.sequence_table import SequenceTable
from mmrt.tests.actors.bench import GREEDY, Bench, Counting, Row, Weights

RECORD = source_of_schema(
    {
        "type": "object",
        "properties": {"name": {"type": "string", "pattern": "^[a-z]{9}$"}, "n": {"enum": [100, 200]}},
        "required": ["name", "n"],
    }
)
NUM_NEW = 40
SAMPLINGS = {
    "greedy": GREEDY,
    "drawn": Sampling(temperature=1.0, top_p=0.9, seed=7),
    "guided": Sampling(temperature=0.8, guidance_scale=2.0, seed=3),
    "with logprobs": Sampling(temperature=1.0, seed=5, logprobs=3),
    "guided with logprobs": Sampling(temperature=0, guidance_scale=1.5, logprobs=2),
    "penalised": Sampling(temperature=0, repetition_penalty=1.2, presence_penalty=0.3),
    "ruled": Sampling(temperature=0, logit_bias=[(5, 3.0)], bad_words=[[5, 5]], min_tokens=9),
    "grammar": Sampling(temperature=1.0, seed=3, grammar=grammar_text(RECORD)),
    "greedy grammar": Sampling(temperature=0, grammar=grammar_text(RECORD), logprobs=1),
}


class Informed(PromptLookup):
    """Guesses some of the ids that an answer will have, and then others; ``_pays`` always."""

    answers: dict[int, list[int]]

    def __init__(self, table: SequenceTable, page_tokens: int) -> None:
        super().__init__(table, page_tokens)
        self.random = np.random.default_rng(5)
        self.num_made = 0

    def _pays(self, share: float, expected: float, num_tokens: int, width: int) -> bool:
        return True

    def _look_up(self, batch: Batch, number: int) -> Ints:
        most = min(MOST_GUESSES, batch.room(self._table, self._page_tokens, number))
        count = int(batch.count_N[number])
        ids = np.array(self.answers.get(int(batch.row_N[number]), [])[count : count + max(most, 0)], np.int64)
        if ids.size and self.random.random() < 0.5:
            ids[self.random.integers(len(ids)) :] = self.random.integers(0, 1000)
        self.num_made += len(ids)
        return ids


@pytest.fixture(scope="module")
def matchers(tiny: tuple[ModelConfig, Weights], checkpoint: Path) -> Matchers:
    return Matchers(load_vocabulary(checkpoint, tiny[0]))


@pytest.fixture
def bench(run: RunDirectory, tiny: tuple[ModelConfig, Weights], matchers: Matchers) -> Bench:
    return Bench(run, *tiny, grammars=matchers)


def place(bench: Bench, name: str, row: int) -> Row:
    sampling = SAMPLINGS[name]
    companion = [9, 8, 7, 6] if sampling.guidance_scale != 1 else []
    return bench.place(
        np.random.default_rng(1).integers(0, 1000, 37).tolist(),
        companion,
        row=row,
        max_new_tokens=NUM_NEW,
        sampling=sampling,
        ignore_eos=not sampling.grammar,
    )


def answer(bench: Bench, row: Row) -> tuple[object, ...]:
    """Its ids and end, and the ranks and log-probabilities of ids, which may differ in the last bits."""
    ids, asked = bench.committed(row), row.spec.generation.sampling.logprobs
    if asked is None:
        return ids, bench.end(row)
    own, rank, likeliest, values = bench.table.logprobs.read(row.row, ANSWER, 0, len(ids), asked)
    return ids, bench.end(row), rank.tolist(), likeliest.tolist(), own, values


def alone(bench: Bench, names: Sequence[str]) -> dict[str, tuple[Any, ...]]:
    """Answers without guesses, one by one."""
    found = {}
    for name in names:
        row = place(bench, name, 7)
        bench.start(row)
        bench.run_to_end()
        found[name] = tuple(pytest.approx(part, abs=1e-4) if isinstance(part, np.ndarray) else part for part in answer(bench, row))
        bench.table.set_phase(7, Phase.FREE)
    return found


@pytest.mark.parametrize("name", SAMPLINGS)
def test_an_answer_is_the_one_without_guesses(bench: Bench, name: str) -> None:
    """And so is one that goes on in a new process, in mid-way, and one that was preempted."""
    expected = alone(bench, [name])[name]
    Informed.answers = {row: expected[0] for row in range(8)}
    bench.lookup = Informed
    for row_number, how in enumerate(("straight on", "another process", "preempted")):
        lookup = bench.new_running_set()._lookup
        row = place(bench, name, row_number)
        bench.start(row)
        num_steps = 0
        while bench.running.rows:
            assert bench.running.step().rows
            num_steps += 1
            if how == "another process":
                bench.new_running_set().add(*row.place)
            if how == "preempted" and num_steps == 3 and bench.running.rows:
                bench.preempt(row)
                bench.start(row)
        assert answer(bench, row) == expected
        if how == "straight on":
            assert isinstance(lookup, Informed)
            has_guesses = name not in ("penalised", "ruled")
            assert bool(lookup.num_made) == has_guesses and (num_steps < len(expected[0]) * 3 / 4) == has_guesses


def test_rows_of_all_kinds_beside_each_other(bench: Bench) -> None:
    names = list(SAMPLINGS)[:8]
    expected = alone(bench, names)
    Informed.answers = {row: expected[name][0] for row, name in enumerate(names)}
    bench.lookup = Informed
    bench.new_running_set()
    rows = [place(bench, name, row) for row, name in enumerate(names)]
    for row in rows:
        bench.start(row)
        bench.running.step()
    bench.run_to_end()
    assert {name: answer(bench, row) for name, row in zip(names, rows, strict=True)} == expected


def test_a_row_writes_no_page_but_its_own_and_ends_where_it_should(bench: Bench) -> None:
    """Pages come one by one, so there is seldom room for all guesses; the answer ends at an id among them."""
    ids, _ = alone(bench, ["greedy"])["greedy"]
    Informed.answers = {0: [*ids, 1, 2, 3, 4, 5, 6, 7, 8]}
    bench.lookup = Informed
    bench.new_running_set()
    stop = ids[33]
    expected = ids[: ids.index(stop) + 1]
    prompt = np.random.default_rng(1).integers(0, 1000, 37).tolist()
    row = bench.place(prompt, max_new_tokens=NUM_NEW, stop_token_ids=[stop])
    bench.grant(row, 3)
    bench.prefill(row)
    others = np.setdiff1d(np.arange(bench.kv.num_pages), bench.table.pages(0, 0))
    before = bench.kv.data[others].copy()
    bench.to_decode(row)
    while bench.running.rows:
        if not bench.running.step().rows:
            assert (bench.kv.data[others] == before).all()
            bench.grant(row, 1)
            others = np.setdiff1d(others, bench.table.pages(0, 0))
            before = bench.kv.data[others].copy()
    assert (bench.kv.data[others] == before).all()
    assert (bench.committed(row), bench.end(row)) == (expected, EndCode.STOP)


@pytest.fixture
def counting(run: RunDirectory, tiny: tuple[ModelConfig, Weights]) -> Callable[..., tuple[Bench, Counting]]:
    def make(lookup: Callable[[SequenceTable, int], PromptLookup] = PromptLookup) -> tuple[Bench, Counting]:
        config, weights = tiny
        model = Counting(config.language.vocab_size)
        return Bench(run, config, weights, model, lookup=lookup), model

    return make


class Cheap(PromptLookup):
    """A token more costs a twentieth of a step."""

    def took(self, num_tokens: int, seconds: float) -> None:
        super().took(num_tokens, 1 + 0.05 * num_tokens)


def test_what_stood_before_is_guessed(counting: Callable[..., tuple[Bench, Counting]]) -> None:
    """The model counts on; its prompt has counted that far before."""
    bench, model = counting(Cheap)
    row = bench.place([*range(100, 160), 5, 6, 7, 100, 101, 102], max_new_tokens=50)
    bench.grant_all(row)
    bench.to_decode(row)
    bench.run_to_end()
    assert bench.committed(row) == list(range(103, 153))
    assert model.num_steps < 12
    checked, right = bench.running.num_guesses
    assert checked >= right == 50 - model.num_steps


def test_wrong_guesses_are_given_up_and_tried_again(counting: Callable[..., tuple[Bench, Counting]]) -> None:
    """The prompt has each three ids that the model will count, and another one behind them."""
    widths = []

    class Noted(Cheap):
        def took(self, num_tokens: int, seconds: float) -> None:
            super().took(num_tokens, seconds)
            widths.append(num_tokens)

    bench, _ = counting(Noted)
    prompt = [id for at in range(500, 545) for id in (at, at + 1, at + 2, 7)]
    row = bench.place([*prompt, 500, 501, 502], max_new_tokens=40)
    bench.grant_all(row)
    bench.to_decode(row)
    bench.run_to_end()
    assert bench.committed(row) == list(range(503, 543))
    assert 1 < sum(width > 1 for width in widths) < 20 and widths[20:] == [1] * 20


def test_a_step_that_fails_behind_right_guesses_ends_who_had_ended(
    counting: Callable[..., tuple[Bench, Counting]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And nothing is guessed for the others for a while."""
    bench, model = counting(Cheap)
    short, long = (bench.place([*range(100, 130), 100, 101, 102], row=row, max_new_tokens=count) for row, count in ((0, 1), (1, 20)))
    for row in (short, long):
        bench.grant_all(row)
        bench.to_decode(row)

    def fail(*_: object) -> tuple[Ints, Ints]:
        raise RuntimeError("behind")

    monkeypatch.setattr(Drawing, "_draw_behind", fail)
    with pytest.raises(RuntimeError, match="behind"):
        bench.running.step()
    assert (bench.committed(short), bench.end(short)) == ([103], EndCode.LENGTH)
    assert bench.running.step_apart().rows == [1]
    bench.run_to_end()
    assert bench.committed(short) == [103] and bench.committed(long) == list(range(103, 123))


def test_a_step_that_fails_further_behind_commits_all_of_who_ends_or_none(
    counting: Callable[..., tuple[Bench, Counting]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One answer ends behind its first guess, then the other's second one fails: neither has an end before its last id."""

    class Sure(PromptLookup):
        def _pays(self, share: float, expected: float, num_tokens: int, width: int) -> bool:
            return True

    bench, _ = counting(Sure)
    short, long = (bench.place([*range(100, 130), 100, 101, 102], row=row, max_new_tokens=count) for row, count in ((0, 2), (1, 20)))
    for row in (short, long):
        bench.grant_all(row)
        bench.to_decode(row)
    draw = Drawing._draw_behind

    def fail(self: Drawing, batch: Batch, guesses: Guesses, behind: Tensor, right: Ints) -> tuple[Ints, Ints]:
        if guesses.place_G[right[0]] == 2:
            raise RuntimeError("further behind")
        return draw(self, batch, guesses, behind, right)

    with monkeypatch.context() as patched:
        patched.setattr(Drawing, "_draw_behind", fail)
        with pytest.raises(RuntimeError, match="further behind"):
            bench.running.step()
    assert (bench.committed(short), bench.end(short)) == ([103], EndCode.NONE)
    bench.running.step_apart()
    bench.run_to_end()
    assert bench.committed(short) == [103, 104] and bench.committed(long) == list(range(103, 123))


def test_all_that_are_due_fit_into_a_step(counting: Callable[..., tuple[Bench, Counting]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompt_lookup, "MOST_TOKENS", 11)
    bench, _ = counting(Cheap)
    rows = [bench.place([*range(100, 120), 100, 101, 102], row=row, max_new_tokens=9) for row in range(8)]
    for row in rows:
        bench.grant_all(row)
        bench.to_decode(row)
    batch, lookup = bench.running._current_batch(), bench.running._lookup
    for member in batch.members:
        member.luck.share, member.luck.tried_at = 0.0, -64
    assert lookup is not None and (guesses := lookup.guess(batch)) is not None
    assert guesses.number_G.tolist() == [0, 1, 2] and lookup.guess(batch) is None


def test_many_rows_leave_no_room_for_guesses(counting: Callable[..., tuple[Bench, Counting]]) -> None:
    bench, _ = counting(Cheap)
    rows = [bench.place([*range(100, 120), 100, 101, 102], row=row, max_new_tokens=9) for row in range(8)]
    for row in rows:
        bench.grant_all(row)
        bench.to_decode(row)
    lookup = bench.running._lookup
    assert lookup is not None
    while bench.running.rows:
        guesses = lookup.guess(bench.running._current_batch())
        assert guesses is None or len(bench.running.rows) + len(guesses.id_G) <= MOST_TOKENS
        bench.running.step()
    assert all(bench.committed(row) == list(range(103, 112)) for row in rows)


@given(st.lists(st.integers(0, 3), max_size=40), st.integers(0, 12))
def test_look_up_finds_the_last_place(text: list[int], most: int) -> None:
    found = look_up(np.array(text, np.int32), most).tolist()
    places = [end for end in range(3, len(text)) if text[end - 3 : end] == text[-3:]]
    if not places or not most:
        assert found == []
        return
    behind = text[places[-1] :]
    assert found == [behind[at % len(behind)] for at in range(most)]


def test_a_line_through_the_times_of_steps() -> None:
    time = StepTime()
    assert time.growth(1) == pytest.approx(0.1)
    for _ in range(10):
        time.took(1, 0.02)
    assert time.growth(1) == pytest.approx(0.1)
    for tokens in [1, 5, 9, 3] * 20:
        time.took(tokens, 0.02 + 0.004 * (tokens - 1))
    assert time.growth(1) == pytest.approx(0.2, rel=0.1)
    assert time.growth(6) == pytest.approx(0.1, rel=0.1)
    for tokens in [1, 5, 9, 3] * 50:
        time.took(tokens, 0.02)
    assert time.growth(1) < 0.03


def test_a_slow_first_step_makes_no_guess_free() -> None:
    time = StepTime()
    time.took(1, 1.0)
    for _ in range(20):
        time.took(9, 0.05)
    assert time.growth(1) >= 0.02
