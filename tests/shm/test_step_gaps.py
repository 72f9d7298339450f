"""The histogram of times between tokens: its buckets, and its words, which outlive their writer."""

import os
import signal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmrt.schema.gap_buckets import BEGINS_S, NUM_BUCKETS, OCTAVE, bucket_of, quantile_s, share_over
from mmrt.shm.errors import MissingError
from mmrt.shm.step_gaps import StepGaps

gaps_ns = st.floats(0, 36).map(lambda octave: int(2**octave))


def counted(gaps: list[int]) -> list[int]:
    counts = [0] * NUM_BUCKETS
    for gap_ns in gaps:
        counts[bucket_of(gap_ns)] += 1
    return counts


@given(gaps_ns)
def test_a_gap_is_in_the_bucket_that_holds_it(gap_ns: int) -> None:
    bucket = bucket_of(gap_ns)
    assert BEGINS_S[bucket] * 1e9 <= gap_ns
    assert bucket == NUM_BUCKETS - 1 or gap_ns < BEGINS_S[bucket + 1] * 1e9
    assert bucket < OCTAVE or BEGINS_S[bucket + 1] <= 1.0626 * BEGINS_S[bucket], "a sixteenth of an octave"


def test_extreme_gaps() -> None:
    assert (bucket_of(-5), bucket_of(0), bucket_of(1 << 60)) == (0, 0, NUM_BUCKETS - 1)
    assert share_over([0] * NUM_BUCKETS, 0.1) is None and quantile_s([0] * NUM_BUCKETS, 0.99) is None
    assert quantile_s(counted([1 << 60]), 1.0) == BEGINS_S[-1]


@given(st.lists(st.integers(2_000_000, 10_000_000_000), min_size=1, max_size=60), st.floats(0.001, 10), st.floats(0.01, 1))
def test_shares_and_quantiles_are_right_to_a_bucket(gaps: list[int], limit_s: float, share: float) -> None:
    counts = counted(gaps)
    over = share_over(counts, limit_s)
    assert over is not None
    surely = sum(gap / 1e9 > 1.07 * limit_s for gap in gaps) / len(gaps)
    perhaps = sum(gap / 1e9 > limit_s / 1.07 for gap in gaps) / len(gaps)
    assert surely - 1e-9 <= over <= perhaps + 1e-9
    found, exact = quantile_s(counts, share), sorted(gaps)[max(0, -int(-share * len(gaps) // 1) - 1)] / 1e9
    assert found is not None and exact / 1.07 <= found <= 1.07 * exact


def test_counts_outlive_their_writer_and_are_continued(run, crashes):
    StepGaps.create(run, 2).close()

    def write():
        words = StepGaps.attach(run, 0)
        words.add(50_000_000, 3)
        words.add(90_000_000, 1)
        os.kill(os.getpid(), signal.SIGKILL)

    for _ in range(2):
        assert crashes.Child(write).wait() == -signal.SIGKILL
    reader = StepGaps.attach(run)
    assert reader.read() == counted(2 * [50_000_000] * 3 + 2 * [90_000_000])
    assert reader.sum_s == pytest.approx(0.48)
    reader.close()


def test_a_writer_that_dies_within_a_count_leaves_whole_ones(run, crashes):
    writer = StepGaps.create(run, 1)
    for steps in range(12):
        before = writer.read()
        with crashes.before_step(crashes.codes(StepGaps.add), steps):
            writer.add(50_000_000, 7)
        after = writer.read()
        assert [new - old for old, new in zip(before, after, strict=True)] in (counted([]), counted([50_000_000] * 7))
    writer.close()


def test_each_decode_counts_for_itself_and_all_are_read_together(run):
    StepGaps.create(run, 3).close()
    writers = [StepGaps.attach(run, number) for number in range(3)]
    for number, writer in enumerate(writers):
        writer.add(50_000_000, 1 + number)
    reader = StepGaps.attach(run)
    assert reader.read() == counted([50_000_000] * 6) and reader.sum_s == pytest.approx(0.3)
    for words in (*writers, reader):
        words.close()
    with pytest.raises(ValueError, match="no decode 3 of 3"):
        StepGaps.attach(run, 3)


def test_gaps_behind_first_tokens_count_for_observers_alone(run):
    writer = StepGaps.create(run, 2)
    other = StepGaps.attach(run, 1)
    other.add(50_000_000, 2)
    other.add_first(90_000_000, 2)
    writer.add_first(70_000_000, 1)
    assert writer.read() == counted([50_000_000] * 2 + [90_000_000] * 2 + [70_000_000]) and writer.sum_s == pytest.approx(0.35)
    assert writer.read_of_steps() == counted([50_000_000] * 2)
    assert writer.read_each() == [counted([]), writer.read_of_steps()]
    for words in (writer, other):
        words.close()


def test_a_run_without_the_words(run):
    with pytest.raises(MissingError, match="gaps"):
        StepGaps.attach(run)
