"""Times of decode's steps, against sums of single ones."""

from itertools import accumulate

import hypothesis.strategies as st
import pytest
from hypothesis import example, given

from mmrt_lab.sim.costs import CONTEXT_QUANTUM
from mmrt_lab.sim.jitter import StepTimes

FACTORS = [0.5 + (7 * number % 11) / 10 for number in range(CONTEXT_QUANTUM + 3)]
PERIOD = len(FACTORS)
TIMES = [round(1000 * factor) for factor in FACTORS]


def time_of(step: int) -> int:
    return TIMES[step % PERIOD]


@given(st.integers(0, 3 * PERIOD), st.integers(0, CONTEXT_QUANTUM))
@example(PERIOD - 1, CONTEXT_QUANTUM)
@example(PERIOD, 1)
@example(2 * PERIOD - 1, 1)
def test_times_after_a_step_are_sums(step: int, count: int) -> None:
    times = StepTimes(FACTORS, 1000)
    assert times.of(step) == time_of(step) and times.after(step, -1) == -time_of(step)
    assert times.after(step, count) == sum(map(time_of, range(step + 1, step + 1 + count)))


@given(st.integers(0, 3 * PERIOD), st.integers(0, CONTEXT_QUANTUM), st.integers(0, 400_000))
@example(PERIOD - 1, 3, time_of(PERIOD))
@example(PERIOD - 2, CONTEXT_QUANTUM, 10**9)
def test_steps_within_a_time_are_those_that_end_in_it(step: int, most: int, time_ns: int) -> None:
    later = [time_of(number) for number in range(step + 1, step + 1 + most)]
    expected = [time for time, end in zip(later, accumulate(later), strict=True) if end <= time_ns]
    assert StepTimes(FACTORS, 1000).gaps_after(step, most, time_ns) == expected


def test_more_steps_than_a_decode_plans_are_refused() -> None:
    for count in (-2, CONTEXT_QUANTUM + 1):
        with pytest.raises(AssertionError):
            StepTimes(FACTORS, 1000).after(5, count)
    with pytest.raises(AssertionError):
        StepTimes(FACTORS[:-4], 1000)
