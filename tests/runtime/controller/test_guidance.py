"""CFG pairs as one row: sums, targets, and what fits a pool (CF2-CF5)."""

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from mmrt.runtime.controller.scheduling.guidance import (
    fitting_new_tokens,
    is_prefilled,
    limit_pages,
    member_lengths,
    prefill_targets,
    wanted_pages,
)

lengths_strategy = st.lists(st.integers(1, 60), min_size=1, max_size=2).map(tuple)


def test_a_companion_of_no_tokens_is_none() -> None:
    assert member_lengths(5, 0) == (5,)
    assert member_lengths(5, 3) == (5, 3)


def test_the_need_is_what_both_prompts_take_not_twice_the_first() -> None:
    """CF5's example: 1,074 + 50 tokens, not 2 x 1,074."""
    assert sum(wanted_pages((1074, 50), 0, 9, 1, ahead_pages=0)) == 1124
    assert limit_pages((1074, 50), 1, 1) == (1074, 50)


def test_both_members_must_be_prefilled() -> None:
    targets = prefill_targets((9, 4), 0)
    assert targets == (8, 3)
    assert is_prefilled([8, 3], targets) and not is_prefilled([8, 2], targets) and not is_prefilled([7, 3], targets)
    assert is_prefilled([0, 0], prefill_targets((1, 1), 0)), "one-token prompts have no prefill"


def test_what_was_generated_is_prefilled_again_behind_both_prompts() -> None:
    assert prefill_targets((9, 4), 5) == (13, 8)


@settings(deadline=None)
@given(lengths_strategy, st.integers(0, 50), st.integers(1, 50), st.integers(1, 8), st.integers(0, 5))
def test_wanted_lies_between_least_and_limit(lengths: tuple[int, ...], committed: int, more: int, page: int, ahead: int) -> None:
    max_new = committed + more
    least = wanted_pages(lengths, committed, max_new, page, ahead_pages=0)
    wanted = wanted_pages(lengths, committed, max_new, page, ahead)
    limit = limit_pages(lengths, max_new, page)
    for member in range(len(lengths)):
        assert least[member] * page >= lengths[member] + committed
        assert least[member] <= wanted[member] <= limit[member]
        assert wanted[member] - least[member] <= ahead
        assert limit[member] * page >= lengths[member] + max_new - 1


@settings(deadline=None)
@given(lengths_strategy, st.integers(1, 40), st.integers(1, 8))
def test_fitting_is_the_most_that_fits(lengths: tuple[int, ...], pool: int, page: int) -> None:
    fitting = fitting_new_tokens(lengths, pool, page)
    if fitting:
        assert sum(limit_pages(lengths, fitting, page)) <= pool
    assert sum(limit_pages(lengths, fitting + 1, page)) > pool


@pytest.mark.parametrize(("lengths", "pool", "fitting"), [((4,), 1, 1), ((5,), 1, 0), ((1,), 2, 8), ((1, 1), 2, 4)])
def test_fitting_examples(lengths: tuple[int, ...], pool: int, fitting: int) -> None:
    assert fitting_new_tokens(lengths, pool, 4) == fitting
