"""decode's running set on a real table: a text is the same whoever continues it, with or without its pages."""

import errno
import os
from collections.abc import Callable

import numpy as np
import pytest
import torch

from mmrt.runtime.bus.sampling import Sampling
from mmrt.schema.rows import EndCode, Phase
from mmrt.tests.actors.bench import GREEDY, MAX_CONTEXT, PAGE_TOKENS, Bench, Counting, Row

NUM_NEW = 40
RANDOM = Sampling(temperature=1.0, top_p=0.9, seed=7)
GUIDED = Sampling(temperature=0, guidance_scale=2.0)
PENALISED = Sampling(temperature=0, repetition_penalty=1.2, presence_penalty=0.3, frequency_penalty=0.4)

RULED = Sampling(temperature=0, logit_bias=[(5, 3.0)], bad_words=[[5, 5], [7], [5, 9, 5]], min_tokens=9)


def text(bench: Bench, row: int = 0, sampling: Sampling = GREEDY) -> Row:
    prompt = np.random.default_rng(1).integers(0, 1000, 37).tolist()
    return bench.place(prompt, row=row, max_new_tokens=NUM_NEW, sampling=sampling)


def pair(bench: Bench, row: int = 0) -> Row:
    random = np.random.default_rng(2)
    prompt, companion = random.integers(0, 1000, 37).tolist(), random.integers(0, 1000, 11).tolist()
    return bench.place(prompt, companion, row=row, max_new_tokens=NUM_NEW, sampling=GUIDED)


def sampled(bench: Bench, row: int = 0) -> Row:
    return text(bench, row, RANDOM)


def penalised(bench: Bench, row: int = 0) -> Row:
    return text(bench, row, PENALISED)


def ruled(bench: Bench, row: int = 0) -> Row:
    return text(bench, row, RULED)


both_ways = pytest.mark.parametrize("launches_ahead", [False, True], ids=["as told", "ahead"])
KINDS = [text, sampled, pair, penalised, ruled]


def uninterrupted(bench: Bench, kind: Callable[..., Row]) -> list[int]:
    row = kind(bench, row=7)
    bench.start(row)
    bench.run_to_end()
    ids = bench.committed(row)
    bench.table.set_phase(7, Phase.FREE)
    assert len(ids) == NUM_NEW and len(set(ids)) > 5
    return ids


@both_ways
@pytest.mark.parametrize("kind", KINDS)
def test_a_new_generation_continues_after_the_last_committed_id(bench: Bench, kind: Callable[..., Row]) -> None:
    expected = uninterrupted(bench, kind)
    row = kind(bench)
    bench.start(row)
    for num_steps in (1, 0, 14, 9):
        for _ in range(num_steps):
            bench.running.step()
        bench.new_running_set().add(*row.place)
    bench.run_to_end()
    assert bench.committed(row) == expected
    assert bench.end(row) == EndCode.LENGTH


@pytest.mark.many
@both_ways
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_steps", [0, 1, 12])
def test_a_preempted_row_is_prefilled_again_and_continues(bench: Bench, kind: Callable[..., Row], num_steps: int) -> None:
    expected = uninterrupted(bench, kind)
    row = kind(bench)
    bench.start(row)
    for _ in range(num_steps):
        bench.running.step()
    bench.preempt(row)
    assert bench.running.rows == [] and not bench.running.step().rows
    bench.start(row, chunk=10)
    bench.run_to_end()
    assert bench.committed(row) == expected


@both_ways
def test_positions_behind_media_survive_a_preemption(bench: Bench) -> None:
    """An image takes fewer positions than tokens: what follows it, generated or not, is shifted."""
    prompt = bench.ids(90)
    media, rows = bench.image(5, 16, 16)
    expected: list[int] = []
    for row_index, num_steps in ((7, 0), (0, 17)):
        row = bench.place(prompt, row=row_index, max_new_tokens=NUM_NEW, spans=[media])
        bench.start(row, chunk=24, spans=[rows])
        for _ in range(num_steps):
            bench.running.step()
        if num_steps:
            bench.preempt(row)
            bench.start(row, chunk=50, spans=[rows])
        bench.run_to_end()
        expected = expected or bench.committed(row)
        assert bench.committed(row) == expected
    alone = bench.place(prompt, row=1, max_new_tokens=NUM_NEW)
    bench.start(alone)
    bench.run_to_end()
    assert bench.committed(alone) != expected, "the image makes no difference"


