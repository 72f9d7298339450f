"""Deadlines of steps: many times what has been measured, never less than the watchdog's patience."""

from hypothesis import given
from hypothesis import strategies as st

from mmrt.actors.host.step_limit import FACTOR, StepLimit


def test_unknown_costs_get_all_the_time() -> None:
    assert StepLimit(30.0, 300.0).limit_s(1) == 300.0
    assert StepLimit(600.0, 300.0).limit_s(1) == 600.0


def test_known_costs_are_multiplied_and_inherited() -> None:
    limit = StepLimit(1.0, 300.0)
    limit.took(100, 10.0)
    assert limit.worst_s == 0.1 and limit.limit_s(50) == FACTOR * 5
    assert StepLimit(1.0, 300.0, limit.worst_s).limit_s(50) == FACTOR * 5
    assert limit.limit_s(1_000_000) == 300.0 and limit.limit_s(0.01) == 1.0


def test_a_large_step_may_take_longer_than_the_ceiling() -> None:
    limit = StepLimit(30.0, 300.0, ceiling_units=4096)
    assert (limit.limit_s(4096), limit.limit_s(3 * 4096)) == (300.0, 900.0)
    limit.took(4096, 100.0)
    assert (limit.limit_s(4096), limit.limit_s(2 * 4096)) == (300.0, 600.0)


def test_a_small_step_that_took_long_says_nothing_about_large_ones() -> None:
    """One that was paused for a moment: a hang of a large step must still be found in this life."""
    limit = StepLimit(1.0, 300.0, least_units=256)
    limit.took(2, 0.7)
    assert limit.limit_s(256) == limit.limit_s(2) == FACTOR * 0.7
    limit.took(512, 1.4)
    assert limit.limit_s(512) == FACTOR * 1.4


@given(st.lists(st.tuples(st.floats(1, 1e6), st.floats(1e-6, 100)), min_size=1, max_size=60))
def test_a_step_like_any_of_the_last_ones_is_no_hang(steps: list[tuple[float, float]]) -> None:
    limit = StepLimit(0.0, 1e9, least_units=100)
    for units, seconds in steps:
        limit.took(units, seconds)
    for units, seconds in steps:
        assert limit.limit_s(units) >= seconds