@both_ways
def test_rows_that_come_and_go_do_not_change_each_other(bench: Bench) -> None:
    expected = {kind: uninterrupted(bench, kind) for kind in (text, pair)}
    first, second, third = pair(bench, 0), text(bench, 1), pair(bench, 2)
    bench.start(first)
    for _ in range(5):
        bench.running.step()
    bench.start(second)
    bench.running.step()
    bench.start(third)
    bench.running.step()
    bench.running.settle()
    bench.running.remove(*second.place)
    bench.running.step()
    bench.running.settle()
    bench.running.add(*second.place)
    bench.run_to_end()
    assert [bench.committed(row) for row in (first, second, third)] == [expected[pair], expected[text], expected[pair]]


@both_ways
def test_who_is_out_of_pages_waits_and_comes_back(counting: Bench) -> None:
    short, long = counting.place([10] * 30, max_new_tokens=40), counting.place([500] * 10, row=1, max_new_tokens=60)
    counting.grant(short, 2)
    counting.grant_all(long)
    for row in (short, long):
        counting.to_decode(row)
    counting.running.step()
    assert counting.running.step().rows == [0, 1]
    assert counting.running.step().rows == [0, 1]  # the token at index 31 is fed: both pages are full
    for _ in range(5):
        assert counting.running.step().rows == [1]
    counting.grant(short, 1)
    counting.running.settle()
    assert sorted(counting.running.step().rows) == [0, 1]
    for _ in range(15):
        counting.running.step()
    assert counting.running.step().rows == [1]
    counting.grant(short, 2)
    counting.run_to_end()
    assert counting.committed(short) == list(range(11, 51))
    assert counting.committed(long) == list(range(501, 561))


@both_ways
def test_a_pair_waits_as_one(counting: Bench) -> None:
    row = counting.place([10] * 3, [20] * 14, max_new_tokens=12, sampling=GUIDED)
    counting.grant(row, 1, 1)
    counting.to_decode(row)
    for _ in range(3):
        assert counting.running.step().rows == [0]
    assert counting.running.step().rows == []  # there is room for the member, not for its companion
    assert len(counting.committed(row)) == 3
    counting.grant(row, 0, 1)
    counting.run_to_end()
    assert len(counting.committed(row)) == 12


@both_ways
def test_nobody_steps_without_any_page(counting: Bench) -> None:
    row = counting.place([1, 2, 3])
    counting.to_decode(row)
    assert counting.running.rows == [0]
    assert counting.running.step().rows == []


@both_ways
@pytest.mark.parametrize("num_prompt", [1, 16, 17, MAX_CONTEXT - 9])
def test_the_context_can_be_filled_to_its_end(counting: Bench, num_prompt: int) -> None:
    room = min(MAX_CONTEXT - num_prompt, 60)
    row = counting.place([7] * num_prompt, max_new_tokens=room)
    counting.grant_all(row)
    counting.to_decode(row)
    counting.run_to_end()
    assert counting.committed(row) == list(range(8, 8 + room))
    assert counting.end(row) == EndCode.LENGTH


@both_ways
@pytest.mark.parametrize(("ignore_eos", "code", "count"), [(False, EndCode.STOP, 6), (True, EndCode.LENGTH, 20)])
def test_an_end_of_sequence_id_ends_unless_it_is_ignored(counting: Bench, ignore_eos: bool, code: EndCode, count: int) -> None:
    eos = min(counting.config.eos_token_ids)
    row = counting.place([eos - 6], max_new_tokens=20, ignore_eos=ignore_eos)
    counting.grant_all(row)
    counting.to_decode(row)
    outcomes = []
    while counting.running.rows:
        outcomes.append(counting.running.step())
    assert counting.committed(row) == list(range(eos - 5, eos - 5 + count))
    assert counting.end(row) == code
    assert [outcome.ended for outcome in outcomes if outcome.ended] == [[(*row.place, code)]]


@both_ways
def test_a_requests_own_stop_tokens_end_it_alone(counting: Bench) -> None:
    rows = [counting.place([4], row=0, max_new_tokens=9, stop_token_ids=[77, 8, 7]), counting.place([4], row=1, max_new_tokens=9)]
    for row in rows:
        counting.grant_all(row)
        counting.to_decode(row)
    while counting.running.rows:
        counting.running.step()
    assert [counting.committed(row) for row in rows] == [[5, 6, 7], [*range(5, 14)]]
    assert [counting.end(row) for row in rows] == [EndCode.STOP, EndCode.LENGTH]
    counting.running.add(*rows[0].place)
    assert counting.running.rows == [], "nor does a new generation of decode go on"


@pytest.mark.parametrize("by_length", [True, False])
def test_a_row_whose_last_id_was_committed_but_not_its_end(counting: Bench, by_length: bool) -> None:
    """decode was killed between the two words: the next generation must append nothing."""
    eos = min(counting.config.eos_token_ids)
    last = 5 if by_length else eos
    row = counting.place([4], max_new_tokens=1 if by_length else 20, ignore_eos=False)
    counting.grant_all(row)
    counting.table.set_phase(row.row, Phase.DECODE)
    counting.table.commit(np.array([row.row]), np.array([row.generation]), np.array([last]))
    counting.running.add(*row.place)
    assert counting.running.rows == []
    assert counting.end(row) == (EndCode.LENGTH if by_length else EndCode.STOP)
    assert counting.committed(row) == [last]


def test_an_ended_row_and_one_of_another_generation_are_not_taken_in(counting: Bench) -> None:
    row = counting.place([4], max_new_tokens=1)
    counting.grant_all(row)
    counting.to_decode(row)
    counting.run_to_end()
    counting.running.add(*row.place)
    assert counting.running.rows == []
    counting.table.set_phase(row.row, Phase.FREE)
    counting.table.begin(row.row)
    counting.running.add(*row.place)  # seen in a scan a moment ago; the row is somebody else's by now
    assert counting.running.rows == []


def test_adding_twice_and_removing_another_generation_do_nothing(counting: Bench) -> None:
    row = counting.place([4], max_new_tokens=5)
    counting.grant_all(row)
    counting.to_decode(row)
    counting.running.step()
    counting.running.add(*row.place)
    counting.running.remove(row.row, row.generation + 1)
    counting.run_to_end()
    assert counting.committed(row) == [5, 6, 7, 8, 9]


def test_one_that_cannot_be_computed_ends_alone(counting: Bench) -> None:
    good, bad, pair_row = (
        counting.place([10], max_new_tokens=8),
        counting.place([100], row=1, max_new_tokens=8),
        counting.place([200], [300], row=2, max_new_tokens=8, sampling=GUIDED),
    )
    for row in (good, bad, pair_row):
        counting.grant_all(row)
        counting.to_decode(row)
    counting.running.step()
    counting.running.step()
    assert isinstance(counting.model, Counting)
    counting.model.broken = frozenset({102})
    with pytest.raises(RuntimeError):
        counting.running.step()
    outcome = counting.running.step_apart()
    assert sorted(outcome.rows) == [0, 1, 2] and outcome.ended == [(*bad.place, EndCode.ERROR)]
    counting.run_to_end()
    assert counting.committed(good) == list(range(11, 19))
    assert counting.committed(bad) == [101, 102]
    assert len(counting.committed(pair_row)) == 8
    assert [counting.end(row) for row in (good, bad)] == [EndCode.LENGTH, EndCode.ERROR]


@both_ways
def test_when_nobody_can_be_computed_nobody_is_blamed(counting: Bench) -> None:
    rows = [counting.place([10], row=index, max_new_tokens=8) for index in range(3)]
    for row in rows:
        counting.grant_all(row)
        counting.to_decode(row)
    assert isinstance(counting.model, Counting)
    counting.model.broken = frozenset({10})
    with pytest.raises(RuntimeError):
        counting.running.step_apart()
    counting.model.broken = frozenset()
    assert [counting.end(row) for row in rows] == [EndCode.NONE] * 3
    counting.run_to_end()
    assert [counting.committed(row) for row in rows] == [list(range(11, 19))] * 3


@both_ways
def test_members_whose_log_probabilities_find_no_room_end_alone(counting: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also when there are several, and no others."""
    asking = Sampling(temperature=0, logprobs=1)
    rows = [counting.place([10], row=row, max_new_tokens=8, sampling=asking if row else GREEDY) for row in range(3)]
    for row in rows:
        counting.grant_all(row)
        counting.to_decode(row)
    counting.running.step()
    counting.running.settle()
    known = counting.committed(rows[1])

    def no_room(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwrite", no_room)
    outcome = counting.running.step()
    assert sorted(outcome.ended) == [(*row.place, EndCode.ERROR) for row in rows[1:]]
    counting.run_to_end()
    assert counting.committed(rows[0]) == list(range(11, 19))
    assert [counting.committed(row) for row in rows[1:]] == [known] * 2, "none without its log-probability"


@both_ways
def test_arrays_are_kept_while_nothing_changes(counting: Bench) -> None:
    row = counting.place([4], max_new_tokens=2 * PAGE_TOKENS)
    counting.grant_all(row)
    counting.to_decode(row)
    counting.running.step()
    batch = counting.running._batch
    for _ in range(PAGE_TOKENS):
        counting.running.step()
    assert counting.running._batch is batch


@pytest.mark.parametrize("launches_ahead", [True])
def test_the_next_step_is_launched_before_ids_are_committed(counting: Bench) -> None:
    row = counting.place([10], max_new_tokens=4)
    counting.grant_all(row)
    counting.to_decode(row)
    assert isinstance(counting.model, Counting)
    decode, seen = counting.model.decode, list[int]()

    def noting(*arguments: torch.Tensor) -> torch.Tensor:
        seen.append(len(counting.committed(row)))
        return decode(*arguments)

    counting.model.decode = noting  # type: ignore[method-assign]
    assert not counting.running.is_ahead and not counting.running.settle().rows
    assert counting.running.step().rows == [0] and counting.running.is_ahead
    assert seen == [0, 0] and counting.committed(row) == [11]
    assert counting.running.settle().rows == [0] and not counting.running.is_ahead
    assert seen == [0, 0] and counting.committed(row) == [11, 12]
    assert counting.running.step().rows == [0]
    assert counting.running.step().ended == [(*row.place, EndCode.LENGTH)]
    assert seen == [0, 0, 2, 2] and not counting.running.is_ahead and counting.running.rows == []


@pytest.mark.parametrize("launches_ahead", [True])
def test_a_launch_that_fails_loses_no_ids_of_the_step_before(counting: Bench) -> None:
    good, bad = counting.place([10], max_new_tokens=8), counting.place([100], row=1, max_new_tokens=8)
    for row in (good, bad):
        counting.grant_all(row)
        counting.to_decode(row)
    assert isinstance(counting.model, Counting)
    counting.model.broken = frozenset({102})
    counting.running.step()
    with pytest.raises(RuntimeError):
        counting.running.step()
    assert not counting.running.is_ahead and counting.committed(good) == [11, 12]
    assert counting.running.step_apart().ended == [(*bad.place, EndCode.ERROR)]
    counting.run_to_end()
    assert counting.committed(good) == list(range(11, 19)) and counting.committed(bad) == [101, 102]
